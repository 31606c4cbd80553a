//! Which pages are written: D taken and given apart from W, and W given back without a lock.

use crate::format::Height;
use crate::unmap::Removed;
use crate::walk::translation;
use crate::{Cursor, Entry, EntryRef, Flush, Leaf, Stage2, TableFormat, Translation, Write};
use lacuna_addr::{Gfn, GfnRange, Level};
use lacuna_sync::shim::Ordering;
use lacuna_tables::TableId;

/// How often a repair tries against others: as KVM.
const TRIES: usize = 4;

impl<'s, F: TableFormat> Cursor<'s, F> {
    /// Takes D from every 4 KiB leaf in `runs` and leaves W, so that the next walk for a write
    /// sets it again, and a logging one notes it. From larger leaves, of which one D would speak
    /// for all pages, it takes W too. `cleared` is told of each leaf that had D, as it was: that D
    /// is in nobody's hands but yours. Until the flush is finished a vCPU may write through its
    /// TLB.
    ///
    /// # Panics
    /// When the cursor does not hold `runs`.
    pub fn clear_dirty(
        &mut self,
        runs: impl IntoIterator<Item = GfnRange>,
        mut cleared: impl FnMut(Removed),
    ) -> Flush<'s> {
        let mut flush = self.flush();
        self.each_leaf(runs, |at, gfn| {
            if let Some(leaf) = self.stage2.arm(at, F::dirty_cleared) {
                flush.add_stale(leaf.span(gfn));
                if leaf.dirty {
                    cleared(Removed { gfn, at, leaf });
                }
            }
        });
        flush
    }

    /// Sets D of every leaf in `range` that may be written: no walk will have to. Nothing to flush,
    /// for a TLB can only know less.
    ///
    /// # Panics
    /// When the cursor does not hold `range`.
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
    /// When the cursor does not hold `runs`.
    #[inline]
    pub(crate) fn each_leaf(
        &self,
        runs: impl IntoIterator<Item = GfnRange>,
        mut visit: impl FnMut(EntryRef, Gfn),
    ) {
        let mut tables = BlockTables::new(self.stage2);
        for run in runs {
            self.assert_holds_all(run);
            // Nearly always: pages of one block, which has small leaves.
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
                Entry::Leaf(_) => visit(at, span.start()),
                Entry::Absent => {}
                Entry::Frozen => unreachable!("a frozen entry in a linked table"),
            }
        }
    }
}

/// The tables of 4 KiB leaves of one block after the other, each looked up once.
struct BlockTables<'s, F> {
    stage2: &'s Stage2<F>,
    /// The last block, by number, and its table if it has one.
    last: Option<(u64, Option<TableId>)>,
}

impl<'s, F: TableFormat> BlockTables<'s, F> {
    fn new(stage2: &'s Stage2<F>) -> Self {
        Self { stage2, last: None }
    }

    /// The table that translates all of `run`; `None` when a larger leaf does, or no single table.
    #[inline]
    fn of_run(&mut self, run: GfnRange) -> Option<TableId> {
        let last = (run.end_raw() - 1) / Level::L2M.pages();
        if last != run.start().block() {
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
    /// Asks the processor for the cache lines of the 4 KiB leaves of `gfns`, because
    /// [`Cursor::protect`] or [`Cursor::clear_dirty`] is going to change them: prefetched they come
    /// together, while locked exchanges wait for one after the other. One gfn of each
    /// [`Stage2::LINE`] is enough. A hint that changes nothing, so it takes no lock: where a table
    /// has changed meanwhile, another line comes in vain.
    pub fn prefetch(&self, gfns: impl IntoIterator<Item = Gfn>) {
        let mut tables = BlockTables::new(self);
        for gfn in gfns {
            if let Some(table) = tables.of(gfn) {
                let at = EntryRef::page_of(table, gfn);
                self.arena.prefetch(at.table(), at.index());
            }
        }
    }

    /// Gives W, with A and D, to the 4 KiB leaf of `gfn` if it is [`Write::OnFault`], without a
    /// lock. `None` when this is not so easy: nothing is mapped, a larger leaf is, or writes are
    /// never allowed, or others change the leaf all the time.
    ///
    /// The page counts as written *from here on*: tell whoever wants to know afterwards. The caller
    /// is online in the VM's `Qsbr`, as for a walk.
    pub fn repair(&self, gfn: Gfn) -> Option<Translation> {
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
