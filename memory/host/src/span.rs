//! A block of a region's pages, and the words that say where they are.

use crate::block_word::BlockWord;
use crate::page_no::PageNo;
use crate::residency::PageWord;

/// A block of a region's pages.
#[derive(Clone, Copy)]
pub(crate) struct Span<'a> {
    pub first: PageNo,
    pub block_word: &'a BlockWord,
    pub words: &'a [PageWord],
}
