//! The end of a slot's log against a writing vCPU, every interleaving of the real code. The large
//! leaf has D for every write, and no thread sets bits in a table that is out of use.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=3 \
//!     CARGO_TARGET_DIR=target/loom cargo test -p lacuna-stage2 --test loom_end --release
//! ```
//! Block 0 of the guest is armed: its 512 small leaves lack W, or D. The thread that ends the log
//! does what `Mmu::set_logging` does. It sets the slot's state to off, kicks all vCPUs and waits
//! once, replaces the table by one leaf, and retires the table. Then another block gets a table:
//! this one, as soon as it is free. A vCPU walks and logs. It makes fast page faults while it sees
//! that the slot logs, and otherwise faults under the range lock.
//!
//! The model with faults fails in each of these cases: the kick is left out, is not waited for, or
//! precedes the state's change to off; the fence in `kick_all` is missing; a vCPU makes fast page
//! faults in any state of the slot. The model with the log fails if the large leaf gets W without
//! D.
#![cfg(loom)]

use lacuna_addr::{Access, Gfn, GfnRange, Level, Pfn};
use lacuna_stage2::{Arena, Leaf, MapError, PmlLog, Stage2, Walk, Write};
use lacuna_sync::shim::thread::{self, yield_now};
use lacuna_sync::shim::{Arc, AtomicBool, Ordering};
use lacuna_sync::{GracePeriod, Qsbr};

/// The frame of block 0's first page.
const FIRST: u32 = 512;
/// The written page, and its index in the other block's table.
const PAGE: u64 = 5;
/// The root, two upper tables, and one leaf table.
const TABLES: u32 = 4;

struct Fixture {
    stage2: Stage2,
    qsbr: Qsbr,
    /// The slot's state: it logs.
    logs: AtomicBool,
}

/// A vCPU that writes one page, with a TLB entry for it.
struct Vcpu<'w> {
    fixture: &'w Fixture,
    log: PmlLog,
    tlb_writable: bool,
    flushed: GracePeriod,
}

fn gfn(raw: u64) -> Gfn {
    Gfn::new(raw).expect("a small number")
}

fn frame(page: u64) -> Pfn {
    Pfn::new(FIRST + page as u32)
}

impl Fixture {
    /// Block 0 mapped by small leaves without D, and with W as `write` says.
    fn new(write: Write) -> Self {
        let stage2 = Stage2::new(Arena::new(TABLES).expect("a small arena")).expect("a root");
        for page in 0..512 {
            let leaf = Leaf {
                write,
                dirty: false,
                ..Leaf::clean(frame(page))
            };
            let mapped = stage2.fault_cursor(gfn(page)).map(gfn(page), leaf);
            assert!(mapped.is_ok(), "{mapped:?}");
        }
        Self {
            stage2,
            qsbr: Qsbr::new(1),
            logs: AtomicBool::new(true),
        }
    }

    fn end(&self) {
        self.logs.store(false, Ordering::Release);
        let kick = self.qsbr.kick_all();
        while !self.qsbr.all_left(&kick) {
            yield_now();
        }
        let mut cursor = self.stage2.fault_cursor(gfn(0));
        match cursor.collapse_uniform(gfn(0), frame(0)).expect("uniform") {
            Some((collapsed, table)) => {
                assert_eq!(collapsed.leaf.level, Level::L2M);
                drop(cursor);
                table.retire(&self.qsbr);
            }
            // A vCPU's fault was first.
            None => cursor.preset_dirty(GfnRange::page(gfn(0))),
        }
    }

    /// Protects a page of block 1, if a table for it is free.
    fn use_a_free_table(&self) -> bool {
        self.stage2.reap(&self.qsbr);
        let leaf = Leaf::clean(Pfn::new(77));
        let other = gfn(512 + PAGE);
        self.stage2.fault_cursor(other).map(other, leaf).is_ok()
    }

    /// The final leaf of `gfn`.
    fn last_leaf(&self, gfn: Gfn) -> Leaf {
        let gone = self.stage2.fault_cursor(gfn).unmap_page(gfn);
        let (removed, flush) = gone.expect("still mapped");
        flush.finish(&self.qsbr);
        removed.leaf
    }
}

impl Vcpu<'_> {
    /// Goes online, writes the page, and goes offline.
    fn write(&mut self) {
        let fixture = self.fixture;
        let grace = fixture.qsbr.online(0);
        let slot = fixture.qsbr.vcpu(0);
        if grace > self.flushed {
            self.flushed = grace;
            self.tlb_writable = false;
            slot.flushed();
        }
        if !self.tlb_writable {
            slot.note(0);
            let walk = fixture
                .stage2
                .walk_logged(gfn(PAGE), Access::Write, &mut self.log);
            match walk.expect("room") {
                Walk::Hit(hit) => assert_eq!(hit.pfn, frame(PAGE), "another frame"),
                Walk::Violation(_) => self.fault(),
            }
            self.tlb_writable = true;
        }
        self.log.take();
        fixture.qsbr.offline(0);
    }

    /// As `Mmu::fault`, for a host with the whole block.
    fn fault(&self) {
        let Fixture { stage2, logs, .. } = self.fixture;
        let at = gfn(PAGE);
        if logs.load(Ordering::Relaxed) && stage2.fast_page_fault(at).is_some() {
            return;
        }
        let mut cursor = stage2.fault_cursor(at);
        if logs.load(Ordering::Relaxed) {
            let mapped = cursor.map(at, Leaf::dirty(frame(PAGE)));
            assert!(mapped.is_ok(), "{mapped:?}");
            return;
        }
        let huge = Leaf::dirty(frame(0)).at(Level::L2M);
        match cursor.map(gfn(0), huge) {
            Ok(_) => {}
            Err(MapError::Occupied { .. }) => {
                let done = cursor.collapse_to(at, huge).expect("uniform");
                let (_, table) = done.expect("it is occupied by a table");
                drop(cursor);
                table.retire(&self.fixture.qsbr);
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// A vCPU goes online twice and writes the page each time, while the log ends; all pages are
/// `armed`.
fn no_write_is_lost(armed: Write) {
    let mut model = loom::model::Builder::new();
    // Mostly only their owner touches a table's 512 entries: many steps, few choices.
    model.max_branches = 100_000;
    model.expect_explicit_explore = true;
    model.check(move || {
        let fixture = Arc::new(Fixture::new(armed));
        loom::explore();
        let vcpu = {
            let fixture = Arc::clone(&fixture);
            thread::spawn(move || {
                let mut vcpu = Vcpu {
                    fixture: &fixture,
                    log: PmlLog::new(),
                    tlb_writable: false,
                    flushed: GracePeriod::default(),
                };
                vcpu.write();
                vcpu.write();
            })
        };
        fixture.end();
        let reused = fixture.use_a_free_table();
        vcpu.join().expect("vCPU");
        loom::stop_exploring();
        fixture.stage2.verify();
        if reused {
            let other = fixture.last_leaf(gfn(512 + PAGE));
            let found = (other.write, other.dirty);
            assert_eq!(found, (Write::OnFault, false), "W or D went astray");
        }
        let last = fixture.last_leaf(gfn(PAGE));
        assert_eq!(last.level, Level::L2M);
        assert!(last.dirty, "a write was lost");
    });
}

#[test]
fn by_faults_repaired_without_a_lock() {
    no_write_is_lost(Write::OnFault);
}

#[test]
fn by_the_log() {
    no_write_is_lost(Write::Allowed);
}
