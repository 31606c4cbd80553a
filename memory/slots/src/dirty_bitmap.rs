//! A bit for each page of a slot: set if the page was written since the last harvest.
//!
//! ```text
//! writer                                 harvester
//! 1 gains W or D, or writes              a take: the word becomes 0    (or clear: some bits of it)
//! 2 mark: the bit becomes 1              b rearm: clears W or D of those pages
//!   (a guest store that 1 allowed        c flush: no vCPU can still write without step 1
//!    may be before or after)           d copy the pages
//! ```
//! Every change of a word is one read-modify-write, so of any `mark` and any `take` one is first.
//! If `mark` is first, `take` gets the bit. By release and acquire it also sees what preceded
//! `mark`: b finds the W or D of step 1, and d the data of a host write. If `take` is first, the
//! bit stays for the next harvest. So users must follow two rules: *mark after 1, never before*,
//! and *copy after the flush, never before*.
//!
//! `mark` must not skip the write if the bit is set already. The race: the load of the bit passes
//! the writer's own stores to the page, and finds the bit set; `take` clears the bit; the harvester
//! copies the page without these stores. Then no mark is left. A fence would prevent this, but it
//! costs as much as the saved instruction; `tests/loom.rs` shows the loss.
//!
//! Words are little-endian in KVM's byte form: page `p` is bit `p % 64` of word `p / 64`, and bit
//! `p % 8` of byte `p / 8` after [`u64::to_le_bytes`].

use lacuna_sync::shim::{AtomicU64, Ordering};

/// Pages in one word.
const WORD: usize = u64::BITS as usize;

/// The dirty bits of one slot. Any thread may call any method at any time.
pub struct DirtyBitmap {
    words: Box<[AtomicU64]>,
    pages: usize,
}

/// The state of the bit before a mark.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Marked {
    /// The page was clean.
    New,
    /// The page was dirty already.
    Already,
}

/// Why a range was not cleared. Nothing has changed then.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClearError {
    /// The range does not begin at a word.
    #[error("first page {first_page} is not a multiple of 64: clear whole words")]
    Misaligned {
        /// Its first page.
        first_page: usize,
    },
    /// The range ends within a word, and that word is not the slot's last.
    #[error(
        "{pages} pages from page {first_page} end within a word: clear a multiple of 64 pages, or \
         up to the end of the slot at page {slot_pages}"
    )]
    Ragged {
        /// Its first page.
        first_page: usize,
        /// Its pages.
        pages: usize,
        /// The pages of the slot.
        slot_pages: usize,
    },
    /// The range reaches beyond the slot.
    #[error(
        "{pages} pages from page {first_page} reach beyond the slot's end at page {slot_pages}: \
         clear fewer"
    )]
    BeyondSlot {
        /// Its first page.
        first_page: usize,
        /// Its pages.
        pages: usize,
        /// The pages of the slot.
        slot_pages: usize,
    },
    /// The mask does not have one word for each word of the range.
    #[error("{pages} pages have a mask of {needed} words, not of {given}: pass {needed}")]
    Mask {
        /// Pages to be cleared.
        pages: usize,
        /// Words of the mask for so many pages.
        needed: usize,
        /// Words of the mask.
        given: usize,
    },
}

impl DirtyBitmap {
    /// A bitmap for a slot of `pages` clean pages.
    pub fn new(pages: usize) -> Self {
        let words = (0..pages.div_ceil(WORD)).map(|_| AtomicU64::new(0));
        Self {
            words: words.collect(),
            pages,
        }
    }

    /// The number of pages of the slot.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// The number of words that hold a bit for each page.
    pub fn words(&self) -> usize {
        self.words.len()
    }

    /// Marks a page that a vCPU has written, or can write from now on without a mark.
    ///
    /// # Panics
    /// If the slot does not have that page.
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

    /// As [`Self::mark`] for all of `pages`; returns their number. Pages of one word take one
    /// exchange together, unless between them comes a page of another word with the same place
    /// among the `JOINED` waiting words. A page may be marked as late as the return.
    ///
    /// # Panics
    /// If the slot does not have one of the pages. Some may be marked then.
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

    /// Moves the words from `first_word` on into `out`, and leaves zeros: reports and clears in one
    /// call (KVM's GET without manual protect). Rearm and flush before the pages are copied. If the
    /// words then cannot be delivered, call [`Self::put_back`].
    ///
    /// # Panics
    /// If the bitmap does not have those words.
    pub fn take(&self, first_word: usize, out: &mut [u64]) {
        for (word, out) in self.part(first_word, out.len()).iter().zip(out) {
            // Most words of most harvests are zero. A load does not take their cache line from
            // other cores. A mark that the load misses stays for the next harvest.
            *out = match word.load(Ordering::Relaxed) {
                0 => 0,
                _ => word.swap(0, Ordering::Acquire),
            };
        }
    }

    /// Copies the words from `first_word` on into `out`, and changes nothing (KVM's GET with manual
    /// protect).
    ///
    /// # Panics
    /// If the bitmap does not have those words.
    pub fn copy(&self, first_word: usize, out: &mut [u64]) {
        for (word, out) in self.part(first_word, out.len()).iter().zip(out) {
            *out = word.load(Ordering::Acquire);
        }
    }

    /// Clears the pages in `mask`, out of the `pages` pages from `first_page` on. Leaves in `mask`
    /// only the dirty ones: the pages to rearm (KVM's CLEAR). A page marked since the words were
    /// copied may be among them, so copy it after the flush.
    ///
    /// # Errors
    /// KVM's rules: the range begins at a word, and ends at a word or with the slot. The mask must
    /// also have one word for each word of the range.
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

    /// Marks again the pages of an undelivered harvest. Rearming need not be undone: the pages are
    /// reported once more, whether they are written again or not.
    ///
    /// # Panics
    /// If the bitmap does not have those words, or the slot not those pages.
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

    /// Marks every page: for initially-all-set, or to start again.
    pub fn set_all(&self) {
        for (i, word) in self.words.iter().enumerate() {
            // A store would be wrong here: it would overwrite marks, whose release semantics must
            // not be lost.
            word.fetch_or(self.valid(i), Ordering::Release);
        }
    }

    /// The bits of a word that stand for pages of the slot.
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

/// Pending marks of [`DirtyBitmap::mark_all`] in one word.
#[derive(Clone, Copy)]
struct Joined {
    word: usize,
    bits: u64,
}

/// The number of words whose marks are joined: 32 words are 8 MiB of guest memory. The bench
/// `dirty` shows the gain if the pages of a full log lie in some megabytes, and the cost if they
/// are random.
const JOINED: usize = 32;

/// Asserts that a slot of `slot_pages` pages has `page`. The message is made out of line, so that
/// `page` stays in a register.
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
