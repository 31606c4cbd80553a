//! The geometry of four-level tables with nine bits a level.

use lacuna_addr::{GPA_BITS, Gfn, GfnRange, Level, PAGE_SHIFT, Pfn};
use lacuna_tables::{ENTRIES, Index};
use std::ops::Range;

/// The height of a table above the guest's pages: 1 holds 4 KiB leaves, 4 is the root.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Height(u8);

/// A step of a walk, numbered as in the Arm architecture: the root is at level 0, and the tables of
/// 4 KiB leaves are at level 3.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct LookupLevel(u8);

impl LookupLevel {
    /// All levels, in the order of a walk.
    pub const ALL: [Self; 4] = [Self(0), Self(1), Self(2), Self(3)];

    /// Its number.
    pub const fn get(self) -> u8 {
        self.0
    }
}

const INDEX_BITS: u32 = ENTRIES.trailing_zeros();

const _: () = assert!(
    PAGE_SHIFT + 4 * INDEX_BITS == GPA_BITS,
    "four levels translate every Gpa"
);

impl Height {
    pub(crate) const ROOT: Self = Self(4);
    /// All heights, in the order of a walk.
    pub(crate) const DOWN: [Self; 4] = [Self(4), Self(3), Self(2), Self(1)];
    /// The heights whose entries span more than a block.
    pub(crate) const ABOVE_BLOCKS: [Self; 2] = [Self(4), Self(3)];

    /// The height whose tables hold leaves of `level`.
    #[inline]
    pub(crate) const fn of_leaf(level: Level) -> Self {
        Self(level as u8)
    }

    /// The size of a leaf in a table of this height; the root holds none.
    #[inline]
    pub(crate) const fn leaf_level(self) -> Option<Level> {
        match self.0 {
            1 => Some(Level::L4K),
            2 => Some(Level::L2M),
            3 => Some(Level::L1G),
            _ => None,
        }
    }

    /// The step of a walk that reads tables of this height.
    #[inline]
    pub(crate) const fn lookup_level(self) -> LookupLevel {
        LookupLevel(4 - self.0)
    }

    /// The height of the tables to which entries of this height point.
    #[inline]
    pub(crate) fn below(self) -> Self {
        assert!(self.0 > 1, "a table of 4 KiB leaves points to no table");
        Self(self.0 - 1)
    }

    /// The index of the entry that translates `gfn` in a table of this height.
    #[inline]
    pub(crate) const fn index(self, gfn: Gfn) -> Index {
        Index::truncate(gfn.get() >> self.entry_shift())
    }

    /// The entries of the table of this height over `inside` that translate a part of `range`, each
    /// with all its frames.
    #[inline]
    pub(crate) fn entries(
        self,
        inside: Gfn,
        range: GfnRange,
    ) -> impl Iterator<Item = (Index, GfnRange)> {
        let shift = self.entry_shift();
        let all = self.table_span(inside);
        let base = all.start().get();
        let indices = match range.intersect(all) {
            Some(part) => {
                (part.start().get() - base) >> shift..((part.end_raw() - 1 - base) >> shift) + 1
            }
            None => 0..0,
        };
        indices.map(move |i| {
            let span = GfnRange::new(gfn(base + (i << shift)), 1 << shift);
            (Index::truncate(i), span.expect("an entry's span"))
        })
    }

    /// All frames that the table of this height over `inside` translates.
    #[inline]
    pub(crate) fn table_span(self, inside: Gfn) -> GfnRange {
        let shift = self.entry_shift() + INDEX_BITS;
        GfnRange::new(gfn(inside.get() >> shift << shift), 1 << shift).expect("a table's span")
    }

    #[inline]
    const fn entry_shift(self) -> u32 {
        INDEX_BITS * (self.0 as u32 - 1)
    }
}

/// The numbers of the blocks that `range` overlaps, for the locks and filters of `lacuna_sync`.
#[inline]
pub(crate) fn block_numbers(range: GfnRange) -> Range<u64> {
    range.start().block().get()..range.last().block().get() + 1
}

/// The frame behind `gfn` in a leaf of `level` that starts at `base`.
#[inline]
pub(crate) const fn frame_of(base: Pfn, level: Level, gfn: Gfn) -> Pfn {
    Pfn::new((base.get() | (gfn.get() & (level.pages() - 1))) as u32)
}

/// The frames that a leaf of `level` around `inside` maps.
#[inline]
pub(crate) fn leaf_span(level: Level, inside: Gfn) -> GfnRange {
    let shift = level.page_shift();
    GfnRange::new(gfn(inside.get() >> shift << shift), level.pages()).expect("a leaf's span")
}

#[inline]
fn gfn(raw: u64) -> Gfn {
    Gfn::new(raw).expect("inside a table of the four-level tree")
}
