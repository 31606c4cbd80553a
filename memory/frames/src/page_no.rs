//! The numbers of pages.

use lacuna_addr::{BackingAddr, BackingRange, Level, PAGE_SHIFT};

/// Pages in a block.
pub const BLOCK: usize = Level::L2M.pages() as usize;

/// A page number: a [`BackingAddr`] divided by 4 KiB. No page has number zero.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct PageNo(u64);

impl PageNo {
    /// Page `number`.
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The page at `addr`.
    pub const fn of(addr: BackingAddr) -> Self {
        Self(addr.get() >> PAGE_SHIFT)
    }

    /// Its number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Its address.
    pub const fn addr(self) -> BackingAddr {
        BackingAddr::new(self.0 << PAGE_SHIFT)
    }

    /// The page `count` pages later.
    pub const fn plus(self, count: usize) -> Self {
        Self(self.0 + count as u64)
    }

    /// Its index in its block.
    pub const fn in_block(self) -> usize {
        self.0 as usize % BLOCK
    }

    /// The first page of its block.
    pub const fn block_start(self) -> Self {
        Self(self.0 - self.in_block() as u64)
    }

    /// The block that begins with this page.
    pub fn block_range(self) -> BackingRange {
        BackingRange::new(self.addr(), BLOCK as u64).expect("aligned")
    }

    /// This page alone.
    pub fn range(self) -> BackingRange {
        BackingRange::new(self.addr(), 1).expect("aligned")
    }
}
