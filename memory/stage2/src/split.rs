//! Splits a large leaf to a table of 512 leaves: the same translation, so no flush is needed.
//!
//! ```text
//! a table, not yet linked: 512 leaves with the large leaf's frames, rights, A and D
//! parent: Leaf -> Table     only from the value that was copied
//! ```
//! The race with a walk: this thread copies the large leaf into the table; a walk sets A or D in
//! the large leaf; this thread links the table. The small leaves would lack that A or D. So the
//! link is a compare-and-swap from the copied value: it fails then, and the copy is repeated.
//!
//! A walk finds either the large leaf or the small one. Each small leaf inherits D, so after that a
//! written block is 512 dirty pages.

use crate::format::Height;
use crate::{Cursor, Entry, EntryRef, Leaf, Stage2, TableFormat};
use lacuna_addr::{Gfn, GfnRange, Level};
use lacuna_tables::{Exhausted, Index, TableId};

/// The result of a split.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use = "512 new leaves must enter the reverse map"]
pub struct Split {
    /// The first guest frame of the large leaf.
    pub gfn: Gfn,
    /// The large leaf as it was when the table replaced it, with its last A and D.
    pub leaf: Leaf,
    /// The place of the first frame's leaf. [`EntryRef::beside`] gives the others, or
    /// [`EntryRef::beside_block`] after the split of a 1 GiB leaf.
    pub first: EntryRef,
}

impl<F: TableFormat> Cursor<'_, F> {
    /// Splits the 2 MiB leaf that maps `gfn`; `None` if there is none. A 1 GiB leaf stays: see
    /// [`Cursor::split_gib`].
    ///
    /// # Errors
    /// [`Exhausted`]: no table page is free, and nothing has changed.
    ///
    /// # Panics
    /// If the cursor does not hold `gfn`.
    pub fn split(&mut self, gfn: Gfn) -> Result<Option<Split>, Exhausted> {
        self.assert_holds(gfn);
        let Some((at, Entry::Leaf(_))) = self.stage2.block_entry(gfn) else {
            return Ok(None);
        };
        let table = self.stage2.arena.alloc()?;
        Ok(Some(self.split_into(at, gfn, table)))
    }

    /// Splits the 2 MiB leaves that map frames inside and outside of `range`: at most two, in its
    /// first and its last block. After that, unmapping or protecting `range` changes nothing
    /// outside. Calls `split` with each split.
    ///
    /// # Errors
    /// [`Exhausted`]: no table page is free. The splits passed to `split` are done.
    ///
    /// # Panics
    /// If the cursor does not hold `range`.
    pub fn cut(&mut self, range: GfnRange, mut split: impl FnMut(Split)) -> Result<(), Exhausted> {
        self.assert_holds_all(range);
        for edge in [range.start(), range.last()] {
            let block = edge.block().range();
            if range.intersect(block) != Some(block)
                && let Some(done) = self.split(edge)?
            {
                split(done);
            }
        }
        Ok(())
    }

    /// Splits the large leaf at `at`, which maps `gfn`, into the new `table`.
    pub(crate) fn split_into(&self, at: EntryRef, gfn: Gfn, table: TableId) -> Split {
        loop {
            let Entry::Leaf(leaf) = self.stage2.read(at) else {
                unreachable!("only a cursor over the leaf removes it")
            };
            let span = leaf.span(gfn);
            if self.stage2.link_split(at, span, leaf, table).is_ok() {
                return Split {
                    gfn: span.start(),
                    leaf,
                    first: EntryRef::new(table, Index::truncate(0)),
                };
            }
        }
    }
}

impl<F: TableFormat> Stage2<F> {
    /// The entry that translates or leads to the whole block of `gfn`; `None` if its table is
    /// missing.
    pub(crate) fn block_entry(&self, gfn: Gfn) -> Option<(EntryRef, Entry)> {
        let mut table = self.root;
        for height in Height::ABOVE_BLOCKS {
            match self.read(EntryRef::new(table, height.index(gfn))) {
                Entry::Table(below) => table = below,
                _ => return None,
            }
        }
        let at = EntryRef::new(table, Height::of_leaf(Level::L2M).index(gfn));
        Some((at, self.read(at)))
    }
}
