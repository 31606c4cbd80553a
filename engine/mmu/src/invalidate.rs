//! Invalidation: the host takes a range of pages back.
//!
//! ```text
//! begin   for each slot with backing in the range, each 2 MiB block: take its lock,
//!         in_progress += 1, unmap what the reverse map leads to
//! finish  one shoot-down for all, addressed to the vCPUs that may hold one of the blocks
//!         take each lock again: seq += 1, in_progress -= 1: faults are admitted
//! ```
//! Faults on unmapped pages are excluded too. A block without mapped pages needs no shoot-down,
//! unless another invalidation is in progress under its range lock. The race: thread A unmaps the
//! block and unlocks it before it waits for its shoot-down; thread B finds nothing mapped in the
//! block; B returns, and its caller reuses the frames while a TLB still has the leaf. So B adds the
//! block to its own shoot-down (`Cursor::unsettled`).
//!
//! A huge leaf that reaches beyond the range is split in place, and only the part is unmapped. If
//! no table is free for the split of a 2 MiB leaf, the whole leaf is unmapped. A 1 GiB leaf can
//! always be split (`gib`).

use crate::rmap::{BLOCK, Rmap, parts};
use crate::{InBlock, Mmu, MmuFormat};
use lacuna_addr::{BackingRange, Gfn, GfnRange};
use lacuna_slots::{Overlap, Slot, Snapshot};
use lacuna_stage2::{Cursor, EntryRef, Ept, Flush, Removed};
use std::sync::Arc;

/// Counts the steps of an invalidation. The product counts nothing: its counter is `()`, whose
/// calls compile to nothing.
pub trait Counter: Default {
    /// Slots read, or nodes of their index.
    fn slots(&mut self, _: u64) {}
    /// Visits to words of reverse maps, at all levels.
    fn words(&mut self, _: u64) {}
    /// Table entries read to find leaves, or to remove them.
    fn entries(&mut self, _: u64) {}
    /// Leaves removed, of any level.
    fn leaves(&mut self, _: u64) {}
}

impl Counter for () {}

/// An invalidation that has unmapped its ranges and keeps faults out. Until it is finished, some
/// vCPU may still use the pages, and faults near them wait.
#[must_use = "faults near the ranges wait until it is finished"]
pub struct Invalidation<'m, F = Ept, C = ()> {
    pub(crate) mmu: &'m Mmu<F>,
    /// The frames near which faults must retry until this invalidation ends.
    pub(crate) begun: Begun,
    /// The flush for the unmapped pages, and for those that other invalidations may have unmapped
    /// there but not waited for yet.
    pub(crate) flush: Flush<'m>,
    /// The steps so far.
    pub(crate) counter: C,
}

/// The ranges of guest frames in which an invalidation has begun. A single range, the common case,
/// needs no allocation.
#[derive(Default)]
pub(crate) struct Begun {
    first: Option<GfnRange>,
    more: Vec<GfnRange>,
    /// Each 1 GiB whose leaf was unmapped: it has begun there once more, under all range locks.
    pub(crate) gibs: Vec<GfnRange>,
}

/// A visit to a part of one block: its lock, and the results of the invalidation so far.
pub(crate) struct Visit<'v, 's, F, C> {
    /// Holds the block's range lock.
    pub(crate) cursor: &'v mut Cursor<'s, F>,
    /// The reverse map of the part's slot.
    pub(crate) rmap: &'v Rmap,
    /// Gets the pages that the visit unmaps.
    pub(crate) flush: &'v mut Flush<'s>,
    /// Counts the visit's steps.
    pub(crate) counter: &'v mut C,
}

impl<F: MmuFormat> Mmu<F> {
    /// Unmaps `ranges` and excludes faults there. [`Invalidation::finish`] does the rest.
    pub fn begin_invalidation(&self, ranges: &[BackingRange]) -> Invalidation<'_, F> {
        self.begin_with(ranges, |_, _, part, visit| self.unmap_part(part, visit))
    }

    /// As [`Mmu::begin_invalidation`]; `unmap` finds and unmaps the leaves of a part of a slot. The
    /// part is inside the visit's block.
    #[inline]
    pub(crate) fn begin_with<C: Counter>(
        &self,
        ranges: &[BackingRange],
        unmap: impl Fn(&Snapshot<Rmap>, &Arc<Slot<Rmap>>, GfnRange, &mut Visit<'_, '_, F, C>),
    ) -> Invalidation<'_, F, C> {
        let slots = self.slots.read();
        let mut done = Invalidation {
            mmu: self,
            begun: Begun::default(),
            flush: Flush::none(&self.stage2),
            counter: C::default(),
        };
        for &range in ranges {
            let nodes = slots.overlapping(range, |overlap| done.begin(&slots, overlap, &unmap));
            done.counter.slots(nodes as u64);
        }
        done
    }
}

impl<'m, F: MmuFormat, C: Counter> Invalidation<'m, F, C> {
    #[inline]
    fn begin(
        &mut self,
        slots: &Snapshot<Rmap>,
        overlap: Overlap<'_, Rmap>,
        unmap: &impl Fn(&Snapshot<Rmap>, &Arc<Slot<Rmap>>, GfnRange, &mut Visit<'_, 'm, F, C>),
    ) {
        let Overlap { slot, gfns } = overlap;
        self.begun.push(gfns);
        for part in parts(gfns) {
            let mut cursor = self.block_cursor(&slot.attach, gfns, part.start());
            self.flush.join(cursor.unsettled());
            cursor.invalidate_begin();
            let mut visit = Visit {
                cursor: &mut cursor,
                rmap: &slot.attach,
                flush: &mut self.flush,
                counter: &mut self.counter,
            };
            unmap(slots, slot, part, &mut visit);
        }
    }
}

impl<F: MmuFormat, C> Invalidation<'_, F, C> {
    /// Whether some vCPU may hold a translation of an unmapped page.
    pub fn must_flush(&self) -> bool {
        !self.flush.is_empty()
    }

    /// Waits until no vCPU can use the ranges, then admits faults again.
    pub fn finish(self) {
        if !self.flush.is_empty() {
            self.flush.finish(&*self.mmu.qsbr);
        }
        self.begun.admit_faults(self.mmu);
    }
}

/// With this many small leaves in a block or more, unlinking their table is cheaper than removing
/// them one by one: emptying 512 entries costs about as much as removing so many leaves.
const MANY: u32 = 64;

impl<F: MmuFormat> Mmu<F> {
    /// Unmaps `part`, which is inside the visit's block. Visits each level once.
    ///
    /// If the part is a whole block with at least [`MANY`] small leaves, their table is unlinked as
    /// one. The visit descends the tables for that: page by page, the reverse map costs more than
    /// twice as much.
    #[inline]
    pub(crate) fn unmap_part<C: Counter>(&self, part: GfnRange, visit: &mut Visit<'_, '_, F, C>) {
        let rmap = visit.rmap;
        if part.pages() == BLOCK
            && let InBlock::Small(MANY..) = rmap.block(part.start())
        {
            visit.counter.words(1);
            return self.unmap_walk(part, visit);
        }
        self.cut(visit.cursor, rmap, part);
        visit.counter.words(1);
        let entries = rmap.leaves(&self.stage2, part, |at, gfn| {
            self.unmap_leaf(at, gfn, visit);
        });
        visit.counter.entries(entries);
    }

    /// Unmaps `part` by descending the tables, without the reverse map.
    pub(crate) fn unmap_walk<C: Counter>(&self, part: GfnRange, visit: &mut Visit<'_, '_, F, C>) {
        let Visit {
            cursor,
            rmap,
            flush,
            counter,
        } = visit;
        // If no table is free for the split, the leaf stays huge and is removed as a whole.
        let _ = cursor.cut(part, |split| rmap.split(split.gfn, split.first));
        let (stale, entries) =
            cursor.unmap_counted(part, |removed| self.forget(rmap, *counter, removed));
        flush.join(stale);
        counter.entries(entries);
    }

    /// If `part` is not its whole block, splits the block's huge leaf.
    #[inline]
    pub(crate) fn cut(&self, cursor: &mut Cursor<'_, F>, rmap: &Rmap, part: GfnRange) {
        if part.pages() < BLOCK {
            // If no table is free for the split, the leaf stays huge and is removed as a whole.
            let _ = self.split(cursor, rmap, part.start());
        }
    }

    /// Unmaps the leaf at `at`, which maps `gfn`.
    #[inline]
    pub(crate) fn unmap_leaf<C: Counter>(
        &self,
        at: EntryRef,
        gfn: Gfn,
        visit: &mut Visit<'_, '_, F, C>,
    ) {
        let (removed, flush) = visit
            .cursor
            .unmap_at(at, gfn)
            .expect("the reverse map leads to leaves");
        visit.flush.join(flush);
        self.forget(visit.rmap, visit.counter, removed);
    }

    /// Updates the reverse map after a leaf was removed, and reports its D to the host.
    #[inline]
    pub(crate) fn forget(&self, rmap: &Rmap, counter: &mut impl Counter, removed: Removed) {
        counter.leaves(1);
        rmap.clear(&removed);
        if removed.leaf.dirty {
            self.host.mark_dirty(removed.leaf.pfn, removed.leaf.level);
        }
    }
}

impl Begun {
    fn push(&mut self, gfns: GfnRange) {
        match self.first {
            None => self.first = Some(gfns),
            Some(_) => self.more.push(gfns),
        }
    }

    fn iter(&self) -> impl Iterator<Item = GfnRange> {
        self.first.into_iter().chain(self.more.iter().copied())
    }

    /// Ends the invalidation of these ranges: faults there need not retry any more.
    pub(crate) fn admit_faults<F: MmuFormat>(&self, mmu: &Mmu<F>) {
        for part in self.iter().flat_map(parts) {
            mmu.stage2.fault_cursor(part.start()).invalidate_end();
        }
        for gib in &self.gibs {
            mmu.stage2.cursor(*gib).invalidate_end();
        }
    }
}
