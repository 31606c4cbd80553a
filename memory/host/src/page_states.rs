//! Counts the pages of a range by their state, for maps of a guest's memory.

use crate::host::Host;
use crate::region::Region;
use lacuna_addr::{BackingRange, PageStates};
use lacuna_frames::{BLOCK, BlockWord, PageBlockState, PageNo, PageState, PageWord};

impl Host {
    /// Counts the pages of `range` by their state; none is dirty. Pages of no region are in no
    /// count. Reads 8
    /// bytes for each page, and for a whole or untouched block of 2 MiB only 8 bytes. No vCPU
    /// waits for it, so a page that changes its state meanwhile counts in one state or the other.
    pub fn page_states(&self, range: BackingRange) -> PageStates {
        let mut states = PageStates::default();
        for region in self.core.regions.snapshot().iter() {
            if let Some(part) = region.range().intersect(range) {
                region.count_into(part, &mut states);
            }
        }
        states
    }
}

impl Region {
    fn count_into(&self, range: BackingRange, states: &mut PageStates) {
        let (mut page, end) = (PageNo::of(range.start()), PageNo::of(range.end()));
        let is_huge = self.has_units();
        while page < end {
            let next = page.block_start().plus(BLOCK).min(end);
            let pages = next.get() - page.get();
            match self.block_word(page).map(BlockWord::load) {
                Some(PageBlockState::Compound { .. }) => {
                    states.resident += pages;
                    states.huge += pages;
                }
                Some(PageBlockState::Untouched) => *self.empty(states) += pages,
                Some(PageBlockState::Gone) => {}
                Some(PageBlockState::Split) | None => {
                    for at in 0..pages as usize {
                        let word = self.word(page.plus(at)).map(PageWord::load);
                        word.into_iter()
                            .for_each(|word| self.count_page(word, is_huge, states));
                    }
                }
            }
            page = next;
        }
    }

    fn count_page(&self, state: PageState, is_huge: bool, states: &mut PageStates) {
        match state {
            PageState::Resident { .. }
            | PageState::Evicting { .. }
            | PageState::Writeback { .. }
            | PageState::Collapsed
            | PageState::InPlace => {
                states.resident += 1;
                states.huge += u64::from(is_huge);
            }
            PageState::Swapped { .. }
            | PageState::Reading { .. }
            | PageState::PagedOut
            | PageState::PagingIn => states.swapped += 1,
            PageState::Fetching { .. } | PageState::Lost => states.missing += 1,
            PageState::Empty => *self.empty(states) += 1,
            PageState::Zero | PageState::Discarding => states.untouched += 1,
            PageState::Gone => {}
        }
    }

    /// The count of pages that nothing has filled yet.
    fn empty<'a>(&self, states: &'a mut PageStates) -> &'a mut u64 {
        match self.origin {
            Some(_) => &mut states.missing,
            None => &mut states.untouched,
        }
    }
}
