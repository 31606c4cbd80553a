//! Where a page is: one state machine, and one 64-bit word a page with its state.
//!
//! ```text
//!                                  no answer, or an error: Lost
//!          fault, source        ----------- Fetching -----------.
//!       Empty ------------------'                               | provided
//!         | fault, no source: a frame of zeros                  v          read error: Lost
//!         '-------------------------------------------------> Resident <--------- Reading
//!                                                   fault:   |  ^   ^   read done    ^
//!       Zero ---------------------------------------- zeros -|--'   |                | fault: a
//!         ^                                            evict |      | fault          | frame
//!         | clean without entry, or all zeros                v      |                |
//!         '------------------------------------------- Evicting ----'  clean with    |
//!                                  (unmapped everywhere)  |    |          entry      |
//!                                        dirty: write out |    '----------------> Swapped
//!                                                         v                          ^
//!                        fault: Resident (swap cache) <- Writeback ------------------'
//!                                                                      written
//!         any state at rest --> Gone (region removed)
//!         Reading --> Swapped (a read-ahead failed)
//! ```
//! `Empty` is a never provided page. Without a page source, its first fault fills it with zeros;
//! with a source, the source provides it (see `source`). A page of zeros that reclaim drops becomes
//! `Zero`: it was provided, so the source gets no second request.
//!
//! A page in `Evicting` or `Writeback` still has its frame. A fault takes it back with one
//! compare-and-swap; the reclaimer's compare-and-swap then fails, and the reclaimer leaves the page
//! alone. Only the thread that has isolated the frame's descriptor moves a page out of its frame
//! (see `desc`), so two reclaimers never work on one page.
//!
//! `Collapsed` means that the page is part of a compound page, and that the block word says where
//! it is (see `block_word`). A collapse changes Resident, Evicting or Empty to Collapsed; a split
//! changes it to Resident. For `Empty` the block word is read too: if the first touch of a block
//! made a compound page, all its page words are Empty.
//!
//! `Discarding`: a thread discards the page's bytes, and then makes it Zero or Empty; or it pages
//! the page out, and then makes it PagedOut or InPlace. `InPlace`,
//! `PagedOut` and `PagingIn` are states of Linux memory, whose pages have no frame of the budget:
//! `lacuna-host` draws them.
//!
//! The word: bits 0..3 state, 3..32 frame, 32..64 swap entry + 1 (0 for none).

use lacuna_addr::{NoRoom, PageCount, Pfn};
use lacuna_swap::SwapEntry;
use lacuna_sync::shim::{AtomicU64, Ordering};

/// Number of bits of a frame number in a page word.
pub const FRAME_BITS: u32 = 29;
const STATE_BITS: u32 = 3;
const ENTRY_SHIFT: u32 = 32;
const _: () = assert!(STATE_BITS + FRAME_BITS == ENTRY_SHIFT);

/// Where a page is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(
    missing_docs,
    reason = "each variant says what its frame and its swap entry are"
)]
pub enum PageState {
    /// Never provided: the region's page source will provide it, or else it reads as zeros.
    Empty,
    /// The source has or will get a request; the answer fills `frame`, and a ticket exists.
    Fetching { frame: Pfn },
    /// Provided, but without a frame: it reads as zeros.
    Zero,
    /// In `frame`. `entry`, if any, held the same bytes when the frame was last clean.
    Resident {
        frame: Pfn,
        entry: Option<SwapEntry>,
    },
    /// In `frame`, being unmapped.
    Evicting {
        frame: Pfn,
        entry: Option<SwapEntry>,
    },
    /// In `frame`, unmapped, being written to `entry`.
    Writeback { frame: Pfn, entry: SwapEntry },
    /// In `entry` only.
    Swapped { entry: SwapEntry },
    /// In `entry`, being read into `frame`; a ticket exists.
    Reading { frame: Pfn, entry: SwapEntry },
    /// Its content could not be read back.
    Lost,
    /// Its region was removed.
    Gone,
    /// Part of a compound page, or a collapse is about to make it one: see `block_word`.
    Collapsed,
    /// In its region's Linux memory: see `linux`.
    InPlace,
    /// A thread is discarding its bytes, or is asking Linux to page it out.
    Discarding,
    /// In its region's Linux memory, but Linux was asked to page it out.
    PagedOut,
    /// As `PagedOut`, being brought back; a ticket exists.
    PagingIn,
}

use PageState::{
    Collapsed, Discarding, Empty, Evicting, Fetching, Gone, InPlace, Lost, PagedOut, PagingIn,
    Reading, Resident, Swapped, Writeback, Zero,
};

/// Tag 7 is Gone, or Collapsed if the frame field has this value.
const COLLAPSED: u64 = 1;
/// As above, for Zero.
const ZERO: u64 = 2;
/// As above, for InPlace.
const IN_PLACE: u64 = 3;
/// As above, for Discarding.
const DISCARDING: u64 = 4;
/// As above, for PagedOut.
const PAGED_OUT: u64 = 5;
/// As above, for PagingIn.
const PAGING_IN: u64 = 6;

impl PageState {
    #[inline]
    const fn encode(self) -> u64 {
        const fn pack(tag: u64, frame: u64, entry: Option<SwapEntry>) -> u64 {
            let entry = match entry {
                Some(entry) => entry.get() as u64 + 1,
                None => 0,
            };
            tag | frame << STATE_BITS | entry << ENTRY_SHIFT
        }
        match self {
            Empty => pack(0, 0, None),
            Resident { frame, entry } => pack(1, frame.get(), entry),
            Evicting { frame, entry } => pack(2, frame.get(), entry),
            Writeback { frame, entry } => pack(3, frame.get(), Some(entry)),
            Swapped { entry } => pack(4, 0, Some(entry)),
            Reading { frame, entry } => pack(5, frame.get(), Some(entry)),
            Fetching { frame } => pack(5, frame.get(), None),
            Lost => pack(6, 0, None),
            Gone => pack(7, 0, None),
            Collapsed => pack(7, COLLAPSED, None),
            Zero => pack(7, ZERO, None),
            InPlace => pack(7, IN_PLACE, None),
            Discarding => pack(7, DISCARDING, None),
            PagedOut => pack(7, PAGED_OUT, None),
            PagingIn => pack(7, PAGING_IN, None),
        }
    }

    #[inline]
    const fn decode(word: u64) -> Self {
        let frame = Pfn::new((word as u32) >> STATE_BITS);
        let number = (word >> ENTRY_SHIFT) as u32;
        let entry = if number == 0 {
            None
        } else {
            Some(SwapEntry::new(number - 1))
        };
        match (word & ((1 << STATE_BITS) - 1), entry) {
            (1, entry) => Resident { frame, entry },
            (2, entry) => Evicting { frame, entry },
            (3, Some(entry)) => Writeback { frame, entry },
            (4, Some(entry)) => Swapped { entry },
            (5, Some(entry)) => Reading { frame, entry },
            (5, None) => Fetching { frame },
            (6, _) => Lost,
            (7, _) if frame.get() == COLLAPSED => Collapsed,
            (7, _) if frame.get() == ZERO => Zero,
            (7, _) if frame.get() == IN_PLACE => InPlace,
            (7, _) if frame.get() == DISCARDING => Discarding,
            (7, _) if frame.get() == PAGED_OUT => PagedOut,
            (7, _) if frame.get() == PAGING_IN => PagingIn,
            (7, _) => Gone,
            _ => Empty,
        }
    }

    /// The frame in the word.
    pub const fn frame(self) -> Option<Pfn> {
        match self {
            Resident { frame, .. }
            | Evicting { frame, .. }
            | Writeback { frame, .. }
            | Reading { frame, .. }
            | Fetching { frame } => Some(frame),
            Empty
            | Zero
            | Swapped { .. }
            | Lost
            | Gone
            | Collapsed
            | InPlace
            | Discarding
            | PagedOut
            | PagingIn => None,
        }
    }

    /// The swap entry in the word.
    pub const fn entry(self) -> Option<SwapEntry> {
        match self {
            Resident { entry, .. } | Evicting { entry, .. } => entry,
            Writeback { entry, .. } | Swapped { entry } | Reading { entry, .. } => Some(entry),
            Empty
            | Fetching { .. }
            | Zero
            | Lost
            | Gone
            | Collapsed
            | InPlace
            | Discarding
            | PagedOut
            | PagingIn => None,
        }
    }

    /// A reclaimer that has isolated the frame begins to take it.
    pub const fn evicted(self) -> Option<Self> {
        match self {
            Resident { frame, entry } => Some(Evicting { frame, entry }),
            _ => None,
        }
    }

    /// A fault takes the page back, or the reclaimer gives up.
    pub const fn rescued(self) -> Option<Self> {
        match self {
            Evicting { frame, entry } => Some(Resident { frame, entry }),
            Writeback { frame, entry } => Some(Resident {
                frame,
                entry: Some(entry),
            }),
            _ => None,
        }
    }

    /// The unmapped page is clean: its swap entry, or zeros, have the same bytes.
    pub const fn dropped(self) -> Option<Self> {
        match self {
            Evicting {
                entry: Some(entry), ..
            } => Some(Swapped { entry }),
            Evicting { entry: None, .. } => Some(Zero),
            _ => None,
        }
    }

    /// The unmapped page contains only zeros.
    pub const fn zero_dropped(self) -> Option<Self> {
        match self {
            Evicting { .. } => Some(Zero),
            _ => None,
        }
    }

    /// The unmapped page is about to be written to `to`. The caller frees its old swap entry.
    pub const fn write_started(self, to: SwapEntry) -> Option<Self> {
        match self {
            Evicting { frame, .. } => Some(Writeback { frame, entry: to }),
            _ => None,
        }
    }

    /// The write is done.
    pub const fn written(self) -> Option<Self> {
        match self {
            Writeback { entry, .. } => Some(Swapped { entry }),
            _ => None,
        }
    }

    /// The swap entry is freed: its write failed, or the device needs the space.
    pub const fn without_entry(self) -> Option<Self> {
        match self {
            Writeback { frame, .. } | Resident { frame, .. } => {
                Some(Resident { frame, entry: None })
            }
            _ => None,
        }
    }

    /// A fault gives the swapped-out page a frame for the read.
    pub const fn read_started(self, into: Pfn) -> Option<Self> {
        match self {
            Swapped { entry } => Some(Reading { frame: into, entry }),
            _ => None,
        }
    }

    /// A fault gives the page a frame for its source to fill.
    pub const fn fetch_started(self, into: Pfn) -> Option<Self> {
        match self {
            Empty => Some(Fetching { frame: into }),
            _ => None,
        }
    }

    /// The page has arrived. After a read, the swap entry stays valid while the page stays clean.
    pub const fn arrived(self) -> Option<Self> {
        match self {
            Reading { frame, entry } => Some(Resident {
                frame,
                entry: Some(entry),
            }),
            Fetching { frame } => Some(Resident { frame, entry: None }),
            _ => None,
        }
    }

    /// The page has arrived in Linux memory.
    pub const fn arrived_in_place(self) -> Option<Self> {
        match self {
            Fetching { .. } | PagingIn => Some(InPlace),
            _ => None,
        }
    }

    /// A thread begins to discard the bytes of a page of Linux memory.
    pub const fn discarded(self) -> Option<Self> {
        match self {
            Empty | Zero | InPlace | PagedOut => Some(Discarding),
            _ => None,
        }
    }

    /// The kernel has taken the page's memory away.
    pub const fn taken(self) -> Option<Self> {
        match self {
            InPlace | PagedOut => Some(Lost),
            _ => None,
        }
    }

    /// As [`PageState::taken`], for a page that is filled and taken with others. Also takes a page
    /// that is about to follow the others into place.
    pub const fn taken_with_others(self) -> Option<Self> {
        match self {
            InPlace | Empty | Zero => Some(Lost),
            _ => None,
        }
    }

    /// The read failed, or the source cannot provide the page.
    pub const fn arrival_failed(self) -> Option<Self> {
        match self {
            Reading { .. } | Fetching { .. } | PagingIn => Some(Lost),
            _ => None,
        }
    }

    /// A page that was read ahead has not arrived: its entry may be read again.
    pub const fn read_given_up(self) -> Option<Self> {
        match self {
            Reading { entry, .. } => Some(Swapped { entry }),
            _ => None,
        }
    }

    /// The region is removed. `None` while an operation on the page is in progress.
    pub const fn removed(self) -> Option<Self> {
        match self {
            Empty | Zero | Resident { .. } | Swapped { .. } | Lost | InPlace | PagedOut => {
                Some(Gone)
            }
            Evicting { .. }
            | Writeback { .. }
            | Reading { .. }
            | Fetching { .. }
            | Discarding
            | PagingIn => None,
            Gone | Collapsed => None,
        }
    }

    /// The compound page is split: this page has `frame` from now on.
    pub const fn split_off(self, frame: Pfn) -> Option<Self> {
        match self {
            Empty | Collapsed => Some(Resident { frame, entry: None }),
            _ => None,
        }
    }
}

/// The state of one page. A page without a frame costs nothing else.
pub struct PageWord(AtomicU64);

#[cfg(not(loom))]
const _: () = assert!(size_of::<PageWord>() == 8);

impl PageWord {
    /// The word of an empty page.
    #[cfg(loom)]
    pub fn new() -> Self {
        Self(AtomicU64::new(Empty.encode()))
    }

    /// The present state.
    #[inline]
    pub fn load(&self) -> PageState {
        PageState::decode(self.0.load(Ordering::Acquire))
    }

    /// Changes the word from `from` to `to`. If another thread has changed it, returns the current
    /// state. All changes pass here.
    // Always inlined, for the fault paths: see `Host::resolve`.
    #[inline(always)]
    pub fn change(&self, from: PageState, to: PageState) -> Result<(), PageState> {
        self.0
            .compare_exchange(
                from.encode(),
                to.encode(),
                Ordering::AcqRel,
                Ordering::Acquire,
            )
            .map(|_| ())
            .map_err(PageState::decode)
    }

    /// Applies `step` to the current state, again if another thread changes it meanwhile. Returns
    /// the state before the change, or the current state if `step` does not apply to it.
    pub fn advance(
        &self,
        step: impl Fn(PageState) -> Option<PageState>,
    ) -> Result<PageState, PageState> {
        let mut state = self.load();
        loop {
            let next = step(state).ok_or(state)?;
            match self.change(state, next) {
                Ok(()) => return Ok(state),
                Err(now) => state = now,
            }
        }
    }
}

/// The words of `pages` empty pages; the kernel has backed none yet.
#[cfg(not(loom))]
pub fn empty_words(pages: PageCount) -> Result<Box<[PageWord]>, NoRoom> {
    let bytes = pages.get().saturating_mul(size_of::<PageWord>() as u64);
    let no_room = NoRoom { bytes };
    let count = usize::try_from(pages.get()).map_err(|_| no_room)?;
    let layout = std::alloc::Layout::array::<PageWord>(count).map_err(|_| no_room)?;
    assert!(layout.size() > 0, "a region has pages");
    // SAFETY: the layout is not empty.
    let words = unsafe { std::alloc::alloc_zeroed(layout) }.cast::<PageWord>();
    if words.is_null() {
        return Err(no_room);
    }
    // SAFETY: a fresh allocation by the global allocator, of just this layout; a word of zeros is
    // an empty page's (`PageState::encode`).
    Ok(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(words, count)) })
}

/// Under loom an atomic is more than its bits.
#[cfg(loom)]
pub fn empty_words(pages: PageCount) -> Result<Box<[PageWord]>, NoRoom> {
    Ok((0..pages.get()).map(|_| PageWord::new()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_survives_its_word() {
        let (frame, entry) = (
            Pfn::new((1 << FRAME_BITS) - 1),
            SwapEntry::new(u32::MAX - 1),
        );
        let some = Some(entry);
        for state in [
            Empty,
            Resident { frame, entry: None },
            Resident { frame, entry: some },
            Evicting { frame, entry: None },
            Evicting {
                frame: Pfn::new(0),
                entry: Some(SwapEntry::new(0)),
            },
            Writeback { frame, entry },
            Swapped { entry },
            Reading { frame, entry },
            Fetching { frame },
            Fetching { frame: Pfn::new(0) },
            Zero,
            Lost,
            Gone,
            Collapsed,
            InPlace,
            Discarding,
        ] {
            assert_eq!(PageState::decode(state.encode()), state);
        }
        assert_eq!(Empty.encode(), 0);
    }

    #[test]
    fn a_page_in_transit_cannot_be_removed() {
        let (frame, entry) = (Pfn::new(1), SwapEntry::new(2));
        assert_eq!(Reading { frame, entry }.removed(), None);
        assert_eq!(Fetching { frame }.removed(), None);
        assert_eq!(Writeback { frame, entry }.removed(), None);
        assert_eq!(Evicting { frame, entry: None }.removed(), None);
        assert_eq!(Resident { frame, entry: None }.removed(), Some(Gone));
    }
}
