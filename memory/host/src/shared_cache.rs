//! The part of a per-CPU page cache that other threads read.

use crate::counters::FaultCounters;
use crate::region::Region;
use lacuna_frames::PageNo;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};

/// The most pages that one vCPU pins: more than any instruction touches, page walks of both stages
/// included.
pub const MAX_PINNED: usize = 64;

/// The part of a [`PerCpuPages`](crate::PerCpuPages) that reclaim and statistics read. Only its
/// vCPU writes it, so plain loads and stores suffice.
#[repr(align(128))]
pub(crate) struct SharedCache {
    /// Number of valid entries in `pinned`.
    pub pinned_count: AtomicU32,
    /// Number of free frames in the cache.
    pub cached: AtomicU32,
    pub count: FaultCounters,
    /// Frames that pages of the last used region have got since the last report to the region.
    pub unreported: AtomicI64,
    /// A page of that region.
    pub reports_to: AtomicU64,
    /// Pages on which the instruction in progress has faulted, as hazard pointers. Reclaim reads
    /// them once a batch and skips these pages. If a page is pinned too late for one batch, the
    /// next batch skips it. So reclaim takes a page from an instruction at most once.
    pub pinned: [AtomicU64; MAX_PINNED],
}

impl SharedCache {
    pub fn new() -> Self {
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

    pub fn unreported(&self) -> i64 {
        self.unreported.load(Ordering::Relaxed)
    }

    /// Resident pages of `region` that the region has not counted yet, for `verify`.
    pub fn unreported_to(&self, region: &Region) -> i64 {
        let own = region.contains(PageNo::new(self.reports_to.load(Ordering::Relaxed)));
        if own { self.unreported() } else { 0 }
    }

    pub fn report_to(&self, region: &Region) {
        region.add_resident(self.unreported());
        self.unreported.store(0, Ordering::Relaxed);
    }
}
