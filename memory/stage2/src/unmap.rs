//! Unmapping.
//!
//! A single page is unmapped alone. If a range covers a table's whole span, the table is unlinked
//! too:
//!
//! ```text
//! parent: Table -> Absent      no new walk enters
//! each child: -> Frozen        the last A and D are in the value swapped out; a walk still inside
//!                              starts again at the root
//! the table is in the flush, and is freed when every vCPU has passed
//! ```

use crate::format::Height;
use crate::{Cursor, Entry, EntryRef, Flush, Leaf, TableFormat};
use lacuna_addr::{Gfn, GfnRange, Level};
use lacuna_sync::shim::Ordering;
use lacuna_tables::TableId;

/// A removed leaf.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Removed {
    /// The first guest frame that it mapped.
    pub gfn: Gfn,
    /// The place where it was.
    pub at: EntryRef,
    /// The leaf as it was when it was removed, with its last A and D.
    pub leaf: Leaf,
}

/// One pass over a range that removes its leaves.
struct Sweep<'a, 's, F> {
    cursor: &'a Cursor<'s, F>,
    /// The frames to be unmapped.
    range: GfnRange,
    /// The leaves and tables removed so far.
    flush: Flush<'s>,
    /// Called with each removed leaf.
    removed: &'a mut dyn FnMut(Removed),
    /// The number of entries read so far.
    entries: u64,
}

impl<'s, F: TableFormat> Cursor<'s, F> {
    /// Removes every leaf that maps a frame of `range`; `removed` is called with each, in ascending
    /// order. A 2 MiB leaf that reaches beyond the range is removed as a whole, unless
    /// [`Cursor::cut`] has split it first. The frames may be reused after the flush is finished.
    ///
    /// # Panics
    /// If the cursor does not hold `range`, or not all of a 1 GiB leaf found in it.
    pub fn unmap(&mut self, range: GfnRange, removed: impl FnMut(Removed)) -> Flush<'s> {
        self.unmap_counted(range, removed).0
    }

    /// As [`Cursor::unmap`]; also returns the number of entries that it read.
    ///
    /// # Panics
    /// As [`Cursor::unmap`].
    pub fn unmap_counted(
        &mut self,
        range: GfnRange,
        mut removed: impl FnMut(Removed),
    ) -> (Flush<'s>, u64) {
        self.assert_holds_all(range);
        let mut sweep = Sweep {
            cursor: self,
            range,
            flush: self.flush(),
            removed: &mut removed,
            entries: 0,
        };
        sweep.table(self.stage2.root, Height::ROOT, range.start());
        (sweep.flush, sweep.entries)
    }

    /// Removes the leaf that maps `gfn`, if any.
    ///
    /// # Panics
    /// As [`Cursor::unmap`].
    pub fn unmap_page(&mut self, gfn: Gfn) -> Option<(Removed, Flush<'s>)> {
        self.assert_holds(gfn);
        let at = self.stage2.find(gfn)?;
        self.unmap_at(at, gfn)
    }

    /// As [`Cursor::unmap_page`], without the walk: `at` is the place of `gfn`'s leaf, from the
    /// reverse map. `None` if no leaf is there.
    ///
    /// # Panics
    /// As [`Cursor::unmap`]; in debug builds also if `gfn` is not mapped at `at`.
    pub fn unmap_at(&mut self, at: EntryRef, gfn: Gfn) -> Option<(Removed, Flush<'s>)> {
        self.assert_maps(at, gfn);
        let Entry::Leaf(leaf) = self.stage2.update(at, gfn, removal) else {
            return None;
        };
        let span = leaf.span(gfn);
        self.assert_holds_large(leaf, span);
        self.give_deposit(at, leaf);
        let mut flush = self.flush();
        flush.add_stale(span);
        Some((
            Removed {
                gfn: span.start(),
                at,
                leaf,
            },
            flush,
        ))
    }

    /// Asserts that `gfn` is mapped at `at`, if it is mapped.
    #[track_caller]
    #[inline]
    pub(crate) fn assert_maps(&self, at: EntryRef, gfn: Gfn) {
        self.assert_holds(gfn);
        debug_assert!(
            self.stage2.find(gfn).is_none_or(|found| found == at),
            "the reverse map has {at:?} for gfn {gfn}, which is mapped elsewhere"
        );
    }

    /// A 2 MiB leaf is one block, so a cursor that holds one of its frames holds all of them.
    #[inline]
    pub(crate) fn assert_holds_large(&self, leaf: Leaf, span: GfnRange) {
        if leaf.level == Level::L1G {
            self.assert_holds_all(span);
        }
    }
}

impl<F: TableFormat> crate::Stage2<F> {
    /// Whether a leaf is there. Stable only under a cursor.
    #[inline]
    pub fn has_leaf(&self, at: EntryRef) -> bool {
        F::is_leaf(self.entry(at).load(Ordering::Acquire))
    }

    /// The place of the leaf that maps `gfn`. Stable only under a cursor.
    pub fn find(&self, gfn: Gfn) -> Option<EntryRef> {
        let mut table = self.root;
        for height in Height::DOWN {
            let at = EntryRef::new(table, height.index(gfn));
            match self.read(at) {
                Entry::Table(below) => table = below,
                Entry::Leaf(_) => return Some(at),
                Entry::Absent | Entry::Frozen => return None,
            }
        }
        None
    }
}

impl<F: TableFormat> Sweep<'_, '_, F> {
    /// Handles the part of the range under a table of `height` that translates `inside`.
    fn table(&mut self, table: TableId, height: Height, inside: Gfn) {
        for (index, span) in height.entries(inside, self.range) {
            let at = EntryRef::new(table, index);
            self.entries += 1;
            match self.cursor.stage2.read(at) {
                Entry::Absent => {}
                Entry::Table(below) if self.range.intersect(span) == Some(span) => {
                    self.unlink(at, below, height.below(), span.start());
                }
                Entry::Table(below) => self.table(below, height.below(), self.start_in(span)),
                Entry::Leaf(leaf) => {
                    self.cursor.assert_holds_large(leaf, span);
                    let old = self.cursor.stage2.update(at, span.start(), removal);
                    self.report(at, span, old);
                }
                Entry::Frozen => unreachable!("a frozen entry in a linked table"),
            }
        }
    }

    /// Unlinks `table` of `height`, to which `parent` points, with all tables and leaves below it.
    fn unlink(&mut self, parent: EntryRef, table: TableId, height: Height, first: Gfn) {
        self.cursor.stage2.update(parent, first, |_| Entry::Absent);
        self.freeze(table, height, first);
    }

    fn freeze(&mut self, table: TableId, height: Height, first: Gfn) {
        // The range covers the table, so these are all of its entries.
        for (index, span) in height.entries(first, self.range) {
            let at = EntryRef::new(table, index);
            self.entries += 1;
            let old = self
                .cursor
                .stage2
                .update(at, span.start(), |_| Entry::Frozen);
            match old {
                Entry::Table(below) => self.freeze(below, height.below(), span.start()),
                old => self.report(at, span, old),
            }
        }
        let dead = self.cursor.stage2.arena.detach(table);
        self.flush.add_table(dead, height.table_span(first));
    }

    fn report(&mut self, at: EntryRef, span: GfnRange, old: Entry) {
        if let Entry::Leaf(leaf) = old {
            let gfn = span.start();
            self.cursor.give_deposit(at, leaf);
            self.flush.add_stale(span);
            (self.removed)(Removed { gfn, at, leaf });
        }
    }

    /// A frame of `span` inside the range.
    fn start_in(&self, span: GfnRange) -> Gfn {
        self.range
            .intersect(span)
            .expect("entries() yields what overlaps")
            .start()
    }
}

#[inline]
fn removal(found: Entry) -> Entry {
    match found {
        Entry::Leaf(_) => Entry::Absent,
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use crate::{Arena, Entry, Leaf, Stage2};
    use lacuna_addr::{Gfn, Pfn};
    use lacuna_sync::Qsbr;

    #[test]
    fn a_dead_table_is_frozen_so_that_a_walk_inside_starts_again() {
        let stage2 = Stage2::new(Arena::new(8).expect("address space")).expect("a root");
        let gfn = Gfn::new(5).expect("a frame");
        let leaf = Leaf::clean(Pfn::new(1));
        let _ = stage2.fault_cursor(gfn).map(gfn, leaf).expect("room");
        let at = stage2.find(gfn).expect("just mapped");
        let mut cursor = stage2.fault_cursor(gfn);
        let flush = cursor.unmap(cursor.range(), |_| {});
        drop(cursor);
        assert_eq!(stage2.read(at), Entry::Frozen);
        flush.finish(&Qsbr::new(0));
        let again = stage2.fault_cursor(gfn).map(gfn, leaf).expect("room").at();
        assert_eq!(
            (again, stage2.read(at)),
            (at, Entry::Leaf(leaf)),
            "zeroed and used again"
        );
    }
}
