//! The manager: its parts, its configuration, and its regions.

use crate::block_word::{BLOCK, PageBlockState};
use crate::collapse::Collapser;
use crate::desc::Desc;
use crate::error::{HostError, LostPage};
use crate::frames::{BATCH, Frames, StoreFrames};
use crate::io::{Executor, Io};
use crate::linux::{LinuxAddresses, Losses};
use crate::per_cpu_pages::{MAX_PINNED, PerCpuPages, SharedCache};
use crate::pool::{FramePtr, MAX_FRAMES, Page, Pool};
use crate::region::{MmuNotifier, Regions};
use crate::residency::PageNo;
use crate::sampled_split::SampledSplits;
use crate::settled::Settled;
use crate::source::Origin;
use crate::spare_caches::SpareCaches;
use crate::stats::Counters;
use crate::swap::{Reads, SwapEntry, SwapMap, SwapStore};
use crate::ticket::Ticket;
use crate::writeback::Failure;
use lacuna_addr::{BackingAddr, BackingRange, Level, PageCount, Pfn, room_for, room_for_threads};
use lacuna_source::{PageSource, SourcePage};
use lacuna_sync::lock_order::{self, LockClass};
use lacuna_sync::{Clock, Mutex, MutexGuard, Nanos};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};
use std::thread::Thread;

/// Frames that must exist in addition to the vCPUs' frames: a cluster that is being written out,
/// and the swap store's reserve.
const BASE_FRAMES: u64 = 64;
/// The frames that one more vCPU can keep from all others: its pinned pages and a full per-CPU page
/// cache.
const FRAMES_PER_VCPU: u64 = (MAX_PINNED + BATCH) as u64;

/// Where the host makes compound pages: aligned blocks of 2 MiB.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum HugePages {
    /// Nowhere.
    #[default]
    Never,
    /// Where [`Host::advise_huge`] was called.
    Madvise,
    /// Wherever a block of frames is free.
    Always,
}

/// The configuration of a [`Host`].
pub struct HostConfig {
    /// Frames of the resident budget, shared by every region.
    pub budget: PageCount,
    /// The swap device, for pages that reclaim evicts.
    pub swap: Box<dyn SwapStore>,
    /// Where the host makes compound pages.
    pub huge: HugePages,
    /// The executor that carries out reads and completes operations.
    pub io: Io,
    /// The clock of the device latencies.
    pub clock: Arc<dyn Clock>,
}

/// The host memory manager: see the crate's documentation.
pub struct Host {
    pub(crate) core: Arc<Core>,
    pub(crate) io: Executor,
    /// Page caches for threads that are not vCPUs', between two operations.
    pub(crate) spare_caches: SpareCaches,
}

/// The state that the executor's threads share with all others.
pub(crate) struct Core {
    pub frames: Arc<Frames>,
    /// The used parts of the addresses for Linux memory.
    pub linux: LinuxAddresses,
    /// Pages of Linux memory that the kernel has taken away.
    pub losses: Losses,
    pub regions: Regions,
    pub huge: HugePages,
    pub store: Box<dyn SwapStore>,
    pub device: String,
    pub entries: Mutex<SwapMap, lock_order::SwapEntries>,
    /// Pages in flight, from swap or from a source, by page.
    pub tickets: Mutex<BTreeMap<PageNo, Ticket>, lock_order::Tickets>,
    pub lost: Mutex<BTreeMap<PageNo, LostPage>, lock_order::LostPages>,
    caches: Mutex<Vec<Arc<SharedCache>>, lock_order::PageCaches>,
    /// The clock hand: the next window of frames that reclaim looks at.
    pub hand: AtomicUsize,
    /// The compound page in use that will be split next.
    pub sampled_splits: Mutex<SampledSplits, lock_order::SampledSplit>,
    /// Held while a collapse changes page words to Collapsed and then the block word to Compound. A
    /// fault that sees a state in between waits for this lock.
    pub collapsing: Mutex<(), lock_order::Collapsing>,
    /// The next block for background collapse.
    pub collapser: Mutex<Collapser, lock_order::CollapseHand>,
    /// Buffers for pages in write-out.
    pub buffers: Mutex<Vec<Vec<Page>>, lock_order::WriteBuffers>,
    /// Pages being written out.
    pub writing: AtomicUsize,
    /// Completions that a thread is delivering.
    pub completing: AtomicUsize,
    /// Pages only in swap.
    pub swapped_out_now: AtomicI64,
    /// Whether the simulated latency of the device has ended.
    pub at_once: AtomicBool,
    pub settled: Settled,
    pub stats: Counters,
    pub clock: Arc<dyn Clock>,
    /// The failure of the last write-out; `None` after a successful one.
    pub failure: Mutex<Option<Failure>, lock_order::WriteFailure>,
    pub background: Mutex<Option<Thread>, lock_order::BackgroundThread>,
}

/// The stop flag of a wait that cannot be stopped.
pub(crate) static NEVER: AtomicBool = AtomicBool::new(false);

#[track_caller]
pub(crate) fn lock<T, C: LockClass>(mutex: &Mutex<T, C>) -> MutexGuard<'_, T> {
    // Each critical section of this crate leaves its data consistent at each step that may panic.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Host {
    /// Makes a host without regions. It reserves the budget's addresses. The kernel backs them on
    /// first touch, 2 MiB at a time where it can, or at [`Host::prefault`].
    pub fn new(config: HostConfig) -> Result<Arc<Self>, HostError> {
        Self::with_linux_memory(config, PageCount::new(0))
    }

    /// As [`Host::new`], and reserves addresses for `linux` pages of Linux memory
    /// ([`Host::add_linux_region`]). Each region takes whole blocks of 2 MiB of them.
    pub fn with_linux_memory(config: HostConfig, linux: PageCount) -> Result<Arc<Self>, HostError> {
        let HostConfig {
            budget,
            huge,
            swap: mut store,
            io,
            clock,
        } = config;
        check_budget(budget, 1)?;
        if budget > MAX_FRAMES {
            return Err(HostError::BudgetTooLarge {
                budget,
                maximum: MAX_FRAMES,
            });
        }
        room_for::<Desc>(budget.get())?;
        // Two blocks: each part is rounded up to a block.
        let room = MAX_FRAMES
            .get()
            .saturating_sub(budget.get() + 2 * BLOCK as u64);
        let room = PageCount::new(room);
        if linux > room {
            return Err(HostError::LinuxRoom {
                pages: linux,
                room,
                late: 0,
            });
        }
        let pool = Pool::new(budget.get() as usize, linux.get() as usize)?;
        let frames = Arc::new(Frames::new(pool));
        // One for the thread that waits for a swap file.
        room_for_threads(1)?;
        store.attach(StoreFrames::new(frames.clone()));
        let core = Core {
            frames,
            linux: LinuxAddresses::default(),
            losses: Losses::default(),
            regions: Regions::default(),
            huge,
            device: store.describe(),
            entries: Mutex::new(SwapMap::new(store.capacity().get())),
            store,
            tickets: Mutex::default(),
            lost: Mutex::default(),
            caches: Mutex::default(),
            hand: AtomicUsize::new(0),
            sampled_splits: Mutex::default(),
            collapsing: Mutex::default(),
            collapser: Mutex::default(),
            buffers: Mutex::default(),
            writing: AtomicUsize::new(0),
            completing: AtomicUsize::new(0),
            swapped_out_now: AtomicI64::new(0),
            at_once: AtomicBool::new(false),
            settled: Settled::default(),
            stats: Counters::default(),
            clock,
            failure: Mutex::default(),
            background: Mutex::default(),
        };
        let core = Arc::new(core);
        Ok(Arc::new(Self {
            io: Executor::new(io, core.clone()),
            core,
            spare_caches: SpareCaches::default(),
        }))
    }

    /// Lets the kernel back all memory of the budget now, so that no fault waits for that later.
    /// For 512 MiB it took 0.07 s on a host with backed memory, and 1.0 s on a host whose
    /// hypervisor had to back its memory first. `each` is called before each step of 16 MiB, and
    /// ends the call by `Break`.
    ///
    /// # Errors
    /// The kernel has not enough memory.
    pub fn prefault(&self, each: &mut dyn FnMut() -> ControlFlow<()>) -> Result<(), HostError> {
        self.core.frames.pool.prefault(each)
    }

    /// The smallest budget in which `vcpus` vCPUs make progress, whatever their guests do.
    pub const fn minimum_budget(vcpus: usize) -> PageCount {
        PageCount::new(BASE_FRAMES.saturating_add(FRAMES_PER_VCPU.saturating_mul(vcpus as u64)))
    }

    /// Makes the per-CPU page cache of one more vCPU. [`HostError::BudgetTooSmall`] if the budget
    /// does not suffice for the progress of that vCPU too.
    pub fn per_cpu_pages(&self) -> Result<PerCpuPages, HostError> {
        // These caches belong to no vCPU, and hold frames that the new vCPU may need.
        self.spare_caches.drain();
        let vcpus = lock(&self.core.caches).len() + 1;
        check_budget(PageCount::new(self.core.frames.len() as u64), vcpus)?;
        Ok(PerCpuPages::new(self.core.clone()))
    }

    /// Adds a region of `pages` pages of zeros. `notifier` handles their mappings.
    pub fn add_region(
        &self,
        pages: PageCount,
        notifier: Arc<dyn MmuNotifier>,
    ) -> Result<BackingRange, HostError> {
        self.core.regions.add(pages, notifier, None, None)
    }

    /// Adds a region of `pages` pages that `source` provides, from its page `first` on. A fault on
    /// a missing page resolves to [`Resolution::Missing`](crate::Resolution::Missing). `notifier`
    /// handles the pages' mappings.
    pub fn add_region_from(
        &self,
        source: Arc<dyn PageSource>,
        first: SourcePage,
        pages: PageCount,
        notifier: Arc<dyn MmuNotifier>,
    ) -> Result<BackingRange, HostError> {
        let origin = Origin::new(&self.core, source, first);
        self.core.regions.add(pages, notifier, Some(origin), None)
    }

    /// Whether `range` lies in one region, and `notifier` handles its mappings. The answer stays
    /// true, because a removed region's addresses are never used again.
    pub fn is_notified(&self, range: BackingRange, notifier: &dyn MmuNotifier) -> bool {
        let region = self.core.regions.find(PageNo::of(range.start()));
        region.is_some_and(|region| {
            region.range().intersect(range) == Some(range)
                && std::ptr::addr_eq(Arc::as_ptr(&region.notifier), notifier)
        })
    }

    /// Whether a page source provides the pages of `addr`'s region.
    pub fn has_source(&self, addr: BackingAddr) -> bool {
        let region = self.core.regions.find(PageNo::of(addr));
        region.is_some_and(|region| region.origin.is_some())
    }

    /// Under [`HugePages::Madvise`]: from now on the host makes compound pages, if possible, of the
    /// blocks wholly inside `range`.
    pub fn advise_huge(&self, range: BackingRange) -> Result<(), HostError> {
        let region = self.core.regions.find(PageNo::of(range.start()));
        let region = region.filter(|region| region.range().intersect(range) == Some(range));
        let region = region.ok_or(HostError::NoSuchRegion(range.start()))?;
        region.advise(range);
        Ok(())
    }

    /// The bytes of frame `pfn`. The caller knows their page, from a [`crate::Resolution::Ready`]
    /// that has not been invalidated.
    #[inline]
    pub fn frame(&self, pfn: Pfn) -> FramePtr<'_> {
        self.core.frames.pool.frame(pfn)
    }

    /// The first frame of `addr`'s compound page, if there is one. It may be split a moment later;
    /// the split calls its notifier's [`MmuNotifier::split_huge`].
    pub fn compound_page(&self, addr: BackingAddr) -> Option<Pfn> {
        let page = PageNo::of(addr);
        let region = self.core.regions.find(page)?;
        match region.block_word(page)?.load() {
            PageBlockState::Compound { block } => Some(block.frame(0)),
            _ => None,
        }
    }

    /// Prefetches the descriptor of frame `pfn`, because [`Host::mark_dirty`] will follow soon.
    /// Changes nothing.
    #[inline]
    pub fn prefetch(&self, pfn: Pfn) {
        self.core.frames.prefetch(pfn);
    }

    /// Records that the page in `pfn`, or the block of pages that begins there, was written: a leaf
    /// with D that maps it was removed, or is known.
    #[inline]
    pub fn mark_dirty(&self, pfn: Pfn, level: Level) {
        self.core.frames.mark_dirty(pfn, level);
    }

    /// The failure of the last write-out; `None` after a successful one.
    pub fn failure(&self) -> Option<HostError> {
        lock(&self.core.failure)
            .as_ref()
            .map(|failure| failure.error.clone())
    }

    /// How the executor carries out reads, such as `io_uring`.
    pub fn describe_io(&self) -> &str {
        self.io.describe()
    }

    /// The seed of a host in virtual time; `None` in real time.
    pub fn seed(&self) -> Option<u64> {
        self.io.seed()
    }

    /// The latency that the swap device states, in nanoseconds: no read completes earlier.
    pub fn stated_latency_ns(&self) -> u64 {
        self.core.store.latency_ns()
    }

    /// Whether a read takes less time than reporting it to a guest: the device answers at once, and
    /// no latency is added.
    pub fn reads_at_once(&self) -> bool {
        matches!(self.core.store.reads(), Reads::Immediate) && self.core.store.latency_ns() == 0
    }

    /// The time until which a polling thread may sleep: when the first completion is due. `None` if
    /// a completion may arrive at any time, or none is expected.
    pub fn next_due(&self) -> Option<Nanos> {
        self.io.next_due()
    }

    /// When the next completion of a virtual executor is due. `None` in real time.
    pub fn next_completion(&self) -> Option<Nanos> {
        self.io.next_completion()
    }

    /// Delivers the arrived completions that are due at `now`; returns their number. In virtual
    /// time nothing else delivers them. In real time this saves the wake-up of a thread; it costs a
    /// few nanoseconds if nothing has arrived. Callbacks run here ([`Ticket::on_done`]), so the
    /// caller holds no lock.
    pub fn poll(&self, now: Nanos) -> usize {
        self.io.poll(&self.core, now)
    }

    /// Ends simulated latency ([`SwapStore::latency_ns`]): completions that wait for it are
    /// delivered, and later ones do not wait. Call it after a run, so that a reader of the guest's
    /// memory need not wait for a slow device. No effect in virtual time.
    pub fn end_latency(&self) {
        self.core.at_once.store(true, Ordering::SeqCst);
        self.io.deliver_all();
    }

    /// Promises that the caller will call [`Host::poll`] about every 50 us for the life of the
    /// guard. While any guard exists, the delivering threads stay asleep. A thread drops its guard
    /// before it goes to sleep: otherwise operations in flight would wait for it.
    pub fn polling(&self) -> Polling<'_> {
        self.io.join();
        Polling(self)
    }
}

/// A thread polls: see [`Host::polling`].
#[must_use]
pub struct Polling<'a>(&'a Host);

impl Drop for Polling<'_> {
    fn drop(&mut self) {
        self.0.io.leave();
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        for region in self.core.regions.snapshot().iter() {
            region
                .outside()
                .into_iter()
                .for_each(|outside| outside.end());
        }
        self.io.shut_down();
    }
}

fn check_budget(budget: PageCount, vcpus: usize) -> Result<(), HostError> {
    let minimum = Host::minimum_budget(vcpus);
    if budget < minimum {
        return Err(HostError::BudgetTooSmall {
            budget,
            vcpus,
            minimum,
        });
    }
    Ok(())
}

impl Core {
    pub fn register(&self, cache: &Arc<SharedCache>) {
        let mut caches = lock(&self.caches);
        caches.push(cache.clone());
        self.promise_to(caches.len());
    }

    fn promise_to(&self, vcpus: usize) {
        let minimum = Host::minimum_budget(vcpus).get();
        self.frames.promise(minimum as usize);
    }

    pub fn unregister(&self, cache: &Arc<SharedCache>) {
        let mut caches = lock(&self.caches);
        caches.retain(|other| !Arc::ptr_eq(other, cache));
        self.promise_to(caches.len());
        // Under the lock, so that `Core::stats` counts this cache's faults exactly once.
        self.stats.absorb(&cache.count);
    }

    pub fn with_caches<T>(&self, read: impl FnOnce(&[Arc<SharedCache>]) -> T) -> T {
        read(&lock(&self.caches))
    }

    /// The pages on which an instruction in progress has faulted, ascending.
    pub fn pinned_pages(&self) -> Vec<PageNo> {
        let mut pinned = Vec::new();
        self.with_caches(|caches| caches.iter().for_each(|cache| cache.gather(&mut pinned)));
        pinned.sort_unstable();
        pinned
    }

    /// Frees a swap entry. Its content is no longer needed, and no write to it is in flight.
    pub fn free_entry(&self, entry: SwapEntry) {
        // Discard first: once the entry is free, another thread may write to it.
        self.store.discard(entry);
        lock(&self.entries).free(entry);
    }

    pub fn lost_page(&self, page: PageNo) -> LostPage {
        let lost = lock(&self.lost).get(&page).cloned();
        lost.unwrap_or_else(|| {
            let reason = self.reason_of_loss(page);
            LostPage::new(page.addr(), reason.unwrap_or("no region holds it"))
        })
    }

    /// Records that the page is lost, and why.
    pub fn note_lost(&self, page: PageNo, lost: &LostPage) {
        let lost = LostPage {
            page: page.addr(),
            ..lost.clone()
        };
        lock(&self.lost).insert(page, lost);
    }
}
