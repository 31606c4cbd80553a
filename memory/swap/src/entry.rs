//! The places on a swap device.

use lacuna_addr::PAGE_SIZE;

/// A place for one page on a swap device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct SwapEntry(u32);

impl SwapEntry {
    /// Place number `index`; `u32::MAX` is not a place.
    pub const fn new(index: u32) -> Self {
        assert!(index != u32::MAX);
        Self(index)
    }

    /// Its number.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Its byte offset on a device laid out flat.
    pub const fn offset(self) -> u64 {
        self.0 as u64 * PAGE_SIZE as u64
    }

    /// The place `count` further on.
    pub const fn plus(self, count: u32) -> Self {
        Self::new(self.0 + count)
    }
}
