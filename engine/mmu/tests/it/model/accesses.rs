//! Random accesses, reclaim, aging and slot changes, compared with a plain model of page contents.
//! Everything is verified after every step.

use super::Mmu;
use lacuna_addr::{Access, BackingAddr, BackingRange, Gfn, Gpa, PAGE_SIZE, PageCount};
use lacuna_host::{Fault, FaultyStore, Host, HostConfig, HugePages, Io, MmuNotifier};
use lacuna_mmu::{Outcome, SlotSpec, VcpuMmu};
use lacuna_slots::{SlotError, SlotFlags, SlotId};
use lacuna_stage2::Walk;
use lacuna_sync::{Clock, Qsbr, VirtualClock};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Pages of backing: three blocks and a rest. Then the first frames of slot 0 and of slot 1. Slot 1
/// is an alias of the pages [`ALIASED`] of the backing.
const PAGES: u64 = 1600;
const HOME: u64 = 0x400;
const ALIAS: u64 = 0x1_0000;
const ALIASED: (u64, u64) = (512, 800);

struct Bench {
    clock: Arc<VirtualClock>,
    store: FaultyStore,
    host: Arc<Host>,
    mmu: Arc<Mmu>,
    qsbr: Arc<Qsbr>,
    vcpu: VcpuMmu,
    backing: BackingAddr,
    contents: BTreeMap<u64, u64>,
    slots: BTreeMap<u16, SlotSpec>,
}

/// The result of an access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Seen {
    Value(u64),
    Mmio,
    Lost,
}

impl Bench {
    fn new(seed: u64, huge: HugePages) -> Self {
        let clock = Arc::new(VirtualClock::default());
        let store = FaultyStore::new(PageCount::new(4 * PAGES));
        // Far fewer frames than pages, so that every run evicts; with huge pages there is room for
        // one or two.
        let frames = [PAGES / 4, PAGES * 7 / 8][usize::from(huge != HugePages::Never)];
        let budget = PageCount::new(Host::minimum_budget(1).get().max(frames));
        let host = Host::new(HostConfig {
            budget,
            huge,
            swap: Box::new(store.clone()),
            io: Io::Virtual {
                seed,
                latency_ns: 1_000..90_000,
            },
            clock: Arc::clone(&clock) as Arc<dyn Clock>,
        });
        let host = host.unwrap();
        let qsbr = Arc::new(Qsbr::new(1));
        let mmu = Mmu::new(Arc::clone(&host), Arc::clone(&qsbr), 4096).unwrap();
        let notifier = Arc::clone(&mmu) as Arc<dyn MmuNotifier>;
        let backing = host
            .add_region(PageCount::new(PAGES), notifier)
            .unwrap()
            .start();
        let vcpu = mmu.vcpu_mmu().unwrap();
        let (contents, slots) = (BTreeMap::new(), BTreeMap::new());
        let mut bench = Self {
            clock,
            store,
            host,
            mmu,
            qsbr,
            vcpu,
            backing,
            contents,
            slots,
        };
        bench.add(0, HOME, 0, PAGES).unwrap();
        bench.add(1, ALIAS, ALIASED.0, ALIASED.1).unwrap();
        bench
    }

    fn add(&mut self, id: u16, gfn: u64, page: u64, pages: u64) -> Result<(), SlotError> {
        let spec = SlotSpec {
            id: SlotId(id),
            guest: gfn * PAGE_SIZE as u64,
            backing: self.backing.checked_add_pages(page).unwrap(),
            bytes: pages * PAGE_SIZE as u64,
            flags: SlotFlags::empty(),
        };
        self.mmu.add_slot(spec)?;
        self.slots.insert(id, spec);
        Ok(())
    }

    /// The page of the backing that `gfn` maps, according to the model.
    fn page(&self, gfn: u64, access: Access) -> Option<u64> {
        let at = gfn * PAGE_SIZE as u64;
        let slot = self
            .slots
            .values()
            .find(|s| s.guest <= at && at < s.guest + s.bytes)?;
        if slot.flags.contains(SlotFlags::READONLY) && access.is_write() {
            return None;
        }
        Some((slot.backing.get() - self.backing.get() + at - slot.guest) / PAGE_SIZE as u64)
    }

    /// One access of a vCPU: walk, fault, wait, until it succeeds.
    fn access(&mut self, gfn: u64, write: Option<u64>) -> Seen {
        let access = if write.is_some() {
            Access::Write
        } else {
            Access::Read
        };
        let gfn = Gfn::new(gfn).unwrap();
        for _ in 0..10_000 {
            if let Walk::Hit(hit) = self.mmu.walk(&mut self.vcpu, gfn, access) {
                self.vcpu.retired();
                let frame = self.host.frame(hit.pfn);
                if let Some(value) = write {
                    assert!(
                        hit.writable,
                        "a write that walked may be remembered as writable"
                    );
                    frame.write(8, &value.to_le_bytes());
                }
                let mut bytes = [0; 8];
                frame.read(8, &mut bytes);
                return Seen::Value(u64::from_le_bytes(bytes));
            }
            match self.mmu.fault(&mut self.vcpu, gfn, access) {
                Outcome::Mapped(_) => {}
                Outcome::Busy => panic!("no invalidation is in progress"),
                Outcome::Pending(ticket) | Outcome::Missing(ticket) => {
                    self.host.start(&ticket);
                    self.pass_time(100_000);
                    assert!(ticket.is_done());
                }
                Outcome::NoMemory => {
                    let _ = self.host.reclaim_direct(self.vcpu.frames()).unwrap();
                    self.pass_time(100_000);
                }
                Outcome::NotAtHand => panic!("no slot exits"),
                Outcome::Mmio => return Seen::Mmio,
                Outcome::Lost(_) => return Seen::Lost,
                Outcome::NoTables(error) => panic!("{error}"),
            }
        }
        panic!("no progress at {gfn}");
    }

    fn pass_time(&self, ns: u64) {
        self.clock.advance(ns);
        self.host.poll(self.clock.now());
    }

    fn check(&mut self, gfn: u64, write: Option<u64>) {
        let access = if write.is_some() {
            Access::Write
        } else {
            Access::Read
        };
        let expected = self.page(gfn, access).map(|page| {
            write.map(|value| self.contents.insert(page, value));
            self.contents.get(&page).copied().unwrap_or(0)
        });
        let expected = expected.map_or(Seen::Mmio, Seen::Value);
        assert_eq!(self.access(gfn, write), expected, "gfn {gfn:#x}");
    }

    fn verify(&self) {
        self.mmu.verify();
        self.host.verify();
    }
}

#[derive(Clone, Debug)]
enum Op {
    Read(u64),
    Write(u64, u64),
    Run(u64),
    Balance,
    Collapse,
    SplitHuge(u64),
    Time(u64),
    Delete(u16),
    Add(u16),
    Move(u16, u64),
    ReadOnly(u16, bool),
}

fn gfn() -> impl Strategy<Value = u64> {
    prop_oneof![HOME..HOME + PAGES, ALIAS..ALIAS + ALIASED.1, 0..0x2_0000u64]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => gfn().prop_map(Op::Read),
        8 => (gfn(), any::<u64>()).prop_map(|(gfn, value)| Op::Write(gfn, value)),
        1 => (HOME..HOME + PAGES - 512).prop_map(Op::Run),
        3 => Just(Op::Balance),
        2 => (0..200_000u64).prop_map(Op::Time),
        1 => (0..2u16).prop_map(Op::Delete),
        1 => (0..2u16).prop_map(Op::Add),
        1 => (0..2u16, 0..0x2_0000u64).prop_map(|(id, gfn)| Op::Move(id, gfn)),
        1 => (0..2u16, 0..256u64).prop_map(|(id, block)| Op::Move(id, block * 512)),
        1 => Just(Op::Collapse),
        1 => (0..3u64).prop_map(Op::SplitHuge),
        1 => (0..2u16, any::<bool>()).prop_map(|(id, on)| Op::ReadOnly(id, on)),
    ]
}

fn apply(bench: &mut Bench, op: &Op) {
    match *op {
        Op::Read(gfn) => bench.check(gfn, None),
        Op::Write(gfn, value) => bench.check(gfn, Some(value)),
        Op::Run(gfn) => (gfn..gfn + 512).for_each(|gfn| bench.check(gfn, None)),
        Op::Balance => drop(bench.host.balance()),
        Op::Collapse => drop(bench.host.collapse_step()),
        Op::SplitHuge(block) => {
            let start = bench.backing.checked_add_pages(block * 512).unwrap();
            bench.mmu.split_huge(BackingRange::new(start, 512).unwrap());
        }
        Op::Time(ns) => bench.pass_time(ns),
        Op::Delete(id) => {
            let known = bench.slots.remove(&id).is_some();
            assert_eq!(bench.mmu.delete_slot(SlotId(id)).is_ok(), known);
        }
        Op::Add(id) => {
            let [gfn, page, pages] =
                [[HOME, 0, PAGES], [ALIAS, ALIASED.0, ALIASED.1]][usize::from(id)];
            let free = !bench.slots.contains_key(&id) && !overlaps(bench, id, gfn, pages);
            assert_eq!(bench.add(id, gfn, page, pages).is_ok(), free);
        }
        Op::Move(id, gfn) => {
            let Some(spec) = bench.slots.get(&id).copied() else {
                let target = Gpa::new(gfn * PAGE_SIZE as u64).unwrap();
                assert!(bench.mmu.move_slot(SlotId(id), target).is_err());
                return;
            };
            let free = !overlaps(bench, id, gfn, spec.bytes / PAGE_SIZE as u64);
            let target = Gpa::new(gfn * PAGE_SIZE as u64).unwrap();
            assert_eq!(bench.mmu.move_slot(SlotId(id), target).is_ok(), free);
            if free {
                bench.slots.get_mut(&id).unwrap().guest = target.get();
            }
        }
        Op::ReadOnly(id, on) => {
            let flags = if on {
                SlotFlags::READONLY
            } else {
                SlotFlags::empty()
            };
            let known = bench
                .slots
                .get_mut(&id)
                .map(|spec| spec.flags = flags)
                .is_some();
            assert_eq!(bench.mmu.set_slot_flags(SlotId(id), flags).is_ok(), known);
        }
    }
}

fn overlaps(bench: &Bench, id: u16, gfn: u64, pages: u64) -> bool {
    let (start, end) = (gfn * PAGE_SIZE as u64, (gfn + pages) * PAGE_SIZE as u64);
    let other =
        |(other, s): (&u16, &SlotSpec)| *other != id && s.guest < end && start < s.guest + s.bytes;
    bench.slots.iter().any(other)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// In every case a guest reads the last value written to the page, through either slot.
    #[test]
    fn contents_survive_everything(
        seed in any::<u64>(),
        huge in prop::sample::select(vec![HugePages::Never, HugePages::Always]),
        ops in prop::collection::vec(op(), 1..250),
    ) {
        let mut bench = Bench::new(seed, huge);
        for op in &ops {
            apply(&mut bench, op);
            bench.verify();
        }
        for gfn in HOME..HOME + PAGES {
            bench.check(gfn, None);
        }
        bench.verify();
    }
}

#[test]
fn four_times_overcommit_keeps_every_word() {
    let mut bench = Bench::new(1, HugePages::Never);
    for round in 1..4u64 {
        (0..PAGES).for_each(|page| bench.check(HOME + page, Some(round << 32 | page)));
        bench.verify();
        (0..PAGES)
            .rev()
            .for_each(|page| bench.check(HOME + page, None));
    }
    let stats = bench.host.stats();
    assert!(
        stats.swapped_out > PAGES && stats.swapped_in > PAGES,
        "{stats:?}"
    );
    assert!(
        stats.write_clusters < stats.swapped_out / 4,
        "writes are clustered: {stats:?}"
    );
}

/// Blocks are mapped whole at the first touch, and split when their pages are evicted. Nothing is
/// lost.
#[test]
fn huge_pages_come_whole_and_leave_by_pages() {
    let mut bench = Bench::new(5, HugePages::Always);
    bench.check(HOME + 5, Some(1));
    let counts = bench.mmu.counts();
    assert_eq!(counts.leaves, [0, 1, 0], "one touch, one leaf");
    for round in 1..4u64 {
        (0..PAGES).for_each(|page| bench.check(HOME + page, Some(round << 32 | page)));
        bench.verify();
        (0..PAGES)
            .rev()
            .for_each(|page| bench.check(HOME + page, None));
        bench.verify();
    }
    let stats = bench.host.stats();
    assert!(stats.splits > 0 && stats.swapped_in > 0, "{stats:?}");
}

#[test]
fn pages_only_read_are_dropped_without_a_second_write() {
    let mut bench = Bench::new(2, HugePages::Never);
    (0..PAGES).for_each(|page| bench.check(HOME + page, Some(page + 1)));
    for _ in 0..2 {
        (0..PAGES).for_each(|page| bench.check(HOME + page, None));
    }
    let before = bench.host.stats();
    for _ in 0..4 {
        (0..PAGES).for_each(|page| bench.check(HOME + page, None));
    }
    let after = bench.host.stats();
    assert!(after.swapped_in > before.swapped_in + PAGES);
    assert_eq!(
        after.swapped_out, before.swapped_out,
        "clean pages keep their swap entries"
    );
}

#[test]
fn a_lost_page_is_lost_and_never_zero() {
    let mut bench = Bench::new(3, HugePages::Never);
    (0..PAGES).for_each(|page| bench.check(HOME + page, Some(page + 1)));
    bench.store.set_fault(Some(Fault::Read));
    let mut lost = 0;
    for page in 0..PAGES {
        match bench.access(HOME + page, None) {
            Seen::Value(value) => assert_eq!(value, page + 1),
            Seen::Lost => lost += 1,
            Seen::Mmio => panic!("the slot is there"),
        }
    }
    assert!(lost > 0);
}

/// A slot is deleted and its page is unmapped, but a vCPU has not passed a quiescent point yet.
/// Then reclaim takes the same page. Reclaim finds nothing mapped, but must wait for that vCPU
/// before it reuses the frame.
#[test]
fn reclaim_waits_for_a_slot_change_that_waits() {
    let mut bench = Bench::new(4, HugePages::Never);
    bench.check(HOME, Some(7));
    let (mmu, gfn) = (Arc::clone(&bench.mmu), Gfn::new(HOME).unwrap());
    let page = BackingRange::new(bench.backing, 1).unwrap();
    let qsbr = Arc::clone(&bench.qsbr);
    let _ = qsbr.online(0);
    std::thread::scope(|scope| {
        let change = scope.spawn(|| mmu.delete_slot(SlotId(0)));
        while mmu.is_mapped(gfn) {
            std::thread::yield_now();
        }
        let reclaim = scope.spawn(|| mmu.invalidate(&[page]));
        // The time suffices for a call that does not wait to return; a waiting call cannot return
        // at all.
        std::thread::sleep(std::time::Duration::from_millis(50));
        let waited = !change.is_finished() && !reclaim.is_finished();
        qsbr.offline(0);
        change.join().unwrap().unwrap();
        reclaim.join().unwrap();
        assert!(waited, "a frame could have been reused under a vCPU");
    });
    bench.verify();
}
