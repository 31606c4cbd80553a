//! A table of 512 leaves becomes one 2 MiB leaf, in place.
//!
//! ```text
//! 1 read the children: what large leaf does the same?
//! 2 parent: Table -> Leaf       every later walk finds the large leaf
//! 3 each child: -> Frozen       its last A and D are in the value swapped out; a walk still inside
//!                               starts again at the root, and finds the large leaf
//! 4 A or D came between 1 and 3: into the large leaf too
//! ```
//! At no moment does a walk find nothing or another frame, for the children map the frames that the
//! large leaf maps. The cursor is held from 1 to 4, so nobody takes the large leaf away, or judges
//! its D, before 4. No TLB entry is wrong: each is a part of the large leaf, with its rights or
//! fewer. Only the table has to wait for walks inside it ([`Flush::retire`](crate::Flush::retire)).
//!
//! Where no page of the block can be repaired meanwhile, 3 and 4 fall away: the large leaf that has
//! W gets D at once. A walk inside of the table can set A, which is lost, and D where there is W;
//! and what it finds is a part of the large leaf, as what a TLB has.
//!
//! Where besides all pages are known to be mapped as one large leaf would map them, one thing is
//! left to be found out in 1: whether any page has W. Without repairs W comes and goes under the
//! cursor alone, so the search may end with the first page that has it, and what it finds stays
//! true until 2. D follows from W; and A, which nobody would look for in 512 places, is set: a
//! block that looks used is looked at again by reclaim, one that looks unused is taken apart.
//!
//! **What becomes of rights, A and D.** A and D are *or*-ed: the large leaf's D speaks for the
//! whole block, so pages that were clean count as dirty with it, and none that was dirty is
//! forgotten. W is given if any page has it, since [`Write::OnFault`](crate::Write::OnFault) means
//! that the MMU may set W without asking: the next write to a page that was clean sets D, which is
//! as good a notice as the fault. So do not collapse where every first write must *fault* (dirty
//! logging by page). [`Write::Never`](crate::Write::Never) beside any other, or pages that differ
//! in exec, are not uniform: rights that the backing does not grant are never invented.

use crate::format::{self, block_range};
use crate::{Cursor, Entry, EntryRef, Flush, Leaf, Stage2, TableFormat, Write};
use lacuna_addr::{Gfn, GfnRange, Level, Pfn};
use lacuna_sync::shim::Ordering;
use lacuna_tables::{Index, TableId};

/// A table's leaves are not the parts of one 2 MiB leaf.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("gfn {gfn} keeps its block from being one 2 MiB leaf: {found:?} is there")]
pub struct NotUniform {
    /// The first page that does not fit.
    pub gfn: Gfn,
    /// What is there.
    pub found: Entry,
}

/// A table that became a 2 MiB leaf.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use = "the reverse map must forget the small leaves"]
pub struct Collapsed {
    /// The first guest frame of the block.
    pub gfn: Gfn,
    /// Where the large leaf is.
    pub at: EntryRef,
    /// It, with all that its pages had.
    pub leaf: Leaf,
}

impl<'s, F: TableFormat> Cursor<'s, F> {
    /// Replaces the table of 4 KiB leaves around `gfn` by the 2 MiB leaf that does the same. `None`
    /// when there is no such table. The flush has only the table in it.
    ///
    /// # Errors
    /// [`NotUniform`]: a page is not mapped, or not to the frame that one leaf would map it to, or
    /// with rights that do not mix. Nothing has changed.
    ///
    /// # Panics
    /// When the cursor does not hold `gfn`.
    pub fn collapse(&mut self, gfn: Gfn) -> Result<Option<(Collapsed, Flush<'s>)>, NotUniform> {
        self.assert_holds(gfn);
        let Some((at, Entry::Table(table))) = self.stage2.block_entry(gfn) else {
            return Ok(None);
        };
        let block = block_range(gfn);
        let leaf = self.whole(table, block, None)?;
        Ok(Some(self.collapse_at(at, table, block, leaf)))
    }

    /// As [`Cursor::collapse`], where the caller knows that every page of the block is mapped, to
    /// the frames from `first` on, with rights that differ in W alone; and that no repair of one is
    /// under way, or will be. Then nothing comes to the table any more that the large leaf does not
    /// have, and the 512 leaves in it are left as they are. The large leaf has A; and W, with D, if
    /// any page has W.
    ///
    /// # Errors
    /// [`NotUniform`]: the first or the last page says that the caller is wrong. Nothing has
    /// changed.
    ///
    /// # Panics
    /// When the cursor does not hold `gfn`; in debug builds also when any page says so.
    pub fn collapse_unrepaired(
        &mut self,
        gfn: Gfn,
        first: Pfn,
    ) -> Result<Option<(Collapsed, Flush<'s>)>, NotUniform> {
        self.assert_holds(gfn);
        let Some((at, Entry::Table(table))) = self.stage2.block_entry(gfn) else {
            return Ok(None);
        };
        let block = block_range(gfn);
        let leaf = self.known(table, block, first)?;
        self.stage2.link_collapsed(at, block, table, leaf);
        self.stage2.forget_leaves(block);
        Ok(Some(self.collapsed(at, table, block, leaf)))
    }

    /// As [`Cursor::collapse`], where the caller knows what is behind the whole block: `leaf`. Its
    /// rights, A and D are joined with the pages', and pages that are not mapped yet are mapped by
    /// it. `None` when there is no table of 4 KiB leaves: [`Cursor::map`] can do it.
    ///
    /// # Errors
    /// [`NotUniform`]: a page is mapped to another frame, or with rights that do not mix. Nothing
    /// has changed.
    ///
    /// # Panics
    /// When the cursor does not hold `gfn`, or `leaf` is not a sound 2 MiB leaf.
    pub fn collapse_to(
        &mut self,
        gfn: Gfn,
        leaf: Leaf,
    ) -> Result<Option<(Collapsed, Flush<'s>)>, NotUniform> {
        self.assert_holds(gfn);
        assert_eq!((leaf.level, leaf.defect()), (Level::L2M, None), "{leaf:?}");
        let Some((at, Entry::Table(table))) = self.stage2.block_entry(gfn) else {
            return Ok(None);
        };
        let block = block_range(gfn);
        let leaf = self.whole(table, block, Some(leaf))?;
        Ok(Some(self.collapse_at(at, table, block, leaf)))
    }

    /// What large leaf does what the table does, and what `granted` does.
    fn whole(
        &self,
        table: TableId,
        block: GfnRange,
        granted: Option<Leaf>,
    ) -> Result<Leaf, NotUniform> {
        let mut whole = granted;
        for gfn in block.iter() {
            let found = self.stage2.read(EntryRef::page_of(table, gfn));
            whole = match found {
                Entry::Absent if granted.is_some() => whole,
                Entry::Leaf(page) => Some(join(whole, page, gfn).ok_or(NotUniform { gfn, found })?),
                _ => return Err(NotUniform { gfn, found }),
            };
        }
        Ok(whole.expect("a block has pages"))
    }

    /// The large leaf that maps the frames from `first` on, as the pages of `table` do.
    fn known(&self, table: TableId, block: GfnRange, first: Pfn) -> Result<Leaf, NotUniform> {
        let stage2 = self.stage2;
        let page = |gfn| match stage2.read(EntryRef::page_of(table, gfn)) {
            Entry::Leaf(page) if page.pfn == format::frame_of(first, Level::L2M, gfn) => Ok(page),
            found => Err(NotUniform { gfn, found }),
        };
        let last = Gfn::new(block.end_raw() - 1).expect("the last of a range");
        let (one, _) = (page(block.start())?, page(last)?);
        debug_assert!(
            block.iter().all(|gfn| page(gfn).is_ok()) && self.whole(table, block, None).is_ok(),
            "{block:?} is not mapped to the frames from {first} on"
        );
        let write = match one.write {
            Write::Never => Write::Never,
            _ if stage2.any_writable(table) => Write::Allowed,
            _ => Write::OnFault,
        };
        Ok(Leaf {
            pfn: first,
            level: Level::L2M,
            write,
            exec: one.exec,
            accessed: true,
            dirty: write == Write::Allowed,
        })
    }

    fn collapse_at(
        &self,
        at: EntryRef,
        table: TableId,
        block: GfnRange,
        leaf: Leaf,
    ) -> (Collapsed, Flush<'s>) {
        let stage2 = self.stage2;
        stage2.link_collapsed(at, block, table, leaf);
        let mut last = leaf;
        for gfn in block.iter() {
            let child = EntryRef::page_of(table, gfn);
            if let Entry::Leaf(page) = stage2.update(child, gfn, |_| Entry::Frozen) {
                last = last.merged(page);
            }
        }
        let with_last = |found| match found {
            Entry::Leaf(now) => Entry::Leaf(now.merged(last)),
            other => unreachable!("{other:?} took the place of a leaf under a cursor"),
        };
        let Entry::Leaf(now) = stage2.update(at, block.start(), with_last) else {
            unreachable!("checked above")
        };
        self.collapsed(at, table, block, now.merged(last))
    }

    /// `table` is out of use: what is to be done about it.
    fn collapsed(
        &self,
        at: EntryRef,
        table: TableId,
        block: GfnRange,
        leaf: Leaf,
    ) -> (Collapsed, Flush<'s>) {
        let mut flush = self.flush();
        flush.add_table(self.stage2.arena.detach(table), block);
        let gfn = block.start();
        (Collapsed { gfn, at, leaf }, flush)
    }
}

impl<F: TableFormat> Stage2<F> {
    /// Whether a write goes through to any page of `table`, which holds 4 KiB leaves.
    fn any_writable(&self, table: TableId) -> bool {
        // Relaxed: whatever gave W did so under the range lock, or before all vCPUs had passed.
        Index::all().any(|index| {
            let entry = self.arena.entry(table, index);
            F::is_writable_leaf(entry.load(Ordering::Relaxed))
        })
    }
}

/// The large leaf that does what `whole` does and, for `gfn`, what `page` does; `None` when there
/// is none. The first page decides about the frames.
#[inline]
fn join(whole: Option<Leaf>, page: Leaf, gfn: Gfn) -> Option<Leaf> {
    let Some(whole) = whole else {
        let first = Leaf {
            level: Level::L2M,
            ..page
        };
        return first.defect().is_none().then_some(first);
    };
    let never = |leaf: Leaf| leaf.write == Write::Never;
    let fits =
        page.pfn == whole.frame_of(gfn) && page.exec == whole.exec && never(page) == never(whole);
    fits.then(|| whole.merged(page))
}
