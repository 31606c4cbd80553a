//! Table entries, decoded.

use crate::format::{self, Height};
use core::num::NonZeroU32;
use lacuna_addr::{Gfn, GfnRange, Level, Pfn};
use lacuna_tables::{ENTRIES, Index, TableId};

/// The meaning of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Entry {
    /// Nothing is mapped here: an access is a violation.
    Absent,
    /// A pointer to the table of the next lower height, which translates the entry's frames.
    Table(TableId),
    /// A mapping of the entry's guest frames to host frames.
    Leaf(Leaf),
    /// The entry's table was unlinked. It is not `Absent` because of this race: a vCPU's walk reads
    /// the pointer to the table; another thread unlinks it, and maps the page by another table;
    /// then the walk reads this entry. For `Absent` the walk would report a violation of a mapped
    /// page. For `Frozen` it starts again at the root, from which it cannot reach this table.
    Frozen,
}

/// A mapping of `level.pages()` guest frames to as many host frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Leaf {
    /// The first host frame that it maps; a multiple of `level.pages()`.
    pub pfn: Pfn,
    /// Its size: it maps `level.pages()` frames.
    pub level: Level,
    /// What happens to a guest's write.
    pub write: Write,
    /// Whether the guest may fetch instructions from it.
    pub exec: bool,
    /// The A bit: a walk has used the leaf since aging last cleared the bit.
    pub accessed: bool,
    /// The D bit: a walk for a write has used the leaf since the bit was last cleared, or the MMU
    /// has set the bit before any write. Only a leaf that allows writes may have it.
    pub dirty: bool,
}

/// What happens to a write. In order of growing rights.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Write {
    /// The slot is read-only. The write faults, and the MMU never sets W.
    Never,
    /// The write faults. The MMU may then set W without asking the host for the page: the fault has
    /// only to record the write.
    OnFault,
    /// W is set: the write succeeds without a fault.
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

    /// A 4 KiB leaf as a write fault installs it: W and D preset, because the faulting access is
    /// about to write.
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

    /// The leaf of `level` equivalent to this larger leaf for the guest frames from `gfn` on.
    #[inline]
    #[must_use]
    pub const fn part(self, gfn: Gfn, level: Level) -> Self {
        Self {
            pfn: self.frame_of(gfn),
            level,
            ..self
        }
    }

    /// Both leaves' rights, A and D, on this leaf's frames.
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

    /// The host frame behind `gfn`, one of this leaf's guest frames.
    #[inline(always)]
    pub const fn frame_of(self, gfn: Gfn) -> Pfn {
        format::frame_of(self.pfn, self.level, gfn)
    }

    /// This leaf's guest frames, `gfn` among them.
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

/// The place of an entry, in 32 bits: a reverse map stores it for a leaf.
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

    /// The place of the 4 KiB leaf of `gfn`, if this is another leaf's place in the same block.
    #[must_use]
    #[inline]
    pub fn beside(self, gfn: Gfn) -> Self {
        Self::page_of(self.table(), gfn)
    }

    /// The place of the 2 MiB leaf of `gfn`, if this is another 2 MiB leaf's place in the same
    /// 1 GiB.
    #[must_use]
    #[inline]
    pub fn beside_block(self, gfn: Gfn) -> Self {
        Self::new(self.table(), Height::of_leaf(Level::L2M).index(gfn))
    }

    /// The places in `table` of the leaves of `level` that map `span`, each with its first frame.
    #[inline]
    pub(crate) fn parts(
        table: TableId,
        span: GfnRange,
        level: Level,
    ) -> impl Iterator<Item = (Self, Gfn)> {
        let place = move |(index, gfn)| (Self::new(table, index), gfn);
        Index::all().zip(span.steps(level)).map(place)
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
