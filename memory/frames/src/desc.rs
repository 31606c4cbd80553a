//! The descriptor of a frame: 16 bytes each.
//!
//! ```text
//!          take a batch              page word CAS won
//!   Free ---------------> Cached --------------------------> Used <-----------.
//!    ^  <---------------    |                                 | isolate (CAS)  | release
//!    |     give back        '--> Store (holds compressed      v                |
//!    |                            pages; back by give)     Isolated -----------'
//!    '-------------------------------------------------------'  the page has left the frame
//! ```
//! **Isolated** is exclusive: one reclaimer, region removal or copy at a time may take the frame
//! from its page. While the frame's content is written out, it stays isolated until the write
//! completes. In each of the states Free, Cached and Store a frame has one owner too (free map,
//! per-CPU page cache, swap store). So only `Used -> Isolated` needs a compare-and-swap, and a
//! fault does none on a descriptor.

use crate::page_no::PageNo;
use lacuna_sync::shim::AtomicU64;
use lacuna_sync::shim::atomic::{AtomicU8, Ordering};

/// The owner of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum FrameState {
    /// In the free map; or part of a compound page (see `block`).
    Free,
    /// A per-CPU page cache, or a fault that has not yet published the frame.
    Cached,
    /// A page.
    Used,
    /// A page, and a thread that may take it away.
    Isolated,
    /// The swap store: it holds compressed pages.
    Store,
}

impl FrameState {
    const ALL: [Self; 5] = [
        Self::Free,
        Self::Cached,
        Self::Used,
        Self::Isolated,
        Self::Store,
    ];
}

/// In [`Desc::owner`]: the page was read from swap beside another one, and no access has used it
/// since. Page numbers have fewer bits.
const AHEAD: u64 = 1 << 63;

/// A frame descriptor.
pub struct Desc {
    /// The page in the frame, while Used or Isolated; and [`AHEAD`].
    owner: AtomicU64,
    state: AtomicU8,
    /// The content may differ from the swap entry, or from zeros if there is no entry. The mark is
    /// set before a write access may proceed, and when a leaf with D is removed. Only the eviction
    /// that writes the page out clears it. A stale fault may mark a frame that another page has by
    /// then; that costs a needless write.
    dirty: AtomicU8,
    /// Reclaim spares the page for one turn of the clock hand. Either it was swapped in since the
    /// hand last passed, so the faulting vCPU may not have retried yet. Or a thread other than
    /// the hand's has found it accessed.
    recent: AtomicU8,
}

// In addition to its 4 KiB, a frame costs its descriptor, 16 bytes, and a bit in the free map.
#[cfg(not(loom))]
const _: () = assert!(size_of::<Desc>() == 16);

impl Default for Desc {
    fn default() -> Self {
        Self {
            owner: AtomicU64::new(0),
            state: AtomicU8::new(FrameState::Free as u8),
            dirty: AtomicU8::new(0),
            recent: AtomicU8::new(0),
        }
    }
}

impl Desc {
    /// The frame goes to the free map.
    pub fn free(&self) {
        self.dirty.store(0, Ordering::Relaxed);
        self.set_state(FrameState::Free);
    }

    /// Sets the future owner during the split of the frame's block. The dirty mark already counts.
    pub fn adopt(&self, owner: PageNo) {
        self.owner.store(owner.get(), Ordering::Relaxed);
        self.recent.store(0, Ordering::Relaxed);
    }

    /// Sets the future owner, before the page word names the frame.
    #[inline]
    pub fn prepare(&self, owner: PageNo, dirty: Dirt) {
        self.owner.store(owner.get(), Ordering::Relaxed);
        self.dirty
            .store(u8::from(dirty == Dirt::Dirty), Ordering::Relaxed);
        self.recent.store(0, Ordering::Relaxed);
    }

    /// The page word names the frame: from now on it is Used.
    #[inline]
    pub fn publish(&self) {
        self.set_state(FrameState::Used);
    }

    /// Changes the state. The caller is the only thread that may change it.
    #[inline]
    pub fn set_state(&self, state: FrameState) {
        self.state.store(state as u8, Ordering::Release);
    }

    /// The present state.
    #[inline]
    pub fn state(&self) -> FrameState {
        FrameState::ALL[usize::from(self.state.load(Ordering::Acquire))]
    }

    /// Takes the right to move the page away from its frame. `None` if another thread has the
    /// right, or no page is in the frame. Ends with [`Desc::publish`], or when the frame is given
    /// back.
    #[inline]
    pub fn isolate(&self) -> Option<PageNo> {
        let (used, isolated) = (FrameState::Used as u8, FrameState::Isolated as u8);
        self.state
            .compare_exchange(used, isolated, Ordering::AcqRel, Ordering::Relaxed)
            .ok()
            .map(|_| self.owner())
    }

    /// The page in the frame. Valid while Used or Isolated.
    #[inline]
    pub fn owner(&self) -> PageNo {
        PageNo::new(self.owner.load(Ordering::Relaxed) & !AHEAD)
    }

    /// Marks the page dirty: it was written or is about to be. Tests the mark first, because a
    /// store would take the cache line from other cores.
    #[inline]
    pub fn mark_dirty(&self) {
        if self.dirty.load(Ordering::Relaxed) == 0 {
            self.dirty.store(1, Ordering::Release);
        }
    }

    /// Reads the mark.
    #[inline]
    pub fn dirt(&self) -> Dirt {
        if self.dirty.load(Ordering::Acquire) != 0 {
            Dirt::Dirty
        } else {
            Dirt::Clean
        }
    }

    /// Reads and clears the mark. Only for an unmapped page.
    #[inline]
    pub fn take_dirty(&self) -> Dirt {
        if self.dirty.swap(0, Ordering::AcqRel) != 0 {
            Dirt::Dirty
        } else {
            Dirt::Clean
        }
    }

    /// Records that the page is read ahead.
    #[inline]
    pub fn mark_ahead(&self) {
        self.owner.fetch_or(AHEAD, Ordering::Relaxed);
    }

    /// Whether the page was read ahead, and no access has used it.
    #[inline]
    pub fn is_ahead(&self) -> bool {
        self.owner.load(Ordering::Relaxed) & AHEAD != 0
    }

    /// Records an access to `page`. Returns whether it is the first after the page's read-ahead. A
    /// stale fault may find the frame with another page, whose mark stays.
    #[inline]
    pub fn take_ahead(&self, page: PageNo) -> bool {
        let marked = page.get() | AHEAD;
        self.owner.load(Ordering::Relaxed) == marked && {
            let taken = self.owner.compare_exchange(
                marked,
                page.get(),
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
            taken.is_ok()
        }
    }

    /// Makes reclaim spare the page for one turn of the clock hand.
    #[inline]
    pub fn mark_recent(&self) {
        self.recent.store(1, Ordering::Relaxed);
    }

    /// Clears the mark. Returns whether it was set.
    #[inline]
    pub fn take_recent(&self) -> bool {
        self.recent.load(Ordering::Relaxed) != 0 && {
            self.recent.store(0, Ordering::Relaxed);
            true
        }
    }
}

/// Whether a page differs from its copy in swap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Dirt {
    /// It does not differ: it can be dropped.
    Clean,
    /// It may differ.
    Dirty,
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn only_an_access_to_the_frames_page_takes_the_mark_of_its_read_ahead() {
        let desc = Desc::default();
        let (page, earlier) = (PageNo::new(7), PageNo::new(5));
        desc.prepare(page, Dirt::Clean);
        desc.mark_ahead();
        assert!(!desc.take_ahead(earlier));
        assert!(desc.is_ahead());
        assert_eq!(desc.owner(), page);
        assert!(desc.take_ahead(page));
        assert!(!desc.take_ahead(page) && !desc.is_ahead());
        assert_eq!(desc.owner(), page);
        desc.mark_ahead();
        desc.prepare(earlier, Dirt::Clean);
        assert!(!desc.is_ahead());
    }
}
