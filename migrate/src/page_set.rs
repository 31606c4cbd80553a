//! A set of pages, by their numbers.

use lacuna_machine::SourcePage;
use std::ops::Range;

/// A set of the pages of a guest: one bit for each.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PageSet {
    words: Vec<u64>,
    pages: u64,
}

impl PageSet {
    /// No page of `pages`.
    pub fn empty(pages: u64) -> Self {
        let words = pages.div_ceil(64) as usize;
        Self {
            words: vec![0; words],
            pages,
        }
    }

    /// Every page of `pages`.
    pub fn full(pages: u64) -> Self {
        let mut set = Self::empty(pages);
        set.words.fill(u64::MAX);
        set.clear_beyond();
        set
    }

    /// Adds a page. A page beyond the guest's is ignored.
    pub fn insert(&mut self, page: SourcePage) {
        if page.0 < self.pages {
            self.words[(page.0 / 64) as usize] |= 1 << (page.0 % 64);
        }
    }

    /// Removes a page. Returns whether the set had it.
    pub fn remove(&mut self, page: SourcePage) -> bool {
        let had = self.contains(page);
        if had {
            self.words[(page.0 / 64) as usize] &= !(1 << (page.0 % 64));
        }
        had
    }

    /// Removes the first run of pages from `from` on, or from the first page on if no page follows:
    /// at most `most` pages.
    pub fn take_run(&mut self, from: SourcePage, most: u64) -> Option<Range<u64>> {
        let start = self.next(from.0, true).or_else(|| self.next(0, true))?;
        // The rest of a long run is searched in its own turn.
        let pages = start..self.pages.min(start.saturating_add(most));
        let is_taken = |page: &u64| self.remove(SourcePage(*page));
        let taken = pages.take_while(is_taken).count() as u64;
        Some(start..start + taken)
    }

    /// The first run of pages in `pages`.
    pub(crate) fn first_run(&self, pages: Range<u64>) -> Option<Range<u64>> {
        let start = self.next(pages.start, true)?;
        let end = self.next(start, false).unwrap_or(self.pages);
        (start < pages.end).then(|| start..end.min(pages.end))
    }

    /// Removes the pages of `other`, a set of the same guest.
    pub fn subtract(&mut self, other: &Self) {
        let words = self.words.iter_mut().zip(&other.words);
        words.for_each(|(word, other)| *word &= !other);
    }

    /// Adds the pages of `other`, a set of the same guest.
    pub fn add(&mut self, other: &Self) {
        let words = self.words.iter_mut().zip(&other.words);
        words.for_each(|(word, other)| *word |= other);
    }

    /// Removes the pages that are not in `other`, a set of the same guest.
    pub(crate) fn keep(&mut self, other: &Self) {
        let words = self.words.iter_mut().zip(&other.words);
        words.for_each(|(word, other)| *word &= other);
    }

    /// Adds the rest of each unit of which the set has a page: `unit` pages, from a multiple of
    /// `unit` on.
    pub(crate) fn widen(&mut self, unit: u64) {
        let runs: Vec<_> = self.runs().collect();
        for run in runs {
            let end = run.end.next_multiple_of(unit).min(self.pages);
            (run.start - run.start % unit..end).for_each(|page| self.insert(SourcePage(page)));
        }
    }

    /// Whether the page is in the set.
    pub fn contains(&self, page: SourcePage) -> bool {
        page.0 < self.pages && self.words[(page.0 / 64) as usize] >> (page.0 % 64) & 1 == 1
    }

    /// How many pages are in the set.
    pub fn len(&self) -> u64 {
        self.words
            .iter()
            .map(|word| u64::from(word.count_ones()))
            .sum()
    }

    /// Whether the set has no page.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// The size of the guest in pages.
    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    /// One bit for each page, the lowest bit first.
    pub(crate) fn words(&self) -> &[u64] {
        &self.words
    }

    /// Adds the pages of `words`, which come from [`PageSet::words`] as little-endian bytes. The
    /// first word has number `index`. Bits beyond the guest's pages are ignored.
    pub(crate) fn add_words(&mut self, index: usize, words: &[[u8; 8]]) {
        let own = self.words.iter_mut().skip(index).zip(words);
        own.for_each(|(own, word)| *own |= u64::from_le_bytes(*word));
        self.clear_beyond();
    }

    /// Clears the last word's bits beyond the guest's pages.
    fn clear_beyond(&mut self) {
        if let Some(last) = self.words.last_mut()
            && !self.pages.is_multiple_of(64)
        {
            *last &= (1 << (self.pages % 64)) - 1;
        }
    }

    /// The pages as ranges of numbers, ascending.
    pub fn runs(&self) -> impl Iterator<Item = Range<u64>> {
        let mut at = 0;
        std::iter::from_fn(move || {
            let start = self.next(at, true)?;
            at = self.next(start, false).unwrap_or(self.pages);
            Some(start..at)
        })
    }

    /// The first page from `from` on that is in the set, or with `is_in` false, the first that is
    /// not.
    fn next(&self, from: u64, is_in: bool) -> Option<u64> {
        let flip = if is_in { 0 } else { u64::MAX };
        let mut index = (from / 64) as usize;
        let mut word = (self.words.get(index)? ^ flip) & u64::MAX << (from % 64);
        while word == 0 {
            index += 1;
            word = self.words.get(index)? ^ flip;
        }
        let page = index as u64 * 64 + u64::from(word.trailing_zeros());
        (page < self.pages).then_some(page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_full_set_is_one_run() {
        for pages in [1, 63, 64, 65, 200] {
            let set = PageSet::full(pages);
            assert_eq!(set.len(), pages);
            let mut runs = set.runs();
            assert_eq!((runs.next(), runs.next()), (Some(0..pages), None));
        }
        assert_eq!(PageSet::full(0).runs().count(), 0);
    }

    proptest! {
        #[test]
        fn runs_are_the_pages(pages in 1_u64..300, chosen: Vec<u16>) {
            let chosen: BTreeSet<u64> = chosen.into_iter().map(|page| page.into()).collect();
            let mut set = PageSet::empty(pages);
            chosen.iter().for_each(|page| set.insert(SourcePage(*page)));
            let expected: Vec<_> = chosen.range(..pages).copied().collect();
            prop_assert_eq!(set.runs().flatten().collect::<Vec<_>>(), &expected[..]);
            prop_assert_eq!(set.len(), expected.len() as u64);
            prop_assert_eq!(set.is_empty(), expected.is_empty());
            let mut rest = set.clone();
            let mut taken = BTreeSet::new();
            while let Some(run) = rest.take_run(SourcePage(pages / 2), 7) {
                prop_assert!(!run.is_empty() && run.end - run.start <= 7);
                for page in run {
                    prop_assert!(taken.insert(page), "{} was taken twice", page);
                }
            }
            prop_assert_eq!(taken.into_iter().collect::<Vec<_>>(), expected.clone());
            prop_assert!(rest.is_empty());
            let mut none = set.clone();
            none.subtract(&set);
            prop_assert!(none.is_empty());
            let mut both = set.clone();
            both.add(&PageSet::full(pages));
            prop_assert_eq!(both, PageSet::full(pages));
            let mut without = PageSet::full(pages);
            chosen.iter().for_each(|page| _ = without.remove(SourcePage(*page)));
            prop_assert_eq!(without.len(), pages - set.len());
            let mut pieces = Vec::new();
            let mut from = pages / 3;
            while let Some(run) = set.first_run(from..pages - pages / 4) {
                from = run.end;
                pieces.extend(run);
            }
            let inside = expected.iter().filter(|p| (pages / 3..pages - pages / 4).contains(*p));
            prop_assert!(pieces.iter().eq(inside));
            for page in 0..pages + 2 {
                let is_gone = !without.contains(SourcePage(page)) && page < pages;
                prop_assert_eq!(is_gone, set.contains(SourcePage(page)));
                prop_assert_eq!(set.contains(SourcePage(page)), expected.contains(&page));
            }
        }
    }
}
