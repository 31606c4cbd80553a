//! The per-CPU page cache: free frames, pinned pages and fault counters of one vCPU.
//!
//! A fault on a resident page changes only this cache, the page word and one frame descriptor. So
//! it takes no shared lock. Reclaim and statistics read [`SharedCache`], which one thread writes.

use crate::frames::BATCH;
use crate::host::Core;
use crate::region::Region;
use crate::residency::PageNo;
use crate::turns::Turn;
use lacuna_addr::Pfn;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};

/// The most pages that one vCPU pins: more than any instruction touches, page walks of both stages
/// included.
pub const MAX_PINNED: usize = 64;
const REGIONS: usize = 4;

/// The per-CPU page cache of one vCPU, or of another thread that calls [`crate::Host::resolve`].
/// Dropping it gives its frames back.
pub struct PerCpuPages {
    pub(crate) core: Arc<Core>,
    /// Free frames that this vCPU may use.
    free: Vec<u32>,
    /// The last used regions, latest first. A VM with few slots uses one or two.
    regions: Vec<Arc<Region>>,
    pub(crate) shared: Arc<SharedCache>,
}

/// The part of a [`PerCpuPages`] that reclaim and statistics read. Only its vCPU writes it, so
/// plain loads and stores suffice.
#[repr(align(128))]
pub(crate) struct SharedCache {
    /// Number of valid entries in `pinned`.
    pinned_count: AtomicU32,
    /// Number of free frames in the cache.
    pub cached: AtomicU32,
    pub count: FaultCounters,
    /// Frames that pages of the last used region have got since the last report to the region.
    unreported: AtomicI64,
    /// A page of that region.
    reports_to: AtomicU64,
    /// Pages on which the instruction in progress has faulted, as hazard pointers. Reclaim reads
    /// them once a batch and skips these pages. If a page is pinned too late for one batch, the
    /// next batch skips it. So reclaim takes a page from an instruction at most once.
    pinned: [AtomicU64; MAX_PINNED],
}

/// Faults by kind.
#[derive(Default)]
pub(crate) struct FaultCounters {
    pub zero_fill: AtomicU64,
    pub resident: AtomicU64,
    pub rescued: AtomicU64,
    pub swap_in: AtomicU64,
    pub shared_ticket: AtomicU64,
    pub huge_fill: AtomicU64,
    pub huge_fallback: AtomicU64,
    pub zeroing_ns: AtomicU64,
    pub missing: AtomicU64,
    pub provided: AtomicU64,
}

impl FaultCounters {
    /// Adds 1. Only the owning thread calls this.
    #[inline]
    pub fn bump(counter: &AtomicU64) {
        Self::add(counter, 1);
    }

    /// Adds `count`. Only the owning thread calls this.
    #[inline]
    pub fn add(counter: &AtomicU64, count: u64) {
        counter.store(counter.load(Ordering::Relaxed) + count, Ordering::Relaxed);
    }

    pub fn all(&self) -> [&AtomicU64; 10] {
        [
            &self.zero_fill,
            &self.resident,
            &self.rescued,
            &self.swap_in,
            &self.shared_ticket,
            &self.huge_fill,
            &self.huge_fallback,
            &self.zeroing_ns,
            &self.missing,
            &self.provided,
        ]
    }
}

impl SharedCache {
    fn new() -> Self {
        Self {
            pinned_count: AtomicU32::new(0),
            cached: AtomicU32::new(0),
            count: FaultCounters::default(),
            unreported: AtomicI64::new(0),
            reports_to: AtomicU64::new(0),
            pinned: [const { AtomicU64::new(0) }; MAX_PINNED],
        }
    }

    /// Adds the pinned pages to `out`.
    pub fn gather(&self, out: &mut Vec<PageNo>) {
        let count = (self.pinned_count.load(Ordering::Acquire) as usize).min(MAX_PINNED);
        let pages = self.pinned[..count].iter();
        out.extend(pages.map(|page| PageNo::new(page.load(Ordering::Relaxed))));
    }

    /// Pins a page. No instruction faults on more than [`MAX_PINNED`] pages; if one did, its oldest
    /// pin would be overwritten.
    #[inline]
    pub fn pin(&self, page: PageNo) {
        let count = self.pinned_count.load(Ordering::Relaxed) as usize;
        // A slice, not `take`: its loop has a quarter of the instructions.
        let mut known = self.pinned[..count.min(MAX_PINNED)].iter();
        if known.any(|pinned| pinned.load(Ordering::Relaxed) == page.get()) {
            return;
        }
        self.pinned[count % MAX_PINNED].store(page.get(), Ordering::Relaxed);
        self.pinned_count
            .store((count as u32).wrapping_add(1), Ordering::Release);
    }

    #[inline]
    pub fn allocated(&self) {
        self.unreported.store(
            self.unreported.load(Ordering::Relaxed) + 1,
            Ordering::Relaxed,
        );
    }

    fn unreported(&self) -> i64 {
        self.unreported.load(Ordering::Relaxed)
    }

    /// Resident pages of `region` that the region has not counted yet, for `verify`.
    pub fn unreported_to(&self, region: &Region) -> i64 {
        let own = region.contains(PageNo::new(self.reports_to.load(Ordering::Relaxed)));
        if own { self.unreported() } else { 0 }
    }

    fn report_to(&self, region: &Region) {
        region.add_resident(self.unreported());
        self.unreported.store(0, Ordering::Relaxed);
    }
}

impl PerCpuPages {
    pub(crate) fn new(core: Arc<Core>) -> Self {
        let shared = Arc::new(SharedCache::new());
        core.register(&shared);
        let free = Vec::with_capacity(2 * BATCH);
        Self {
            core,
            free,
            regions: Vec::with_capacity(REGIONS),
            shared,
        }
    }

    /// Unpins all pages, so that reclaim may take them. The vCPU calls this when the instruction
    /// has retired, when an exception replaces it, and at a reset.
    #[inline]
    pub fn unpin_all(&mut self) {
        if self.shared.pinned_count.load(Ordering::Relaxed) != 0 {
            self.shared.pinned_count.store(0, Ordering::Release);
        }
    }

    /// Gives the free frames back to the budget, because the vCPU will be idle for long.
    pub fn flush(&mut self) {
        self.core.frames.give(self.free.drain(..));
        self.shared.cached.store(0, Ordering::Relaxed);
        self.report();
    }

    /// Finds the region of `page` and puts it first; `None` if no region has the page.
    #[inline]
    pub(crate) fn find(&mut self, page: PageNo) -> Option<()> {
        match self.regions.first() {
            Some(region) if region.contains(page) => Some(()),
            _ => self.find_slow(page),
        }
    }

    /// The region that the last [`PerCpuPages::find`] found.
    #[inline]
    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.regions[0]
    }

    /// The next free frame. Refills the cache first if it is empty.
    #[inline]
    pub(crate) fn take(&mut self) -> Option<Pfn> {
        let index = match self.free.pop() {
            Some(index) => index,
            None => self.refill()?,
        };
        self.shared
            .cached
            .store(self.free.len() as u32, Ordering::Relaxed);
        Some(Pfn::new(index))
    }

    /// Puts back a frame that no page word has named.
    pub(crate) fn untake(&mut self, pfn: Pfn) {
        self.free.push(pfn.index() as u32);
        self.shared
            .cached
            .store(self.free.len() as u32, Ordering::Relaxed);
    }

    /// Refills the empty cache of a thread in the queue for frames; returns how many frames it has.
    pub(crate) fn refill_in_turn(&mut self, turn: Turn) -> usize {
        if self.free.is_empty() {
            self.core.frames.take_turn(turn, &mut self.free);
            self.shared
                .cached
                .store(self.free.len() as u32, Ordering::Relaxed);
        }
        self.free.len()
    }

    pub(crate) fn report(&self) {
        if let Some(region) = self.regions.first() {
            self.shared.report_to(region);
        }
    }

    #[cold]
    fn refill(&mut self) -> Option<u32> {
        self.report();
        self.core.frames.take_batch(&mut self.free);
        self.core.wake_background_if_low();
        self.free.pop()
    }

    /// Drops its references to removed regions. Such a region keeps its page source.
    pub(crate) fn forget_removed(&mut self) {
        // The rare case: a report changes a counter that all vCPUs of the region share.
        if !self.regions.iter().any(|region| region.is_removed()) {
            return;
        }
        self.report();
        self.regions.retain(|region| !region.is_removed());
    }

    #[cold]
    fn find_slow(&mut self, page: PageNo) -> Option<()> {
        self.report();
        self.forget_removed();
        self.shared.reports_to.store(page.get(), Ordering::Relaxed);
        if let Some(at) = self.regions.iter().position(|region| region.contains(page)) {
            self.regions[..=at].rotate_right(1);
            return Some(());
        }
        let region = self.core.regions.find(page)?;
        self.regions.truncate(REGIONS - 1);
        self.regions.insert(0, region);
        Some(())
    }
}

impl Drop for PerCpuPages {
    fn drop(&mut self) {
        self.unpin_all();
        self.flush();
        self.core.unregister(&self.shared);
    }
}
