//! The used entries of the swap device, the entry up to which the device has room, and the checksum
//! of the last write to each entry.
//!
//! ```text
//! entries 0 ................ limit ................. capacity
//!         offered first      | the device had no room here when it was last asked: offered, so
//!                            | that it is asked again, when nothing below is free
//! ```
//! The checksums are kept here and not on the device. So the content of another entry, or of an
//! older write to the same entry, does not match unless it is equal. They cost 4 bytes for each
//! entry up to the last one that was ever used: a thousandth of the swapped-out memory, outside the
//! budget.

use crate::entry::SwapEntry;

/// The least number of entries that are tried first.
const NEAR_MIN: u64 = 4096;

/// A bitmap that grows with its use. The search is next-fit, so that the pages of one batch get
/// neighbouring entries.
pub struct SwapMap {
    /// One bit an entry; set = used. Entries past the end are free.
    words: Vec<u64>,
    /// One checksum for each bit of `words`.
    checksums: Vec<u32>,
    used: usize,
    capacity: u32,
    /// The lowest entry for which the device had no room; `capacity` if it has had room since, or
    /// never lacked it.
    limit: u32,
    hint: u32,
    /// The reason why the device had no room at `limit`.
    ended: String,
}

/// `count` adjacent entries, taken by the caller.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// The first of them.
    pub first: SwapEntry,
    /// Their number.
    pub count: u32,
}

/// Whether entries are free below the limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum SwapSpace {
    /// At least one is free.
    Left,
    /// None is free.
    Full,
}

impl SwapMap {
    /// `capacity` entries, at most as many as a page word can name.
    pub fn new(capacity: u64) -> Self {
        let capacity = u32::try_from(capacity)
            .unwrap_or(u32::MAX)
            .min(u32::MAX - 1);
        Self {
            words: Vec::new(),
            checksums: Vec::new(),
            used: 0,
            capacity,
            limit: capacity,
            hint: 0,
            ended: String::new(),
        }
    }

    /// The number of used entries.
    pub fn used(&self) -> usize {
        self.used
    }

    /// Takes up to `want` adjacent entries: as many as the best place near the last one offers,
    /// halving `want` until one fits. `None` when every entry is taken.
    pub fn take(&mut self, want: u32) -> Option<Run> {
        let halves = || std::iter::successors(Some(want), |n| Some(n / 2)).take_while(|&n| n > 0);
        let near = self.limit.min(self.near());
        let in_use = halves().find_map(|count| {
            let found = self.find(self.hint, near, count);
            let found = found.or_else(|| self.find(0, near, count));
            found.map(|first| (first, count))
        });
        let below = || {
            halves().find_map(|count| {
                let found = self.find(self.hint, self.limit, count);
                let found = found.or_else(|| self.find(0, self.limit, count));
                found.map(|first| (first, count))
            })
        };
        let beyond = || {
            halves().find_map(|count| {
                let found = self.find(self.limit, self.capacity, count);
                found.map(|first| (first, count))
            })
        };
        let (first, count) = in_use.or_else(below).or_else(beyond)?;
        (first..first + count).for_each(|entry| self.set(entry));
        self.hint = first + count;
        Some(Run {
            first: SwapEntry::new(first),
            count,
        })
    }

    /// The end of the entries that are tried first. Half of them are free, so a device without a
    /// limit does not grow with each write, and neither does this map.
    fn near(&self) -> u32 {
        let entries = 2 * self.used as u64 + NEAR_MIN;
        u32::try_from(entries).unwrap_or(u32::MAX)
    }

    /// Frees an entry.
    pub fn free(&mut self, entry: SwapEntry) {
        let (word, bit) = (entry.get() as usize / 64, entry.get() % 64);
        assert!(self.words[word] >> bit & 1 == 1, "{entry:?} freed twice");
        self.words[word] &= !(1 << bit);
        self.used -= 1;
    }

    /// Sets the checksums of a write to `first` and the next entries, all in use.
    pub fn seal(&mut self, first: SwapEntry, checksums: &[u32]) {
        let first = first.get() as usize;
        self.checksums[first..first + checksums.len()].copy_from_slice(checksums);
    }

    /// The checksum of the last write to `entry`, a used entry.
    pub fn checksum(&self, entry: SwapEntry) -> u32 {
        self.checksums[entry.get() as usize]
    }

    /// Records that the device has no room for `entry`. Entries from there on are then tried only
    /// if none below is free. Returns whether an entry below is free.
    pub fn ends_at(&mut self, entry: SwapEntry, reason: &str) -> SwapSpace {
        self.limit = self.limit.min(entry.get());
        self.ended = reason.into();
        match self.find(0, self.limit, 1) {
            Some(_) => SwapSpace::Left,
            None => SwapSpace::Full,
        }
    }

    /// Records that the device had room for `entry`. If `entry` is at or beyond the limit, removes
    /// the limit.
    pub fn has_room_at(&mut self, entry: SwapEntry) {
        if entry.get() >= self.limit {
            self.limit = self.capacity;
        }
    }

    /// Why [`SwapMap::take`] found nothing.
    pub fn why_full(&self) -> &str {
        if self.limit < self.capacity {
            &self.ended
        } else {
            "every swap entry is in use"
        }
    }

    /// Whether `entry` is in use.
    pub fn is_used(&self, entry: SwapEntry) -> bool {
        self.is_set(entry.get())
    }

    fn is_set(&self, entry: u32) -> bool {
        let word = self.words.get(entry as usize / 64);
        word.is_some_and(|word| word >> (entry % 64) & 1 == 1)
    }

    fn set(&mut self, entry: u32) {
        let word = entry as usize / 64;
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
            self.checksums.resize((word + 1) * 64, 0);
        }
        self.words[word] |= 1 << (entry % 64);
        self.used += 1;
    }

    /// The first of `count` adjacent free entries in `from..to`.
    fn find(&self, from: u32, to: u32, count: u32) -> Option<u32> {
        let mut start = from;
        while to.checked_sub(start).is_some_and(|room| room >= count) {
            if start.is_multiple_of(64) && self.words.get(start as usize / 64) == Some(&u64::MAX) {
                start += 64;
                continue;
            }
            match (start..start + count)
                .rev()
                .find(|&entry| self.is_set(entry))
            {
                Some(taken) => start = taken + 1,
                None => return Some(start),
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_shrink_to_what_is_free() {
        let mut map = SwapMap::new(8);
        assert_eq!(
            map.take(6),
            Some(Run {
                first: SwapEntry::new(0),
                count: 6
            })
        );
        map.free(SwapEntry::new(2));
        map.free(SwapEntry::new(3));
        assert_eq!(
            map.take(4),
            Some(Run {
                first: SwapEntry::new(6),
                count: 2
            })
        );
        assert_eq!(
            map.take(4),
            Some(Run {
                first: SwapEntry::new(2),
                count: 2
            })
        );
        assert_eq!(map.take(1), None);
        assert_eq!(map.used(), 8);
    }

    /// Pages that come and go do not use up the entries of a device without a limit.
    #[test]
    fn entries_are_used_again() {
        let mut map = SwapMap::new(u64::MAX);
        let mut used = std::collections::VecDeque::new();
        for _ in 0..100_000 {
            let run = map.take(32).unwrap();
            assert_eq!(run.count, 32);
            used.extend((0..32).map(|at| run.first.plus(at)));
            while used.len() > 2000 {
                map.free(used.pop_front().unwrap());
            }
        }
        assert!(map.checksums.len() <= 2 * 2032 + 4096 + 64);
    }

    #[test]
    fn a_device_that_ran_out_is_asked_again_when_nothing_else_is_left() {
        let mut map = SwapMap::new(1000);
        let run = map.take(32).unwrap();
        assert_eq!(map.ends_at(SwapEntry::new(16), "no space"), SwapSpace::Full);
        (0..32).for_each(|i| map.free(run.first.plus(i)));
        assert_eq!(map.ends_at(SwapEntry::new(16), "no space"), SwapSpace::Left);
        assert_eq!(map.take(32).unwrap().count, 16);
        let beyond = map.take(32).unwrap();
        assert_eq!((beyond.first.get(), beyond.count), (16, 32));
        (0..32).for_each(|i| map.free(beyond.first.plus(i)));
        assert_eq!(map.ends_at(SwapEntry::new(16), "no space"), SwapSpace::Full);
        map.has_room_at(SwapEntry::new(0));
        map.free(SwapEntry::new(3));
        assert_eq!(map.take(8).unwrap().first.get(), 3, "below first");
        let beyond = map.take(8).unwrap();
        assert_eq!(beyond.first.get(), 16);
        map.has_room_at(beyond.first);
        map.free(SwapEntry::new(3));
        assert_eq!(map.take(8).unwrap().first.get(), 24, "it has grown back");
    }
}
