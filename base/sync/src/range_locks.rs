//! The range lock of the stage-2 cursor, with the invalidation sequence beside it.
//!
//! Guest frames are divided into blocks of 512 (2 MiB, one leaf table). Every block has one of the
//! range locks. Neighbouring blocks have different locks, and so have blocks that are a power of
//! two apart: guests often give each thread an equal share of memory, and the threads advance in
//! step. A range lock has a lock bit, a count of invalidations in progress, and a sequence number.
//! The lock exists even if nothing is mapped, so an invalidation also excludes faults in blocks
//! where it found nothing to unmap.
//!
//! ```text
//! fault:        s = invalidate_seq(block)     resolve the page    guard = lock(block)
//!               guard.invalidate_retry(s)?  yes -> drop, again   no -> install, drop
//! invalidation: invalidate_begin: lock, in_progress += 1, unmap, drop   shoot down
//!               invalidate_end: lock, seq += 1, in_progress -= 1, drop
//! ```
//!
//! Either the fault's critical section is first, and `invalidate_begin` finds and unmaps the new
//! leaf; or `invalidate_begin` is first, and the fault sees `in_progress > 0` or a moved `seq`.
//! `seq` moves at the end, as in KVM (`Documentation/virt/kvm/locking.rst`), but per range lock: an
//! invalidation makes only faults near it retry.

use crate::held::Held;
use crate::lock_order;
use crate::shim::{AtomicU64, Ordering, spin_loop, yield_now};
use std::ops::Range;

/// One lock word: bit 0 locked, bits 1..=15 invalidations in progress, bits 16.. sequence.
///
/// In one word, a read of the sequence is one load, and the release of a guard is one store.
const LOCKED: u64 = 1;
const IN_PROGRESS_ONE: u64 = 1 << 1;
const IN_PROGRESS_MASK: u64 = 0x7fff << 1;
const SEQ_ONE: u64 = 1 << 16;

/// The sequence read by a fault before it asked for its page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct InvalidateSeq(u64);

#[repr(align(64))]
struct RangeLock(AtomicU64);

/// Range locks over blocks of 512 guest frames.
pub struct RangeLocks {
    locks: Box<[RangeLock]>,
}

/// A held range lock. Dropping it unlocks.
pub struct RangeGuard<'a> {
    word: &'a AtomicU64,
    value: u64,
    _held: Held,
}

impl RangeLocks {
    /// `count` range locks; a power of two.
    pub fn new(count: usize) -> Self {
        assert!(
            count.is_power_of_two(),
            "range lock count must be a power of two"
        );
        Self {
            locks: (0..count).map(|_| RangeLock(AtomicU64::new(0))).collect(),
        }
    }

    /// The number of range locks.
    pub fn count(&self) -> usize {
        self.locks.len()
    }

    /// The range lock of a block (gfn >> 9).
    pub fn index_of(&self, block: u64) -> usize {
        let n = self.locks.len();
        (block ^ block >> n.trailing_zeros()) as usize & (n - 1)
    }

    /// The range locks of a range of blocks, each once, in ascending order, which is the locking
    /// order.
    pub fn indices(&self, blocks: Range<u64>) -> Vec<usize> {
        let n = self.locks.len() as u64;
        if blocks.end - blocks.start >= n {
            return (0..self.locks.len()).collect();
        }
        let mut v: Vec<usize> = blocks.map(|b| self.index_of(b)).collect();
        v.sort_unstable();
        v.dedup();
        v
    }

    /// Call this before asking the backing for the page.
    #[inline]
    pub fn invalidate_seq(&self, block: u64) -> InvalidateSeq {
        InvalidateSeq(self.locks[self.index_of(block)].0.load(Ordering::Acquire) & !LOCKED)
    }

    /// The sequences of all range locks of `blocks` in one number: their sum. A sequence only
    /// grows, so the sum is the same if and only if no invalidation has begun or ended there.
    pub fn invalidate_seq_of(&self, blocks: Range<u64>) -> InvalidateSeq {
        let seq = |index: usize| self.locks[index].0.load(Ordering::Acquire) & !LOCKED;
        let seqs = self.indices(blocks).into_iter().map(seq);
        InvalidateSeq(seqs.fold(0, u64::wrapping_add))
    }

    /// Takes the range lock of `block`.
    #[inline]
    #[track_caller]
    pub fn lock(&self, block: u64) -> RangeGuard<'_> {
        self.lock_index(self.index_of(block))
    }

    /// Takes range lock `index`. A thread takes several only in ascending order.
    #[inline]
    #[track_caller]
    pub fn lock_index(&self, index: usize) -> RangeGuard<'_> {
        let word = &self.locks[index].0;
        let locks = self.locks.as_ptr().addr();
        let (value, held) =
            Held::take_range::<lock_order::RangeLock, _>(locks, index, || lock_word(word));
        RangeGuard {
            word,
            value,
            _held: held,
        }
    }
}

/// Sets the lock bit; returns the word without it.
#[inline]
fn lock_word(word: &AtomicU64) -> u64 {
    let mut spins = 0u32;
    loop {
        let seen = word.load(Ordering::Relaxed);
        let locked = || {
            let (success, failure) = (Ordering::Acquire, Ordering::Relaxed);
            word.compare_exchange_weak(seen, seen | LOCKED, success, failure)
        };
        if seen & LOCKED == 0 && locked().is_ok() {
            return seen;
        }
        // Critical sections are a few hundred instructions, but the holder's thread may have been
        // preempted: after some spins, yield the core.
        spins += 1;
        if spins.is_multiple_of(64) {
            yield_now()
        } else {
            spin_loop()
        }
    }
}

impl InvalidateSeq {
    /// Whether an invalidation was in progress when the sequence was read: such a fault may as well
    /// wait.
    pub const fn invalidate_in_progress(self) -> bool {
        self.0 & IN_PROGRESS_MASK != 0
    }
}

impl RangeGuard<'_> {
    /// Whether the fault must be retried: an invalidation is in progress, or one has ended since
    /// `seq` was read. Then a page resolved after `seq` must not be installed.
    #[inline]
    pub fn invalidate_retry(&self, seq: InvalidateSeq) -> bool {
        self.value != seq.0 || self.value & IN_PROGRESS_MASK != 0
    }

    /// As [`RangeGuard::invalidate_retry`], for the guards of a range of blocks, and the sequence
    /// of [`RangeLocks::invalidate_seq_of`] for that range.
    pub fn any_invalidate_retry(guards: &[Self], seq: InvalidateSeq) -> bool {
        let sum = guards
            .iter()
            .fold(0, |sum: u64, guard| sum.wrapping_add(guard.value));
        sum != seq.0 || guards.iter().any(Self::invalidate_in_progress)
    }

    /// Whether an invalidation is in progress: it may have removed the page for which the caller
    /// still waits.
    #[inline]
    pub fn invalidate_in_progress(&self) -> bool {
        self.value & IN_PROGRESS_MASK != 0
    }

    /// An invalidation of something under this range lock begins.
    pub fn invalidate_begin(&mut self) {
        assert!(
            self.value & IN_PROGRESS_MASK != IN_PROGRESS_MASK,
            "too many invalidations at once"
        );
        self.value += IN_PROGRESS_ONE;
    }

    /// The invalidation ends: its mappings are gone from every TLB.
    pub fn invalidate_end(&mut self) {
        assert!(
            self.value & IN_PROGRESS_MASK != 0,
            "invalidate_end without invalidate_begin"
        );
        self.value = (self.value - IN_PROGRESS_ONE).wrapping_add(SEQ_ONE);
    }
}

impl Drop for RangeGuard<'_> {
    fn drop(&mut self) {
        self.word.store(self.value, Ordering::Release);
    }
}
