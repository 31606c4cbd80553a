//! The memory of a VM, as the host sees it: a stage 2 of one level with accessed and dirty bits,
//! and one vCPU that faults on it.
#![allow(dead_code, reason = "each test file uses its part")]

pub mod linux;
pub mod shared_file;
pub mod source;

use lacuna_addr::{Access, BackingAddr, BackingRange, Level, PAGE_SIZE, PageCount, Pfn};
use lacuna_host::{
    Frame, Host, HostConfig, HostError, HugePages, Io, MmuNotifier, PerCpuPages, Resolution,
    SourcePage, SwapStore,
};
use lacuna_sync::{Clock, VirtualClock};
use source::{TestSource, word_of};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, Weak};

const BLOCK: u64 = 2 << 20;

#[derive(Clone, Copy)]
struct Leaf {
    /// The frame of the leaf's first page.
    pfn: Pfn,
    accessed: bool,
    dirty: bool,
}

impl Leaf {
    fn new(pfn: u64) -> Self {
        Self {
            pfn: Pfn::new(pfn as u32),
            accessed: false,
            dirty: false,
        }
    }
}

/// Leaves by the address of their first page.
#[derive(Default)]
struct Leaves {
    pages: BTreeMap<u64, Leaf>,
    blocks: BTreeMap<u64, Leaf>,
}

impl Leaves {
    /// The leaf of `addr`, and the frame of its page.
    fn find(&mut self, addr: BackingAddr) -> Option<(&mut Leaf, Pfn)> {
        let start = addr.get() & !(BLOCK - 1);
        if let Some(leaf) = self.blocks.get_mut(&start) {
            let index = (addr.get() - start) / PAGE_SIZE as u64;
            let pfn = Pfn::new((leaf.pfn.get() + index) as u32);
            return Some((leaf, pfn));
        }
        let leaf = self.pages.get_mut(&addr.get())?;
        let pfn = leaf.pfn;
        Some((leaf, pfn))
    }

    /// Maps the page unless it is mapped: the whole block, if allowed and no page of it is mapped.
    fn install(&mut self, addr: BackingAddr, frame: Frame) -> (&mut Leaf, Pfn) {
        let start = addr.get() & !(BLOCK - 1);
        let index = (addr.get() - start) / PAGE_SIZE as u64;
        if self.find(addr).is_none() {
            let mapped = self.pages.range(start..start + BLOCK).next().is_some();
            if frame.level == Level::L2M && !mapped {
                assert_eq!(frame.pfn.get() % 512, index, "a whole block is aligned");
                let leaf = Leaf::new(frame.pfn.get() - index);
                self.blocks.insert(start, leaf);
            } else {
                self.pages.insert(addr.get(), Leaf::new(frame.pfn.get()));
            }
        }
        let found = self.find(addr).expect("just installed");
        assert_eq!(found.1, frame.pfn, "a page moves only by an invalidation");
        found
    }

    fn split_huge(&mut self, start: u64) {
        let Some(whole) = self.blocks.remove(&start) else {
            return;
        };
        for i in 0..512 {
            let pfn = Pfn::new((whole.pfn.get() + i) as u32);
            self.pages
                .insert(start + i * PAGE_SIZE as u64, Leaf { pfn, ..whole });
        }
    }

    /// The first addresses of the huge leaves that overlap `range`.
    fn blocks_of(&self, range: BackingRange) -> Vec<u64> {
        let first = range.start().get() & !(BLOCK - 1);
        let blocks = self.blocks.range(first..range.end().get());
        blocks.map(|(&start, _)| start).collect()
    }
}

/// The listener: removes leaves, reports D, clears A.
#[derive(Default)]
pub struct FakeMmu {
    host: OnceLock<Weak<Host>>,
    leaves: Mutex<Leaves>,
    /// The page that reclaim cannot unmap.
    pub pinned: Mutex<Option<BackingAddr>>,
}

impl FakeMmu {
    /// A listener that reports dirty pages to `host`.
    pub fn of(host: &Arc<Host>) -> Arc<Self> {
        let mmu = Arc::<Self>::default();
        mmu.belongs_to(host);
        mmu
    }

    /// Sets the host to which it reports dirty pages.
    pub fn belongs_to(&self, host: &Arc<Host>) {
        self.host.set(Arc::downgrade(host)).unwrap();
    }
}

impl MmuNotifier for FakeMmu {
    fn invalidate(&self, ranges: &[BackingRange]) {
        let host = self
            .host
            .get()
            .and_then(Weak::upgrade)
            .expect("the host calls");
        assert!(
            ranges.is_sorted_by(|a, b| a.end() <= b.start()),
            "{ranges:?}"
        );
        let mut leaves = self.leaves.lock().unwrap();
        for &range in ranges {
            for start in leaves.blocks_of(range) {
                let block = BackingRange::new(BackingAddr::new(start), 512).unwrap();
                if block.intersect(range) != Some(block) {
                    leaves.split_huge(start);
                } else if let Some(leaf) = leaves.blocks.remove(&start)
                    && leaf.dirty
                {
                    host.mark_dirty(leaf.pfn, Level::L2M);
                }
            }
            let pages = range.start().get()..range.end().get();
            for (_, leaf) in leaves.pages.extract_if(pages, |_, _| true) {
                if leaf.dirty {
                    host.mark_dirty(leaf.pfn, Level::L4K);
                }
            }
        }
    }

    fn try_invalidate(&self, ranges: &[BackingRange], kept: &mut Vec<BackingAddr>) {
        let pinned = *self.pinned.lock().unwrap();
        let pages = ranges.iter().flat_map(|range| {
            (0..range.pages()).map(|page| range.start().checked_add_pages(page).unwrap())
        });
        let (stay, go): (Vec<_>, Vec<_>) = pages.partition(|page| Some(*page) == pinned);
        let go = go.into_iter().map(|page| BackingRange::new(page, 1));
        self.invalidate(&go.map(Option::unwrap).collect::<Vec<_>>());
        kept.extend(stay);
    }

    fn age(&self, ranges: &[BackingRange], young: &mut [bool]) {
        assert_eq!(ranges.len(), young.len());
        let mut leaves = self.leaves.lock().unwrap();
        for (&range, young) in ranges.iter().zip(young) {
            *young = false;
            for start in leaves.blocks_of(range) {
                let leaf = leaves.blocks.get_mut(&start).expect("found");
                *young |= std::mem::take(&mut leaf.accessed);
            }
            let pages = range.start().get()..range.end().get();
            for (_, leaf) in leaves.pages.range_mut(pages) {
                *young |= std::mem::take(&mut leaf.accessed);
            }
        }
    }

    fn split_huge(&self, range: BackingRange) {
        assert!(range.pages() == 512 && range.start().get().is_multiple_of(BLOCK));
        let mut leaves = self.leaves.lock().unwrap();
        leaves.split_huge(range.start().get());
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
    pub cache: PerCpuPages,
    pub range: BackingRange,
    clock: Arc<VirtualClock>,
    /// The largest leaf that this VM can map.
    pub max_level: Level,
    /// The expected content of every page: its first word, repeated. Absent means zero.
    pub model: BTreeMap<u64, u64>,
    /// Answers any one of its requests whenever the vCPU waits for a page. Without a source, pages
    /// are zeros.
    pub source: Option<Arc<TestSource>>,
}

/// A host under virtual time, without huge pages.
pub fn virtual_host(budget: u64, swap: Box<dyn SwapStore>) -> (Arc<Host>, Arc<VirtualClock>) {
    huge_host(budget, swap, HugePages::Never)
}

/// A host under virtual time.
pub fn huge_host(
    budget: u64,
    swap: Box<dyn SwapStore>,
    huge: HugePages,
) -> (Arc<Host>, Arc<VirtualClock>) {
    let io = Io::Virtual {
        seed: 7,
        latency_ns: 1_000..200_000,
    };
    host((budget, 0), swap, huge, io)
}

/// A host with a real device: operations complete when the device completes them, but only while
/// the caller polls.
pub fn ring_host(budget: u64, swap: Box<dyn SwapStore>) -> (Arc<Host>, Arc<VirtualClock>) {
    let io = Io::Ring { readers: 1 };
    let (host, clock) = host((budget, 0), swap, HugePages::Never, io);
    std::mem::forget(host.polling());
    (host, clock)
}

fn host(
    (budget, linux): (u64, u64),
    swap: Box<dyn SwapStore>,
    huge: HugePages,
    io: Io,
) -> (Arc<Host>, Arc<VirtualClock>) {
    let clock = Arc::new(VirtualClock::default());
    let budget = PageCount::new(budget);
    let config = HostConfig {
        budget,
        huge,
        swap,
        io,
        clock: clock.clone(),
    };
    let host = Host::with_linux_memory(config, PageCount::new(linux)).unwrap();
    (host, clock)
}

impl Vm {
    pub fn new(host: &Arc<Host>, clock: &Arc<VirtualClock>, pages: u64) -> Self {
        let mmu = FakeMmu::of(host);
        let range = host.add_region(PageCount::new(pages), mmu.clone()).unwrap();
        Self::of(host, clock, mmu, range)
    }

    /// A VM whose pages `source` provides.
    pub fn with_source(
        host: &Arc<Host>,
        clock: &Arc<VirtualClock>,
        pages: u64,
        source: &Arc<TestSource>,
    ) -> Self {
        let mmu = FakeMmu::of(host);
        let pages = PageCount::new(pages);
        let range = host.add_region_from(source.clone(), SourcePage(0), pages, mmu.clone());
        let range = range.unwrap();
        source.provides(range);
        let mut vm = Self::of(host, clock, mmu, range);
        vm.source = Some(source.clone());
        vm
    }

    pub fn of(
        host: &Arc<Host>,
        clock: &Arc<VirtualClock>,
        mmu: Arc<FakeMmu>,
        range: BackingRange,
    ) -> Self {
        Self {
            host: host.clone(),
            cache: host.per_cpu_pages().unwrap(),
            mmu,
            range,
            clock: clock.clone(),
            max_level: Level::L2M,
            model: BTreeMap::new(),
            source: None,
        }
    }

    pub fn addr(&self, page: u64) -> BackingAddr {
        self.range
            .start()
            .checked_add_pages(page % self.range.pages())
            .unwrap()
    }

    /// Advances the time to the next completion. Returns false if nothing is in flight.
    pub fn step_time(&self) -> bool {
        let Some(due) = self.host.next_completion() else {
            return false;
        };
        self.clock.advance_to(due);
        assert!(self.host.poll(due) > 0);
        true
    }

    /// Handles the completions, if reads are in flight.
    fn let_come(&self) {
        if self.host.next_completion().is_some() {
            assert!(self.step_time());
        } else if self.host.poll(self.clock.now()) == 0 {
            std::thread::yield_now();
        }
    }

    /// Finds the frame of a page. It waits as a seeded scheduler would.
    pub fn fault(&mut self, page: u64, access: Access) -> Result<Frame, HostError> {
        let addr = self.addr(page);
        loop {
            match self
                .host
                .resolve(addr, access, self.max_level, &mut self.cache)
            {
                Resolution::Ready(frame) => return Ok(frame),
                Resolution::Pending(ticket) => {
                    self.host.start(&ticket);
                    while !ticket.is_done() {
                        self.let_come();
                    }
                }
                Resolution::Missing(ticket) => {
                    self.host.start(&ticket);
                    let source = self
                        .source
                        .as_ref()
                        .expect("only a source's page is missing");
                    while !ticket.is_done() {
                        // Answers any of the open requests, in the end this one. With an added
                        // delay, the source gets it later.
                        if !source.answer_one(addr.get() >> 12) {
                            assert!(self.step_time(), "it was asked for");
                        }
                    }
                }
                Resolution::NoMemory => {
                    let progress = self.host.reclaim_direct(&mut self.cache)?;
                    if progress.freed == 0 {
                        assert!(progress.writing > 0 && self.step_time(), "{progress:?}");
                    }
                }
                Resolution::Busy => std::thread::yield_now(),
                Resolution::Lost(lost) => return Err(lost.into()),
            }
        }
    }

    /// One instruction that touches one page: through the leaf if there is one, else by a fault.
    pub fn touch(&mut self, page: u64, how: Use) -> Result<(), HostError> {
        let addr = self.addr(page);
        let access = if how == Use::Read {
            Access::Read
        } else {
            Access::Write
        };
        let mmu = self.mmu.clone();
        let mapped = mmu.leaves.lock().unwrap().find(addr).map(|(_, pfn)| pfn);
        let frame = match mapped {
            Some(pfn) => Frame {
                pfn,
                level: Level::L4K,
            },
            None => self.fault(page, access)?,
        };
        let mut leaves = mmu.leaves.lock().unwrap();
        let (leaf, pfn) = leaves.install(addr, frame);
        leaf.accessed = true;
        // After a write through a leaf that a read installed, only D records the write.
        leaf.dirty |= access.is_write();
        drop(leaves);
        let frame = self.host.frame(pfn);
        match how {
            Use::Write(value) => {
                frame.write(0, &value.to_le_bytes().repeat(PAGE_SIZE / 8));
                self.model.insert(addr.get(), value);
            }
            Use::Read => self.check(addr, |bytes| frame.read(0, bytes)),
        }
        self.cache.unpin_all();
        Ok(())
    }

    fn check(&self, addr: BackingAddr, read: impl FnOnce(&mut [u8])) {
        let mut bytes = [0; PAGE_SIZE];
        read(&mut bytes);
        let want = self.expected(addr);
        assert!(
            bytes.chunks(8).all(|word| word == want.to_le_bytes()),
            "{addr} is not {want:#x}"
        );
    }

    /// The word that the page at `addr` contains, repeated.
    pub fn expected(&self, addr: BackingAddr) -> u64 {
        let provided = self.source.as_ref().map_or(0, |_| word_of(addr));
        self.model.get(&addr.get()).copied().unwrap_or(provided)
    }

    /// Reads back every page.
    pub fn check_all(&mut self) {
        for page in 0..self.range.pages() {
            self.touch(page, Use::Read).unwrap();
        }
    }

    /// Reads back every written page.
    pub fn check_touched(&mut self) {
        let first = self.range.start().get();
        let pages: Vec<u64> = self.model.keys().map(|at| (at - first) >> 12).collect();
        for page in pages {
            self.touch(page, Use::Read).unwrap();
        }
    }

    /// The number of mapped pages.
    pub fn mapped(&self) -> usize {
        let leaves = self.mmu.leaves.lock().unwrap();
        leaves.pages.len() + 512 * leaves.blocks.len()
    }

    /// The number of blocks mapped by one leaf.
    pub fn mapped_huge(&self) -> usize {
        self.mmu.leaves.lock().unwrap().blocks.len()
    }
}
