//! The free frames: a bit each, counted by block, so that whole blocks are found at once.
//!
//! ```text
//! block       0         1         2         3         4      (cut)
//! bits    [..#.#..] [........] [#######] [..###..] [......]           . = free
//! counts      5         8          0        4         6
//! partial     x                                       x    <- single frames: the lowest of these
//! whole                 x                                  <- then the lowest of these, broken up
//! placed                                    x              <- then the lowest of these
//! ```
//! Frames are taken lowest first, so frames in use gather at the low end and other blocks stay
//! whole. The last block is never whole if the pool's end cuts it.
//!
//! In a *placed* block, each used frame was asked for by its number: the pages of one block lie in
//! it in order, and its free frames are kept for the rest of them.

use crate::block_word::BlockNo;
use crate::page_no::BLOCK;
use lacuna_addr::Pfn;

const WORDS: usize = BLOCK / 64;

pub(crate) struct FreeMap {
    /// Set = free.
    bits: Box<[[u64; WORDS]]>,
    counts: Box<[u16]>,
    /// Blocks with both free and used frames.
    partial: BlockSet,
    /// Blocks with all frames free.
    free: BlockSet,
    /// As `partial`, but placed.
    placed: BlockSet,
    len: usize,
}

impl FreeMap {
    /// `frames` frames, all free.
    pub fn new(frames: usize) -> Self {
        let blocks = frames.div_ceil(BLOCK);
        let mut map = Self {
            bits: vec![[0; WORDS]; blocks].into(),
            counts: vec![0; blocks].into(),
            partial: BlockSet::new(blocks),
            free: BlockSet::new(blocks),
            placed: BlockSet::new(blocks),
            len: 0,
        };
        let whole = frames / BLOCK;
        (0..whole).for_each(|block| map.give_block(BlockNo::new(block as u32)));
        (whole * BLOCK..frames).for_each(|frame| map.give(frame as u32));
        map
    }

    /// The number of free frames.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether `frame` is free.
    pub fn contains(&self, frame: Pfn) -> bool {
        let (block, word, bit) = place(frame.index());
        self.bits[block][word] & bit != 0
    }

    /// Moves up to `count` frames to `out`; neighbours are ascending.
    pub fn take(&mut self, count: usize, out: &mut Vec<u32>) {
        let end = out.len() + count;
        while out.len() < end {
            let sets = [&self.partial, &self.free, &self.placed];
            let Some(block) = sets.into_iter().find_map(BlockSet::first) else {
                return;
            };
            let before = out.len();
            for (i, bits) in self.bits[block].iter_mut().enumerate() {
                while *bits != 0 && out.len() < end {
                    out.push((block * BLOCK + i * 64) as u32 + bits.trailing_zeros());
                    *bits &= *bits - 1;
                }
            }
            let taken = out.len() - before;
            self.len -= taken;
            self.recount(block, usize::from(self.counts[block]) - taken);
        }
    }

    /// Takes a whole block.
    pub fn take_block(&mut self) -> Option<BlockNo> {
        let block = self.free.first()?;
        self.bits[block] = [0; WORDS];
        self.len -= BLOCK;
        self.recount(block, 0);
        Some(BlockNo::new(block as u32))
    }

    /// Takes the frame at `place` of `block`, or of a whole block, which is then placed.
    pub fn take_at(&mut self, place: usize, block: Option<BlockNo>) -> Option<Pfn> {
        let block = block.map(BlockNo::index).or_else(|| self.free.first())?;
        let (bits, bit) = (&mut self.bits[block][place / 64], 1 << (place % 64));
        if *bits & bit == 0 {
            return None;
        }
        *bits &= !bit;
        self.len -= 1;
        if self.free.contains(block) {
            self.placed.insert(block);
        }
        self.recount(block, usize::from(self.counts[block]) - 1);
        Some(BlockNo::new(block as u32).frame(place))
    }

    /// Frees one frame.
    pub fn give(&mut self, frame: u32) {
        let (block, word, bit) = place(frame as usize);
        let bits = &mut self.bits[block][word];
        assert!(*bits & bit == 0, "frame {frame} freed twice");
        *bits |= bit;
        self.len += 1;
        self.recount(block, usize::from(self.counts[block]) + 1);
    }

    /// Frees a block. None of its frames is free yet.
    pub fn give_block(&mut self, block: BlockNo) {
        let block = block.index();
        assert!(self.counts[block] == 0, "frames of block {block} are free");
        self.bits[block] = [u64::MAX; WORDS];
        self.len += BLOCK;
        self.recount(block, BLOCK);
    }

    fn recount(&mut self, block: usize, count: usize) {
        self.counts[block] = count as u16;
        match count {
            0 => {
                self.partial.remove(block);
                self.free.remove(block);
                self.placed.remove(block);
            }
            BLOCK => {
                self.partial.remove(block);
                self.placed.remove(block);
                self.free.insert(block);
            }
            _ => {
                self.free.remove(block);
                if !self.placed.contains(block) {
                    self.partial.insert(block);
                }
            }
        }
    }

    /// Panics if counts and sets do not match the bits.
    pub fn verify(&self) {
        let mut len = 0;
        for (block, bits) in self.bits.iter().enumerate() {
            let count: usize = bits.iter().map(|bits| bits.count_ones() as usize).sum();
            assert_eq!(
                count,
                usize::from(self.counts[block]),
                "free in block {block}"
            );
            assert_eq!(self.free.contains(block), count == BLOCK, "block {block}");
            let is_partial = 0 < count && count < BLOCK;
            let sets = [&self.partial, &self.placed].map(|set| set.contains(block));
            assert_eq!(sets[0] != sets[1], is_partial, "block {block}");
            assert!(sets != [true; 2], "block {block}");
            len += count;
        }
        assert_eq!(len, self.len, "free frames");
    }
}

fn place(frame: usize) -> (usize, usize, u64) {
    (frame / BLOCK, frame % BLOCK / 64, 1 << (frame % 64))
}

/// A set of block numbers, with a fast search for the lowest.
struct BlockSet {
    words: Box<[u64]>,
    /// No member is in an earlier word.
    low: usize,
}

impl BlockSet {
    fn new(len: usize) -> Self {
        let words = vec![0; len.div_ceil(64)].into();
        Self { words, low: 0 }
    }

    fn first(&self) -> Option<usize> {
        let words = &self.words[self.low..];
        let at = words.iter().position(|&word| word != 0)?;
        Some((self.low + at) * 64 + words[at].trailing_zeros() as usize)
    }

    fn contains(&self, number: usize) -> bool {
        self.words[number / 64] >> (number % 64) & 1 == 1
    }

    fn insert(&mut self, number: usize) {
        self.words[number / 64] |= 1 << (number % 64);
        self.low = self.low.min(number / 64);
    }

    fn remove(&mut self, number: usize) {
        self.words[number / 64] &= !(1 << (number % 64));
        while self.words.get(self.low) == Some(&0) {
            self.low += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(map: &mut FreeMap, count: usize) -> Vec<u32> {
        let mut out = Vec::new();
        map.take(count, &mut out);
        map.verify();
        out
    }

    #[test]
    fn single_frames_spare_whole_blocks() {
        let mut map = FreeMap::new(3 * BLOCK + 10);
        assert_eq!(take(&mut map, 4), [1536, 1537, 1538, 1539], "the cut block");
        assert_eq!(map.take_block(), Some(BlockNo::new(0)));
        assert_eq!(take(&mut map, 8).last(), Some(&513), "then one is broken");
        assert_eq!(map.take_block(), Some(BlockNo::new(2)));
        assert_eq!(map.take_block(), None);
        map.give_block(BlockNo::new(0));
        assert_eq!(take(&mut map, 1), [514], "and used up before the next");
        (512..515).for_each(|frame| map.give(frame));
        map.verify();
        assert_eq!(map.take_block(), Some(BlockNo::new(0)));
        assert_eq!(map.take_block(), Some(BlockNo::new(1)), "it has healed");
        assert_eq!(take(&mut map, 1), [], "the rest is in use");
        assert_eq!(map.len(), 0);
    }

    #[test]
    fn a_placed_block_is_broken_up_last() {
        let mut map = FreeMap::new(3 * BLOCK);
        let first = BlockNo::new(0);
        assert_eq!(map.take_at(7, None), Some(first.frame(7)));
        assert_eq!(map.take_at(8, Some(first)), Some(first.frame(8)));
        assert_eq!(map.take_at(8, Some(first)), None, "it is in use");
        assert_eq!(map.take_at(7, None), Some(BlockNo::new(1).frame(7)));
        assert_eq!(take(&mut map, 2), [1024, 1025], "of the whole block");
        assert_eq!(take(&mut map, BLOCK - 1).last(), Some(&0));
        map.give(7);
        map.verify();
        assert_eq!(take(&mut map, 1), [1], "the block is still placed");
        (0..2).chain(8..9).for_each(|frame| map.give(frame));
        map.verify();
        assert_eq!(map.take_block(), Some(first), "it has healed");
    }

    #[test]
    fn a_pool_smaller_than_a_block() {
        let mut map = FreeMap::new(100);
        assert_eq!(map.take_block(), None);
        assert_eq!(take(&mut map, 200).len(), 100);
    }

    #[test]
    #[should_panic(expected = "freed twice")]
    fn a_frame_is_given_back_once() {
        FreeMap::new(100).give(7);
    }
}
