//! Table entries, decoded.

use crate::format::{self, Height};
use core::num::NonZeroU32;
use lacuna_addr::{Gfn, GfnRange, Level, Pfn};
use lacuna_tables::{ENTRIES, Index, TableId};

/// The meaning of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Entry {
    /// Nothing is mapped.
    Absent,
    /// It points to a table of the next lower height.
    Table(TableId),
    /// It maps frames.
    Leaf(Leaf),
    /// Its table was unlinked and is being taken apart. A walk that finds this starts again at the
    /// root, from which it can no longer reach this table; `Absent` would be a false violation.
    Frozen,
}

/// A mapping of `level.pages()` guest frames to as many host frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Leaf {
    /// The first host frame; a multiple of the level's pages.
    pub pfn: Pfn,
    /// How much it maps.
    pub level: Level,
    /// Whether writes are allowed.
    pub write: Write,
    /// Whether instruction fetches are allowed.
    pub exec: bool,
    /// Accessed since it was last aged.
    pub accessed: bool,
    /// Written, or writable without a record by the walker.
    pub dirty: bool,
}

/// What happens to a write. In order of growing rights.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Write {
    /// The backing is read-only: the write ends as MMIO or an error.
    Never,
    /// It faults, and the MMU may set W without asking the host: the fault only records the write.
    OnFault,
    /// It succeeds.
    Allowed,
}

impl Leaf {
    /// A 4 KiB leaf as a read fault installs it: accessed, clean, the first write faults.
    #[inline]
    pub const fn clean(pfn: Pfn) -> Self {
        Self {
            pfn,
            level: Level::L4K,
            write: Write::OnFault,
            exec: true,
            accessed: true,
            dirty: false,
        }
    }

    /// A 4 KiB leaf as a write fault installs it: W and D preset, because the access that faulted
    /// is about to write.
    #[inline]
    pub const fn dirty(pfn: Pfn) -> Self {
        Self {
            write: Write::Allowed,
            dirty: true,
            ..Self::clean(pfn)
        }
    }

    /// A 4 KiB leaf of a read-only slot.
    #[inline]
    pub const fn read_only(pfn: Pfn) -> Self {
        Self {
            write: Write::Never,
            ..Self::clean(pfn)
        }
    }

    /// The same leaf at another level.
    #[must_use]
    #[inline]
    pub const fn at(self, level: Level) -> Self {
        Self { level, ..self }
    }

    /// The 4 KiB leaf that is equivalent to this leaf for `gfn`, one of the guest frames that it
    /// maps.
    #[inline]
    #[must_use]
    pub const fn part(self, gfn: Gfn) -> Self {
        Self {
            pfn: self.frame_of(gfn),
            level: Level::L4K,
            ..self
        }
    }

    /// Both leaves' rights, A and D, on this one's frames.
    #[must_use]
    #[inline]
    pub(crate) fn merged(self, other: Self) -> Self {
        Self {
            write: self.write.max(other.write),
            exec: self.exec || other.exec,
            accessed: self.accessed || other.accessed,
            dirty: self.dirty || other.dirty,
            ..self
        }
    }

    /// Whether it grants all that `other` grants.
    #[inline]
    pub(crate) fn covers(self, other: Self) -> bool {
        self.write >= other.write && self.exec >= other.exec
    }

    /// Whether a write succeeds (W).
    #[inline]
    pub const fn is_writable(self) -> bool {
        matches!(self.write, Write::Allowed)
    }

    /// The host frame behind `gfn`, one of the guest frames that this leaf maps.
    #[inline(always)]
    pub const fn frame_of(self, gfn: Gfn) -> Pfn {
        format::frame_of(self.pfn, self.level, gfn)
    }

    /// The guest frames that this leaf maps, `gfn` among them.
    #[inline]
    pub fn span(self, gfn: Gfn) -> GfnRange {
        format::leaf_span(self.level, gfn)
    }

    /// Why the leaf is not valid; `None` if it is.
    #[inline]
    pub(crate) fn defect(self) -> Option<&'static str> {
        if self.dirty && self.write != Write::Allowed {
            return Some("D without W: a page that cannot be written cannot get dirty");
        }
        if !self.pfn.get().is_multiple_of(self.level.pages()) {
            return Some("its first frame is not aligned to its level");
        }
        None
    }
}

/// The place of an entry, in 32 bits: what a reverse map stores for a leaf.
///
/// It is valid as long as the leaf stays mapped. The holder of the cursor over its gfn can rely on
/// that.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(transparent)]
pub struct EntryRef(NonZeroU32);

impl EntryRef {
    #[inline(always)]
    pub(crate) fn new(table: TableId, index: Index) -> Self {
        let packed = table.get() * ENTRIES as u32 + u32::from(index.get());
        Self(NonZeroU32::new(packed).expect("a TableId is not zero"))
    }

    /// The place of the 4 KiB leaf of `gfn` in `table`, which translates its block.
    #[inline]
    pub(crate) fn page_of(table: TableId, gfn: Gfn) -> Self {
        Self::new(table, Height::of_leaf(Level::L4K).index(gfn))
    }

    /// The place of the 4 KiB leaf of `gfn`, if this is the place of another one of the same block.
    #[must_use]
    #[inline]
    pub fn beside(self, gfn: Gfn) -> Self {
        Self::page_of(self.table(), gfn)
    }

    /// The table it is in.
    #[inline]
    pub fn table(self) -> TableId {
        TableId::new(self.0.get() / ENTRIES as u32).expect("packed from a TableId")
    }

    /// The index in that table.
    #[inline]
    pub fn index(self) -> Index {
        Index::truncate(u64::from(self.0.get()))
    }

    /// A nonzero number for an atomic array.
    #[inline]
    pub const fn to_bits(self) -> u32 {
        self.0.get()
    }

    /// The inverse of [`EntryRef::to_bits`]; `None` for invalid numbers such as zero.
    #[inline]
    pub const fn from_bits(bits: u32) -> Option<Self> {
        match NonZeroU32::new(bits) {
            Some(bits) if bits.get() >= ENTRIES as u32 => Some(Self(bits)),
            _ => None,
        }
    }
}
