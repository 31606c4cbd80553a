//! One batch of the clock: whose pages it may take, and what it has isolated.

use crate::core::Core;
use crate::region::{MmuNotifier, Region, RegionList};
use lacuna_addr::{BackingRange, Pfn};
use lacuna_frames::{BATCH, PageNo, PageWord};
use std::sync::Arc;

/// The most pages of one write: 128 KiB.
pub(crate) const CLUSTER: usize = BATCH;

/// How reclaim handles a window of frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Window {
    /// It looks at each frame.
    Frames,
    /// It skips all of them: they are a compound page, or a sampled split.
    Passed,
}

/// The pages that a batch of reclaim spares. The priority falls from one variant to the next while
/// no frame becomes free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ScanPriority {
    /// Spares pages that were accessed since the hand's last turn.
    SpareAccessed,
    /// Spares compound pages, and takes single pages even if they were accessed: a thread waits for
    /// a frame, and a single page is a smaller loss.
    SpareCompound,
    /// Spares none: only compound pages are left.
    TakeAll,
}

/// A frame that this thread has isolated, and the page in it.
pub(crate) struct Victim {
    pub frame: Pfn,
    pub page: PageNo,
    pub region: Arc<Region>,
}

impl Victim {
    pub fn word(&self) -> &PageWord {
        self.region.word(self.page).expect("picked from its region")
    }
}

/// The state of one batch: the owners of pages, and the asked listeners.
pub(crate) struct Round {
    pub priority: ScanPriority,
    pub scanned: usize,
    pub pinned: Vec<PageNo>,
    regions: RegionList,
    /// Pages that the batch may take from each region.
    allowance: Vec<i64>,
    aged: Vec<(usize, Arc<dyn MmuNotifier>)>,
}

impl Round {
    pub fn new(core: &Core, priority: ScanPriority) -> Self {
        let regions = core.regions.snapshot();
        // Frames of a store in memory are not shared among the regions.
        let pages = core.frames.budget().saturating_sub(core.frames.in_store());
        let allowance = regions
            .iter()
            .map(|region| region.resident() - region.floor(pages, regions.len()))
            .collect();
        Self {
            priority,
            scanned: 0,
            pinned: core.pinned_pages(),
            regions,
            allowance,
            aged: Vec::new(),
        }
    }

    /// Whether the region of `page` is above its floor.
    pub fn may_take_from(&self, page: PageNo) -> bool {
        self.find(page).is_some_and(|at| self.allowance[at] > 0)
    }

    /// Counts one page of the region of `page` as taken, if the region is above its floor.
    pub fn take_from(&mut self, page: PageNo) -> Option<Arc<Region>> {
        let at = self.find(page).filter(|&at| self.allowance[at] > 0)?;
        self.allowance[at] -= 1;
        Some(self.regions[at].clone())
    }

    fn find(&self, page: PageNo) -> Option<usize> {
        let after = self
            .regions
            .partition_point(|region| region.range().start() <= page.addr());
        let at = after.checked_sub(1)?;
        self.regions[at].contains(page).then_some(at)
    }

    /// Asks the region's MMU notifier which of `ranges` were accessed.
    pub fn age(&mut self, region: &Region, ranges: &[BackingRange], young: &mut [bool]) {
        region.notifier.age(ranges, young);
        if self.aged.iter().all(|(aged, _)| *aged != region.listener) {
            self.aged.push((region.listener, region.notifier.clone()));
        }
    }

    /// Ends the aging pass at every asked notifier.
    pub fn end(&mut self) {
        for (_, notifier) in self.aged.drain(..) {
            notifier.end_of_aging();
        }
    }
}
