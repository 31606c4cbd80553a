//! Page-modification logging: the walk records every page whose D it sets.
//!
//! ```text
//! index  511 510 ...  1   0   0xffff
//!         |--- entries --->|  full: the next walk that has to set A or D ends, and sets neither
//! ```
//! As Intel's processors do it (SDM 29.3.6). Entries go down from 511; each is a page's address.
//! Only a change of D from 0 to 1 makes an entry, but a full log also stops a walk that would set
//! only A.

use lacuna_addr::{Gfn, Gpa};

/// The log of one vCPU.
pub struct PmlLog {
    entries: Box<[Gpa; Self::ENTRIES]>,
    /// The index of the next entry: from 511 down, then `0xffff` when the log is full.
    index: u16,
}

/// The log has no room: flush it, then walk again. Neither A nor D was set.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the page-modification log is full: flush it, then walk again")]
pub struct LogFull;

impl PmlLog {
    /// The capacity in pages.
    pub const ENTRIES: usize = 512;
    const EMPTY: u16 = Self::ENTRIES as u16 - 1;

    /// An empty log.
    pub fn new() -> Self {
        Self {
            entries: Box::new([Gpa::default(); Self::ENTRIES]),
            index: Self::EMPTY,
        }
    }

    /// The index of the next entry: 511 if the log is empty, `0xffff` if it is full.
    pub fn index(&self) -> u16 {
        self.index
    }

    /// Whether the log is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.index == Self::EMPTY
    }

    /// Whether the log must be flushed before a walk may set A or D.
    #[inline]
    pub fn is_full(&self) -> bool {
        usize::from(self.index) >= Self::ENTRIES
    }

    /// The log's memory, in order from 511 down.
    pub fn entries(&self) -> &[Gpa; Self::ENTRIES] {
        &self.entries
    }

    /// The logged pages, the newest first as in [`Self::entries`]. The log is then empty.
    #[inline]
    pub fn take(&mut self) -> &[Gpa] {
        let first = usize::from(self.index.wrapping_add(1));
        self.index = Self::EMPTY;
        &self.entries[first..]
    }

    #[inline]
    fn append(&mut self, gfn: Gfn) {
        self.entries[usize::from(self.index)] = gfn.gpa();
        self.index = self.index.wrapping_sub(1);
    }
}

impl Default for PmlLog {
    fn default() -> Self {
        Self::new()
    }
}

/// The log of a walk that sets A or D.
pub(crate) trait Log {
    /// Whether the walk may set them.
    fn has_room(&self) -> bool;
    /// The walk has set D of the leaf that maps `gfn`.
    fn written(&mut self, gfn: Gfn);
}

/// No log.
pub(crate) struct Unlogged;

impl Log for Unlogged {
    #[inline]
    fn has_room(&self) -> bool {
        true
    }

    #[inline]
    fn written(&mut self, _: Gfn) {}
}

impl Log for PmlLog {
    #[inline]
    fn has_room(&self) -> bool {
        !self.is_full()
    }

    #[inline]
    fn written(&mut self, gfn: Gfn) {
        self.append(gfn);
    }
}
