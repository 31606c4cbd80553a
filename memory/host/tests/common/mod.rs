//! A VM's memory as the manager sees it: a stage 2 of one level with accessed and dirty bits, and
//! one vCPU that faults on it.
#![allow(dead_code, reason = "each test file uses its part")]

use lacuna_addr::{Access, Hva, HvaRange, PAGE_SIZE, PageCount, Pfn};
use lacuna_host::{
    FrameCache, Host, HostConfig, HostError, Io, MmuNotifier, Resolution, SwapStore,
};
use lacuna_sync::{Clock, VirtualClock};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, Weak};

#[derive(Clone, Copy)]
struct Leaf {
    pfn: Pfn,
    accessed: bool,
    dirty: bool,
}

/// The listener: removes leaves, reports D, ages A.
#[derive(Default)]
pub struct FakeMmu {
    host: OnceLock<Weak<Host>>,
    leaves: Mutex<BTreeMap<u64, Leaf>>,
}

impl FakeMmu {
    /// The host that is told of what was written.
    pub fn belongs_to(&self, host: &Arc<Host>) {
        self.host.set(Arc::downgrade(host)).unwrap();
    }
}

impl MmuNotifier for FakeMmu {
    fn invalidate(&self, pages: &[Hva]) {
        let host = self
            .host
            .get()
            .and_then(Weak::upgrade)
            .expect("the host calls");
        let mut leaves = self.leaves.lock().unwrap();
        for page in pages {
            if let Some(leaf) = leaves.remove(&page.get())
                && leaf.dirty
            {
                host.mark_dirty(leaf.pfn);
            }
        }
    }

    fn age(&self, pages: &[Hva], young: &mut [bool]) {
        assert_eq!(pages.len(), young.len());
        let mut leaves = self.leaves.lock().unwrap();
        for (page, young) in pages.iter().zip(young) {
            if let Some(leaf) = leaves.get_mut(&page.get()) {
                *young = std::mem::take(&mut leaf.accessed);
            }
        }
    }

    fn end_of_aging(&self) {}
}

/// How a vCPU uses a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Use {
    Read,
    Write(u64),
}

/// One VM with one vCPU.
pub struct Vm {
    pub host: Arc<Host>,
    pub mmu: Arc<FakeMmu>,
    pub cache: FrameCache,
    pub range: HvaRange,
    clock: Arc<VirtualClock>,
    /// What every page must contain: its first word, repeated. Absent means zero.
    pub model: BTreeMap<u64, u64>,
}

/// A host under virtual time.
pub fn virtual_host(budget: u64, swap: Box<dyn SwapStore>) -> (Arc<Host>, Arc<VirtualClock>) {
    let io = Io::Virtual {
        seed: 7,
        latency_ns: 1_000..200_000,
    };
    host(budget, swap, io)
}

/// A host whose device is real: what is started arrives when it does, but only while the caller
/// polls.
pub fn ring_host(budget: u64, swap: Box<dyn SwapStore>) -> (Arc<Host>, Arc<VirtualClock>) {
    let (host, clock) = host(budget, swap, Io::Ring { readers: 1 });
    std::mem::forget(host.polling());
    (host, clock)
}

fn host(budget: u64, swap: Box<dyn SwapStore>, io: Io) -> (Arc<Host>, Arc<VirtualClock>) {
    let clock = Arc::new(VirtualClock::default());
    let budget = PageCount::new(budget);
    let host = Host::new(HostConfig {
        budget,
        swap,
        io,
        clock: clock.clone(),
    })
    .unwrap();
    (host, clock)
}

impl Vm {
    pub fn new(host: &Arc<Host>, clock: &Arc<VirtualClock>, pages: u64) -> Self {
        let mmu = Arc::new(FakeMmu::default());
        mmu.belongs_to(host);
        let range = host.add_region(PageCount::new(pages), mmu.clone()).unwrap();
        Self {
            host: host.clone(),
            cache: host.frame_cache().unwrap(),
            mmu,
            range,
            clock: clock.clone(),
            model: BTreeMap::new(),
        }
    }

    pub fn hva(&self, page: u64) -> Hva {
        self.range
            .start()
            .checked_add_pages(page % self.range.pages())
            .unwrap()
    }

    /// Lets time pass to the next completion; false when nothing is in flight.
    pub fn step_time(&self) -> bool {
        let Some(due) = self.host.next_completion() else {
            return false;
        };
        self.clock.advance_to(due);
        assert!(self.host.poll(due) > 0);
        true
    }

    /// Something is in flight: takes in what comes.
    fn let_come(&self) {
        if self.host.next_completion().is_some() {
            assert!(self.step_time());
        } else if self.host.poll(self.clock.now()) == 0 {
            std::thread::yield_now();
        }
    }

    /// Finds the frame of a page, waiting as a seeded scheduler would.
    pub fn fault(&mut self, page: u64, access: Access) -> Result<Pfn, HostError> {
        let hva = self.hva(page);
        loop {
            match self.host.resolve(hva, access, &mut self.cache) {
                Resolution::Ready(pfn) => return Ok(pfn),
                Resolution::Pending(ticket) => {
                    self.host.start(&ticket);
                    while !ticket.is_done() {
                        self.let_come();
                    }
                }
                Resolution::NoMemory => {
                    let progress = self.host.reclaim_direct()?;
                    if progress.freed == 0 {
                        assert!(progress.writing > 0 && self.step_time(), "{progress:?}");
                    }
                }
                Resolution::Lost(lost) => return Err(lost.into()),
            }
        }
    }

    /// One instruction that touches one page: through the leaf if there is one, else by a fault.
    pub fn touch(&mut self, page: u64, how: Use) -> Result<(), HostError> {
        let hva = self.hva(page);
        let found = self
            .mmu
            .leaves
            .lock()
            .unwrap()
            .get(&hva.get())
            .map(|leaf| leaf.pfn);
        let access = if how == Use::Read {
            Access::Read
        } else {
            Access::Write
        };
        let pfn = match found {
            Some(pfn) => pfn,
            None => self.fault(page, access)?,
        };
        let mut leaves = self.mmu.leaves.lock().unwrap();
        let leaf = leaves.entry(hva.get()).or_insert(Leaf {
            pfn,
            accessed: true,
            dirty: false,
        });
        leaf.accessed = true;
        // A write through a leaf that a read installed: only D tells.
        leaf.dirty |= access.is_write();
        drop(leaves);
        let frame = self.host.frame(pfn);
        match how {
            Use::Write(value) => {
                frame.write(0, &value.to_le_bytes().repeat(PAGE_SIZE / 8));
                self.model.insert(hva.get(), value);
            }
            Use::Read => self.check(hva, |bytes| frame.read(0, bytes)),
        }
        self.cache.release_holds();
        Ok(())
    }

    fn check(&self, hva: Hva, read: impl FnOnce(&mut [u8])) {
        let mut bytes = [0; PAGE_SIZE];
        read(&mut bytes);
        let want = self.model.get(&hva.get()).copied().unwrap_or(0);
        assert!(
            bytes.chunks(8).all(|word| word == want.to_le_bytes()),
            "{hva} is not {want:#x}"
        );
    }

    /// Reads every page back.
    pub fn check_all(&mut self) {
        for page in 0..self.range.pages() {
            self.touch(page, Use::Read).unwrap();
        }
    }

    /// Pages that have a leaf.
    pub fn mapped(&self) -> usize {
        self.mmu.leaves.lock().unwrap().len()
    }
}
