//! A bit for each page of a slot: written since somebody last asked.
//!
//! ```text
//! writer                                 harvester
//! 1 gains W or D, or writes              a take: the word becomes 0    (or clear: some bits of it)
//! 2 mark: the bit becomes 1              b re-arm: W or D goes, of those pages
//!   (a guest store that 1 allowed        c flush: whoever could still write without 1 has stopped
//!    may come before or after)           d copy the pages
//! ```
//! Every change of a word is one read-modify-write, so that of any `mark` and any `take` one comes
//! first. If `mark` does, `take` gets the bit and, by release and acquire, sees what came before
//! `mark`: b finds the W or D of 1, and d the data of a host write. If `take` does, the bit stays
//! for the next harvest. Hence the two rules for users: *mark after 1, never before*, and *copy
//! after the flush, never before*.
//!
//! `mark` does not test first and skip the write when the bit is set already: that load may pass
//! the writer's own stores, and then `take` clears a bit whose page it sees without them. A fence
//! would mend it, at the price of the instruction that was to be saved; `tests/loom.rs` shows it.
//!
//! Words are little-endian in KVM's byte form: page `p` is bit `p % 64` of word `p / 64`, and bit
//! `p % 8` of byte `p / 8` after [`u64::to_le_bytes`].

use lacuna_sync::shim::{AtomicU64, Ordering};

/// Pages in one word.
const WORD: usize = u64::BITS as usize;

/// The dirty bits of one slot. Anybody may call anything at any time.
pub struct DirtyBitmap {
    words: Box<[AtomicU64]>,
    pages: usize,
}

/// What a mark found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Marked {
    /// The page was clean.
    New,
    /// It was dirty already.
    Already,
}

/// Why a range to be cleared was refused. Nothing has changed then.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClearError {
    /// It does not begin with a word.
    #[error("first page {first_page} is not a multiple of 64: clear whole words")]
    Misaligned {
        /// Where it was to begin.
        first_page: usize,
    },
    /// It ends within a word that is not the last.
    #[error(
        "{pages} pages from page {first_page} end within a word: clear a multiple of 64 pages, or \
         up to the end of the slot at page {slot_pages}"
    )]
    Ragged {
        /// Where it was to begin.
        first_page: usize,
        /// How many pages it was to have.
        pages: usize,
        /// How many the slot has.
        slot_pages: usize,
    },
    /// It reaches beyond the slot.
    #[error(
        "{pages} pages from page {first_page} reach beyond the slot's end at page {slot_pages}: \
         clear fewer"
    )]
    BeyondSlot {
        /// Where it was to begin.
        first_page: usize,
        /// How many pages it was to have.
        pages: usize,
        /// How many the slot has.
        slot_pages: usize,
    },
    /// There is not one word of mask for each word of the range.
    #[error("{pages} pages need a mask of {needed} words, not of {given}")]
    Mask {
        /// How many pages were to be cleared.
        pages: usize,
        /// How many words that takes.
        needed: usize,
        /// How many there are.
        given: usize,
    },
}

impl DirtyBitmap {
    /// For a slot of so many pages, all of them clean.
    pub fn new(pages: usize) -> Self {
        let words = (0..pages.div_ceil(WORD)).map(|_| AtomicU64::new(0));
        Self {
            words: words.collect(),
            pages,
        }
    }

    /// The slot's pages.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// The words that hold a bit for each of them.
    pub fn words(&self) -> usize {
        self.words.len()
    }

    /// The page has been written, or can be from now on without a mark.
    ///
    /// # Panics
    /// When the slot does not have that page.
    #[inline]
    pub fn mark(&self, page: usize) -> Marked {
        assert_has(page, self.pages);
        let bit = 1 << (page % WORD);
        let before = self.words[page / WORD].fetch_or(bit, Ordering::Release);
        if before & bit == 0 {
            Marked::New
        } else {
            Marked::Already
        }
    }

    /// [`Self::mark`] of all of `pages`, and how many those are. Pages that share a word take one
    /// exchange together, unless between them comes a page of another word with the same place
    /// among the [`JOINED`] that wait. No page is certainly marked before the return.
    ///
    /// # Panics
    /// When the slot does not have one of the pages. Some may be marked then.
    #[inline]
    pub fn mark_all(&self, pages: impl Iterator<Item = usize>) -> usize {
        let mut joined = [Joined { word: 0, bits: 0 }; JOINED];
        let mut count = 0;
        for page in pages {
            assert_has(page, self.pages);
            count += 1;
            let word = page / WORD;
            let place = &mut joined[word % JOINED];
            if place.word != word {
                self.mark_joined(*place);
                *place = Joined { word, bits: 0 };
            }
            place.bits |= 1 << (page % WORD);
        }
        joined.into_iter().for_each(|some| self.mark_joined(some));
        count
    }

    #[inline]
    fn mark_joined(&self, Joined { word, bits }: Joined) {
        if bits != 0 {
            self.words[word].fetch_or(bits, Ordering::Release);
        }
    }

    /// Moves the words from `first_word` on into `out`, all of it, and leaves zeroes: the call that
    /// reports and clears in one (KVM's GET without manual protect). Re-arm and flush before the
    /// pages are copied; [`Self::put_back`] if the words then cannot be delivered.
    ///
    /// # Panics
    /// When the bitmap does not have those words.
    pub fn take(&self, first_word: usize, out: &mut [u64]) {
        for (word, out) in self.part(first_word, out.len()).iter().zip(out) {
            // Most words of most harvests are zero: a load leaves their line where it is. A mark
            // that it misses stays.
            *out = match word.load(Ordering::Relaxed) {
                0 => 0,
                _ => word.swap(0, Ordering::Acquire),
            };
        }
    }

    /// Copies the words from `first_word` on into `out`, all of it, and changes nothing (KVM's GET
    /// with manual protect).
    ///
    /// # Panics
    /// When the bitmap does not have those words.
    pub fn copy(&self, first_word: usize, out: &mut [u64]) {
        for (word, out) in self.part(first_word, out.len()).iter().zip(out) {
            *out = word.load(Ordering::Acquire);
        }
    }

    /// Of `pages` pages from `first_page` on, clears those that `mask` names, and leaves in `mask`
    /// those of them that were dirty: the ones to re-arm (KVM's CLEAR). A page marked since the
    /// words were copied may be among them, so copy it after the flush.
    ///
    /// # Errors
    /// KVM's rules: the range begins with a word, and ends with one or with the slot. And the mask
    /// has a word for each of its words.
    pub fn clear(
        &self,
        first_page: usize,
        pages: usize,
        mask: &mut [u64],
    ) -> Result<(), ClearError> {
        self.check(first_page, pages, mask.len())?;
        for (word, mask) in self.part(first_page / WORD, mask.len()).iter().zip(mask) {
            *mask = match word.load(Ordering::Relaxed) & *mask {
                0 => 0,
                _ => word.fetch_and(!*mask, Ordering::Acquire) & *mask,
            };
        }
        Ok(())
    }

    fn check(&self, first_page: usize, pages: usize, given: usize) -> Result<(), ClearError> {
        let slot_pages = self.pages;
        if !first_page.is_multiple_of(WORD) {
            return Err(ClearError::Misaligned { first_page });
        }
        let left = slot_pages.checked_sub(first_page);
        let Some(left) = left.filter(|left| pages <= *left) else {
            return Err(ClearError::BeyondSlot {
                first_page,
                pages,
                slot_pages,
            });
        };
        if pages < left && !pages.is_multiple_of(WORD) {
            return Err(ClearError::Ragged {
                first_page,
                pages,
                slot_pages,
            });
        }
        match pages.div_ceil(WORD) {
            needed if needed == given => Ok(()),
            needed => Err(ClearError::Mask {
                pages,
                needed,
                given,
            }),
        }
    }

    /// Marks again what a harvest took and could not deliver. Needs no re-arming to be undone: the
    /// pages are reported once more, whether they are written again or not.
    ///
    /// # Panics
    /// When the bitmap does not have those words, or the slot not those pages.
    pub fn put_back(&self, first_word: usize, words: &[u64]) {
        let part = self.part(first_word, words.len());
        for (i, (word, bits)) in part.iter().zip(words).enumerate() {
            let at = first_word + i;
            assert_eq!(bits & !self.valid(at), 0, "word {at} has no such pages");
            if *bits != 0 {
                word.fetch_or(*bits, Ordering::Release);
            }
        }
    }

    /// Marks every page: initially-all-set, or a start over.
    pub fn set_all(&self) {
        for (i, word) in self.words.iter().enumerate() {
            // Not a store: the marks that it would overwrite have released something.
            word.fetch_or(self.valid(i), Ordering::Release);
        }
    }

    /// The bits of a word that are pages of the slot.
    fn valid(&self, word: usize) -> u64 {
        match self.pages - word * WORD {
            left if left < WORD => (1 << left) - 1,
            _ => u64::MAX,
        }
    }

    fn part(&self, first_word: usize, count: usize) -> &[AtomicU64] {
        let end = first_word.checked_add(count);
        let part = end.and_then(|end| self.words.get(first_word..end));
        part.unwrap_or_else(|| panic!("{count} words from {first_word} of {}", self.words.len()))
    }
}

/// Marks of one word that are still to be made, by [`DirtyBitmap::mark_all`].
#[derive(Clone, Copy)]
struct Joined {
    word: usize,
    bits: u64,
}

/// Words whose marks are joined at a time: 32 are 8 MiB of guest memory. The bench `dirty` shows
/// what joining saves where the pages of a full log lie in some megabytes, and what it costs where
/// they are at random.
const JOINED: usize = 32;

/// That a slot of so many pages has this one. The message is made out of line: `page` stays in a
/// register.
#[inline]
fn assert_has(page: usize, slot_pages: usize) {
    #[cold]
    fn fail(page: usize, slot_pages: usize) -> ! {
        panic!("page {page} of {slot_pages}")
    }
    if page >= slot_pages {
        fail(page, slot_pages);
    }
}
