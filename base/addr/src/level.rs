//! Leaf sizes.

use crate::PAGE_SHIFT;

/// The size that one table leaf maps.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
#[repr(u8)]
pub enum Level {
    /// 4 KiB.
    L4K = 1,
    /// 2 MiB.
    L2M = 2,
    /// 1 GiB.
    L1G = 3,
}

impl Level {
    /// Every level, smallest first.
    pub const ALL: [Self; 3] = [Self::L4K, Self::L2M, Self::L1G];

    /// log2 of the pages that one leaf of this level covers.
    pub const fn page_shift(self) -> u32 {
        9 * (self as u32 - 1)
    }

    /// Pages that one leaf covers.
    pub const fn pages(self) -> u64 {
        1 << self.page_shift()
    }

    /// log2 of the bytes that one leaf covers.
    pub const fn byte_shift(self) -> u32 {
        PAGE_SHIFT + self.page_shift()
    }

    /// Bytes that one leaf covers.
    pub const fn bytes(self) -> u64 {
        1 << self.byte_shift()
    }

    /// The next smaller level, or `None` below 4 KiB.
    pub const fn smaller(self) -> Option<Self> {
        match self {
            Self::L4K => None,
            Self::L2M => Some(Self::L4K),
            Self::L1G => Some(Self::L2M),
        }
    }
}
