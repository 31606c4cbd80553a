//! The blocks that a vCPU's TLB may translate.
//!
//! A *block* is 512 guest frames, 2 MiB. Each vCPU has a *TLB residency filter*, with one bit for
//! each block number modulo [`TlbFilter::BITS`]. The filter never misses a block that the TLB may
//! hold. It may name a block that the TLB does not hold; that costs a needless flush.
//!
//! ```text
//! remover (the thread that unmaps)       vCPU
//! remove the entry                       note(block):  bit clear? set it, fence
//! fence, read the bit                    walk: read the entry
//! ```
//! At least one of them sees the other: the remover sees the bit, or the vCPU sees that the entry
//! is gone. `note` needs no fence if the bit is already set: the fence that followed the setting of
//! the bit covers every later walk of the block. The bits are cleared only after the vCPU has
//! flushed its TLB.

use crate::shim::{AtomicU64, Ordering, fence};
use std::ops::Range;

/// Loom uses one word: its models have few blocks, and each word multiplies the states to explore.
const WORDS: usize = if cfg!(loom) { 1 } else { 64 };

/// The TLB residency filter of one vCPU. It has cache lines of its own, because its vCPU writes it
/// and other threads only read it.
#[repr(align(64))]
pub(crate) struct TlbFilter([AtomicU64; WORDS]);

impl TlbFilter {
    /// The number of bits: 4096 blocks, which is 8 GiB. Blocks that are a multiple of 8 GiB apart
    /// share a bit.
    pub(crate) const BITS: u64 = WORDS as u64 * 64;

    /// A filter with all bits set, for a vCPU that does not use its filter.
    pub(crate) fn everything() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(u64::MAX)))
    }

    /// Call this before a walk of `block` reads its first entry.
    #[inline]
    pub(crate) fn note(&self, block: u64) {
        let (word, bit) = place(block);
        if self.0[word].load(Ordering::Relaxed) & bit == 0 {
            self.set(word, bit);
        }
    }

    #[cold]
    fn set(&self, word: usize, bit: u64) {
        self.0[word].fetch_or(bit, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Call this after the TLB was flushed. Release: a remover that sees a clear bit also sees
    /// every earlier access through the TLB.
    pub(crate) fn clear(&self) {
        for word in &self.0 {
            // Most words are zero already. An unwritten cache line stays valid in the removers'
            // caches.
            if word.load(Ordering::Relaxed) != 0 {
                word.store(0, Ordering::Release);
            }
        }
    }

    /// Whether the filter has any of `blocks`. The caller executes a SeqCst fence before this call,
    /// which pairs with the fence in `note`.
    pub(crate) fn meets(&self, blocks: &Blocks) -> bool {
        blocks
            .masks()
            .any(|(word, mask)| self.0[word].load(Ordering::Acquire) & mask != 0)
    }
}

/// A set of blocks, to compare with filters. One block, or one run of consecutive blocks, is stored
/// exactly and without an allocation. Other sets keep only block numbers modulo the filter's size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocks(Set);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Set {
    /// Consecutive blocks; no block if the range is empty.
    Run(Range<u64>),
    /// One bit for each block number modulo [`TlbFilter::BITS`].
    Bits(Box<[u64; WORDS]>),
}

impl Default for Blocks {
    fn default() -> Self {
        Self::none()
    }
}

impl Blocks {
    /// No block.
    pub const fn none() -> Self {
        Self(Set::Run(0..0))
    }

    /// One block, by its number (gfn >> 9).
    pub const fn one(block: u64) -> Self {
        Self(Set::Run(block..block + 1))
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        matches!(&self.0, Set::Run(run) if run.is_empty())
    }

    /// Adds a run of blocks.
    pub fn add(&mut self, more: Range<u64>) {
        if more.is_empty() {
            return;
        }
        match &mut self.0 {
            Set::Run(run) if run.is_empty() => *run = more,
            Set::Run(run) if more.start <= run.end && run.start <= more.end => {
                *run = run.start.min(more.start)..run.end.max(more.end);
            }
            Set::Run(run) => {
                let mut bits = Box::new([0; WORDS]);
                set(&mut bits, run);
                set(&mut bits, &more);
                self.0 = Set::Bits(bits);
            }
            Set::Bits(bits) => set(bits, &more),
        }
    }

    /// Adds the blocks of `other`.
    pub fn join(&mut self, mut other: Self) {
        // If only one of the sets has bits, add the run of the other to it.
        if let Set::Bits(_) = other.0 {
            std::mem::swap(self, &mut other);
        }
        match other.0 {
            Set::Run(run) => self.add(run),
            Set::Bits(more) => {
                let Set::Bits(bits) = &mut self.0 else {
                    unreachable!("swapped above: both have bits")
                };
                bits.iter_mut()
                    .zip(more.iter())
                    .for_each(|(word, more)| *word |= more);
            }
        }
    }

    /// Where the set's bits are in a filter: the index of a word, and a mask of its bits.
    fn masks(&self) -> impl Iterator<Item = (usize, u64)> {
        let (run, bits) = match &self.0 {
            Set::Run(run) => (run.clone(), None),
            Set::Bits(bits) => (0..0, Some(bits.iter().copied().enumerate())),
        };
        let bits = bits.into_iter().flatten().filter(|(_, mask)| *mask != 0);
        run_masks(&run).chain(bits)
    }
}

fn set(bits: &mut [u64; WORDS], run: &Range<u64>) {
    run_masks(run).for_each(|(word, mask)| bits[word] |= mask);
}

/// The masks of a run, one word after the other. A run longer than the filter yields every bit
/// once.
fn run_masks(run: &Range<u64>) -> impl Iterator<Item = (usize, u64)> + use<> {
    let end = run.end.min(run.start.saturating_add(TlbFilter::BITS));
    let mut next = run.start;
    std::iter::from_fn(move || {
        if next >= end {
            return None;
        }
        let (word, _) = place(next);
        let upto = (next / 64 + 1).saturating_mul(64).min(end);
        let mask = u64::MAX >> (64 - (upto - next)) << (next % 64);
        next = upto;
        Some((word, mask))
    })
}

const fn place(block: u64) -> (usize, u64) {
    ((block % TlbFilter::BITS / 64) as usize, 1 << (block % 64))
}
