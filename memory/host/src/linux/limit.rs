//! Keeps the pages in place in Linux memory near a limit: the background thread pages out the pages
//! that were not accessed for a turn of a clock hand of its own.
//!
//! ```text
//! hand -> window of a block -> age --------> old ones: page_out     young ones stay
//! a turn in which no page left               the next turn takes young ones too
//! then again none                            the hand moves once a second
//! ```
//! No fault waits for room, so a guest may be above the limit for a moment, or for as long as Linux
//! keeps the pages.

use crate::core::Core;
use crate::counters::Counters;
use crate::host::Host;
use crate::region::Region;
use lacuna_addr::PageCount;
use lacuna_frames::{BLOCK, PageNo, PageState, PageWord};
use lacuna_linux::LinuxMemory;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The place of the clock hand, and the pages that have left in its present turn.
#[derive(Default)]
pub(crate) struct LinuxHand {
    /// The next page number.
    next: u64,
    left: u64,
    /// The last turns, one after the other, in which no page has left.
    barren: u32,
}

impl LinuxHand {
    /// Whether no page leaves, young or old: Linux has no place for them.
    pub fn is_stuck(&self) -> bool {
        self.barren > 1
    }
}

/// The result of one step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Trimmed {
    /// There is no limit.
    Unlimited,
    /// No more pages are in place than the limit allows.
    Enough,
    /// This many pages have left.
    Left(u64),
}

impl Host {
    /// Sets how many pages of Linux memory shall be in place, of all regions but those in huge
    /// pages of hugetlbfs, which cannot leave. While there are more, the background thread
    /// ([`Host::spawn_background`]) pages out the coldest ones, as [`Host::page_out`] does. Any
    /// thread may call this at any time.
    pub fn limit_linux(&self, pages: PageCount) {
        self.core.linux_limit.store(pages.get(), Ordering::Relaxed);
        self.core.wake_background();
    }

    /// How many pages of Linux memory shall be in place; the largest number without a limit.
    pub fn linux_limit(&self) -> PageCount {
        PageCount::new(self.core.linux_limit.load(Ordering::Relaxed))
    }
}

impl Core {
    /// One step of the hand: a block of pages.
    pub fn trim_linux(&self, hand: &mut LinuxHand) -> Trimmed {
        let limit = self.linux_limit.load(Ordering::Relaxed);
        if limit == u64::MAX {
            return Trimmed::Unlimited;
        }
        let regions = self.regions.snapshot();
        let in_place = regions.iter().filter(can_leave).filter_map(linux_of);
        let in_place: u64 = in_place.map(LinuxMemory::pages_in_place).sum();
        let over = in_place.saturating_sub(limit) as usize;
        if over == 0 {
            return Trimmed::Enough;
        }
        let Some((region, first)) = self.next_window(hand) else {
            return Trimmed::Left(0);
        };
        let Some(linux) = &region.linux else {
            return Trimmed::Left(0);
        };
        let pages = (0..BLOCK - first.in_block()).map(|at| first.plus(at));
        let in_place = |page: &PageNo| {
            let word = region.word(*page).map(PageWord::load);
            word == Some(PageState::InPlace)
        };
        let mut pages: Vec<_> = pages.filter(in_place).collect();
        if pages.is_empty() {
            return Trimmed::Left(0);
        }
        let ranges: Vec<_> = pages.iter().map(|page| page.range()).collect();
        let mut young = vec![false; pages.len()];
        region.notifier.age(&ranges, &mut young);
        region.notifier.end_of_aging();
        let (seen, mut young) = (pages.len(), young.into_iter());
        pages.retain(|_| !young.next().unwrap_or(false) || hand.barren > 0);
        Counters::add(&self.stats.young, (seen - pages.len()) as u64);
        pages.truncate(over);
        // Memory that Linux cannot page out is like memory that it keeps.
        let left = self.page_out(&region, linux, pages).unwrap_or(0);
        hand.left += left;
        Trimmed::Left(left)
    }

    /// The region and the first page of the next window. At the end of a turn the hand begins
    /// again.
    fn next_window(&self, hand: &mut LinuxHand) -> Option<(Arc<Region>, PageNo)> {
        let regions = self.regions.snapshot();
        let end = |region: &Arc<Region>| {
            PageNo::of(region.range().start()).get() + region.range().pages()
        };
        let mut linux = regions.iter().filter(can_leave);
        let found = linux.find(|region| end(region) > hand.next).or_else(|| {
            hand.barren = match hand.left {
                0 => hand.barren.saturating_add(1),
                _ => 0,
            };
            (hand.next, hand.left) = (0, 0);
            regions.iter().find(can_leave)
        });
        let region = Arc::clone(found?);
        let first = PageNo::new(hand.next.max(PageNo::of(region.range().start()).get()));
        hand.next = first.block_start().get() + BLOCK as u64;
        Some((region, first))
    }

    /// Pages in place in Linux memory, of all regions.
    pub fn linux_pages(&self) -> u64 {
        let regions = self.regions.snapshot();
        let linux = regions.iter().filter_map(linux_of);
        linux.map(LinuxMemory::pages_in_place).sum()
    }
}

/// Whether Linux can page out the region's memory.
fn can_leave(region: &&Arc<Region>) -> bool {
    region.linux.is_some() && !region.has_units()
}

fn linux_of(region: &Arc<Region>) -> Option<&LinuxMemory> {
    region.linux.as_ref()
}
