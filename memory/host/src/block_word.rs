//! How a block of 512 pages is kept: as a compound page, or split into pages with a word each.
//!
//! ```text
//!                no block of frames is free, or
//!                the caller cannot map 2 MiB
//!   Untouched -------------------------------> Split <----------.
//!       |                                        |              | split: the page words
//!       | first touch: a block of zeros          | collapse     | are filled in first
//!       |                                        v              |
//!       '------------------------------------> Compound --------'
//!
//!   Untouched, Compound --> Gone (region removed; under Split, each page word becomes Gone)
//!
//!   block word   its page words
//!   Untouched    all Empty
//!   Split        each says where its page is
//!   Compound     Empty or Collapsed: page i is in frame 512 * block + i
//! ```
//! **A fault reads the page word first.** It reads the block word only if the page word says Empty
//! or Collapsed. So a page with a frame of its own is found as if there were no blocks, and a first
//! touch of 2 MiB changes one word instead of 512.
//!
//! This is sound for two reasons. A block word never becomes Untouched again. And it changes from
//! Split to Compound only after every page word has become Collapsed. So if a fault has read Split,
//! and the block becomes a compound page, the fault's compare-exchange of its page word from Empty
//! fails.
//!
//! A fault that can map 2 MiB reads the block word first: while it does not say Split, the page
//! words add nothing.
//!
//! No state says that a split is in progress, and none is needed. The page words are filled in
//! before the block word changes. The descriptors of the frames are published last, and before that
//! no frame can leave its page.

use crate::residency::PageNo;
use lacuna_addr::{Level, Pfn};
use lacuna_sync::shim::{AtomicU64, Ordering};

/// Pages in a block.
pub const BLOCK: usize = Level::L2M.pages() as usize;

const TAG_BITS: u32 = 2;

/// An aligned block of frames: a frame number divided by 512.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct BlockNo(u32);

impl BlockNo {
    pub const fn new(number: u32) -> Self {
        Self(number)
    }

    /// The block that contains `frame`.
    pub const fn of(frame: Pfn) -> Self {
        Self((frame.index() / BLOCK) as u32)
    }

    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// The frame for page `index` of a block of pages.
    pub const fn frame(self, index: usize) -> Pfn {
        Pfn::new(self.0 * BLOCK as u32 + index as u32)
    }

    /// The frame for `page`.
    pub const fn frame_of(self, page: PageNo) -> Pfn {
        self.frame(page.in_block())
    }
}

/// How a block of pages is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageBlockState {
    /// No page of it was ever faulted on.
    Untouched,
    /// Each page has a word of its own that says where it is.
    Split,
    /// All 512 pages are in `block`.
    Compound { block: BlockNo },
    /// Its region was removed.
    Gone,
}

use PageBlockState::{Compound, Gone, Split, Untouched};

impl PageBlockState {
    const fn encode(self) -> u64 {
        match self {
            Untouched => 0,
            Split => 1,
            Compound { block } => 2 | (block.0 as u64) << TAG_BITS,
            Gone => 3,
        }
    }

    const fn decode(word: u64) -> Self {
        match word & ((1 << TAG_BITS) - 1) {
            0 => Untouched,
            1 => Split,
            2 => Compound {
                block: BlockNo((word >> TAG_BITS) as u32),
            },
            _ => Gone,
        }
    }

    /// Whether the drawing at the head of the file has this arrow.
    const fn may_become(self, next: Self) -> bool {
        matches!(
            (self, next),
            (Untouched, Split | Compound { .. } | Gone)
                | (Split, Compound { .. })
                | (Compound { .. }, Split | Gone)
        )
    }
}

/// The state of one block of pages.
pub struct BlockWord(AtomicU64);

impl BlockWord {
    /// The word of an untouched block.
    pub fn new() -> Self {
        Self(AtomicU64::new(Untouched.encode()))
    }

    /// The state now.
    #[inline]
    pub fn load(&self) -> PageBlockState {
        PageBlockState::decode(self.0.load(Ordering::Acquire))
    }

    /// Changes the word from `from` to `to`. If another thread has changed it, returns the state
    /// that it found. All changes pass here.
    pub fn change(&self, from: PageBlockState, to: PageBlockState) -> Result<(), PageBlockState> {
        debug_assert!(from.may_become(to), "{from:?} to {to:?}");
        self.0
            .compare_exchange(
                from.encode(),
                to.encode(),
                Ordering::AcqRel,
                Ordering::Acquire,
            )
            .map(|_| ())
            .map_err(PageBlockState::decode)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_survives_its_word() {
        let block = BlockNo(u32::MAX);
        for state in [Untouched, Split, Compound { block }, Gone] {
            assert_eq!(PageBlockState::decode(state.encode()), state);
        }
        assert_eq!(Untouched.encode(), 0);
    }

    #[test]
    fn nothing_is_untouched_again() {
        let block = BlockNo(1);
        for state in [Untouched, Split, Compound { block }, Gone] {
            assert!(!state.may_become(Untouched) && !Gone.may_become(state));
        }
    }
}
