//! Regions: what a VM's memory slots point into.
//!
//! The manager numbers pages with a counter; a region is a run of numbers, followed by one that is
//! never given to anybody, so that an access past a region's end cannot reach the next. The set of
//! regions is an immutable snapshot swapped whole: a vCPU keeps the regions that it used last.

use crate::error::HostError;
use crate::residency::{PageNo, PageWord};
use lacuna_addr::{Hva, HvaRange, PageCount};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// Who maps the manager's pages and must hear when one goes away. Called with no lock held, on the
/// thread that reclaims.
pub trait MmuNotifier: Send + Sync {
    /// Unmaps `pages`. On return nothing maps them and no vCPU can touch them: it waits for
    /// quiescence. Calls [`crate::Host::mark_dirty`] for the frame of every leaf it removed that
    /// had D set.
    fn invalidate(&self, pages: &[Hva]);

    /// Tests and clears the accessed bit of every leaf that maps `pages[i]`, and stores in
    /// `young[i]` whether any was set.
    fn age(&self, pages: &[Hva], young: &mut [bool]);

    /// An aging pass is over. Processors that cache translations set A only on a miss: bump the TLB
    /// generation once, or hot pages look cold.
    fn end_of_aging(&self);
}

pub(crate) struct Region {
    first: PageNo,
    words: Box<[PageWord]>,
    pub notifier: Arc<dyn MmuNotifier>,
    /// Regions of one notifier have one number: their pages go in one call.
    pub listener: usize,
    removed: AtomicBool,
    /// Pages that have a frame. Magazines report late, so that it may be a batch too low.
    resident: AtomicI64,
}

impl Region {
    pub fn range(&self) -> HvaRange {
        HvaRange::new(self.first.hva(), self.words.len() as u64).expect("checked when added")
    }

    pub fn contains(&self, page: PageNo) -> bool {
        page.get().wrapping_sub(self.first.get()) < self.words.len() as u64
    }

    /// `page`'s word; `None` outside.
    #[inline]
    pub fn word(&self, page: PageNo) -> Option<&PageWord> {
        self.words
            .get(page.get().wrapping_sub(self.first.get()) as usize)
    }

    /// Every page with its word.
    pub fn pages(&self) -> impl Iterator<Item = (PageNo, &PageWord)> {
        let first = self.first.get();
        self.words
            .iter()
            .enumerate()
            .map(move |(i, word)| (PageNo::new(first + i as u64), word))
    }

    pub fn is_removed(&self) -> bool {
        self.removed.load(Ordering::Acquire)
    }

    pub fn add_resident(&self, pages: i64) {
        self.resident.fetch_add(pages, Ordering::Relaxed);
    }

    pub fn resident(&self) -> i64 {
        self.resident.load(Ordering::Relaxed)
    }

    /// Resident pages below which reclaim leaves the region alone: an equal share of half the
    /// budget. The floors' sum is at most half of it, so that under pressure somebody is always
    /// above his.
    pub fn floor(&self, budget: usize, regions: usize) -> i64 {
        (budget / (2 * regions.max(1))).min(self.words.len()) as i64
    }
}

/// Regions by address, ascending.
pub(crate) type RegionList = Arc<Vec<Arc<Region>>>;

#[derive(Default)]
pub(crate) struct Regions {
    list: RwLock<RegionList>,
    numbers: Mutex<Numbers>,
}

struct Numbers {
    next_page: u64,
    next_listener: usize,
}

impl Default for Numbers {
    fn default() -> Self {
        // Page 0 is never a page, so that zero can mean none.
        Self {
            next_page: 1 << 20,
            next_listener: 0,
        }
    }
}

const MAX_PAGES: u64 = 1 << 36;

impl Regions {
    pub fn snapshot(&self) -> RegionList {
        self.list
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// The region that holds `page`.
    pub fn find(&self, page: PageNo) -> Option<Arc<Region>> {
        find(&self.snapshot(), page).cloned()
    }

    pub fn add(
        &self,
        pages: PageCount,
        notifier: Arc<dyn MmuNotifier>,
    ) -> Result<HvaRange, HostError> {
        let mut numbers = self.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        let end = numbers.next_page.checked_add(pages.get());
        if pages.get() == 0 || end.is_none_or(|end| end > MAX_PAGES) {
            return Err(HostError::BadRegion(pages));
        }
        let first = PageNo::new(numbers.next_page);
        numbers.next_page += pages.get() + 1;
        let mut list = self.list.write().unwrap_or_else(PoisonError::into_inner);
        let same = list
            .iter()
            .find(|region| Arc::ptr_eq(&region.notifier, &notifier));
        let listener = same.map_or(numbers.next_listener, |region| region.listener);
        numbers.next_listener = numbers.next_listener.max(listener + 1);
        let region = Arc::new(Region {
            first,
            words: (0..pages.get()).map(|_| PageWord::new()).collect(),
            notifier,
            listener,
            removed: AtomicBool::new(false),
            resident: AtomicI64::new(0),
        });
        let range = region.range();
        *list = Arc::new(list.iter().cloned().chain([region]).collect());
        Ok(range)
    }

    /// Takes the region out of the list. Its words still have to be emptied.
    pub fn remove(&self, range: HvaRange) -> Result<Arc<Region>, HostError> {
        let mut list = self.list.write().unwrap_or_else(PoisonError::into_inner);
        let index = list.iter().position(|region| region.range() == range);
        let index = index.ok_or(HostError::NoSuchRegion(range.start()))?;
        let region = list[index].clone();
        region.removed.store(true, Ordering::Release);
        let rest = list.iter().filter(|other| !Arc::ptr_eq(other, &region));
        *list = Arc::new(rest.cloned().collect());
        Ok(region)
    }
}

/// The region of `list` that holds `page`.
pub(crate) fn find(list: &[Arc<Region>], page: PageNo) -> Option<&Arc<Region>> {
    let after = list.partition_point(|region| region.first <= page);
    let region = &list[after.checked_sub(1)?];
    region.contains(page).then_some(region)
}
