//! Re-arming after a harvest: the harvested pages are write-protected again, or their D bits are
//! cleared (PML), block by block. To *re-arm* a page means either.
//!
//! The last writer of a dirty page's entry was a vCPU, so the entry's cache line is in the cache of
//! that vCPU's core. An atomic exchange waits for the line: some 100 ns a page if the pages are far
//! apart. So the entries of the next [`AHEAD`] blocks are prefetched while a block is re-armed.

use crate::rmap::{BLOCK, Rmap, parts};
use crate::{Mmu, MmuFormat};
use lacuna_addr::{Gfn, GfnRange};
use lacuna_slots::{Slot, SlotId};
use lacuna_stage2::{Flush, Stage2};
use std::collections::VecDeque;
use std::ops::Range;

/// Pages in one word of a bitmap.
const WORD: usize = u64::BITS as usize;
/// Words in the bitmap of one block.
const BLOCK_WORDS: usize = BLOCK as usize / WORD;
/// How many blocks ahead of the re-armed block the entries are prefetched. In a large guest, a full
/// ring has some tens of pages in each block, a sparse bitmap one or two. With 4 blocks instead of
/// 16, a page of a full ring takes a fifth longer.
const AHEAD: usize = 16;

impl<F: MmuFormat> Mmu<F> {
    /// Re-arms the pages of `slot` with a bit in `words`, and waits for the TLB flush. Bit 0 of
    /// `words` is page `first_page` of the slot.
    pub(crate) fn rearm_words(&self, slot: &Slot<Rmap>, first_page: usize, words: &[u64]) {
        let mut flush = Flush::none(&self.stage2);
        self.rearm(
            slot,
            blocks_of_words(slot.gfns, first_page, words),
            &mut flush,
        );
        flush.finish(&*self.qsbr);
    }

    /// Re-arms the pages of `blocks`, which are in `slot`. Adds the necessary TLB flush to `flush`;
    /// the caller waits for it.
    pub(crate) fn rearm<'s>(
        &'s self,
        slot: &Slot<Rmap>,
        blocks: impl Iterator<Item = BlockPages>,
        flush: &mut Flush<'s>,
    ) {
        let mut blocks = blocks.inspect(|block| self.stage2.prefetch(block.lines()));
        let mut prefetched: VecDeque<_> = blocks.by_ref().take(AHEAD).collect();
        while let Some(block) = prefetched.pop_front() {
            prefetched.extend(blocks.next());
            self.rearm_runs(&slot.attach, block.part, block.runs(), flush);
        }
    }
}

/// Pages to re-arm in one 2 MiB block of a slot.
pub(crate) struct BlockPages {
    /// The slot's part of the block.
    part: GfnRange,
    /// One bit for each page of `part`; bit 0 is the part's first page.
    mask: [u64; BLOCK_WORDS],
}

/// [`BlockPages::lines`] treats each byte of the mask as one cache line of entries.
const _: () = assert!(Stage2::LINE == u8::BITS as u64);

impl BlockPages {
    /// The first of the eight pages of each nonzero byte of `mask`. The eight entries are one cache
    /// line if `part` begins at a multiple of eight frames. Otherwise they are in two lines, and
    /// only the first line is named.
    fn lines(&self) -> impl Iterator<Item = Gfn> {
        const EACH: u64 = u64::from_ne_bytes([1; 8]);
        let first = self.part.start().get();
        self.mask
            .iter()
            .zip(0..)
            .flat_map(move |(word, at)| {
                // Bit 0 of each byte becomes the OR of the byte's bits.
                let pairs = word | word >> 1;
                let fours = pairs | pairs >> 2;
                let mut left = (fours | fours >> 4) & EACH;
                std::iter::from_fn(move || {
                    let bit = left.trailing_zeros();
                    left &= left.wrapping_sub(1);
                    (bit < u64::BITS).then(|| first + at * u64::from(u64::BITS) + u64::from(bit))
                })
            })
            .filter_map(Gfn::new)
    }

    /// The pages as runs of consecutive frames, ascending.
    fn runs(&self) -> impl Iterator<Item = GfnRange> {
        let first = self.part.start();
        Runs::of(&self.mask).map(move |(at, pages)| {
            let start = first.checked_add(at as u64).expect("inside the slot");
            GfnRange::new(start, pages as u64).expect("inside the slot")
        })
    }
}

/// The pages with a bit in `words`, by block, for a slot with the frames `gfns`. Bit 0 is page
/// `first_page` of the slot. Bits beyond the slot's end are ignored.
fn blocks_of_words(
    gfns: GfnRange,
    first_page: usize,
    words: &[u64],
) -> impl Iterator<Item = BlockPages> {
    let first = gfns.start().checked_add(first_page as u64);
    let all = first.and_then(|first| {
        let left = gfns.end_raw().saturating_sub(first.get());
        GfnRange::new(first, left.min((words.len() * WORD) as u64))
    });
    all.into_iter().flat_map(move |all| {
        parts(all).filter_map(move |part| {
            let from = (part.start().get() - all.start().get()) as usize;
            let mask = window(words, from, part.pages() as usize);
            (mask != [0; BLOCK_WORDS]).then_some(BlockPages { part, mask })
        })
    })
}

/// Bits `from..from + count` of `words`, moved to bit 0. `count` is at most one block's pages.
fn window(words: &[u64], from: usize, count: usize) -> [u64; BLOCK_WORDS] {
    let (first, shift) = (from / WORD, from % WORD);
    let word = |at: usize| words.get(at).copied().unwrap_or(0);
    std::array::from_fn(|i| {
        let low = word(first + i) >> shift;
        let high = word(first + i + 1).checked_shl((WORD - shift) as u32);
        let bits = low | high.unwrap_or(0);
        match count.saturating_sub(i * WORD) {
            left if left >= WORD => bits,
            left => bits & ((1 << left) - 1),
        }
    })
}

/// Pages reaped from dirty rings, of any slots, in any order. Each is one number: the slot's id in
/// the high 16 bits, the page's index in the slot below.
#[derive(Default)]
pub(crate) struct Found(Vec<u64>);

/// Bits of a page's index in its slot.
const PAGE_BITS: u32 = 48;
/// The number of bits in one pass of [`sort_by_bits`].
const DIGIT: u32 = 8;

impl Found {
    pub(crate) fn add(&mut self, id: SlotId, page: usize) {
        debug_assert!((page as u64) < 1 << PAGE_BITS);
        self.0.push(u64::from(id.0) << PAGE_BITS | page as u64);
    }

    /// Calls `each` once for each slot, with its pages. Returns the number of added pages, repeated
    /// ones included.
    pub(crate) fn each_slot(mut self, mut each: impl FnMut(SlotId, SlotPages<'_>)) -> usize {
        sort_by_bits(&mut self.0, PAGE_BITS..u64::BITS);
        let slots = self
            .0
            .chunk_by_mut(|a, b| *a >> PAGE_BITS == *b >> PAGE_BITS);
        for some in slots {
            each(SlotId((some[0] >> PAGE_BITS) as u16), SlotPages(some));
        }
        self.0.len()
    }
}

/// Sorts `numbers` by `bits`. This is a radix sort, lowest digit first: a comparison sort of a
/// full ring's 65 536 pages takes a fifth of the harvest.
fn sort_by_bits(numbers: &mut [u64], bits: Range<u32>) {
    let first = numbers.first().copied().unwrap_or(0);
    let differ = numbers
        .iter()
        .fold(0, |bits, number| bits | (number ^ first));
    let mut spare = vec![0; numbers.len()];
    let (mut from, mut to) = (&mut *numbers, &mut spare[..]);
    let mut passes = 0;
    for shift in bits.step_by(DIGIT as usize) {
        let digit = |number: u64| (number >> shift) as usize & ((1 << DIGIT) - 1);
        if digit(differ) == 0 {
            continue;
        }
        // Count the numbers with each digit; then replace each count with the place of the next
        // number with that digit.
        let mut places = [0; 1 << DIGIT];
        from.iter().for_each(|number| places[digit(*number)] += 1);
        let mut next = 0;
        for place in &mut places {
            next += std::mem::replace(place, next);
        }
        for &number in from.iter() {
            let place = &mut places[digit(number)];
            to[*place] = number;
            *place += 1;
        }
        std::mem::swap(&mut from, &mut to);
        passes += 1;
    }
    if passes % 2 == 1 {
        numbers.copy_from_slice(&spare);
    }
}

/// Pages of one slot, in any order. A page may be repeated.
pub(crate) struct SlotPages<'a>(&'a mut [u64]);

impl<'a> SlotPages<'a> {
    /// The pages by block. Each block appears once, so it is locked once. The slot is at `gfns`;
    /// pages beyond its end are left out.
    pub(crate) fn in_blocks(self, gfns: GfnRange) -> impl Iterator<Item = BlockPages> + use<'a> {
        for found in self.0.iter_mut() {
            *found = gfns.start().get() + (*found & ((1 << PAGE_BITS) - 1));
        }
        sort_by_bits(self.0, BLOCK.ilog2()..u64::BITS);
        let blocks = self.0.chunk_by(|a, b| a / BLOCK == b / BLOCK);
        blocks.filter_map(move |some| {
            let part = Gfn::new(some[0])?.block().range().intersect(gfns)?;
            let mut mask = [0; BLOCK_WORDS];
            for gfn in some.iter().filter(|gfn| **gfn < part.end_raw()) {
                let at = (gfn - part.start().get()) as usize;
                mask[at / WORD] |= 1 << (at % WORD);
            }
            Some(BlockPages { part, mask })
        })
    }
}

/// Iterates over the runs of set bits in a block's bitmap, as (first bit, length).
struct Runs<'a> {
    words: &'a [u64; BLOCK_WORDS],
    /// Index of the current word.
    at: usize,
    /// The bits of that word that no run has contained yet.
    left: u64,
}

impl<'a> Runs<'a> {
    fn of(words: &'a [u64; BLOCK_WORDS]) -> Self {
        let (at, left) = (0, words[0]);
        Self { words, at, left }
    }
}

impl Iterator for Runs<'_> {
    type Item = (usize, usize);

    fn next(&mut self) -> Option<Self::Item> {
        while self.left == 0 {
            self.at += 1;
            self.left = *self.words.get(self.at)?;
        }
        let bit = self.left.trailing_zeros() as usize;
        let first = self.at * WORD + bit;
        let mut pages = (self.left >> bit).trailing_ones() as usize;
        let mut end = bit + pages;
        while end == WORD {
            // The run reaches the end of the word, so it may continue in the next.
            self.at += 1;
            self.left = self.words.get(self.at).copied().unwrap_or(0);
            end = self.left.trailing_ones() as usize;
            pages += end;
        }
        self.left &= !((1 << end) - 1);
        Some((first, pages))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(first: u64, pages: u64) -> GfnRange {
        GfnRange::new(Gfn::new(first).unwrap(), pages).unwrap()
    }

    #[test]
    fn each_block_comes_once_wherever_the_slot_begins() {
        for first in [0, 100, 512, 1023] {
            let mut found = Found::default();
            (0..1024).for_each(|i| found.add(SlotId(1), i * 387 % 1024));
            let blocks = |pages: SlotPages<'_>| pages.in_blocks(range(first, 1024)).count();
            let expected = 2 + usize::from(first % 512 != 0);
            found.each_slot(|_, pages| assert_eq!(blocks(pages), expected, "{first}"));
        }
    }

    /// First frame and count of all runs.
    fn runs_of(blocks: impl Iterator<Item = BlockPages>) -> Vec<(u64, u64)> {
        let runs = blocks.flat_map(|block| block.runs().collect::<Vec<_>>());
        runs.map(|run| (run.start().get(), run.pages())).collect()
    }

    #[test]
    fn words_become_runs_that_end_with_a_block_and_with_the_slot() {
        let words = [1 << 63 | 0b110, u64::MAX, 0, 0b1];
        let found =
            |first, pages, page| runs_of(blocks_of_words(range(first, pages), page, &words));
        assert_eq!(found(0, 256, 0), [(1, 2), (63, 65), (192, 1)]);
        assert_eq!(found(0, 100, 0), [(1, 2), (63, 37)]);
        // A block ends at 512, inside of the run.
        assert_eq!(
            found(412, 256, 0),
            [(413, 2), (475, 37), (512, 28), (604, 1)]
        );
        assert_eq!(found(512, 1000, 640), [(1153, 2), (1215, 65), (1344, 1)]);
        assert_eq!(found(0, 64, 64), []);
        assert_eq!(found(0, 64, 640), []);
    }

    #[test]
    fn pages_of_rings_come_by_slot_and_block_in_order() {
        let (a, b) = (SlotId(1), SlotId(2));
        let mut found = Found::default();
        let pages = [
            (b, 3),
            (a, 1024),
            (a, 0),
            (a, 2),
            (a, 1),
            (a, 0),
            (a, 511),
            (a, 2000),
            (a, 1101),
        ];
        for (id, page) in pages {
            found.add(id, page);
        }
        let mut runs = Vec::new();
        let count = found.each_slot(|id, pages| {
            // The slot has shrunk: 1101 and 2000 are beyond its end.
            let blocks = pages.in_blocks(range(100, 1101));
            runs.extend(runs_of(blocks).into_iter().map(|run| (id, run)));
        });
        assert_eq!(count, 9);
        let expected = [(a, (100, 3)), (a, (611, 1)), (a, (1124, 1)), (b, (103, 1))];
        assert_eq!(runs, expected);
    }
}
