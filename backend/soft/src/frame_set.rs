//! A set of guest frames. It is read without a lock, and a frame is never removed.
//!
//! ```text
//! boot    bitmap of the memory that the VM is created with, 256 GiB at most; contains() is one
//! load later   two-level bitmap of all other frames: a row is 512 GiB, a part is 1 GiB;
//!         the first insertion into a row or part allocates it
//! ```
//! A VMM may add slots anywhere below 2^48 while the VM runs, so the bitmap must cover all of that.
//! Most VMs have only their boot memory, whose look-ups must not pay for the rest.

use lacuna_addr::{GPA_BITS, Gfn, Level, PAGE_SHIFT};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Words in the bitmap of a 2 MiB block.
const BLOCK_WORDS: usize = (Level::L2M.pages() / 64) as usize;
/// Words of a part, the bitmap of 1 GiB.
const PART_WORDS: usize = (Level::L1G.pages() / 64) as usize;
/// Parts of a row.
const PARTS: usize = 512;
/// Rows of the whole guest-physical address space.
const ROWS: usize = (1 << (GPA_BITS - PAGE_SHIFT)) / 64 / PART_WORDS / PARTS;

/// The largest number of frames in `boot`, a bitmap of 8 MiB.
const BOOT_MAX: u64 = 256 * Level::L1G.pages();

type Words = Box<[AtomicU64]>;

/// The set.
pub(crate) struct FrameSet {
    /// Rounded up to whole blocks, so that each block is either in `boot` or in `later`.
    boot: Words,
    /// Indexed from frame 0. The parts that `boot` covers are never allocated.
    later: Box<[OnceLock<Row>]>,
}

/// Up to [`PARTS`] parts.
type Row = Box<[OnceLock<Words>]>;

fn words(count: usize) -> Words {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

fn unmade<T>(count: usize) -> Box<[OnceLock<T>]> {
    (0..count).map(|_| OnceLock::new()).collect()
}

/// The index of a frame's word among all words.
fn index(gfn: Gfn) -> usize {
    (gfn.get() / 64) as usize
}

fn bit(gfn: Gfn) -> u64 {
    1 << (gfn.get() % 64)
}

impl FrameSet {
    /// The number of words that [`FrameSet::new`] makes.
    pub(crate) fn words(boot: u64) -> u64 {
        boot.min(BOOT_MAX)
            .div_ceil(64)
            .next_multiple_of(BLOCK_WORDS as u64)
    }

    /// The empty set. `boot` is one past the last frame of the VM's boot memory.
    pub(crate) fn new(boot: u64) -> Self {
        Self {
            boot: words(Self::words(boot) as usize),
            later: unmade(ROWS),
        }
    }

    #[inline]
    pub(crate) fn contains(&self, gfn: Gfn) -> bool {
        let word = match self.boot.get(index(gfn)) {
            Some(word) => Some(word),
            None => self.part(gfn).map(|part| &part[index(gfn) % PART_WORDS]),
        };
        word.is_some_and(|word| word.load(Ordering::Acquire) & bit(gfn) != 0)
    }

    /// Whether any frame of the 2 MiB block of `gfn` is in the set.
    #[inline]
    pub(crate) fn meets_block(&self, gfn: Gfn) -> bool {
        let first = index(gfn) & !(BLOCK_WORDS - 1);
        let words = match self.boot.get(first..first + BLOCK_WORDS) {
            Some(words) => Some(words),
            None => self
                .part(gfn)
                .map(|part| &part[first % PART_WORDS..][..BLOCK_WORDS]),
        };
        let any = |words: &[AtomicU64]| words.iter().any(|w| w.load(Ordering::Acquire) != 0);
        words.is_some_and(any)
    }

    pub(crate) fn insert(&self, gfn: Gfn) {
        let word = match self.boot.get(index(gfn)) {
            Some(word) => word,
            None => &self.make_part(gfn)[index(gfn) % PART_WORDS],
        };
        word.fetch_or(bit(gfn), Ordering::SeqCst);
    }

    /// The part of `gfn`, a frame outside `boot`; `None` if nothing was inserted there.
    #[cold]
    fn part(&self, gfn: Gfn) -> Option<&Words> {
        let part = index(gfn) / PART_WORDS;
        self.later[part / PARTS].get()?[part % PARTS].get()
    }

    /// As [`FrameSet::part`], but allocates a missing part.
    fn make_part(&self, gfn: Gfn) -> &Words {
        let part = index(gfn) / PART_WORDS;
        let row = self.later[part / PARTS].get_or_init(|| unmade(PARTS));
        row[part % PARTS].get_or_init(|| words(PART_WORDS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bitmap_of_the_largest_guest_is_small() {
        let frames = 1 << (GPA_BITS - PAGE_SHIFT);
        assert_eq!(FrameSet::words(frames) * 8, 8 << 20);
        let set = FrameSet::new(frames);
        for frame in [BOOT_MAX - 1, BOOT_MAX, frames - 1] {
            assert!(!set.contains(gfn(frame)));
            set.insert(gfn(frame));
            assert!(set.contains(gfn(frame)) && set.meets_block(gfn(frame)));
        }
    }

    fn gfn(n: u64) -> Gfn {
        Gfn::new(n).unwrap()
    }

    #[test]
    fn a_frame_is_itself_alone_wherever_it_is() {
        const LAST: u64 = (1 << (GPA_BITS - PAGE_SHIFT)) - 1;
        let some = [0, 63, 64, 999, 1000, 1023, 1024, 1 << 18, 1 << 27, LAST];
        for number in some {
            let set = FrameSet::new(1000);
            set.insert(gfn(number));
            for other in some {
                assert_eq!(set.contains(gfn(other)), other == number);
                let same_block = other / 512 == number / 512;
                assert_eq!(set.meets_block(gfn(other)), same_block, "{number} {other}");
            }
        }
    }
}
