//! Counts of pages by their state.

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
