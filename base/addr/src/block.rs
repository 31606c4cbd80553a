//! Blocks: the aligned 2 MiB of guest frames that a fault locks, and that one large leaf maps.

use crate::{Gfn, GfnRange, Level};
use core::fmt;

/// Frames of a block.
const FRAMES: u64 = Level::L2M.pages();

/// The number of a block of guest frames: a [`Gfn`] divided by 512.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(transparent)]
pub struct BlockNumber(u64);

impl BlockNumber {
    /// The block that contains `gfn`.
    #[inline]
    pub const fn of(gfn: Gfn) -> Self {
        Self(gfn.get() / FRAMES)
    }

    /// The raw number, for hashes and filters of blocks.
    #[inline]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// All frames of the block.
    #[inline]
    pub fn range(self) -> GfnRange {
        let first = Gfn::checked_before(self.0 * FRAMES);
        GfnRange::new(first, FRAMES).expect("2^36 frames are whole blocks")
    }

    /// The distance from block `first` in blocks: the index into an array with an element for each
    /// block from `first` on.
    ///
    /// # Panics
    /// In debug builds, if the block is before `first`.
    #[inline]
    pub const fn index_from(self, first: Self) -> usize {
        (self.0 - first.0) as usize
    }
}

impl fmt::Display for BlockNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl GfnRange {
    /// The blocks that the range overlaps, ascending.
    #[inline]
    pub fn blocks(self) -> impl ExactSizeIterator<Item = BlockNumber> + Clone {
        let (first, last) = (self.start().block(), self.last().block());
        (0..last.index_from(first) + 1).map(move |i| BlockNumber(first.0 + i as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(first: u64, pages: u64) -> GfnRange {
        GfnRange::new(Gfn::new(first).unwrap(), pages).unwrap()
    }

    #[test]
    fn a_range_has_the_blocks_that_it_overlaps() {
        let blocks = |first, pages| {
            let blocks = range(first, pages).blocks();
            blocks.map(BlockNumber::get).collect::<Vec<_>>()
        };
        assert_eq!(blocks(0, 1), [0]);
        assert_eq!(blocks(511, 1), [0]);
        assert_eq!(blocks(511, 2), [0, 1]);
        assert_eq!(blocks(512, 1024), [1, 2]);
        assert_eq!(blocks((1 << 36) - 1, 1), [(1 << 27) - 1]);
    }

    #[test]
    fn every_frame_is_in_the_range_of_its_block() {
        for gfn in [0, 511, 512, (1 << 36) - 1] {
            let gfn = Gfn::new(gfn).unwrap();
            let block = gfn.block();
            assert!(block.range().contains(gfn));
            assert_eq!(block.range().blocks().collect::<Vec<_>>(), [block]);
            assert_eq!(block.index_from(BlockNumber(0)) as u64, block.get());
        }
    }
}
