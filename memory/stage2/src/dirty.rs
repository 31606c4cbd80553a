//! Dirty tracking: D cleared and set independently of W, and W set without a lock.

use crate::format::Height;
use crate::unmap::Removed;
use crate::walk::translation;
use crate::{Cursor, Entry, EntryRef, Flush, Leaf, Stage2, TableFormat, Translation, Write};
use lacuna_addr::{BlockNumber, Gfn, GfnRange, Level};
use lacuna_sync::shim::Ordering;
use lacuna_tables::TableId;

/// The number of tries of a fast page fault while other threads change the entry.
const TRIES: usize = 4;

impl<'s, F: TableFormat> Cursor<'s, F> {
    /// Clears D in every 4 KiB leaf in `runs` and leaves W, so the next walk for a write sets D
    /// again, and a logging walk records it. In larger leaves, where one D would stand for all
    /// pages, W is cleared too. Until the flush is finished, a vCPU may still write through its
    /// TLB, and no D is set.
    ///
    /// Calls `cleared` with each leaf that had D, as it was before the change. The caller must
    /// record that D: the entry has lost it.
    ///
    /// # Panics
    /// If the cursor does not hold `runs`.
    pub fn clear_dirty(
        &mut self,
        runs: impl IntoIterator<Item = GfnRange>,
        mut cleared: impl FnMut(Removed),
    ) -> Flush<'s> {
        let mut flush = self.flush();
        self.each_leaf(runs, |at, gfn| {
            if let Some(leaf) = self.stage2.rearm(at, F::dirty_cleared) {
                flush.add_stale(leaf.span(gfn));
                if leaf.dirty {
                    cleared(Removed { gfn, at, leaf });
                }
            }
        });
        flush
    }

    /// Sets D in every writable leaf in `range`, so that no walk has to. No flush is needed: a TLB
    /// can only have fewer rights.
    ///
    /// # Panics
    /// If the cursor does not hold `range`.
    pub fn preset_dirty(&mut self, range: GfnRange) {
        self.each_leaf([range], |at, gfn| {
            self.stage2.update(at, gfn, |found| match found {
                Entry::Leaf(leaf) if leaf.is_writable() => Entry::Leaf(Leaf {
                    dirty: true,
                    ..leaf
                }),
                other => other,
            });
        });
    }

    /// Calls `visit` with each leaf that maps a frame of `runs`, and the first frame it maps.
    ///
    /// # Panics
    /// If the cursor does not hold `runs`, or not all of a 1 GiB leaf found there.
    #[inline]
    pub(crate) fn each_leaf(
        &self,
        runs: impl IntoIterator<Item = GfnRange>,
        mut visit: impl FnMut(EntryRef, Gfn),
    ) {
        let mut tables = BlockTables::new(self.stage2);
        for run in runs {
            self.assert_holds_all(run);
            // The common case: pages of one block with small leaves.
            let Some(table) = tables.of_run(run) else {
                self.each_leaf_below(self.stage2.root, Height::ROOT, run, &mut visit);
                continue;
            };
            for gfn in run.iter() {
                let at = EntryRef::page_of(table, gfn);
                if self.stage2.has_leaf(at) {
                    visit(at, gfn);
                }
            }
        }
    }

    fn each_leaf_below(
        &self,
        table: TableId,
        height: Height,
        range: GfnRange,
        visit: &mut dyn FnMut(EntryRef, Gfn),
    ) {
        for (index, span) in height.entries(range.start(), range) {
            let at = EntryRef::new(table, index);
            match self.stage2.read(at) {
                Entry::Table(below) => {
                    let part = range
                        .intersect(span)
                        .expect("entries() yields what overlaps");
                    self.each_leaf_below(below, height.below(), part, visit);
                }
                Entry::Leaf(leaf) => {
                    self.assert_holds_large(leaf, span);
                    visit(at, span.start());
                }
                Entry::Absent => {}
                Entry::Frozen => unreachable!("a frozen entry in a linked table"),
            }
        }
    }
}

/// Finds the table of 4 KiB leaves of a block. It remembers the last block, so a caller that goes
/// block by block makes one search for each.
struct BlockTables<'s, F> {
    stage2: &'s Stage2<F>,
    /// The block of the last call, and its table if it has one.
    last: Option<(BlockNumber, Option<TableId>)>,
}

impl<'s, F: TableFormat> BlockTables<'s, F> {
    fn new(stage2: &'s Stage2<F>) -> Self {
        Self { stage2, last: None }
    }

    /// The table that translates all of `run`; `None` if there is no single one, or a larger leaf.
    #[inline]
    fn of_run(&mut self, run: GfnRange) -> Option<TableId> {
        if run.last().block() != run.start().block() {
            return None;
        }
        self.of(run.start())
    }

    /// The table of 4 KiB leaves of `gfn`'s block, if the block has one.
    #[inline]
    fn of(&mut self, gfn: Gfn) -> Option<TableId> {
        let block = gfn.block();
        if self.last.is_none_or(|(last, _)| last != block) {
            let table = match self.stage2.block_entry(gfn) {
                Some((_, Entry::Table(table))) => Some(table),
                _ => None,
            };
            self.last = Some((block, table));
        }
        self.last?.1
    }
}

impl<F: TableFormat> Stage2<F> {
    /// Prefetches the cache lines of the 4 KiB leaves of `gfns`, before [`Cursor::protect`] or
    /// [`Cursor::clear_dirty`] changes them. Prefetched lines arrive in parallel; locked exchanges
    /// wait for one line after the other. One gfn of each [`Stage2::LINE`] is enough. This is a
    /// hint that changes nothing, so it takes no lock: if a table is unlinked meanwhile, it
    /// prefetches a useless line.
    pub fn prefetch(&self, gfns: impl IntoIterator<Item = Gfn>) {
        let mut tables = BlockTables::new(self);
        for gfn in gfns {
            if let Some(table) = tables.of(gfn) {
                let at = EntryRef::page_of(table, gfn);
                self.arena.prefetch(at.table(), at.index());
            }
        }
    }

    /// A fast page fault: sets W, A and D in the 4 KiB leaf of `gfn` if it is [`Write::OnFault`],
    /// without a lock. `None` if that is not possible: nothing is mapped, a larger leaf is, writes
    /// are never allowed, or other threads change the leaf all the time.
    ///
    /// Mark the page dirty after this call, not before. Otherwise: the vCPU marks the page; a
    /// harvest takes the mark, and finds no W to clear; this call sets W; the next write is not
    /// recorded. The caller is online in the VM's `Qsbr`, as for a walk.
    pub fn fast_page_fault(&self, gfn: Gfn) -> Option<Translation> {
        (0..TRIES).find_map(|_| {
            let at = self.find(gfn)?;
            let old = self.read(at);
            let Entry::Leaf(leaf) = old else { return None };
            if leaf.level != Level::L4K || leaf.write == Write::Never {
                return None;
            }
            let new = Leaf {
                write: Write::Allowed,
                accessed: true,
                dirty: true,
                ..leaf
            };
            self.exchange(at, old, Entry::Leaf(new), Ordering::AcqRel)
                .then(|| translation(new, gfn))
        })
    }
}
