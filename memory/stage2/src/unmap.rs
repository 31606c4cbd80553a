//! Unmapping.
//!
//! A page goes alone. A range that covers all that a table spans takes the table with it:
//!
//! ```text
//! parent: Table -> Absent      no new walk enters
//! each child: -> Frozen        the last A and D are in the value swapped out; a walk still inside
//!                              starts again at the root
//! the table rides in the flush, and is free when every vCPU has passed
//! ```

use crate::format::Height;
use crate::{Cursor, Entry, EntryRef, Flush, Leaf, TableFormat};
use lacuna_addr::{Gfn, GfnRange};
use lacuna_sync::shim::Ordering;
use lacuna_tables::TableId;

/// A leaf that was taken out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Removed {
    /// The first guest frame it mapped.
    pub gfn: Gfn,
    /// Where it was.
    pub at: EntryRef,
    /// It, with its last A and D.
    pub leaf: Leaf,
}

/// One sweep over a range: where removed leaves go, and what the flush must carry.
struct Sweep<'a, 's, F> {
    cursor: &'a Cursor<'s, F>,
    range: GfnRange,
    flush: Flush<'s>,
    removed: &'a mut dyn FnMut(Removed),
    /// Entries read.
    entries: u64,
}

impl<'s, F: TableFormat> Cursor<'s, F> {
    /// Removes every leaf that maps a frame of `range`; `removed` is told of each, ascending. A
    /// 2 MiB leaf that reaches beyond the range goes whole, unless [`Cursor::cut`] has split it
    /// first. The frames may be reused when the flush is finished.
    ///
    /// # Panics
    /// When the cursor does not hold `range`, or not all of a 1 GiB leaf found in it.
    pub fn unmap(&mut self, range: GfnRange, removed: impl FnMut(Removed)) -> Flush<'s> {
        self.unmap_counted(range, removed).0
    }

    /// [`Cursor::unmap`], with the number of entries that it read on its way down.
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

    /// [`Cursor::unmap_page`] without the walk: `at` is where `gfn` was mapped, as the reverse map
    /// remembers it. `None` when no leaf is there.
    ///
    /// # Panics
    /// As [`Cursor::unmap`]; in debug builds also when `at` is not where `gfn` is mapped.
    pub fn unmap_at(&mut self, at: EntryRef, gfn: Gfn) -> Option<(Removed, Flush<'s>)> {
        self.assert_maps(at, gfn);
        let Entry::Leaf(leaf) = self.stage2.update(at, gfn, removal) else {
            return None;
        };
        let span = leaf.span(gfn);
        self.assert_holds_large(leaf, span);
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

    /// That `at` is where `gfn` is mapped, if it is mapped.
    #[track_caller]
    #[inline]
    pub(crate) fn assert_maps(&self, at: EntryRef, gfn: Gfn) {
        self.assert_holds(gfn);
        debug_assert!(
            self.stage2.find(gfn).is_none_or(|found| found == at),
            "the reverse map has {at:?} for gfn {gfn}, which is mapped elsewhere"
        );
    }

    /// A 2 MiB leaf is one block, so whoever holds one of its frames holds it all.
    #[inline]
    fn assert_holds_large(&self, leaf: Leaf, span: GfnRange) {
        if leaf.level == lacuna_addr::Level::L1G {
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

    /// Where the leaf is that maps `gfn`. Stable only under a cursor.
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
    /// The part of the range under a table of `height` that translates `inside`.
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

    /// Takes out `table` of `height`, which `parent` points to, with all below it.
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
            self.flush.add_stale(span);
            (self.removed)(Removed { gfn, at, leaf });
        }
    }

    /// A frame of `span` that is in the range.
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
