//! Where a page is: one state machine, one 64-bit word a page, one choke point for its changes.
//!
//! ```text
//!                 fault (zero-filled frame)                  read error
//!       Empty ----------------------------.        .------------------------> Lost
//!         ^                               v        |
//!         | clean without entry,       Resident <--+---------- Reading
//!         | or all zeros              |  ^    ^     read done     ^
//!         |                   evict   |  |    |                   | fault (frame allocated)
//!         |                           v  |    | fault             |
//!         +------------------------ Evicting  |                   |
//!         | (unmapped everywhere)     |  |    |                   |
//!         |               dirty:      |  | clean with entry       |
//!         |               write out   v  '--------------------> Swapped
//!         |                        Writeback ---------------------^
//!         |                               \    written
//!         '- any state at rest --> Gone    '-> fault: Resident again (the swap cache)
//!            (region removed)
//! ```
//! A page in `Evicting` or `Writeback` still has its frame: a fault takes it back with one
//! compare-and-swap and the reclaimer, whose own then fails, lets go. Frames are moved away from a
//! page only by whoever isolated their descriptor (see `desc`), so two reclaimers never meet here.
//!
//! A ninth state, `Merged`, says that the page is part of a whole block and that the block's head
//! tells the rest (see `head`): from Resident, Evicting or Empty by a collapse, to Resident by a
//! split. `Empty` too asks the head: a block that was touched as a whole has only Empty words.
//!
//! The word: bits 0..3 state, 3..32 frame, 32..64 entry + 1 (0 for none).

use crate::head::BLOCK;
use crate::swap::SwapEntry;
use lacuna_addr::{Hva, HvaRange, PAGE_SHIFT, Pfn};
use lacuna_sync::shim::{AtomicU64, Ordering};

/// Bits of a frame number in a page word.
pub const FRAME_BITS: u32 = 29;
const STATE_BITS: u32 = 3;
const ENTRY_SHIFT: u32 = 32;
const _: () = assert!(STATE_BITS + FRAME_BITS == ENTRY_SHIFT);

/// A page of the manager's numbering: an [`Hva`] divided by 4 KiB. Never zero for a real page.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct PageNo(u64);

impl PageNo {
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    pub const fn of(hva: Hva) -> Self {
        Self(hva.get() >> PAGE_SHIFT)
    }

    pub const fn get(self) -> u64 {
        self.0
    }

    pub const fn hva(self) -> Hva {
        Hva::new(self.0 << PAGE_SHIFT)
    }

    /// The page `count` further on.
    pub const fn plus(self, count: usize) -> Self {
        Self(self.0 + count as u64)
    }

    /// Its index in its block.
    pub const fn in_block(self) -> usize {
        self.0 as usize % BLOCK
    }

    /// The first page of its block.
    pub const fn block_start(self) -> Self {
        Self(self.0 - self.in_block() as u64)
    }

    /// The whole block that begins with this page.
    pub fn block_range(self) -> HvaRange {
        HvaRange::new(self.hva(), BLOCK as u64).expect("aligned")
    }

    /// This page alone.
    pub fn range(self) -> HvaRange {
        HvaRange::new(self.hva(), 1).expect("aligned")
    }
}

/// Where a page is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageState {
    /// Nowhere: it reads as zeros.
    Empty,
    /// In `frame`; `entry`, if any, held the same bytes when the frame was last clean.
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
    /// In `entry` alone.
    Swapped { entry: SwapEntry },
    /// In `entry`, being read into `frame`; a ticket exists.
    Reading { frame: Pfn, entry: SwapEntry },
    /// Its entry could not be read.
    Lost,
    /// Its region was removed.
    Gone,
    /// In its block's frames, or about to be: the block's head tells (see `head`).
    Merged,
}

use PageState::{Empty, Evicting, Gone, Lost, Merged, Reading, Resident, Swapped, Writeback};

/// The frame field of a page that is in none tells Merged from Gone.
const MERGED: u64 = 1;

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
            Lost => pack(6, 0, None),
            Gone => pack(7, 0, None),
            Merged => pack(7, MERGED, None),
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
            (6, _) => Lost,
            (7, _) if frame.get() == MERGED => Merged,
            (7, _) => Gone,
            _ => Empty,
        }
    }

    /// The frame that the word names.
    pub const fn frame(self) -> Option<Pfn> {
        match self {
            Resident { frame, .. }
            | Evicting { frame, .. }
            | Writeback { frame, .. }
            | Reading { frame, .. } => Some(frame),
            Empty | Swapped { .. } | Lost | Gone | Merged => None,
        }
    }

    /// The entry that the word names.
    pub const fn entry(self) -> Option<SwapEntry> {
        match self {
            Resident { entry, .. } | Evicting { entry, .. } => entry,
            Writeback { entry, .. } | Swapped { entry } | Reading { entry, .. } => Some(entry),
            Empty | Lost | Gone | Merged => None,
        }
    }

    /// A reclaimer that isolated the frame begins to take it.
    pub const fn evicted(self) -> Option<Self> {
        match self {
            Resident { frame, entry } => Some(Evicting { frame, entry }),
            _ => None,
        }
    }

    /// A fault takes the frame back, or the reclaimer changes its mind.
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

    /// The unmapped page is clean: its entry, or zeros, are as good.
    pub const fn dropped(self) -> Option<Self> {
        match self {
            Evicting {
                entry: Some(entry), ..
            } => Some(Swapped { entry }),
            Evicting { entry: None, .. } => Some(Empty),
            _ => None,
        }
    }

    /// The unmapped page holds only zeros.
    pub const fn zero_dropped(self) -> Option<Self> {
        match self {
            Evicting { .. } => Some(Empty),
            _ => None,
        }
    }

    /// The unmapped page is going to `to`. Its old entry is the caller's to free.
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

    /// The entry holds nothing of use: the write failed, or the device needs the space.
    pub const fn without_entry(self) -> Option<Self> {
        match self {
            Writeback { frame, .. } | Resident { frame, .. } => {
                Some(Resident { frame, entry: None })
            }
            _ => None,
        }
    }

    /// A fault gives the swapped page a frame to be read into.
    pub const fn read_started(self, into: Pfn) -> Option<Self> {
        match self {
            Swapped { entry } => Some(Reading { frame: into, entry }),
            _ => None,
        }
    }

    /// The read is done; the entry stays valid as long as the page stays clean.
    pub const fn read_done(self) -> Option<Self> {
        match self {
            Reading { frame, entry } => Some(Resident {
                frame,
                entry: Some(entry),
            }),
            _ => None,
        }
    }

    /// The read failed.
    pub const fn read_failed(self) -> Option<Self> {
        match self {
            Reading { .. } => Some(Lost),
            _ => None,
        }
    }

    /// The region goes away. A page in transit must come to rest first.
    pub const fn removed(self) -> Option<Self> {
        match self {
            Empty | Resident { .. } | Swapped { .. } | Lost => Some(Gone),
            Evicting { .. } | Writeback { .. } | Reading { .. } | Gone | Merged => None,
        }
    }

    /// The page's block was whole and is split: the page has `frame` to itself.
    pub const fn split_off(self, frame: Pfn) -> Option<Self> {
        match self {
            Empty | Merged => Some(Resident { frame, entry: None }),
            _ => None,
        }
    }
}

/// A page's word: all that a page costs that is nowhere.
pub struct PageWord(AtomicU64);

#[cfg(not(loom))]
const _: () = assert!(size_of::<PageWord>() == 8);

impl PageWord {
    /// An empty page's.
    #[cfg(loom)]
    pub fn new() -> Self {
        Self(AtomicU64::new(Empty.encode()))
    }

    /// Where the page is now.
    #[inline]
    pub fn load(&self) -> PageState {
        PageState::decode(self.0.load(Ordering::Acquire))
    }

    /// The choke point: `from -> to`, unless somebody was quicker; then where the page is instead.
    #[inline]
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

    /// Applies a transition of [`PageState`] to whatever the state is, until it either wins (the
    /// state before) or does not apply (the state that stands).
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
            Lost,
            Gone,
            Merged,
        ] {
            assert_eq!(PageState::decode(state.encode()), state);
        }
        assert_eq!(Empty.encode(), 0);
    }

    #[test]
    fn a_page_in_transit_cannot_be_removed() {
        let (frame, entry) = (Pfn::new(1), SwapEntry::new(2));
        assert_eq!(Reading { frame, entry }.removed(), None);
        assert_eq!(Writeback { frame, entry }.removed(), None);
        assert_eq!(Evicting { frame, entry: None }.removed(), None);
        assert_eq!(Resident { frame, entry: None }.removed(), Some(Gone));
    }
}
