//! How a block of 512 pages is kept: as pages, each with its word, or whole. One word a block.
//!
//! ```text
//!                no block of frames is free, or
//!                the caller cannot map one
//!   Untouched -------------------------------> Small <----------.
//!       |                                        |              | split: the words
//!       | first touch: a block of zeros          | collapse     | are filled in first
//!       |                                        v              |
//!       '-------------------------------------> Whole ----------'
//!
//!   Untouched, Whole --> Gone (region removed; under Small, each word becomes Gone)
//!
//!   head        its page words
//!   Untouched   all Empty
//!   Small       tell where each page is
//!   Whole       Empty (never asked for one by one) or Merged: page i is in frame 512 * block + i
//! ```
//! *A page's own word comes first*, and the head only if the word says Empty or Merged: a page that
//! is resident by itself is found as if there were no blocks, and a first touch of 2 MiB changes
//! one word instead of 512. It is sound because a head never becomes Untouched again, and because
//! Small becomes Whole only after every word has become Merged: the change of a word from Empty,
//! decided under a head that said Small, then fails. (A head that says anything else than Small is
//! the whole truth at that moment, so who likes may look at it before the word.)
//!
//! There is no state for a split in progress: the page words are right before the head changes, and
//! no frame of the block can leave its page before its descriptor is published, which comes last.

use crate::residency::PageNo;
use lacuna_addr::{Level, Pfn};
use lacuna_sync::shim::{AtomicU64, Ordering};

/// Pages of a block.
pub const BLOCK: usize = Level::L2M.pages() as usize;

const TAG_BITS: u32 = 2;

/// An aligned block of frames: a frame number divided by 512.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct BlockNo(u32);

impl BlockNo {
    pub const fn new(number: u32) -> Self {
        Self(number)
    }

    /// The block that `frame` lies in.
    pub const fn of(frame: Pfn) -> Self {
        Self((frame.index() / BLOCK) as u32)
    }

    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// Its frame for the page that is number `index` of its own block.
    pub const fn frame(self, index: usize) -> Pfn {
        Pfn::new(self.0 * BLOCK as u32 + index as u32)
    }

    /// Its frame for `page`.
    pub const fn frame_of(self, page: PageNo) -> Pfn {
        self.frame(page.in_block())
    }
}

/// How a block of pages is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HeadState {
    /// No page was ever asked for.
    Untouched,
    /// Page by page.
    Small,
    /// All of it in `block`.
    Whole { block: BlockNo },
    /// Its region was removed.
    Gone,
}

use HeadState::{Gone, Small, Untouched, Whole};

impl HeadState {
    const fn encode(self) -> u64 {
        match self {
            Untouched => 0,
            Small => 1,
            Whole { block } => 2 | (block.0 as u64) << TAG_BITS,
            Gone => 3,
        }
    }

    const fn decode(word: u64) -> Self {
        match word & ((1 << TAG_BITS) - 1) {
            0 => Untouched,
            1 => Small,
            2 => Whole {
                block: BlockNo((word >> TAG_BITS) as u32),
            },
            _ => Gone,
        }
    }

    /// Whether the drawing above has an arrow.
    const fn may_become(self, next: Self) -> bool {
        matches!(
            (self, next),
            (Untouched, Small | Whole { .. } | Gone)
                | (Small, Whole { .. })
                | (Whole { .. }, Small | Gone)
        )
    }
}

/// A block's word.
pub struct Head(AtomicU64);

impl Head {
    /// An untouched block's.
    pub fn new() -> Self {
        Self(AtomicU64::new(Untouched.encode()))
    }

    /// How the block is kept now.
    #[inline]
    pub fn load(&self) -> HeadState {
        HeadState::decode(self.0.load(Ordering::Acquire))
    }

    /// The choke point: `from -> to`, unless somebody was quicker; then how it is kept instead.
    pub fn change(&self, from: HeadState, to: HeadState) -> Result<(), HeadState> {
        debug_assert!(from.may_become(to), "{from:?} to {to:?}");
        self.0
            .compare_exchange(
                from.encode(),
                to.encode(),
                Ordering::AcqRel,
                Ordering::Acquire,
            )
            .map(|_| ())
            .map_err(HeadState::decode)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_survives_its_word() {
        let block = BlockNo(u32::MAX);
        for state in [Untouched, Small, Whole { block }, Gone] {
            assert_eq!(HeadState::decode(state.encode()), state);
        }
        assert_eq!(Untouched.encode(), 0);
    }

    #[test]
    fn nothing_is_untouched_again() {
        let block = BlockNo(1);
        for state in [Untouched, Small, Whole { block }, Gone] {
            assert!(!state.may_become(Untouched) && !Gone.may_become(state));
        }
    }
}
