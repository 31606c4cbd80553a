//! A VM of model vCPUs with TLBs, and a monitor that keeps a copy of its memory.

use lacuna_addr::{Access, Gfn, Gpa, Hva, HvaRange, PAGE_SIZE, PageCount};
use lacuna_host::{Host, HostConfig, HugePages, Io, MemoryStore, MmuNotifier};
use lacuna_mmu::{
    Backup, Delivery, DirtyError, Faulter, HugeLeaves, Initially, Logging, Mmu, Outcome, RingSize,
    Room,
};
use lacuna_slots::{SlotFlags, SlotId, SlotSpec};
use lacuna_stage2::Walk;
use lacuna_sync::{Epoch, HostClock, Quiescence};
use std::collections::HashMap;
use std::sync::Arc;
use std::thread::yield_now;

/// Three blocks and a rest.
pub const PAGES: u64 = 1600;
/// Where the slot can be: aligned as its backing is, and not.
pub const PLACES: [u64; 2] = [0x400, 0x2_0001];
pub const SLOT: SlotId = SlotId(3);
/// A word for each vCPU, and one for the host.
pub type Words = [u64; 3];
const HOST_WORD: usize = 2;

pub fn ring(backup: Backup) -> Delivery {
    let size = RingSize::from_bytes(RingSize::BYTES_MIN).expect("a ring");
    Delivery::Ring { size, backup }
}

pub struct Bed {
    pub host: Arc<Host>,
    pub mmu: Arc<Mmu>,
    pub quiescence: Arc<Quiescence>,
    pub backing: HvaRange,
}

/// A page as a vCPU's TLB has it.
#[derive(Clone, Copy)]
struct Hit {
    pfn: lacuna_addr::Pfn,
    writable: bool,
}

pub struct Vcpu {
    index: usize,
    faulter: Faulter,
    tlb: HashMap<u64, Hit>,
    flushed: Epoch,
}

/// What keeps a vCPU from an access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stuck {
    /// Its ring is full.
    Ring,
    /// The slot is not there, or read-only.
    NoSlot,
}

impl Bed {
    pub fn new(huge: HugePages, delivery: Delivery) -> (Self, [Vcpu; 2]) {
        let frames = [PAGES / 2, PAGES * 7 / 8][usize::from(huge != HugePages::Never)];
        let config = HostConfig {
            budget: PageCount::new(Host::minimum_budget(2).get().max(frames)),
            huge,
            swap: Box::new(MemoryStore::new()),
            io: Io::Threads { readers: 1 },
            clock: Arc::new(HostClock::default()),
        };
        let host = Host::new(config).unwrap();
        let quiescence = Arc::new(Quiescence::new(2));
        let mmu = Mmu::new(Arc::clone(&host), Arc::clone(&quiescence), 4096).unwrap();
        mmu.set_delivery(delivery).unwrap();
        let notifier = Arc::clone(&mmu) as Arc<dyn MmuNotifier>;
        let backing = host.add_region(PageCount::new(PAGES), notifier).unwrap();
        let spec = SlotSpec {
            id: SLOT,
            guest: PLACES[0] * PAGE_SIZE as u64,
            host: backing.start(),
            bytes: PAGES * PAGE_SIZE as u64,
            flags: SlotFlags::empty(),
        };
        mmu.add_slot(spec).unwrap();
        let vcpus = [0, 1].map(|index| Vcpu {
            index,
            faulter: mmu.faulter().unwrap(),
            tlb: HashMap::new(),
            flushed: Epoch::default(),
        });
        let bed = Self {
            host,
            mmu,
            quiescence,
            backing,
        };
        (bed, vcpus)
    }

    /// The frame of a page of the slot, where that is now.
    pub fn gfn(&self, page: u64) -> Gfn {
        let slots = self.mmu.slots().snapshot();
        let slot = slots.get(SLOT).expect("it is never without");
        slot.gfns.start().checked_add(page).expect("in the slot")
    }

    fn hva(&self, page: u64) -> Hva {
        self.backing.start().checked_add_pages(page).unwrap()
    }

    pub fn words(&self, page: u64) -> Words {
        let mut bytes = [0; 24];
        self.host.copy_out(self.hva(page), &mut bytes).unwrap();
        [0, 8, 16].map(|at| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()))
    }

    /// A write past the vCPUs, if one is allowed.
    pub fn host_write(&self, page: u64, value: u64) -> Result<(), DirtyError> {
        let slots = self.mmu.slots().snapshot();
        let slot = slots.get(SLOT).expect("it is never without");
        let gfn = slot.gfns.start().checked_add(page).expect("in the slot");
        let writing = self.mmu.host_write(slot, gfn)?;
        let at = slot.hva(gfn).get() + 8 * HOST_WORD as u64;
        self.host
            .copy_in(Hva::new(at), &value.to_le_bytes())
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
    /// A stay online with one access; more if it must leave for a moment. The word that was read.
    pub fn access(&mut self, bed: &Bed, page: u64, write: Option<u64>) -> Result<u64, Stuck> {
        loop {
            if self.faulter.room() == Room::SoftFull {
                return Err(Stuck::Ring);
            }
            self.enter(bed);
            let outcome = self.online(bed, page, write);
            self.leave(bed);
            match outcome {
                Ok(word) => return Ok(word),
                Err(Outcome::Mapped(_)) => unreachable!("that is no reason to leave"),
                Err(Outcome::Busy) => yield_now(),
                Err(Outcome::Pending(ticket)) => {
                    bed.host.start(&ticket);
                    let _ = bed.host.wait(&ticket);
                }
                Err(Outcome::NoMemory) => drop(bed.host.reclaim_direct().unwrap()),
                Err(Outcome::Mmio) => return Err(Stuck::NoSlot),
                Err(Outcome::Lost(page)) => panic!("{page}"),
                Err(Outcome::NoTables(error)) => panic!("{error}"),
            }
        }
    }

    pub fn enter(&mut self, bed: &Bed) {
        let q = &bed.quiescence;
        q.vcpu(self.index).take();
        let epoch = q.online(self.index);
        if epoch > self.flushed {
            self.flushed = epoch;
            self.tlb.clear();
            q.vcpu(self.index).flushed();
        }
    }

    pub fn leave(&mut self, bed: &Bed) {
        bed.mmu.flush_log(&mut self.faulter);
        bed.quiescence.offline(self.index);
    }

    pub fn online(&mut self, bed: &Bed, page: u64, write: Option<u64>) -> Result<u64, Outcome> {
        let gfn = bed.gfn(page);
        let access = match write {
            Some(_) => Access::Write,
            None => Access::Read,
        };
        let hit = match self.tlb.get(&gfn.get()) {
            Some(hit) if hit.writable || write.is_none() => *hit,
            _ => self.miss(bed, gfn, access)?,
        };
        self.faulter.retired();
        let (frame, at) = (bed.host.frame(hit.pfn), 8 * self.index);
        if let Some(value) = write {
            assert!(hit.writable);
            frame.write(at, &value.to_le_bytes());
        }
        let mut bytes = [0; 8];
        frame.read(at, &mut bytes);
        Ok(u64::from_le_bytes(bytes))
    }

    fn miss(&mut self, bed: &Bed, gfn: Gfn, access: Access) -> Result<Hit, Outcome> {
        bed.quiescence.vcpu(self.index).note(gfn.block());
        let hit = match bed.mmu.walk(&mut self.faulter, gfn, access) {
            Walk::Hit(hit) => Hit {
                pfn: hit.pfn,
                writable: hit.writable,
            },
            Walk::Violation(_) => match bed.mmu.fault(&mut self.faulter, gfn, access) {
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
}

/// The copy.
pub struct Monitor {
    pub shadow: Vec<Words>,
}

impl Monitor {
    /// Turns logging on, and copies all that does not count as written.
    pub fn begin(bed: &Bed, initially: Initially, huge: HugeLeaves) -> Self {
        let on = Logging::On { initially, huge };
        let refused = bed.mmu.set_logging(SLOT, on).is_err();
        if refused {
            bed.mmu.set_logging(SLOT, Logging::LAZY).unwrap();
        }
        let shadow = match initially {
            Initially::AllSet if !refused => vec![[u64::MAX; 3]; PAGES as usize],
            _ => (0..PAGES).map(|page| bed.words(page)).collect(),
        };
        Self { shadow }
    }

    fn replay(&mut self, bed: &Bed, words: &[u64]) {
        for page in 0..PAGES {
            if words[(page / 64) as usize] >> (page % 64) & 1 == 1 {
                self.shadow[page as usize] = bed.words(page);
            }
        }
    }

    /// Everything that was written, by the calls that clear at once.
    pub fn harvest(&mut self, bed: &Bed) {
        let mut words = vec![0; PAGES.div_ceil(64) as usize];
        if bed.mmu.delivery() != Delivery::Bitmap {
            bed.mmu.collect_rings(|id, page| {
                assert_eq!(id, SLOT);
                words[page / 64] |= 1 << (page % 64);
            });
            bed.mmu.reset_rings();
            self.replay(bed, &words);
        }
        match bed.mmu.get_dirty(SLOT, &mut words) {
            Ok(()) => self.replay(bed, &words),
            Err(error) => assert_eq!(error, DirtyError::NoBitmap),
        }
    }

    /// One half of the slot, by the calls that copy and clear.
    pub fn clear_some(&mut self, bed: &Bed, from: usize, count: usize) {
        let mut words = vec![0; PAGES.div_ceil(64) as usize];
        if bed.mmu.peek_dirty(SLOT, &mut words).is_err() {
            return;
        }
        let part = &mut words[from..(from + count).min(25)];
        let pages = part.len() * 64;
        bed.mmu.clear_dirty(SLOT, from * 64, pages, part).unwrap();
        words[..from].fill(0);
        words[(from + count).min(25)..].fill(0);
        self.replay(bed, &words);
    }

    /// A harvest that does not reach its user.
    pub fn lose(&self, bed: &Bed) {
        bed.mmu.collect_rings(|_, _| {});
        bed.mmu.put_back_rings();
        let mut words = vec![0; PAGES.div_ceil(64) as usize];
        if bed.mmu.get_dirty(SLOT, &mut words).is_ok() {
            bed.mmu.put_back_dirty(SLOT, 0, &words).unwrap();
        }
    }
}
