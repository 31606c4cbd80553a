//! Leaves of 1 GiB: maps, splits and collapses them.
//!
//! Such a leaf spans 512 blocks. It is mapped, split and unmapped only under a cursor over all of
//! them: that is every range lock. So for the holder of one block's lock it is like a table above
//! the block: it stays, and only walks change it, which set A and D.
//!
//! Each 1 GiB leaf has a *deposited* table, which its split links. So the split cannot fail, and
//! the holder of one block's lock can always get a leaf of that block alone: it unlocks, splits
//! under a cursor over the 1 GiB, and locks its block again. Linux deposits a table for each of its
//! huge pages for the same reason (`pgtable_trans_huge_deposit`). Without it, each caller would
//! need a way on where no table is free.

use crate::format::Height;
use crate::map::join;
use crate::{
    Collapsed, Cursor, Entry, EntryRef, Flush, Leaf, MapError, Mapped, NotUniform, Split, Stage2,
    TableFormat,
};
use lacuna_addr::{Gfn, GfnRange, Level};
use lacuna_sync::lock;
use lacuna_tables::TableId;

impl<'s, F: TableFormat> Cursor<'s, F> {
    /// Maps the 1 GiB `leaf` at `gfn`, its first guest frame. Needs a table for a later split.
    ///
    /// # Errors
    /// As [`Cursor::prepare`]. Nothing is mapped then.
    ///
    /// # Panics
    /// If the cursor does not hold all of the 1 GiB, or `leaf` has another level.
    pub fn map_gib(&mut self, gfn: Gfn, leaf: Leaf) -> Result<Mapped, MapError> {
        self.assert_holds_all(GfnRange::gib_of(gfn));
        let Leaf { pfn, level, .. } = leaf;
        assert_eq!(level, Level::L1G, "{leaf:?}");
        if !(gfn.get() | pfn.get()).is_multiple_of(level.pages()) {
            return Err(MapError::Misaligned { gfn, pfn, level });
        }
        let root = EntryRef::new(self.stage2.root, Height::ROOT.index(gfn));
        let directory = match self.stage2.read(root) {
            Entry::Table(directory) => directory,
            _ => self.link(root, gfn)?,
        };
        let at = EntryRef::new(directory, Height::of_leaf(level).index(gfn));
        match self.stage2.read(at) {
            Entry::Absent => {
                let table = self.stage2.arena.alloc()?;
                lock(&self.stage2.deposits).insert(at, table);
            }
            Entry::Leaf(found) if found.pfn == pfn => {}
            found => {
                let wanted = leaf;
                return Err(MapError::Occupied { gfn, wanted, found });
            }
        }
        Ok(join(self.stage2, at, gfn, leaf))
    }

    /// Splits the 1 GiB leaf that maps `gfn` to 512 leaves of 2 MiB; `None` if there is none.
    ///
    /// # Panics
    /// If the cursor does not hold all of the 1 GiB.
    pub fn split_gib(&mut self, gfn: Gfn) -> Option<Split> {
        self.assert_holds_all(GfnRange::gib_of(gfn));
        let (at, Entry::Leaf(_)) = self.stage2.gib_entry(gfn)? else {
            return None;
        };
        let table = lock(&self.stage2.deposits).remove(&at);
        let table = table.expect("a 1 GiB leaf has a deposited table");
        Some(self.split_into(at, gfn, table))
    }

    /// Replaces the table of 2 MiB leaves around `gfn` by the equivalent 1 GiB leaf. If the caller
    /// knows the backing of all of the 1 GiB, it gives `granted`: then blocks that are not mapped
    /// yet are mapped too, and the rights, A and D of `granted` are joined. `None` if there is no
    /// such table, or no table is free for a later split. The flush contains only tables.
    ///
    /// # Errors
    /// [`NotUniform`]: a block has a table of 4 KiB leaves, is mapped to another frame than the
    /// large leaf's, or has rights that cannot be joined. Nothing has changed.
    ///
    /// # Panics
    /// If the cursor does not hold all of the 1 GiB, or `granted` is not a valid 1 GiB leaf.
    pub fn collapse_gib(
        &mut self,
        gfn: Gfn,
        granted: Option<Leaf>,
    ) -> Result<Option<(Collapsed, Flush<'s>)>, NotUniform> {
        let gib = GfnRange::gib_of(gfn);
        self.assert_holds_all(gib);
        let valid = |leaf: Leaf| (leaf.level, leaf.defect()) == (Level::L1G, None);
        assert!(granted.is_none_or(valid), "{granted:?}");
        let Some((at, Entry::Table(table))) = self.stage2.gib_entry(gfn) else {
            return Ok(None);
        };
        let leaf = self.whole(table, gib, (Level::L1G, granted))?;
        let Ok(spare) = self.stage2.arena.alloc() else {
            return Ok(None);
        };
        lock(&self.stage2.deposits).insert(at, spare);
        let mut flush = self.flush();
        for (block, gfn) in EntryRef::parts(table, gib, Level::L2M) {
            // Its 4 KiB leaves are gone.
            if let Entry::Table(_) = self.stage2.read(block) {
                flush.join(self.unmap(gfn.block().range(), |_| {}));
            }
        }
        let (collapsed, unlinked) = self.collapse_at(at, table, gib, leaf);
        flush.join(unlinked);
        Ok(Some((collapsed, flush)))
    }

    /// Frees the deposited table of `leaf`, which was removed from `at`, if that is a 1 GiB leaf.
    #[inline(always)]
    pub(crate) fn give_deposit(&self, at: EntryRef, leaf: Leaf) {
        if leaf.level == Level::L1G {
            self.free_deposit(at);
        }
    }

    #[cold]
    fn free_deposit(&self, at: EntryRef) {
        let table: Option<TableId> = lock(&self.stage2.deposits).remove(&at);
        let table = table.expect("a 1 GiB leaf has a deposited table");
        self.stage2.arena.free_unlinked(table);
    }
}

impl<F: TableFormat> Stage2<F> {
    /// The entry that translates or leads to the whole 1 GiB of `gfn`; `None` if its table is
    /// missing.
    fn gib_entry(&self, gfn: Gfn) -> Option<(EntryRef, Entry)> {
        let directory = self.read_table(self.root, Height::ROOT.index(gfn))?;
        let at = EntryRef::new(directory, Height::of_leaf(Level::L1G).index(gfn));
        Some((at, self.read(at)))
    }
}
