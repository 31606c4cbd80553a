//! Real threads, a real file: vCPUs, background reclaim and readers at once.
//!
//! Each vCPU owns every n-th page of a shared region and keeps what it wrote in a model of its own.
//! The stage 2 is a map behind a lock, so that an access and an invalidation exclude each other:
//! what is tested is the manager, not a shoot-down protocol.

use lacuna_addr::{Access, Hva, HvaRange, PAGE_SIZE, PageCount, Pfn};
use lacuna_host::{
    Dial, FileStore, Host, HostConfig, Io, Latency, MemoryStore, MmuNotifier, Resolution, SwapStore,
};
use lacuna_sync::{Clock, HostClock};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

struct Leaf {
    pfn: Pfn,
    accessed: bool,
    dirty: bool,
}

/// Stage 2 by page, in shards, with a sequence that every invalidation moves.
struct Stage2 {
    host: OnceLock<Weak<Host>>,
    seq: AtomicU64,
    leaves: Vec<Mutex<HashMap<u64, Leaf>>>,
}

impl Stage2 {
    fn new() -> Self {
        let leaves = (0..16).map(|_| Mutex::default()).collect();
        Self {
            host: OnceLock::new(),
            seq: AtomicU64::new(0),
            leaves,
        }
    }

    fn shard(&self, page: Hva) -> &Mutex<HashMap<u64, Leaf>> {
        &self.leaves[(page.get() >> 12) as usize % self.leaves.len()]
    }
}

impl MmuNotifier for Stage2 {
    fn invalidate(&self, pages: &[Hva]) {
        let host = self
            .host
            .get()
            .and_then(Weak::upgrade)
            .expect("the host calls");
        // Before and after: a fault that resolved earlier, or meanwhile, does not install.
        self.seq.fetch_add(1, Ordering::SeqCst);
        for page in pages {
            let leaf = self.shard(*page).lock().unwrap().remove(&page.get());
            if let Some(leaf) = leaf.filter(|leaf| leaf.dirty) {
                host.mark_dirty(leaf.pfn);
            }
        }
        self.seq.fetch_add(1, Ordering::SeqCst);
    }

    fn age(&self, pages: &[Hva], young: &mut [bool]) {
        for (page, young) in pages.iter().zip(young) {
            if let Some(leaf) = self.shard(*page).lock().unwrap().get_mut(&page.get()) {
                *young = std::mem::take(&mut leaf.accessed);
            }
        }
    }

    fn end_of_aging(&self) {}
}

/// Whether vCPUs look for arrivals themselves.
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
    range: HvaRange,
    rng: fastrand::Rng,
    first: u64,
    step: u64,
    model: HashMap<u64, u64>,
}

impl Vcpu {
    fn run(mut self, accesses: usize) {
        let mut cache = self.host.frame_cache().unwrap();
        let host = self.host.clone();
        let mut polling = None;
        for _ in 0..accesses {
            let page = self.first + self.step * self.rng.u64(0..self.range.pages() / self.step);
            let hva = self.range.start().checked_add_pages(page).unwrap();
            let access = if self.rng.bool() {
                Access::Write
            } else {
                Access::Read
            };
            let seq = self.stage2.seq.load(Ordering::SeqCst);
            match self.host.resolve(hva, access, &mut cache) {
                Resolution::Ready(pfn) => self.access(hva, pfn, access, seq),
                Resolution::Pending(ticket) if self.rng.bool() => self.host.start(&ticket),
                Resolution::Pending(ticket) => self.host.wait(&ticket).unwrap(),
                Resolution::NoMemory => _ = self.host.reclaim_direct().unwrap(),
                Resolution::Lost(lost) => panic!("{lost}"),
            }
            cache.release_holds();
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
    }

    /// Installs the leaf if nothing was invalidated since `seq`, and uses it.
    fn access(&mut self, hva: Hva, pfn: Pfn, access: Access, seq: u64) {
        let mut leaves = self.stage2.shard(hva).lock().unwrap();
        if self.stage2.seq.load(Ordering::SeqCst) != seq || seq % 2 == 1 {
            return;
        }
        let leaf = leaves.entry(hva.get()).or_insert(Leaf {
            pfn,
            accessed: true,
            dirty: false,
        });
        leaf.accessed = true;
        assert_eq!(leaf.pfn, pfn, "a page moves only by an invalidation");
        let frame = self.host.frame(pfn);
        let mut bytes = [0; PAGE_SIZE];
        frame.read(0, &mut bytes);
        let want = self.model.get(&hva.get()).copied().unwrap_or(0);
        assert!(
            bytes.chunks(8).all(|word| word == want.to_le_bytes()),
            "{hva} is not {want:#x}"
        );
        if access.is_write() {
            let value = self.rng.u64(0..4) * self.rng.u64(..1 << 60);
            leaf.dirty = true;
            frame.write(0, &value.to_le_bytes().repeat(PAGE_SIZE / 8));
            self.model.insert(hva.get(), value);
        }
    }
}

fn stress(swap: Box<dyn SwapStore>, io: Io, polls: Polls, accesses: usize) {
    let clock = Arc::new(HostClock::default());
    let host = Host::new(HostConfig {
        budget: PageCount::new(512),
        swap,
        io,
        clock: clock.clone(),
    })
    .unwrap();
    let stage2 = Arc::new(Stage2::new());
    stage2.host.set(Arc::downgrade(&host)).unwrap();
    let range = host
        .add_region(PageCount::new(2048), stage2.clone())
        .unwrap();
    let background = host.spawn_background().unwrap();
    std::thread::scope(|scope| {
        for first in 0..3 {
            let vcpu = Vcpu {
                host: host.clone(),
                clock: clock.clone(),
                polls,
                stage2: stage2.clone(),
                range,
                rng: fastrand::Rng::with_seed(first),
                first,
                step: 3,
                model: HashMap::new(),
            };
            scope.spawn(move || vcpu.run(accesses));
        }
    });
    drop(background);
    let stats = host.stats();
    assert!(stats.swapped_in > 0 && stats.swapped_out > 0, "{stats:?}");
    host.remove_region(range).unwrap();
    host.verify();
    assert_eq!((host.stats().resident, host.stats().slots), (0, 0));
}

const THREADS: Io = Io::Threads { readers: 2 };
const RING: Io = Io::Ring { readers: 2 };

fn file(dir: &tempfile::TempDir) -> FileStore {
    FileStore::create(dir.path(), PageCount::new(4096)).unwrap()
}

fn slow<S: SwapStore>(store: S) -> Latency<S> {
    Latency::new(store, Dial::new(Duration::from_micros(300)))
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
