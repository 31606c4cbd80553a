//! A block of a region's pages, and the words that say where they are.

use crate::block_word::BlockWord;
use crate::page_no::PageNo;
use crate::residency::PageWord;

/// A block of a region's pages.
#[derive(Clone, Copy)]
pub struct Span<'a> {
    /// The first page.
    pub first: PageNo,
    /// The block's word.
    pub block_word: &'a BlockWord,
    /// A word for each page.
    pub words: &'a [PageWord],
}

impl Span<'_> {
    /// Every page with its word.
    pub fn pages(&self) -> impl Iterator<Item = (PageNo, &PageWord)> {
        let words = self.words.iter().enumerate();
        words.map(|(i, word)| (self.first.plus(i), word))
    }
}
