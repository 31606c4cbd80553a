//! Which pages were written since the last time: asked, cleared, and armed again.
//!
//! The order is everything: *kick* (what vCPUs have logged becomes visible), *take*, *re-arm*,
//! *flush*, and only then may the caller copy pages. A write that the copy lacks comes after the
//! flush, so it is noticed again.

use crate::dirty::{DirtyError, bitmap_of};
use crate::rmap::{BLOCK, Rmap, parts};
use crate::{Detection, Mmu};
use lacuna_addr::GfnRange;
use lacuna_slots::{Slot, SlotId};
use lacuna_stage2::Flush;
use lacuna_sync::shim::Ordering;

/// Pages in one word of a bitmap.
const WORD: usize = u64::BITS as usize;

impl Mmu {
    /// Moves the slot's dirty bits into `out` and arms those pages again: KVM's GET without manual
    /// protect. Copy the pages afterwards. Not for a vCPU's own thread: it waits for all vCPUs.
    ///
    /// # Errors
    /// No such slot, not one that logs, no bitmap, or a buffer of another size.
    pub fn get_dirty(&self, id: SlotId, out: &mut [u64]) -> Result<(), DirtyError> {
        let _no_change = self.lock_layout();
        let slot = self.slot(id)?;
        let bitmap = bitmap_of(&slot)?;
        check_words(&slot, bitmap.words(), out.len())?;
        self.sync();
        bitmap.take(0, out);
        self.rearm(&slot, 0, out);
        Ok(())
    }

    /// Copies the slot's dirty bits into `out` and leaves all as it is: KVM's GET with manual
    /// protect; [`Mmu::clear_dirty`] is its other half.
    ///
    /// # Errors
    /// As [`Mmu::get_dirty`].
    pub fn peek_dirty(&self, id: SlotId, out: &mut [u64]) -> Result<(), DirtyError> {
        let _no_change = self.lock_layout();
        let slot = self.slot(id)?;
        let bitmap = bitmap_of(&slot)?;
        check_words(&slot, bitmap.words(), out.len())?;
        self.sync();
        bitmap.copy(0, out);
        Ok(())
    }

    /// Of `pages` pages of the slot from `first_page` on, clears those that `mask` names and arms
    /// them again; in `mask` remain those that were dirty. Copy the pages afterwards.
    ///
    /// # Errors
    /// As [`Mmu::get_dirty`], and KVM's rules for the range.
    pub fn clear_dirty(
        &self,
        id: SlotId,
        first_page: usize,
        pages: usize,
        mask: &mut [u64],
    ) -> Result<(), DirtyError> {
        let _no_change = self.lock_layout();
        let slot = self.slot(id)?;
        bitmap_of(&slot)?.clear(first_page, pages, mask)?;
        self.rearm(&slot, first_page, mask);
        Ok(())
    }

    /// Marks again what was taken from the slot and could not be used: words from `first_word` on.
    ///
    /// # Errors
    /// No such slot, not one that logs, no bitmap.
    ///
    /// # Panics
    /// When the slot does not have those pages.
    pub fn put_back_dirty(
        &self,
        id: SlotId,
        first_word: usize,
        words: &[u64],
    ) -> Result<(), DirtyError> {
        let slot = self.slot(id)?;
        bitmap_of(&slot)?.put_back(first_word, words);
        Ok(())
    }

    /// Hands out the pages in all vCPUs' rings, as (slot, page of it), and returns how many. They
    /// stay in the rings until [`Mmu::reset_rings`]; only after that copy the pages. A slot may
    /// have gone since, or be smaller. `each` must not ask this MMU about dirty pages.
    pub fn collect_rings(&self, mut each: impl FnMut(SlotId, usize)) -> usize {
        let _no_change = self.lock_layout();
        self.sync();
        let mut rings = self.dirty.rings.lock().expect("no panic under this lock");
        rings.iter_mut().map(|ring| ring.harvest(&mut each)).sum()
    }

    /// What was collected since the last reset did not reach its user: it will be collected again.
    pub fn put_back_rings(&self) {
        let mut rings = self.dirty.rings.lock().expect("no panic under this lock");
        rings.iter_mut().for_each(|ring| ring.put_back());
    }

    /// Frees the entries that were collected and arms their pages again; returns how many those
    /// were. On return the pages may be copied. Not for a vCPU's own thread.
    pub fn reset_rings(&self) -> usize {
        let _no_change = self.lock_layout();
        let slots = self.slots.snapshot();
        let mut rings = self.dirty.rings.lock().expect("no panic under this lock");
        let mut count = 0;
        let mut found = Words::default();
        for ring in rings.iter_mut() {
            count += ring.reset(|id, page, mask| found.add(id, page, mask));
        }
        drop(rings);
        let mut flush = Flush::none(&self.stage2);
        found.each_block(|id, first_page, words| {
            // It may have gone, and another may have its name.
            let slot = slots.get(id).filter(|slot| slot.attach.log().is_on());
            if let Some(slot) = slot {
                self.rearm_into(slot, first_page, words, &mut flush);
            }
        });
        flush.finish(&*self.quiescence);
        count
    }

    /// What vCPUs have logged so far is marked.
    pub(crate) fn sync(&self) {
        if self.dirty.vcpus_log.load(Ordering::Relaxed) {
            debug_assert!(Detection::Pml == self.dirty.detection());
            self.kick();
        }
    }

    fn rearm(&self, slot: &Slot<Rmap>, first_page: usize, words: &[u64]) {
        let mut flush = Flush::none(&self.stage2);
        self.rearm_into(slot, first_page, words, &mut flush);
        flush.finish(&*self.quiescence);
    }

    /// Arms the pages of `slot` that `words` names, counted from `first_page` on, block by block.
    fn rearm_into<'s>(
        &'s self,
        slot: &Slot<Rmap>,
        first_page: usize,
        words: &[u64],
        flush: &mut Flush<'s>,
    ) {
        let end = slot.gfns.end_raw();
        let Some(first) = slot.gfns.start().checked_add(first_page as u64) else {
            return;
        };
        let pages = ((words.len() * WORD) as u64).min(end.saturating_sub(first.get()));
        let Some(all) = GfnRange::new(first, pages) else {
            return;
        };
        for part in parts(all) {
            let from = (part.start().get() - first.get()) as usize;
            let mut runs = Runs {
                words,
                at: from,
                end: from + part.pages() as usize,
            }
            .map(|(at, pages)| {
                let start = first.checked_add(at as u64).expect("inside the slot");
                GfnRange::new(start, pages as u64).expect("inside the slot")
            })
            .peekable();
            if runs.peek().is_some() {
                self.arm(&slot.attach, part, runs, flush);
            }
        }
    }
}

fn check_words(slot: &Slot<Rmap>, needed: usize, given: usize) -> Result<(), DirtyError> {
    let id = slot.id;
    match needed == given {
        true => Ok(()),
        false => Err(DirtyError::Words { id, needed, given }),
    }
}

/// Pages of slots in any order, to be visited by block: vCPUs write here and there, and a block is
/// locked once.
#[derive(Default)]
struct Words(Vec<(SlotId, usize, u64)>);

/// Words of bits that a block has.
const BLOCK_WORDS: usize = BLOCK as usize / WORD;

impl Words {
    /// Those of 64 pages from `page` on that `mask` names.
    fn add(&mut self, id: SlotId, page: usize, mask: u64) {
        let (word, shift) = (page / WORD, page % WORD);
        self.0.push((id, word, mask << shift));
        if let Some(rest) = mask
            .checked_shr((WORD - shift) as u32)
            .filter(|rest| *rest != 0)
        {
            self.0.push((id, word + 1, rest));
        }
    }

    /// Calls `block` with a slot, a page of it, and a bit for each page of 512 from there.
    fn each_block(mut self, mut block: impl FnMut(SlotId, usize, &[u64])) {
        self.0.sort_unstable();
        let same = |a: &(SlotId, usize, u64), b: &(SlotId, usize, u64)| {
            (a.0, a.1 / BLOCK_WORDS) == (b.0, b.1 / BLOCK_WORDS)
        };
        for some in self.0.chunk_by(same) {
            let mut words = [0; BLOCK_WORDS];
            for (_, word, mask) in some {
                words[word % BLOCK_WORDS] |= mask;
            }
            let (id, word, _) = some[0];
            block(id, word / BLOCK_WORDS * BLOCK as usize, &words);
        }
    }
}

/// Runs of ones among the bits `at..end` of words, as (first, how many).
struct Runs<'a> {
    words: &'a [u64],
    at: usize,
    end: usize,
}

impl Runs<'_> {
    /// The first bit from `at` on that is not as in `bits`, or `end`.
    fn pass(&self, at: usize, bits: u64) -> usize {
        let mut at = at;
        while at < self.end {
            let left = (self.words[at / WORD] ^ bits) >> (at % WORD);
            if left != 0 {
                return (at + left.trailing_zeros() as usize).min(self.end);
            }
            at = (at / WORD + 1) * WORD;
        }
        self.end
    }
}

impl Iterator for Runs<'_> {
    type Item = (usize, usize);

    fn next(&mut self) -> Option<Self::Item> {
        let first = self.pass(self.at, 0);
        self.at = self.pass(first, u64::MAX);
        (first < self.end).then(|| (first, self.at - first))
    }
}

#[cfg(test)]
mod tests {
    use super::{Runs, Words};
    use lacuna_slots::SlotId;

    #[test]
    fn runs_cross_words_and_stop_at_the_end() {
        let words = [1 << 63 | 0b110, u64::MAX, 0, 0b1];
        let runs = |at, end| {
            Runs {
                words: &words,
                at,
                end,
            }
            .collect::<Vec<_>>()
        };
        assert_eq!(runs(0, 256), [(1, 2), (63, 65), (192, 1)]);
        assert_eq!(runs(2, 100), [(2, 1), (63, 37)]);
        assert_eq!(runs(128, 192), []);
        assert_eq!(runs(100, 100), []);
    }

    #[test]
    fn words_come_by_block_in_order() {
        let (a, b) = (SlotId(1), SlotId(2));
        let mut found = Words::default();
        found.add(b, 3, 1);
        found.add(a, 1023, 0b11);
        found.add(a, 0, 0b101);
        found.add(a, 0, 0b10);
        found.add(a, 448, 1 << 63);
        let mut blocks = Vec::new();
        found.each_block(|id, first, words| {
            let pages = (0..512).filter(|page| words[page / 64] >> (page % 64) & 1 == 1);
            blocks.push((id, first, pages.collect::<Vec<_>>()));
        });
        let expected = [
            (a, 0, vec![0, 1, 2, 511]),
            (a, 512, vec![511]),
            (a, 1024, vec![0]),
            (b, 0, vec![3]),
        ];
        assert_eq!(blocks, expected);
    }
}
