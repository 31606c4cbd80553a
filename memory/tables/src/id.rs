//! Ids of tables, and indices of entries in them.

use core::num::NonZeroU32;

/// Entries in one table.
pub const ENTRIES: usize = 512;

/// A table page of one [`Arena`](crate::Arena). Never zero, so that `Option<TableId>` is four
/// bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
#[repr(transparent)]
pub struct TableId(NonZeroU32);

impl TableId {
    /// Ids are below `2^BITS`, so that an id and an index fit in 32 bits together.
    pub const BITS: u32 = 23;

    /// The id that `raw` stands for, as decoded from an entry; `None` for zero and for numbers past
    /// [`Self::BITS`].
    #[inline]
    pub const fn new(raw: u32) -> Option<Self> {
        if raw >> Self::BITS != 0 {
            return None;
        }
        match NonZeroU32::new(raw) {
            Some(id) => Some(Self(id)),
            None => None,
        }
    }

    /// The raw number, for formats that store it.
    #[inline]
    pub const fn get(self) -> u32 {
        self.0.get()
    }
}

/// An index into a table, below [`ENTRIES`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
#[repr(transparent)]
pub struct Index(u16);

impl Index {
    /// The low nine bits of `n`: the part of a shifted frame number that one level uses.
    #[inline]
    pub const fn truncate(n: u64) -> Self {
        Self((n % ENTRIES as u64) as u16)
    }

    /// The raw number.
    #[inline]
    pub const fn get(self) -> u16 {
        self.0
    }

    /// Every index, ascending.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..ENTRIES as u16).map(Self)
    }
}
