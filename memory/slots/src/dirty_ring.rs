//! A vCPU's dirty ring: the pages that the vCPU has written.
//!
//! ```text
//!            reset        fetch              dirty              an entry's flags
//!              v            v                  v                  0 free
//!  ... free ...[2][2][2][2] [1][1][1][1][1][1] ... free ...       1 dirty       pushed
//!              harvested,    to be harvested                      2 reset       harvested
//!              to be rearmed                                      0 again, then rearmed
//! ```
//! The vCPU's thread owns the [`RingProducer`]; one other thread at a time owns the
//! [`RingConsumer`]. The ring never overwrites. A *reserve* of entries lies beyond the soft limit.
//! The reserve is enough for all that a vCPU can still push after [`RingSpace::SoftFull`]: a full
//! hardware log, and the few pages of one exit. So the vCPU must then exit to its VMM, and may
//! enter the guest again only when [`RingProducer::space`] allows it.
//!
//! # Reset, then copy
//! ```text
//! harvest ── deliver ── reset: flags 0, rearm ── flush ── copy the pages
//! ```
//! Between harvest and rearm the page is still marked as written, so a write to it makes no new
//! entry. A copy after the flush contains such a write, or the write has made a new entry. A copy
//! before the rearm may lack the write, and no later harvest reports it: the write is lost.
//! `tests/loom.rs` shows both.

use crate::SlotId;
use lacuna_sync::shim::{Arc, AtomicU32, AtomicU64, Ordering};

/// Entries that a vCPU may need between two checks of the soft limit: a full log of 512 pages, and
/// 64 more. KVM reserves the same number.
const RESERVED: usize = 64 + 512;

/// The most entries of a ring, as in KVM.
const ENTRIES_MAX: usize = 1 << 16;

const FREE: u32 = 0;
const DIRTY: u32 = 1;
const RESET: u32 = 2;

/// The size of a ring: a power of two.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingSize {
    entries: usize,
    reserved: usize,
}

/// Why a ring cannot have this size.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "a dirty ring cannot have {bytes} bytes: choose a power of two from {} to {}",
    RingSize::BYTES_MIN,
    RingSize::BYTES_MAX
)]
pub struct RingSizeError {
    /// The requested size.
    pub bytes: usize,
}

impl RingSize {
    /// Bytes of an entry: `flags: u32, slot: u32, offset: u64`.
    pub const ENTRY_BYTES: usize = 16;
    /// Bytes of the smallest ring: it holds more than its reserve, and fills whole pages.
    pub const BYTES_MIN: usize = (RESERVED * Self::ENTRY_BYTES).next_power_of_two();
    /// Bytes of the largest ring.
    pub const BYTES_MAX: usize = ENTRIES_MAX * Self::ENTRY_BYTES;

    /// A ring of `bytes` bytes.
    ///
    /// # Errors
    /// KVM's rules: a power of two, at least a page and the reserve, at most 65 536 entries.
    pub fn from_bytes(bytes: usize) -> Result<Self, RingSizeError> {
        if !bytes.is_power_of_two() || !(Self::BYTES_MIN..=Self::BYTES_MAX).contains(&bytes) {
            return Err(RingSizeError { bytes });
        }
        Ok(Self::of(bytes / Self::ENTRY_BYTES, RESERVED))
    }

    /// A ring of any size: the loom models use a few entries.
    pub(crate) fn of(entries: usize, reserved: usize) -> Self {
        assert!(entries.is_power_of_two() && reserved < entries);
        Self { entries, reserved }
    }

    /// The number of entries.
    pub fn entries(self) -> usize {
        self.entries
    }

    /// The number of used entries at which the vCPU must leave.
    pub fn soft_limit(self) -> usize {
        self.entries - self.reserved
    }
}

/// Whether a vCPU may continue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum RingSpace {
    /// It may continue.
    Free,
    /// It must leave for its VMM, and must not enter the guest before some entries are reset.
    SoftFull,
}

struct Entry {
    flags: AtomicU32,
    slot: AtomicU32,
    page: AtomicU64,
}

struct Ring {
    size: RingSize,
    entries: Box<[Entry]>,
    reset: ResetIndex,
}

/// The first entry in use, counted since the ring was made. The consumer writes it, on a cache line
/// that a producer with room does not read.
#[repr(align(64))]
struct ResetIndex(AtomicU64);

impl Ring {
    fn at(&self, index: u64) -> &Entry {
        &self.entries[index as usize & (self.size.entries - 1)]
    }
}

/// The vCPU's end.
pub struct RingProducer {
    ring: Arc<Ring>,
    /// The next entry to be used.
    dirty: u64,
    /// `Ring::reset` as last read: reading it for each push would share its cache line.
    reset: u64,
}

/// The harvesting thread's end.
pub struct RingConsumer {
    ring: Arc<Ring>,
    /// The next entry to be harvested.
    fetch: u64,
    /// The next entry to be reset.
    reset: u64,
}

/// A ring for one vCPU.
pub fn dirty_ring(size: RingSize) -> (RingProducer, RingConsumer) {
    let entries = (0..size.entries).map(|_| Entry {
        flags: AtomicU32::new(FREE),
        slot: AtomicU32::new(0),
        page: AtomicU64::new(0),
    });
    let ring = Arc::new(Ring {
        size,
        entries: entries.collect(),
        reset: ResetIndex(AtomicU64::new(0)),
    });
    let producer = RingProducer {
        ring: Arc::clone(&ring),
        dirty: 0,
        reset: 0,
    };
    let (fetch, reset) = (0, 0);
    (producer, RingConsumer { ring, fetch, reset })
}

impl RingProducer {
    /// Records a page that was written, or can be written from now on without a push.
    ///
    /// # Panics
    /// If the reserve is used up too: the vCPU has continued after [`RingSpace::SoftFull`].
    #[inline]
    pub fn push(&mut self, slot: SlotId, page: usize) -> RingSpace {
        self.append(slot, page);
        self.space()
    }

    /// As [`Self::push`] for all of `pages`; returns their number. Call [`Self::space`] afterwards.
    ///
    /// # Panics
    /// As `push`.
    #[inline]
    pub fn push_all(&mut self, slot: SlotId, pages: impl Iterator<Item = usize>) -> usize {
        pages.map(|page| self.append(slot, page)).count()
    }

    #[inline]
    fn append(&mut self, slot: SlotId, page: usize) {
        let used = self.dirty - self.reset;
        assert!(
            used < self.ring.size.entries as u64,
            "the vCPU pushed with {used} pages in its ring"
        );
        let entry = self.ring.at(self.dirty);
        entry.slot.store(u32::from(slot.0), Ordering::Relaxed);
        entry.page.store(page as u64, Ordering::Relaxed);
        entry.flags.store(DIRTY, Ordering::Release);
        self.dirty += 1;
    }

    /// Whether the vCPU may enter the guest.
    #[inline]
    pub fn space(&mut self) -> RingSpace {
        let limit = self.ring.size.soft_limit() as u64;
        if self.dirty - self.reset >= limit {
            self.reset = self.ring.reset.0.load(Ordering::Acquire);
        }
        if self.dirty - self.reset < limit {
            RingSpace::Free
        } else {
            RingSpace::SoftFull
        }
    }
}

impl RingConsumer {
    /// Passes all pages pushed so far to `each`, in order, and returns their number. Their entries
    /// stay in use until [`Self::reset`].
    pub fn harvest(&mut self, mut each: impl FnMut(SlotId, usize)) -> usize {
        let first = self.fetch;
        loop {
            let entry = self.ring.at(self.fetch);
            // Flags 0: not pushed yet. Flags 2: harvested in the last round.
            if entry.flags.load(Ordering::Acquire) != DIRTY {
                return (self.fetch - first) as usize;
            }
            let (slot, page) = entry.read();
            // Call `each` before the reset: if it panics, the next harvest gives the page again.
            each(slot, page);
            entry.flags.store(RESET, Ordering::Relaxed);
            self.fetch += 1;
        }
    }

    /// Undoes all harvests since the last reset, because they were not delivered. The next harvest
    /// gives the same pages in the same order.
    pub fn put_back(&mut self) {
        for index in self.reset..self.fetch {
            self.ring.at(index).flags.store(DIRTY, Ordering::Relaxed);
        }
        self.fetch = self.reset;
    }

    /// Frees the entries harvested so far, passes their pages to `rearm` in order, and returns the
    /// number of entries. Each entry is freed before its page is rearmed, so a push because of the
    /// rearming finds room. Rearm the pages, flush if needed, and only then copy them.
    pub fn reset(&mut self, mut rearm: impl FnMut(SlotId, usize)) -> usize {
        let first = self.reset;
        while self.reset < self.fetch {
            let entry = self.ring.at(self.reset);
            debug_assert_eq!(entry.flags.load(Ordering::Relaxed), RESET, "harvested");
            let (slot, page) = entry.read();
            entry.flags.store(FREE, Ordering::Release);
            self.reset += 1;
            self.ring.reset.0.store(self.reset, Ordering::Release);
            rearm(slot, page);
        }
        (self.reset - first) as usize
    }
}

impl Entry {
    fn read(&self) -> (SlotId, usize) {
        let slot = self.slot.load(Ordering::Relaxed) as u16;
        (SlotId(slot), self.page.load(Ordering::Relaxed) as usize)
    }
}
