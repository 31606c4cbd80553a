//! The state of a block of 512 pages: a compound page, or split into pages with a page word each.
//!
//! ```text
//!                no block of frames is free, or
//!                the caller cannot map 2 MiB
//!   Untouched -------------------------------> Split <----------.
//!       |                                        |              | split: the page words
//!       | first fault: a zeroed block            | collapse     | are filled in first
//!       |                                        v              |
//!       '------------------------------------> Compound --------'
//!
//!   Untouched, Compound --> Gone     region removed; Split stays, and each page word becomes Gone
//!
//!   block word   its page words
//!   Untouched    all Empty
//!   Split        each says where its page is
//!   Compound     Empty or Collapsed: page i is in frame 512 * block + i
//! ```
//! **A fault reads the page word first.** It reads the block word only if the page word says Empty
//! or Collapsed. So a fault on a page with its own frame reads no block word. And the first fault
//! of a block that gets 2 MiB changes one word instead of 512.
//!
//! The race between the two reads: a fault reads Empty in the page word and Split in the block
//! word; another thread collapses the block; the fault gives the page its own frame. That last step
//! fails. The collapse changes every page word to Collapsed before it changes the block word, so
//! the fault's compare-exchange from Empty finds another value. A block word never becomes
//! Untouched again, so a fault that has read Untouched cannot succeed with a late compare-exchange
//! either.
//!
//! A fault that can map 2 MiB reads the block word first. Unless that says Split, the fault needs
//! no page word.
//!
//! A split needs no state for its progress. The splitting thread fills in the page words, then
//! changes the block word, then publishes the descriptors of the frames. Before that last step
//! reclaim cannot take a frame from its page.

use crate::page_no::{BLOCK, PageNo};
use lacuna_addr::Pfn;
use lacuna_sync::shim::{AtomicU64, Ordering};

const TAG_BITS: u32 = 2;

/// An aligned block of frames: a frame number divided by 512.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct BlockNo(u32);

impl BlockNo {
    /// Block `number`.
    pub const fn new(number: u32) -> Self {
        Self(number)
    }

    /// The block that contains `frame`.
    pub const fn of(frame: Pfn) -> Self {
        Self((frame.index() / BLOCK) as u32)
    }

    /// Its number.
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

/// The state of a block of pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageBlockState {
    /// No fault has provided any of its pages yet.
    Untouched,
    /// Each page has its own word, which says where the page is.
    Split,
    /// All 512 pages are in `block`.
    Compound {
        /// The block of frames.
        block: BlockNo,
    },
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

impl Default for BlockWord {
    /// The word of an untouched block.
    fn default() -> Self {
        Self(AtomicU64::new(Untouched.encode()))
    }
}

impl BlockWord {
    /// The present state.
    #[inline]
    pub fn load(&self) -> PageBlockState {
        PageBlockState::decode(self.0.load(Ordering::Acquire))
    }

    /// Changes the word from `from` to `to`. If the word is no longer `from`, changes nothing and
    /// returns the current state. No other function changes the word.
    #[inline]
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
    fn every_state_is_decoded_as_it_was_encoded() {
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
