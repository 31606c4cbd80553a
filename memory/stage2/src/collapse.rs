//! Collapses a table of 512 leaves to one large leaf, in place.
//!
//! ```text
//! 1 read the children: which large leaf is equivalent?
//! 2 parent: Table -> Leaf       every later walk finds the large leaf
//! 3 each child: -> Frozen       its last A and D are in the value swapped out; a walk still inside
//!                               starts again at the root, and finds the large leaf
//! 4 A or D set between 1 and 3: set them in the large leaf too
//! ```
//! No walk ever finds nothing or another frame, because the children map the large leaf's frames.
//! The cursor is held from 1 to 4, so no other thread removes the large leaf, or reads its D,
//! before 4. All TLB entries stay valid: each is a part of the large leaf, with its rights or
//! fewer. Only the table must wait for walks inside it ([`Flush::retire`](crate::Flush::retire)).
//!
//! If no fast page fault can happen in the block meanwhile, 3 and 4 are not needed: a large leaf
//! with W gets D at once. A walk inside the table can set A, and D where there is W; and its leaf
//! is a part of the large leaf, like a TLB entry.
//!
//! If in addition all pages are known to map the large leaf's frames, with rights that differ only
//! in W, step 1 has only to find out whether any page has W. Without fast page faults W changes
//! only under the cursor. So the search may stop at the first page with W, and its result stays
//! true until 2. D follows from W. A is set, because reading it in 512 places is not worth it:
//! reclaim looks again at a block that looks accessed, but splits a block that does not.
//!
//! **Rights, A and D.** A and D are *or*-ed. The large leaf's D stands for the whole block, so
//! clean pages then count as dirty, and no dirty page is forgotten. W is set if any page has it.
//! That is allowed: [`Write::OnFault`](crate::Write::OnFault) lets the MMU set W without asking the
//! host. The next write to a page without W then sets D instead of faulting, and D records it as
//! well. So do not collapse where every first write must *fault* (dirty logging by page).
//! [`Write::Never`](crate::Write::Never) beside any other value, or pages that differ in exec, are
//! not uniform: rights that the backing does not grant are never added.

use crate::format;
use crate::{Cursor, Entry, EntryRef, Flush, Leaf, Stage2, TableFormat, Write};
use lacuna_addr::{Gfn, GfnRange, Level, Pfn};
use lacuna_sync::shim::Ordering;
use lacuna_tables::{Index, TableId};

/// A table's leaves are not the parts of one large leaf.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "the leaves around gfn {gfn} stay small: {found:?} is at that gfn; map the whole table to \
     consecutive frames with equal rights, then collapse it"
)]
pub struct NotUniform {
    /// The first guest frame that does not fit.
    pub gfn: Gfn,
    /// The entry there.
    pub found: Entry,
}

/// The result of a collapse.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use = "the reverse map must forget the small leaves"]
pub struct Collapsed {
    /// The first guest frame of the large leaf.
    pub gfn: Gfn,
    /// The place of the large leaf.
    pub at: EntryRef,
    /// The large leaf, with A, D and rights of all its parts.
    pub leaf: Leaf,
}

impl<'s, F: TableFormat> Cursor<'s, F> {
    /// Replaces the table of 4 KiB leaves around `gfn` by the equivalent 2 MiB leaf. `None` if
    /// there is no such table. The flush contains only the table.
    ///
    /// # Errors
    /// [`NotUniform`]: a page is not mapped, or to another frame than the large leaf's, or has
    /// rights that cannot be joined. Nothing has changed.
    ///
    /// # Panics
    /// If the cursor does not hold `gfn`.
    pub fn collapse(&mut self, gfn: Gfn) -> Result<Option<(Collapsed, Flush<'s>)>, NotUniform> {
        self.assert_holds(gfn);
        let Some((at, Entry::Table(table))) = self.stage2.block_entry(gfn) else {
            return Ok(None);
        };
        let block = gfn.block().range();
        let leaf = self.whole(table, block, (Level::L2M, None))?;
        Ok(Some(self.collapse_at(at, table, block, leaf)))
    }

    /// As [`Cursor::collapse`], if the caller knows two things: every page of the block is mapped
    /// to the frames from `first` on, with rights that differ only in W; and no fast page fault in
    /// the block is in progress, or will be. Then the table cannot get any right or bit that the
    /// large leaf lacks, and its 512 leaves are not changed. The large leaf has A; and W, with D,
    /// if any page has W.
    ///
    /// # Errors
    /// [`NotUniform`]: the first or the last page shows that the caller is wrong. Nothing has
    /// changed.
    ///
    /// # Panics
    /// If the cursor does not hold `gfn`; in debug builds also if any other page is not uniform.
    pub fn collapse_uniform(
        &mut self,
        gfn: Gfn,
        first: Pfn,
    ) -> Result<Option<(Collapsed, Flush<'s>)>, NotUniform> {
        self.assert_holds(gfn);
        let Some((at, Entry::Table(table))) = self.stage2.block_entry(gfn) else {
            return Ok(None);
        };
        let block = gfn.block().range();
        let leaf = self.known(table, block, first)?;
        self.stage2.link_collapsed(at, block, table, leaf);
        self.stage2.forget_leaves(block);
        Ok(Some(self.collapsed(at, table, block, leaf)))
    }

    /// As [`Cursor::collapse`], if the caller knows the backing of the whole block: `leaf`. Joins
    /// its rights, A and D with the pages'. Also maps the pages that are not mapped yet. `None` if
    /// there is no table of 4 KiB leaves: then use [`Cursor::map`].
    ///
    /// # Errors
    /// [`NotUniform`]: a page is mapped to another frame, or has rights that cannot be joined.
    /// Nothing has changed.
    ///
    /// # Panics
    /// If the cursor does not hold `gfn`, or `leaf` is not a valid 2 MiB leaf.
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
        let block = gfn.block().range();
        let leaf = self.whole(table, block, (Level::L2M, Some(leaf)))?;
        Ok(Some(self.collapse_at(at, table, block, leaf)))
    }

    /// The leaf of `level` equivalent to `granted` and the table together, which translates `span`.
    pub(crate) fn whole(
        &self,
        table: TableId,
        span: GfnRange,
        (level, granted): (Level, Option<Leaf>),
    ) -> Result<Leaf, NotUniform> {
        let mut whole = granted;
        let small = level.smaller().expect("a large leaf");
        for (part, gfn) in EntryRef::parts(table, span, small) {
            let found = self.stage2.read(part);
            whole = match found {
                Entry::Absent if granted.is_some() => whole,
                Entry::Table(below) if granted.is_some() && self.stage2.is_empty(below) => whole,
                Entry::Leaf(part) => {
                    Some(join(whole, part, (gfn, level)).ok_or(NotUniform { gfn, found })?)
                }
                _ => return Err(NotUniform { gfn, found }),
            };
        }
        Ok(whole.expect("a table has entries"))
    }

    /// The large leaf that maps the frames from `first` on, with the rights of `table`'s pages.
    fn known(&self, table: TableId, block: GfnRange, first: Pfn) -> Result<Leaf, NotUniform> {
        let stage2 = self.stage2;
        let page = |gfn| match stage2.read(EntryRef::page_of(table, gfn)) {
            Entry::Leaf(page) if page.pfn == format::frame_of(first, Level::L2M, gfn) => Ok(page),
            found => Err(NotUniform { gfn, found }),
        };
        let (one, _) = (page(block.start())?, page(block.last())?);
        debug_assert!(
            block.iter().all(|gfn| page(gfn).is_ok())
                && self.whole(table, block, (Level::L2M, None)).is_ok(),
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

    /// Replaces `table` at `at`, which translates `span`, by the equivalent `leaf`.
    pub(crate) fn collapse_at(
        &self,
        at: EntryRef,
        table: TableId,
        span: GfnRange,
        leaf: Leaf,
    ) -> (Collapsed, Flush<'s>) {
        let stage2 = self.stage2;
        stage2.link_collapsed(at, span, table, leaf);
        let mut last = leaf;
        let small = leaf.level.smaller().expect("a large leaf");
        for (part, gfn) in EntryRef::parts(table, span, small) {
            if let Entry::Leaf(part) = stage2.update(part, gfn, |_| Entry::Frozen) {
                last = last.merged(part);
            }
        }
        let with_last = |found| match found {
            Entry::Leaf(now) => Entry::Leaf(now.merged(last)),
            other => unreachable!("{other:?} took the place of a leaf under a cursor"),
        };
        let Entry::Leaf(now) = stage2.update(at, span.start(), with_last) else {
            unreachable!("checked above")
        };
        self.collapsed(at, table, span, now.merged(last))
    }

    /// The result of a collapse. Its flush has the unlinked `table`.
    fn collapsed(
        &self,
        at: EntryRef,
        table: TableId,
        span: GfnRange,
        leaf: Leaf,
    ) -> (Collapsed, Flush<'s>) {
        let mut flush = self.flush();
        flush.add_table(self.stage2.arena.detach(table), span);
        let gfn = span.start();
        (Collapsed { gfn, at, leaf }, flush)
    }
}

impl<F: TableFormat> Stage2<F> {
    /// Whether `table` has no leaf.
    pub(crate) fn is_empty(&self, table: TableId) -> bool {
        !Index::all().any(|index| self.has_leaf(EntryRef::new(table, index)))
    }

    /// Whether any 4 KiB leaf of `table` is writable.
    fn any_writable(&self, table: TableId) -> bool {
        // Relaxed: W was set under the range lock, which this thread holds now, or by a fast page
        // fault. Since the last of these faults, the caller has waited until all vCPUs had left the
        // guest.
        Index::all().any(|index| {
            let entry = self.arena.entry(table, index);
            F::is_writable_leaf(entry.load(Ordering::Relaxed))
        })
    }
}

/// The leaf of `level` equivalent to `whole` and, for `gfn`, to `part`; `None` if there is none.
/// The first part decides the frames.
#[inline]
fn join(whole: Option<Leaf>, part: Leaf, (gfn, level): (Gfn, Level)) -> Option<Leaf> {
    let Some(whole) = whole else {
        let first = part.at(level);
        return first.defect().is_none().then_some(first);
    };
    let never = |leaf: Leaf| leaf.write == Write::Never;
    let fits =
        part.pfn == whole.frame_of(gfn) && part.exec == whole.exec && never(part) == never(whole);
    fits.then(|| whole.merged(part))
}
