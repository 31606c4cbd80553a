//! Which pages are written: D taken and given apart from W, and W given back without a lock.

use crate::format::{Height, block_range};
use crate::unmap::Removed;
use crate::walk::translation;
use crate::{Cursor, Entry, EntryRef, Flush, Leaf, Stage2, Translation, Write};
use lacuna_addr::{Gfn, GfnRange, Level};
use lacuna_sync::shim::Ordering;

/// How often a repair tries against others: as KVM.
const TRIES: usize = 4;

impl<'s> Cursor<'s> {
    /// Takes D from every 4 KiB leaf in `range` and leaves W, so that the next walk for a write
    /// sets it again, and a logging one notes it. From larger leaves, of which one D would speak
    /// for all pages, it takes W too. `cleared` is told of each leaf that had D, as it was: that D
    /// is in nobody's hands but yours. Until the flush is finished a vCPU may write through its
    /// TLB.
    ///
    /// # Panics
    /// When the cursor does not hold `range`.
    pub fn clear_dirty(&mut self, range: GfnRange, mut cleared: impl FnMut(Removed)) -> Flush<'s> {
        self.assert_holds_all(range);
        let mut flush = self.flush();
        self.each_leaf(range, |at, gfn| {
            let old = self.stage2.update_taking_dirty(at, gfn, cleaned);
            if let Entry::Leaf(leaf) = old
                && leaf.is_writable()
                && leaf != cleaned(leaf)
            {
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
        self.assert_holds_all(range);
        self.each_leaf(range, |at, gfn| {
            self.stage2.update(at, gfn, |found| match found {
                Entry::Leaf(leaf) if leaf.is_writable() => Entry::Leaf(Leaf {
                    dirty: true,
                    ..leaf
                }),
                other => other,
            });
        });
    }

    /// Calls `visit` with each leaf that maps a frame of `range`, and the first frame it maps.
    #[inline]
    pub(crate) fn each_leaf(&self, range: GfnRange, mut visit: impl FnMut(EntryRef, Gfn)) {
        let first = range.start();
        // Nearly always: some pages of one block, which has small leaves.
        if block_range(first).intersect(range) == Some(range)
            && let Some((_, Entry::Table(table))) = self.stage2.block_entry(first)
        {
            for gfn in range.iter() {
                let at = EntryRef::page_of(table, gfn);
                if let Entry::Leaf(_) = self.stage2.read(at) {
                    visit(at, gfn);
                }
            }
            return;
        }
        self.each_leaf_below(self.stage2.root, Height::ROOT, range, &mut visit);
    }

    fn each_leaf_below(
        &self,
        table: lacuna_tables::TableId,
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

impl Stage2 {
    /// Gives W, with A and D, to the 4 KiB leaf of `gfn` if it is [`Write::OnFault`], without a
    /// lock. `None` when this is not so easy: nothing is mapped, a larger leaf is, or writes are
    /// never allowed, or others change the leaf all the time.
    ///
    /// The page counts as written *from here on*: tell whoever wants to know afterwards. The caller
    /// is online in the VM's `Quiescence`, as for a walk.
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

/// Armed: the next write is noticed.
fn cleaned(leaf: Leaf) -> Leaf {
    let write = match leaf.level {
        Level::L4K => leaf.write,
        _ => leaf.write.min(Write::OnFault),
    };
    Leaf {
        write,
        dirty: false,
        ..leaf
    }
}
