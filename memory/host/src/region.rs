//! Regions: the targets of a VM's memory slots.
//!
//! The manager numbers pages with a counter. A region is a run of numbers that begins with a block
//! of 512. The number after it stays unused, so that an access past a region's end cannot reach the
//! next region. Pages at its end that do not fill a block are always small. The set of regions is
//! an immutable snapshot that is replaced as a whole. A vCPU keeps references to the regions that
//! it used last.
//!
//! A number is never used twice. A memory slot, a ticket or a pinned page may still name a page of
//! a removed region, and must not reach another VM's page. There are 2^52 numbers: regions of 4
//! GiB, ten a second, last for thirteen years.
//!
//! A page word is 8 bytes, and a guest may have far more pages than it ever touches. So the words
//! are allocated as zeros, for which the kernel takes no memory until they are written. No thread
//! writes the page words of an untouched block, and its removal does not read them.

use crate::error::HostError;
use crate::origin::Origin;
use lacuna_addr::{BackingAddr, BackingRange, PAGE_SHIFT, PageCount};
use lacuna_frames::{
    BLOCK, BlockNo, BlockWord, PageBlockState, PageNo, PageState, PageWord, Span, empty_words,
};
use lacuna_linux::LinuxMemory;
use lacuna_sync::{CachePadded, Mutex, RwLock, lock_order};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};

/// Where the host makes compound pages: aligned blocks of 2 MiB.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum HugePages {
    /// Nowhere.
    #[default]
    Never,
    /// Where [`Host::advise_huge`](crate::Host::advise_huge) was called.
    Madvise,
    /// Wherever a block of frames is free.
    Always,
}

/// Handles the mappings of the manager's pages, and is called before a page loses its frame. The
/// reclaiming thread calls it, and holds no lock.
pub trait MmuNotifier: Send + Sync {
    /// Unmaps `ranges`, ascending and disjoint. Waits for a grace period: on return nothing maps
    /// them and no vCPU can touch them. Calls [`crate::Host::mark_dirty`] for every removed leaf
    /// with D.
    fn invalidate(&self, ranges: &[BackingRange]);

    /// As [`MmuNotifier::invalidate`], for pages that reclaim would like to take. Pages that cannot
    /// be unmapped now, such as a page that a device has pinned, are added to `kept`, and stay
    /// resident.
    fn try_invalidate(&self, ranges: &[BackingRange], kept: &mut Vec<BackingAddr>) {
        let _ = kept;
        self.invalidate(ranges);
    }

    /// Tests and clears the accessed bit of every leaf that maps a page of `ranges[i]`, and stores
    /// in `young[i]` whether any was set.
    fn age(&self, ranges: &[BackingRange], young: &mut [bool]);

    /// Gives each mapped page of the 2 MiB block `range` its own accessed and dirty bits, because
    /// the host will look at the pages one by one. If there is no room for a table, the bits of the
    /// block still stand for all of its pages.
    fn split_huge(&self, range: BackingRange);

    /// Ends an aging pass. Processors that cache translations set A only on a TLB miss, so their
    /// TLBs must be flushed once; otherwise hot pages look cold.
    fn end_of_aging(&self);
}

pub(crate) struct Region {
    first: PageNo,
    words: Box<[PageWord]>,
    /// The block words of all blocks that `words` fills; of Linux memory none.
    block_words: Box<[BlockWord]>,
    /// A bit a block word: [`crate::Host::advise_huge`] was called.
    advised: Box<[AtomicU64]>,
    pub notifier: Arc<dyn MmuNotifier>,
    /// Provides missing pages; `None`: they are zeros.
    pub origin: Option<Origin>,
    /// Its pages are there, and not in frames of the budget. It has no block words then.
    pub linux: Option<LinuxMemory>,
    /// Regions with the same notifier have the same number: one call handles their pages.
    pub listener: usize,
    /// The host that owns it: see [`Regions::owns`].
    home: Arc<()>,
    removed: AtomicBool,
    /// Pages with a frame. A per-CPU page cache reports its count at a refill, so the value may be
    /// a batch too low. Padded, because every fault reads the neighbouring fields.
    resident: CachePadded<AtomicI64>,
}

/// Where a page is, according to its page word or its block word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PageLocation {
    /// In its own frame or swap entry, as its word says.
    Page(PageState),
    /// In this whole block.
    Block(BlockNo),
}

impl Region {
    pub fn range(&self) -> BackingRange {
        BackingRange::new(self.first.addr(), self.words.len() as u64).expect("checked when added")
    }

    pub fn contains(&self, page: PageNo) -> bool {
        page.get().wrapping_sub(self.first.get()) < self.words.len() as u64
    }

    /// The index of `page` in the region; the region contains the page.
    pub fn index_of(&self, page: PageNo) -> u64 {
        page.get() - self.first.get()
    }

    /// `page`'s word; `None` outside.
    #[inline]
    pub fn word(&self, page: PageNo) -> Option<&PageWord> {
        self.words
            .get(page.get().wrapping_sub(self.first.get()) as usize)
    }

    /// The block word of `page`'s block; `None` where pages are always small.
    #[inline]
    pub fn block_word(&self, page: PageNo) -> Option<&BlockWord> {
        self.block_words
            .get(page.get().wrapping_sub(self.first.get()) as usize / BLOCK)
    }

    /// Where `page` is; `None` outside.
    pub fn place(&self, page: PageNo) -> Option<PageLocation> {
        // The block word is read first: a page word that says Empty is valid only if the block
        // word said Split or Untouched before.
        match self.block_word(page).map(BlockWord::load) {
            Some(PageBlockState::Compound { block }) => Some(PageLocation::Block(block)),
            _ => Some(PageLocation::Page(self.word(page)?.load())),
        }
    }

    /// The block of `page`; `None` where pages are always small.
    pub fn span(&self, page: PageNo) -> Option<Span<'_>> {
        let block_word = self.block_word(page)?;
        let first = page.block_start();
        let at = (first.get() - self.first.get()) as usize;
        Some(Span {
            first,
            block_word,
            words: &self.words[at..at + BLOCK],
        })
    }

    /// Every block with a block word.
    pub fn spans(&self) -> impl Iterator<Item = Span<'_>> {
        let starts = (0..self.block_words.len()).map(|i| self.first.plus(i * BLOCK));
        starts.filter_map(|first| self.span(first))
    }

    /// Every page without a block word, with its page word.
    pub fn tail(&self) -> impl Iterator<Item = (PageNo, &PageWord)> {
        let from = self.block_words.len() * BLOCK;
        let (first, words) = (self.first.plus(from), self.words[from..].iter());
        words
            .enumerate()
            .map(move |(i, word)| (first.plus(i), word))
    }

    /// The range of those pages; `None` if blocks fill the region.
    pub fn tail_range(&self) -> Option<BackingRange> {
        let from = self.block_words.len() * BLOCK;
        let count = (self.words.len() - from) as u64;
        BackingRange::new(self.first.plus(from).addr(), count)
    }

    /// Marks the blocks wholly inside `range`.
    pub fn advise(&self, range: BackingRange) {
        for (i, span) in self.spans().enumerate() {
            let block = span.first.block_range();
            if block.intersect(range) == Some(block) {
                self.advised[i / 64].fetch_or(1 << (i % 64), Ordering::Relaxed);
            }
        }
    }

    /// Whether the policy wants `page`'s block to be a compound page.
    pub fn wants_huge(&self, huge: HugePages, page: PageNo) -> bool {
        match huge {
            HugePages::Never => false,
            HugePages::Always => true,
            HugePages::Madvise => {
                let block = (page.get() - self.first.get()) as usize / BLOCK;
                let word = self.advised.get(block / 64);
                word.is_some_and(|word| word.load(Ordering::Relaxed) >> (block % 64) & 1 == 1)
            }
        }
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

    /// Reclaim leaves the region alone below this number of resident pages: an equal share of half
    /// the budget. The sum of all floors is at most half of the budget, so under pressure some
    /// region is always above its floor.
    pub fn floor(&self, budget: usize, regions: usize) -> i64 {
        (budget / (2 * regions.max(1))).min(self.words.len()) as i64
    }
}

/// Regions by address, ascending.
pub(crate) type RegionList = Arc<Vec<Arc<Region>>>;

#[derive(Default)]
pub(crate) struct Regions {
    list: RwLock<RegionList, lock_order::RegionTable>,
    /// Only its address matters.
    home: Arc<()>,
    numbers: Mutex<Numbers, lock_order::RegionNumbers>,
}

struct Numbers {
    next_page: u64,
    next_listener: usize,
}

impl Default for Numbers {
    fn default() -> Self {
        // Page 0 is never a page, so zero can mean none. Every region begins with a block. The
        // first number has more than 36 bits, so that code without room for all of a number fails
        // at once and not after years.
        Self {
            next_page: 1 << 40,
            next_listener: 0,
        }
    }
}

/// One past the highest page number that an address can have.
const MAX_PAGES: u64 = 1 << (u64::BITS - PAGE_SHIFT);

impl Regions {
    pub fn snapshot(&self) -> RegionList {
        self.list
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Whether `region` is, or was, one of these.
    pub fn owns(&self, region: &Region) -> bool {
        Arc::ptr_eq(&self.home, &region.home)
    }

    /// The region of `page`.
    pub fn find(&self, page: PageNo) -> Option<Arc<Region>> {
        find(&self.snapshot(), page).cloned()
    }

    pub fn add(
        &self,
        pages: PageCount,
        notifier: Arc<dyn MmuNotifier>,
        origin: Option<Origin>,
        linux: Option<LinuxMemory>,
    ) -> Result<BackingRange, HostError> {
        let mut numbers = self.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        let end = numbers.next_page.checked_add(pages.get());
        if pages.get() == 0 || end.is_none_or(|end| end > MAX_PAGES) {
            return Err(HostError::BadRegion(pages));
        }
        let words = empty_words(pages)?;
        // A huge page of hugetlbfs begins at a multiple of its size.
        let unit = linux.as_ref().map_or(1, LinuxMemory::unit);
        let first = PageNo::new(numbers.next_page.next_multiple_of(unit));
        numbers.next_page = (first.get() + pages.get() + 1).next_multiple_of(BLOCK as u64);
        let mut list = self.list.write().unwrap_or_else(PoisonError::into_inner);
        let same = list
            .iter()
            .find(|region| Arc::ptr_eq(&region.notifier, &notifier));
        let listener = same.map_or(numbers.next_listener, |region| region.listener);
        numbers.next_listener = numbers.next_listener.max(listener + 1);
        let block_words = match linux {
            None => words.len() / BLOCK,
            Some(_) => 0,
        };
        let region = Arc::new(Region {
            first,
            words,
            block_words: (0..block_words).map(|_| BlockWord::default()).collect(),
            advised: (0..block_words.div_ceil(64))
                .map(|_| AtomicU64::new(0))
                .collect(),
            notifier,
            origin,
            linux,
            listener,
            home: self.home.clone(),
            removed: AtomicBool::new(false),
            resident: CachePadded::new(AtomicI64::new(0)),
        });
        let range = region.range();
        *list = Arc::new(list.iter().cloned().chain([region]).collect());
        Ok(range)
    }

    /// Removes the region from the list. Its words still have to be emptied.
    pub fn remove(&self, range: BackingRange) -> Result<Arc<Region>, HostError> {
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

/// The region of `page` in `list`.
pub(crate) fn find(list: &[Arc<Region>], page: PageNo) -> Option<&Arc<Region>> {
    let after = list.partition_point(|region| region.first <= page);
    let region = &list[after.checked_sub(1)?];
    region.contains(page).then_some(region)
}
