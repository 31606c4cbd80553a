//! A vCPU's ring of the pages it has dirtied.
//!
//! ```text
//!            reset        fetch              dirty              an entry's flags
//!              v            v                  v                  0 free
//!  ... free ...[2][2][2][2] [1][1][1][1][1][1] ... free ...       1 dirty       pushed
//!              harvested,    to be harvested                      2 reset       harvested
//!              to be re-armed                                     0 again, then re-armed
//! ```
//! The vCPU's thread has the [`RingProducer`], one other thread at a time the [`RingConsumer`].
//! The ring never overwrites: of its entries a *reserve* lies beyond the soft limit, enough for all
//! that a vCPU can still push once it has been told [`Room::SoftFull`] (a full hardware log, and
//! the few pages of one exit). So who pushes promises to leave for its VMM then, and to come back
//! when [`RingProducer::room`] says so.
//!
//! # Reset, then copy
//! ```text
//! harvest ── deliver ── reset: flags 0, re-arm ── flush ── copy the pages
//! ```
//! Between harvest and re-arm a page can be written without a new entry, since it is still armed
//! as written. A copy made after the flush has that write, or the write has made a new entry. A
//! copy made before the re-arm may lack it, with nobody left to tell: it is lost. `tests/loom.rs`
//! shows both.

use crate::SlotId;
use lacuna_sync::shim::{Arc, AtomicU32, AtomicU64, Ordering};

/// Entries that a vCPU may need between two looks at the soft limit: a full log of 512 pages and
/// 64 more. As KVM reserves them.
const RESERVED: usize = 64 + 512;

/// Most entries of a ring, as in KVM.
const ENTRIES_MAX: usize = 1 << 16;

const FREE: u32 = 0;
const DIRTY: u32 = 1;
const RESET: u32 = 2;

/// How large a ring is: a power of two.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingSize {
    entries: usize,
    reserved: usize,
}

/// Why a ring cannot have that size.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "a dirty ring cannot have {bytes} bytes: choose a power of two from {} to {}",
    RingSize::BYTES_MIN,
    RingSize::BYTES_MAX
)]
pub struct RingSizeError {
    /// What was asked for.
    pub bytes: usize,
}

impl RingSize {
    /// Bytes of an entry: `flags: u32, slot: u32, offset: u64`.
    pub const ENTRY_BYTES: usize = 16;
    /// Bytes of the smallest ring: it holds more than its reserve, and fills whole pages.
    pub const BYTES_MIN: usize = (RESERVED * Self::ENTRY_BYTES).next_power_of_two();
    /// Bytes of the largest ring.
    pub const BYTES_MAX: usize = ENTRIES_MAX * Self::ENTRY_BYTES;

    /// A ring of so many bytes.
    ///
    /// # Errors
    /// KVM's rules: a power of two, at least a page and the reserve, at most 65 536 entries.
    pub fn from_bytes(bytes: usize) -> Result<Self, RingSizeError> {
        if !bytes.is_power_of_two() || !(Self::BYTES_MIN..=Self::BYTES_MAX).contains(&bytes) {
            return Err(RingSizeError { bytes });
        }
        Ok(Self::of(bytes / Self::ENTRY_BYTES, RESERVED))
    }

    /// Models use rings of a few entries.
    pub(crate) fn of(entries: usize, reserved: usize) -> Self {
        assert!(entries.is_power_of_two() && reserved < entries);
        Self { entries, reserved }
    }

    /// How many entries it has.
    pub fn entries(self) -> usize {
        self.entries
    }

    /// With how many in use the vCPU has to leave.
    pub fn soft_limit(self) -> usize {
        self.entries - self.reserved
    }
}

/// Whether a vCPU may go on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Room {
    /// It may.
    Yes,
    /// It has to leave for its VMM, and must not enter the guest before some entries are reset.
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

/// The first entry that is not free, counted from the beginning of time. The consumer's, on a line
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
    /// `Ring::reset` as last seen: reading it anew for each push would share its line.
    reset: u64,
}

/// The end of whoever harvests.
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
    /// The page of that slot has been written, or can be from now on without a push.
    ///
    /// # Panics
    /// When the reserve is used up too: somebody has gone on after [`Room::SoftFull`].
    #[inline]
    pub fn push(&mut self, slot: SlotId, page: usize) -> Room {
        self.append(slot, page);
        self.room()
    }

    /// [`Self::push`] of all of `pages`, and how many those are. Ask for [`Self::room`] afterwards.
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
            "the vCPU went on with {used} pages in its ring"
        );
        let entry = self.ring.at(self.dirty);
        entry.slot.store(u32::from(slot.0), Ordering::Relaxed);
        entry.page.store(page as u64, Ordering::Relaxed);
        entry.flags.store(DIRTY, Ordering::Release);
        self.dirty += 1;
    }

    /// Whether the vCPU may enter the guest.
    #[inline]
    pub fn room(&mut self) -> Room {
        let limit = self.ring.size.soft_limit() as u64;
        if self.dirty - self.reset >= limit {
            self.reset = self.ring.reset.0.load(Ordering::Acquire);
        }
        if self.dirty - self.reset < limit {
            Room::Yes
        } else {
            Room::SoftFull
        }
    }
}

impl RingConsumer {
    /// Hands out all pages pushed so far, in order, and returns how many. Their entries stay in use
    /// until [`Self::reset`].
    pub fn harvest(&mut self, mut each: impl FnMut(SlotId, usize)) -> usize {
        let first = self.fetch;
        loop {
            let entry = self.ring.at(self.fetch);
            // Free: not pushed yet. To be reset: a whole round ahead.
            if entry.flags.load(Ordering::Acquire) != DIRTY {
                return (self.fetch - first) as usize;
            }
            let (slot, page) = entry.read();
            entry.flags.store(RESET, Ordering::Relaxed);
            self.fetch += 1;
            each(slot, page);
        }
    }

    /// Undoes all harvests since the last reset: they did not reach their user. The same pages come
    /// out of the next one, in the same order.
    pub fn put_back(&mut self) {
        for index in self.reset..self.fetch {
            self.ring.at(index).flags.store(DIRTY, Ordering::Relaxed);
        }
        self.fetch = self.reset;
    }

    /// Frees the entries harvested so far, hands their pages to `rearm` in order, and returns how
    /// many entries those were. An entry is free before its page is handed out, so that a push that
    /// the arming brings about finds room. Arm the pages, flush if there was one, and only then
    /// copy them.
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
