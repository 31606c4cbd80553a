//! Counts of pages by their state.

use std::ops::AddAssign;

/// Pages of a range by their state, a moment ago.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PageStates {
    /// Pages in the host's memory.
    pub resident: u64,
    /// Pages in swap only, or on their way back.
    pub swapped: u64,
    /// Pages that a page source has not provided, and lost pages.
    pub missing: u64,
    /// Resident pages in huge pages.
    pub huge: u64,
    /// Pages in the log of writes, if there is a log.
    pub dirty: u64,
    /// Pages that are zeros without memory: never touched, discarded, or dropped as zeros.
    pub untouched: u64,
}

impl PageStates {
    /// The counts in the order of the fields.
    pub const fn counts(&self) -> [u64; 6] {
        [
            self.resident,
            self.swapped,
            self.missing,
            self.huge,
            self.dirty,
            self.untouched,
        ]
    }

    /// The states with these [`counts`](Self::counts).
    pub const fn of_counts(counts: [u64; 6]) -> Self {
        let [resident, swapped, missing, huge, dirty, untouched] = counts;
        Self {
            resident,
            swapped,
            missing,
            huge,
            dirty,
            untouched,
        }
    }
}

impl AddAssign for PageStates {
    fn add_assign(&mut self, other: Self) {
        let [a, b] = [self.counts(), other.counts()];
        *self = Self::of_counts(std::array::from_fn(|state| {
            a[state].saturating_add(b[state])
        }));
    }
}
