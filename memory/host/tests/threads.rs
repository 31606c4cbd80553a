//! Real threads and a real file: vCPUs, background reclaim and readers at once.
//!
//! Each vCPU owns every n-th page of a shared region, and keeps what it wrote in a model of its
//! own. The stage 2 is a map behind a lock, so that an access and an invalidation exclude each
//! other: the test is of the manager, not of a shoot-down protocol.

use lacuna_addr::{Access, BackingAddr, BackingRange, Level, PAGE_SIZE, PageCount, Pfn};
use lacuna_host::{
    FileStore, Frame, Host, HostConfig, HostError, HugePages, Io, Latency, LatencySetting,
    MemoryStore, MmuNotifier, Resolution, SwapStore,
};
use lacuna_sync::{Clock, HostClock};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

#[derive(Clone, Copy)]
struct Leaf {
    /// The frame of the leaf's first page.
    pfn: Pfn,
    accessed: bool,
    dirty: bool,
}

/// What is mapped of one block of 512 pages: all of it at once, or page by page.
#[derive(Default)]
struct Block {
    whole: Option<Leaf>,
    pages: HashMap<u64, Leaf>,
}

const BLOCK: u64 = 2 << 20;

impl Block {
    /// Gives each page a leaf of its own.
    fn split_huge(&mut self, start: u64) {
        let Some(whole) = self.whole.take() else {
            return;
        };
        for i in 0..512 {
            let leaf = Leaf {
                pfn: Pfn::new((whole.pfn.get() + i) as u32),
                ..whole
            };
            self.pages.insert(start + i * PAGE_SIZE as u64, leaf);
        }
    }

    fn leaf(&mut self, addr: BackingAddr) -> Option<&mut Leaf> {
        match &mut self.whole {
            Some(whole) => Some(whole),
            None => self.pages.get_mut(&addr.get()),
        }
    }
}

/// A stage 2 by block, in shards, with a sequence number that every invalidation increments.
struct Stage2 {
    host: OnceLock<Weak<Host>>,
    seq: AtomicU64,
    blocks: Vec<Mutex<HashMap<u64, Block>>>,
}

impl Stage2 {
    fn new() -> Self {
        let blocks = (0..16).map(|_| Mutex::default()).collect();
        Self {
            host: OnceLock::new(),
            seq: AtomicU64::new(0),
            blocks,
        }
    }

    /// Runs `visit` on the part of each block that `range` covers.
    fn visit(&self, range: BackingRange, mut visit: impl FnMut(&mut Block, u64, BackingRange)) {
        let mut start = range.start().get() & !(BLOCK - 1);
        while start < range.end().get() {
            let block = BackingRange::new(BackingAddr::new(start), 512).unwrap();
            let part = block.intersect(range).unwrap();
            self.with(BackingAddr::new(start), |block| visit(block, start, part));
            start += BLOCK;
        }
    }

    /// Whether any page is mapped.
    fn maps_something(&self) -> bool {
        self.blocks.iter().any(|blocks| {
            let blocks = blocks.lock().unwrap();
            let mapped = |block: &Block| block.whole.is_some() || !block.pages.is_empty();
            blocks.values().any(mapped)
        })
    }

    fn with<T>(&self, addr: BackingAddr, run: impl FnOnce(&mut Block) -> T) -> T {
        let start = addr.get() & !(BLOCK - 1);
        let shard = &self.blocks[(start / BLOCK) as usize % self.blocks.len()];
        run(shard.lock().unwrap().entry(start).or_default())
    }
}

impl MmuNotifier for Stage2 {
    fn invalidate(&self, ranges: &[BackingRange]) {
        let host = self
            .host
            .get()
            .and_then(Weak::upgrade)
            .expect("the host calls");
        // Before and after: a fault that resolved earlier, or during the invalidation, does not
        // install.
        self.seq.fetch_add(1, Ordering::SeqCst);
        for range in ranges {
            self.visit(*range, |block, start, part| {
                if part.pages() == 512
                    && let Some(leaf) = block.whole.take_if(|leaf| leaf.dirty)
                {
                    host.mark_dirty(leaf.pfn, Level::L2M);
                } else if part.pages() == 512 {
                    block.whole = None;
                } else {
                    block.split_huge(start);
                }
                block.pages.retain(|page, leaf| {
                    let inside = part.contains(BackingAddr::new(*page));
                    if inside && leaf.dirty {
                        host.mark_dirty(leaf.pfn, Level::L4K);
                    }
                    !inside
                });
            });
        }
        self.seq.fetch_add(1, Ordering::SeqCst);
    }

    fn age(&self, ranges: &[BackingRange], young: &mut [bool]) {
        for (range, young) in ranges.iter().zip(young) {
            self.visit(*range, |block, _, part| {
                let whole = block.whole.as_mut();
                let pages = block.pages.iter_mut();
                let pages = pages.filter(|(page, _)| part.contains(BackingAddr::new(**page)));
                for leaf in pages.map(|(_, leaf)| leaf).chain(whole) {
                    *young |= std::mem::take(&mut leaf.accessed);
                }
            });
        }
    }

    fn split_huge(&self, range: BackingRange) {
        self.visit(range, |block, start, _| block.split_huge(start));
    }

    fn end_of_aging(&self) {}
}

/// Whether vCPUs poll for completions themselves.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Polls {
    Never,
    Sometimes,
}

struct Vcpu {
    host: Arc<Host>,
    clock: Arc<HostClock>,
    polls: Polls,
    stage2: Arc<Stage2>,
    range: BackingRange,
    rng: fastrand::Rng,
    first: u64,
    step: u64,
    /// The largest leaf that it can map.
    max_level: Level,
    model: HashMap<u64, u64>,
}

impl Vcpu {
    fn run(self, accesses: usize) {
        self.try_run(accesses).unwrap();
    }

    fn try_run(mut self, accesses: usize) -> Result<(), HostError> {
        let mut cache = self.host.per_cpu_pages().unwrap();
        let host = self.host.clone();
        let mut polling = None;
        for _ in 0..accesses {
            let page = self.first + self.step * self.rng.u64(0..self.range.pages() / self.step);
            let addr = self.range.start().checked_add_pages(page).unwrap();
            let access = if self.rng.bool() {
                Access::Write
            } else {
                Access::Read
            };
            let seq = self.stage2.seq.load(Ordering::SeqCst);
            match self.host.resolve(addr, access, self.max_level, &mut cache) {
                Resolution::Ready(frame) => self.access(addr, frame, access, seq),
                Resolution::Pending(ticket) if self.rng.bool() => self.host.start(&ticket),
                Resolution::Pending(ticket) | Resolution::Missing(ticket) => {
                    self.host.wait(&ticket)?;
                }
                Resolution::NoMemory => _ = self.host.reclaim_direct(&mut cache).unwrap(),
                Resolution::Lost(lost) => return Err(lost.into()),
            }
            cache.unpin_all();
            if polling.is_some() {
                self.host.poll(self.clock.now());
            }
            if self.rng.u8(..) == 0 {
                polling = match polling {
                    None if self.polls == Polls::Sometimes => Some(host.polling()),
                    _ => None,
                };
            }
        }
        Ok(())
    }

    /// Installs the leaf if there was no invalidation since `seq`, and uses it.
    fn access(&mut self, addr: BackingAddr, Frame { pfn, level }: Frame, access: Access, seq: u64) {
        let stage2 = self.stage2.clone();
        stage2.with(addr, |block| {
            if stage2.seq.load(Ordering::SeqCst) == seq && seq.is_multiple_of(2) {
                self.install(block, addr, Frame { pfn, level }, access);
            }
        });
    }

    fn install(&mut self, block: &mut Block, addr: BackingAddr, frame: Frame, access: Access) {
        let index = (addr.get() % BLOCK) / PAGE_SIZE as u64;
        let leaf = |pfn: u64| Leaf {
            pfn: Pfn::new(pfn as u32),
            accessed: true,
            dirty: false,
        };
        let pfn = frame.pfn.get();
        if block.whole.is_none() && block.pages.is_empty() && frame.level == Level::L2M {
            assert_eq!(pfn % 512, index, "a whole block is aligned");
            block.whole = Some(leaf(pfn - index));
        }
        match &block.whole {
            Some(whole) => assert_eq!(
                whole.pfn.get() + index,
                pfn,
                "a page moves only by an invalidation"
            ),
            None => {
                let page = block.pages.entry(addr.get()).or_insert_with(|| leaf(pfn));
                assert_eq!(page.pfn, frame.pfn, "a page moves only by an invalidation");
            }
        }
        let bytes_of = self.host.clone();
        let shared = bytes_of.frame(frame.pfn);
        let mut bytes = [0; PAGE_SIZE];
        shared.read(0, &mut bytes);
        let want = self.model.get(&addr.get()).copied().unwrap_or(0);
        assert!(
            bytes.chunks(8).all(|word| word == want.to_le_bytes()),
            "{addr} is not {want:#x}"
        );
        let leaf = block.leaf(addr).expect("installed");
        leaf.accessed = true;
        if access.is_write() {
            let value = self.rng.u64(0..4) * self.rng.u64(..1 << 60);
            leaf.dirty = true;
            shared.write(0, &value.to_le_bytes().repeat(PAGE_SIZE / 8));
            self.model.insert(addr.get(), value);
        }
    }
}

struct World {
    host: Arc<Host>,
    clock: Arc<HostClock>,
    stage2: Arc<Stage2>,
    range: BackingRange,
    polls: Polls,
}

impl World {
    fn new(config: impl FnOnce(Arc<HostClock>) -> HostConfig, pages: u64, polls: Polls) -> Self {
        let clock = Arc::new(HostClock::default());
        let host = Host::new(config(clock.clone())).unwrap();
        let (stage2, range) = add_region(&host, pages);
        Self {
            host,
            clock,
            stage2,
            range,
            polls,
        }
    }

    fn vcpu(&self, first: u64) -> Vcpu {
        Vcpu {
            host: self.host.clone(),
            clock: self.clock.clone(),
            polls: self.polls,
            stage2: self.stage2.clone(),
            range: self.range,
            rng: fastrand::Rng::with_seed(first),
            first,
            step: 3,
            max_level: Level::L2M,
            model: HashMap::new(),
        }
    }

    fn finish(self) {
        let stats = self.host.stats();
        assert!(stats.swapped_in > 0 && stats.swapped_out > 0, "{stats:?}");
        self.host.remove_region(self.range).unwrap();
        self.host.verify();
        let stats = self.host.stats();
        assert_eq!(
            (stats.resident, stats.swap_entries, stats.huge_pages),
            (0, 0, 0)
        );
    }
}

fn add_region(host: &Arc<Host>, pages: u64) -> (Arc<Stage2>, BackingRange) {
    let stage2 = Arc::new(Stage2::new());
    stage2.host.set(Arc::downgrade(host)).unwrap();
    let range = host
        .add_region(PageCount::new(pages), stage2.clone())
        .unwrap();
    (stage2, range)
}

fn stress(swap: Box<dyn SwapStore>, io: Io, polls: Polls, accesses: usize) {
    let config = |clock: Arc<HostClock>| HostConfig {
        budget: PageCount::new(512),
        huge: HugePages::Never,
        swap,
        io,
        clock,
    };
    let world = World::new(config, 2048, polls);
    let background = world.host.spawn_background().unwrap();
    std::thread::scope(|scope| {
        for first in 0..3 {
            let vcpu = world.vcpu(first);
            scope.spawn(move || vcpu.run(accesses));
        }
    });
    drop(background);
    world.finish();
}

/// Blocks are made, split, and collapsed under the vCPUs that use them. Memory is short, but
/// whenever another VM ends some is free.
fn stress_huge(swap: Box<dyn SwapStore>, accesses: usize) {
    let config = |clock: Arc<HostClock>| HostConfig {
        budget: PageCount::new(6 * 512 + 100),
        huge: HugePages::Always,
        swap,
        io: THREADS,
        clock,
    };
    let world = World::new(config, 8 * 512 + 10, Polls::Never);
    let background = world.host.spawn_background().unwrap();
    let running = AtomicBool::new(true);
    std::thread::scope(|scope| {
        let vcpus: Vec<_> = (0..3)
            .map(|first| {
                let vcpu = world.vcpu(first);
                scope.spawn(move || vcpu.run(accesses))
            })
            .collect();
        scope.spawn(|| {
            while running.load(Ordering::Relaxed) {
                let _ = world.host.collapse_step();
            }
        });
        scope.spawn(|| {
            while running.load(Ordering::Relaxed) {
                let (stage2, range) = add_region(&world.host, 2 * 512);
                let mut vcpu = world.vcpu(0);
                (vcpu.stage2, vcpu.range, vcpu.step) = (stage2, range, 1);
                vcpu.run(3000);
                world.host.remove_region(range).unwrap();
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        let ended: Vec<_> = vcpus.into_iter().map(|vcpu| vcpu.join()).collect();
        running.store(false, Ordering::Relaxed);
        ended.into_iter().for_each(|ended| ended.unwrap());
    });
    drop(background);
    let stats = world.host.stats();
    assert!(stats.huge_faults > 0 && stats.splits > 0, "{stats:?}");
    world.finish();
}

const THREADS: Io = Io::Threads { readers: 2 };
const RING: Io = Io::Ring { readers: 2 };

fn file(dir: &tempfile::TempDir) -> FileStore {
    FileStore::create(dir.path(), PageCount::new(4096)).unwrap()
}

fn slow<S: SwapStore>(store: S) -> Latency<S> {
    Latency::new(store, LatencySetting::new(Duration::from_micros(300)))
}

#[test]
fn three_vcpus_on_a_file() {
    let dir = tempfile::tempdir().unwrap();
    stress(Box::new(file(&dir)), THREADS, Polls::Never, 8_000);
}

#[test]
fn three_vcpus_on_a_ring() {
    let dir = tempfile::tempdir().unwrap();
    stress(Box::new(file(&dir)), RING, Polls::Never, 8_000);
}

#[test]
fn three_vcpus_that_poll_a_ring_at_times() {
    let dir = tempfile::tempdir().unwrap();
    stress(Box::new(file(&dir)), RING, Polls::Sometimes, 8_000);
}

#[test]
fn three_vcpus_that_poll_a_slow_ring_at_times() {
    let dir = tempfile::tempdir().unwrap();
    stress(Box::new(slow(file(&dir))), RING, Polls::Sometimes, 8_000);
}

#[test]
fn three_vcpus_on_compressed_memory() {
    stress(Box::new(MemoryStore::new()), THREADS, Polls::Never, 60_000);
}

#[test]
fn three_vcpus_on_a_slow_device() {
    stress(
        Box::new(slow(MemoryStore::new())),
        THREADS,
        Polls::Never,
        10_000,
    );
}

/// Regions are removed under vCPUs that use them, while others need the frames. A vCPU that is
/// early finds its bytes; one that is late finds the page lost.
#[test]
fn three_vcpus_while_their_regions_are_removed() {
    for (round, huge) in [HugePages::Never, HugePages::Always]
        .repeat(15)
        .iter()
        .enumerate()
    {
        let config = |clock: Arc<HostClock>| HostConfig {
            budget: PageCount::new(4 * 512),
            huge: *huge,
            swap: Box::new(MemoryStore::new()),
            io: THREADS,
            clock,
        };
        let world = World::new(config, 3 * 512 + 10, Polls::Never);
        std::thread::scope(|scope| {
            let vcpus: Vec<_> = (0..3)
                .map(|first| {
                    let vcpu = world.vcpu(first);
                    scope.spawn(move || vcpu.try_run(usize::MAX))
                })
                .collect();
            std::thread::sleep(Duration::from_millis(5 + round as u64 % 7));
            world.host.remove_region(world.range).unwrap();
            let (stage2, range) = add_region(&world.host, 3 * 512);
            let mut heir = world.vcpu(0);
            (heir.stage2, heir.range, heir.step) = (stage2, range, 1);
            heir.run(5000);
            for vcpu in vcpus {
                let end = vcpu.join().unwrap();
                assert!(matches!(end, Err(HostError::Lost(_))), "{end:?}");
            }
            world.host.remove_region(range).unwrap();
        });
        assert!(
            !world.stage2.maps_something(),
            "{huge:?}: frames that are free"
        );
        world.host.verify();
        assert_eq!(world.host.stats().resident, 0);
    }
}

/// Pages are collapsed to blocks under the vCPUs that write to them; there is memory for all.
#[test]
fn three_vcpus_while_their_pages_become_blocks() {
    const PAGES: u64 = 4 * 512;
    let config = |clock: Arc<HostClock>| HostConfig {
        budget: PageCount::new(16 * 512),
        huge: HugePages::Always,
        swap: Box::new(MemoryStore::new()),
        io: THREADS,
        clock,
    };
    let mut world = World::new(config, PAGES, Polls::Never);
    for _ in 0..12 {
        let running = AtomicBool::new(true);
        std::thread::scope(|scope| {
            let vcpus = [0, 1, 2].map(|first| {
                let mut vcpu = world.vcpu(first);
                vcpu.max_level = Level::L4K;
                scope.spawn(move || vcpu.run(8_000))
            });
            scope.spawn(|| {
                while running.load(Ordering::Relaxed) {
                    let _ = world.host.collapse_step();
                }
            });
            let ended = vcpus.map(|vcpu| vcpu.join());
            running.store(false, Ordering::Relaxed);
            ended.into_iter().for_each(|ended| ended.unwrap());
        });
        world.host.verify();
        world.host.remove_region(world.range).unwrap();
        (world.stage2, world.range) = add_region(&world.host, PAGES);
    }
    let stats = world.host.stats();
    assert!(stats.collapses > 12, "{stats:?}");
    assert_eq!(stats.huge_faults, 0, "{stats:?}");
}

#[test]
fn three_vcpus_in_huge_pages_on_compressed_memory() {
    stress_huge(Box::new(MemoryStore::new()), 60_000);
}

#[test]
fn three_vcpus_in_huge_pages_on_a_slow_device() {
    stress_huge(Box::new(slow(MemoryStore::new())), 10_000);
}
