//! A VM of model vCPUs with TLBs.

use super::Mmu;
use lacuna_addr::{Access, BackingAddr, BackingRange, Gfn, Gpa, PAGE_SIZE, PageCount};
use lacuna_host::{Host, HostConfig, HugePages, Io, MemoryStore, MmuNotifier};
use lacuna_mmu::{Backup, Delivery, DirtyError, Outcome, RingSize, RingSpace, SlotSpec, VcpuMmu};
use lacuna_slots::{SlotFlags, SlotId};
use lacuna_stage2::Walk;
use lacuna_sync::{GracePeriod, HostClock, Qsbr};
use std::collections::HashMap;
use std::sync::{Arc, RwLock};
use std::thread::yield_now;

/// Three blocks and a rest.
pub const PAGES: u64 = 1600;
/// The places of the slot: one is aligned like its backing, one is not.
pub const PLACES: [u64; 2] = [0x400, 0x2_0001];
pub const SLOT: SlotId = SlotId(3);
pub const VCPUS_MAX: usize = 5;
/// The content of a page: a word for each vCPU, and one for the host. Only its owner writes to a
/// word, and the values grow: of two copies of a word, the greater is the newer one.
pub type Words = [u64; VCPUS_MAX + 1];
pub const HOST_WORD: usize = VCPUS_MAX;

pub fn ring(backup: Backup) -> Delivery {
    let size = RingSize::from_bytes(RingSize::BYTES_MIN).expect("a ring");
    Delivery::Ring { size, backup }
}

pub struct Fixture {
    pub host: Arc<Host>,
    pub mmu: Arc<Mmu>,
    pub qsbr: Arc<Qsbr>,
    pub backing: BackingRange,
    /// A monitor holds this shared while it reaps the rings and copies. A monitor holds it
    /// exclusively while it puts back the pages reaped since the last reset, because other monitors
    /// may have reaped them.
    pub collecting: RwLock<()>,
}

/// A page in a vCPU's TLB.
#[derive(Clone, Copy)]
struct Hit {
    pfn: lacuna_addr::Pfn,
    writable: bool,
}

pub struct Vcpu {
    index: usize,
    vcpu: VcpuMmu,
    tlb: HashMap<u64, Hit>,
    flushed: GracePeriod,
}

/// What prevents an access of a vCPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stuck {
    /// Its ring is full.
    Ring,
    /// There is no slot, or it is read-only.
    NoSlot,
}

impl Fixture {
    pub fn new(huge: HugePages, delivery: Delivery, vcpus: usize) -> (Self, Vec<Vcpu>) {
        let frames = [PAGES / 2, PAGES * 7 / 8][usize::from(huge != HugePages::Never)];
        let config = HostConfig {
            budget: PageCount::new(Host::minimum_budget(vcpus).get().max(frames)),
            huge,
            swap: Box::new(MemoryStore::new()),
            io: Io::Threads { readers: 1 },
            clock: Arc::new(HostClock::default()),
        };
        let host = Host::new(config).unwrap();
        let qsbr = Arc::new(Qsbr::new(vcpus));
        let mmu = Mmu::new(Arc::clone(&host), Arc::clone(&qsbr), 4096).unwrap();
        mmu.set_delivery(delivery).unwrap();
        let notifier = Arc::clone(&mmu) as Arc<dyn MmuNotifier>;
        let backing = host.add_region(PageCount::new(PAGES), notifier).unwrap();
        let spec = SlotSpec {
            id: SLOT,
            guest: PLACES[0] * PAGE_SIZE as u64,
            backing: backing.start(),
            bytes: PAGES * PAGE_SIZE as u64,
            flags: SlotFlags::empty(),
        };
        mmu.add_slot(spec).unwrap();
        let vcpu = |index| Vcpu {
            index,
            vcpu: mmu.vcpu_mmu().unwrap(),
            tlb: HashMap::new(),
            flushed: GracePeriod::default(),
        };
        let vcpus = (0..vcpus).map(vcpu).collect();
        let fixture = Self {
            host,
            mmu,
            qsbr,
            backing,
            collecting: RwLock::new(()),
        };
        (fixture, vcpus)
    }

    /// The current frame of a page of the slot.
    pub fn gfn(&self, page: u64) -> Gfn {
        let slots = self.mmu.slots();
        let slot = slots.get(SLOT).expect("it is never without");
        slot.gfns.start().checked_add(page).expect("in the slot")
    }

    fn addr(&self, page: u64) -> BackingAddr {
        self.backing.start().checked_add_pages(page).unwrap()
    }

    pub fn words(&self, page: u64) -> Words {
        let mut bytes = [0; size_of::<Words>()];
        self.host.copy_out(self.addr(page), &mut bytes).unwrap();
        let (words, _) = bytes.as_chunks::<8>();
        let mut words = words.iter().map(|word| u64::from_le_bytes(*word));
        [(); VCPUS_MAX + 1].map(|()| words.next().expect("as many"))
    }

    /// A write by the host, if it is allowed.
    pub fn host_write(&self, page: u64, value: u64) -> Result<(), DirtyError> {
        let slots = self.mmu.slots();
        let slot = slots.get(SLOT).expect("it is never without");
        let gfn = slot.gfns.start().checked_add(page).expect("in the slot");
        let writing = self.mmu.host_write(slot, gfn)?;
        // A device is slow.
        yield_now();
        let at = slot.backing_of(gfn).get() + 8 * HOST_WORD as u64;
        self.host
            .copy_in(BackingAddr::new(at), &value.to_le_bytes())
            .unwrap();
        writing.done();
        Ok(())
    }

    pub fn move_to(&self, place: u64) {
        let guest = Gpa::new(place * PAGE_SIZE as u64).unwrap();
        self.mmu.move_slot(SLOT, guest).unwrap();
    }
}

impl Vcpu {
    /// Goes online for one access, or several times if it must leave in between. Returns the read
    /// word.
    pub fn access(
        &mut self,
        fixture: &Fixture,
        page: u64,
        write: Option<u64>,
    ) -> Result<u64, Stuck> {
        loop {
            if !self.has_room() {
                return Err(Stuck::Ring);
            }
            self.enter(fixture);
            let outcome = self.online(fixture, page, write);
            self.leave(fixture);
            match outcome {
                Ok(word) => return Ok(word),
                Err(outcome) => self.settle(fixture, outcome)?,
            }
        }
    }

    /// Whether its ring has room.
    pub fn has_room(&mut self) -> bool {
        self.vcpu.space() == RingSpace::Free
    }

    /// Whether another thread has kicked it.
    pub fn is_poked(&self, fixture: &Fixture) -> bool {
        fixture.qsbr.vcpu(self.index).has_request()
    }

    pub fn enter(&mut self, fixture: &Fixture) {
        let q = &fixture.qsbr;
        q.vcpu(self.index).take();
        let grace = q.online(self.index);
        if grace > self.flushed {
            self.flushed = grace;
            self.tlb.clear();
            q.vcpu(self.index).flushed();
        }
    }

    pub fn leave(&mut self, fixture: &Fixture) {
        fixture.mmu.flush_log(&mut self.vcpu);
        fixture.qsbr.offline(self.index);
    }

    pub fn online(
        &mut self,
        fixture: &Fixture,
        page: u64,
        write: Option<u64>,
    ) -> Result<u64, Outcome> {
        let gfn = fixture.gfn(page);
        let access = match write {
            Some(_) => Access::Write,
            None => Access::Read,
        };
        let hit = match self.tlb.get(&gfn.get()) {
            Some(hit) if hit.writable || write.is_none() => *hit,
            _ => self.miss(fixture, gfn, access)?,
        };
        self.vcpu.retired();
        let (frame, at) = (fixture.host.frame(hit.pfn), 8 * self.index);
        if let Some(value) = write {
            assert!(hit.writable);
            frame.write(at, &value.to_le_bytes());
        }
        let mut bytes = [0; 8];
        frame.read(at, &mut bytes);
        Ok(u64::from_le_bytes(bytes))
    }

    fn miss(&mut self, fixture: &Fixture, gfn: Gfn, access: Access) -> Result<Hit, Outcome> {
        fixture.qsbr.vcpu(self.index).note(gfn.block().get());
        let hit = match fixture.mmu.walk(&mut self.vcpu, gfn, access) {
            Walk::Hit(hit) => Hit {
                pfn: hit.pfn,
                writable: hit.writable,
            },
            Walk::Violation(_) => match fixture.mmu.fault(&mut self.vcpu, gfn, access) {
                Outcome::Mapped(page) => Hit {
                    pfn: page.pfn,
                    writable: page.writable,
                },
                other => return Err(other),
            },
        };
        self.tlb.insert(gfn.get(), hit);
        Ok(hit)
    }

    /// Resolves the fault of an access. The vCPU is offline.
    fn settle(&mut self, fixture: &Fixture, outcome: Outcome) -> Result<(), Stuck> {
        match outcome {
            Outcome::Mapped(_) => unreachable!("that is no reason to leave"),
            Outcome::Busy => yield_now(),
            Outcome::Pending(ticket) | Outcome::Missing(ticket) => {
                fixture.host.start(&ticket);
                let _ = fixture.host.wait(&ticket);
            }
            Outcome::NoMemory => {
                let _ = fixture.host.reclaim_direct(self.vcpu.frames()).unwrap();
            }
            Outcome::NotAtHand => panic!("no slot exits"),
            Outcome::Mmio => return Err(Stuck::NoSlot),
            Outcome::Lost(page) => panic!("{page}"),
            Outcome::NoTables(error) => panic!("{error}"),
        }
        Ok(())
    }
}

impl Vcpu {
    /// A store to an address that must be unmapped by now, if the TLB still allows it.
    pub fn write_by_tlb(&self, fixture: &Fixture, gfn: Gfn, value: u64) -> bool {
        let hit = self.tlb.get(&gfn.get()).filter(|hit| hit.writable);
        if let Some(hit) = hit {
            let frame = fixture.host.frame(hit.pfn);
            frame.write(8 * self.index, &value.to_le_bytes());
        }
        hit.is_some()
    }
}
