//! The per-CPU page cache: free frames, pinned pages and fault counters of one vCPU.
//!
//! A fault on a resident page changes only this cache, the page word and one frame descriptor. So
//! it takes no shared lock. Reclaim and statistics read [`SharedCache`], which one thread writes.

use crate::core::Core;
use crate::region::Region;
use crate::shared_cache::SharedCache;
use lacuna_addr::Pfn;
use lacuna_frames::{BATCH, PageNo, Turn};
use std::sync::Arc;
use std::sync::atomic::Ordering;

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

    /// Faults so far that filled a page or a compound page with zeros.
    pub fn zero_fills(&self) -> u64 {
        let count = &self.shared.count;
        count.zero_fill.load(Ordering::Relaxed) + count.huge_fill.load(Ordering::Relaxed)
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

    /// Gives back a frame that no page word has named: to the budget, so that its block of frames
    /// may be whole again.
    pub(crate) fn untake(&self, pfn: Pfn) {
        self.core.frames.give([pfn.index() as u32]);
        self.core.settled.bump();
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
