//! The working set: the pages that the guest has written lately, each once.

use lacuna::memory::SlotId;
use std::collections::{BTreeMap, VecDeque};

/// The pages that were written in the last periods. It takes 4 bytes for each page of the guest.
pub(super) struct WorkingSet {
    /// For each page the number of the period in which it was written last; 0 for none.
    last: BTreeMap<SlotId, Vec<u32>>,
    /// How many pages were written last in each period, the present one first.
    counts: VecDeque<u64>,
    /// The number of the present period, from 1.
    now: u32,
    /// The most periods.
    window: usize,
}

impl WorkingSet {
    pub fn new(window: usize) -> Self {
        Self {
            last: BTreeMap::new(),
            counts: [0].into(),
            now: 1,
            window,
        }
    }

    pub fn note(&mut self, slot: SlotId, page: usize) {
        let pages = self.last.entry(slot).or_default();
        if pages.len() <= page {
            pages.resize(page + 1, 0);
        }
        let before = std::mem::replace(&mut pages[page], self.now);
        // No count reaches back to period 0.
        if let Some(count) = self.counts.get_mut((self.now - before) as usize) {
            *count -= 1;
        }
        self.counts[0] += 1;
    }

    /// The pages of the present period.
    pub fn present(&self) -> u64 {
        self.counts[0]
    }

    /// Begins the next period. Returns the pages of all periods until then.
    pub fn end_period(&mut self) -> u64 {
        let pages = self.counts.iter().sum();
        self.now += 1;
        self.counts.push_front(0);
        self.counts.truncate(self.window);
        pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_counts_once_in_its_last_period() {
        let (a, b) = (SlotId(0), SlotId(1));
        let mut set = WorkingSet::new(2);
        for (written, present, pages) in [
            (&[(a, 5), (b, 5), (a, 5)][..], 2, 2),
            (&[(a, 5), (a, 900)], 2, 3),
            (&[], 0, 2),
            (&[], 0, 0),
            (&[(b, 5)], 1, 1),
        ] {
            written
                .iter()
                .for_each(|(slot, page)| set.note(*slot, *page));
            assert_eq!(set.present(), present);
            assert_eq!(set.end_period(), pages);
        }
    }
}
