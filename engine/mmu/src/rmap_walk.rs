//! The rmap walk strategies, for comparison: all hold the same lock, and remove the same leaves in
//! the same way.
//!
//! | strategy | for a range of n pages in one of s slots |
//! |---|---|
//! | `PageLoop` | for each page: every slot is compared, then a word at every level: n (s + 2) |
//! | `RangeThenPages` | the slots once; then for each page a word at every level: s + 2n |
//! | `PerLevel` | slots by their index; one word a block; entries where small leaves are |
//! | `Walk` | slots by their index; no reverse map: the tables are descended |
//!
//! At both levels, a page uses its block's word. So a page-by-page strategy visits the word twice
//! for each page, and, if there are small leaves, goes on to the page's entry.
//!
//! KVM used `PageLoop` before 2012. `RangeThenPages` is the first half of that year's series,
//! `PerLevel` the whole series and Lacuna's strategy. `Walk` is KVM's strategy where it has no
//! reverse maps. Each strategy finds its range locks by one search of the slots' index. `PageLoop`
//! and `RangeThenPages` do not count that search as steps, because they find the slots in another
//! way.

use crate::invalidate::{Counter, Invalidation, Visit};
use crate::{InBlock, Mmu, MmuFormat, Rmap};
use lacuna_addr::{BackingRange, Gfn, GfnRange};
use lacuna_slots::{Slot, Snapshot};
use std::sync::Arc;

/// The counted steps of an invalidation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Steps {
    /// Slots read, or nodes of their index.
    pub slots: u64,
    /// Visits to words of reverse maps, at all levels.
    pub words: u64,
    /// Table entries read to find leaves, or to remove them.
    pub entries: u64,
    /// Leaves removed, of any level.
    pub leaves: u64,
}

/// Counts an invalidation by an [`RmapWalk`]. Every strategy finds its range locks by the slots'
/// index; those nodes are counted apart, because not every strategy finds its slots by the index.
#[derive(Default)]
pub struct StepCounter {
    steps: Steps,
    index_nodes: u64,
}

impl Counter for StepCounter {
    fn slots(&mut self, count: u64) {
        self.index_nodes += count;
    }

    fn words(&mut self, count: u64) {
        self.steps.words += count;
    }

    fn entries(&mut self, count: u64) {
        self.steps.entries += count;
    }

    fn leaves(&mut self, count: u64) {
        self.steps.leaves += count;
    }
}

impl<F: MmuFormat> Invalidation<'_, F, StepCounter> {
    /// The steps so far.
    pub fn steps(&self) -> Steps {
        self.counter.steps
    }

    /// As [`Invalidation::finish`]. Returns whether this call had to wait, because some vCPU had
    /// not passed the shoot-down at the request.
    pub fn finish_counted(self) -> bool {
        let qsbr = &*self.mmu.qsbr;
        let shootdown = self.flush.start(qsbr);
        let waits = !shootdown.has_passed(qsbr);
        shootdown.wait(qsbr);
        self.begun.admit_faults(self.mmu);
        waits
    }
}

/// An rmap walk strategy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RmapWalk {
    /// Goes page by page, and for each page over all slots and levels.
    PageLoop,
    /// Goes over the slots once, then page by page over all levels.
    RangeThenPages,
    /// Finds slots by interval search, and visits each level once.
    PerLevel,
    /// Finds slots by interval search, and descends the tables without a reverse map.
    Walk,
}

impl RmapWalk {
    /// All strategies, oldest first.
    pub const ALL: [Self; 4] = [
        Self::PageLoop,
        Self::RangeThenPages,
        Self::PerLevel,
        Self::Walk,
    ];

    /// Finds the slots of `range` and counts its reads, unless the strategy does that under the
    /// range locks.
    fn find_slots(self, slots: &Snapshot<Rmap>, range: BackingRange, counter: &mut StepCounter) {
        match self {
            // This strategy finds them page by page, under the lock.
            Self::PageLoop => {}
            Self::RangeThenPages => {
                let hits = slots
                    .iter()
                    .filter(|s| s.backing.intersect(range).is_some());
                std::hint::black_box(hits.count());
                counter.steps.slots += slots.len() as u64;
            }
            // The search for the range locks has found them.
            Self::PerLevel | Self::Walk => {
                counter.steps.slots += std::mem::take(&mut counter.index_nodes);
            }
        }
    }

    /// Unmaps `part` of `slot`, inside the visit's block.
    #[inline]
    fn unmap<F: MmuFormat>(
        self,
        mmu: &Mmu<F>,
        slots: &Snapshot<Rmap>,
        slot: &Arc<Slot<Rmap>>,
        part: GfnRange,
        visit: &mut Visit<'_, '_, F, StepCounter>,
    ) {
        match self {
            Self::PerLevel => mmu.unmap_part(part, visit),
            Self::PageLoop => mmu.unmap_page_loop(slots, slot, part, visit),
            Self::RangeThenPages => part.iter().for_each(|gfn| mmu.unmap_page(gfn, part, visit)),
            Self::Walk => mmu.unmap_walk(part, visit),
        }
    }
}

impl<F: MmuFormat> Mmu<F> {
    /// [`Mmu::begin_invalidation`] with the strategy `walk`, counted. The times of this call are
    /// comparable: each strategy pays for one search of the index for the range locks, and for its
    /// own work.
    pub fn begin_invalidation_as(
        &self,
        walk: RmapWalk,
        ranges: &[BackingRange],
    ) -> Invalidation<'_, F, StepCounter> {
        let mut begun = self.begin_with(ranges, |slots, slot, part, visit| {
            walk.unmap(self, slots, slot, part, visit);
        });
        let slots = self.slots.read();
        for &range in ranges {
            walk.find_slots(&slots, range, &mut begun.counter);
        }
        begun
    }

    /// Invalidates `range` by the strategy `walk`, and returns its steps.
    pub fn invalidate_as(&self, walk: RmapWalk, range: BackingRange) -> Steps {
        let begun = self.begin_invalidation_as(walk, &[range]);
        let steps = begun.steps();
        begun.finish();
        steps
    }

    fn unmap_page_loop(
        &self,
        slots: &Snapshot<Rmap>,
        slot: &Arc<Slot<Rmap>>,
        part: GfnRange,
        visit: &mut Visit<'_, '_, F, StepCounter>,
    ) {
        for gfn in part.iter() {
            let addr = slot.backing_of(gfn);
            for other in slots.iter() {
                visit.counter.steps.slots += 1;
                // Another slot with the same backing is handled under its own lock.
                if other.backing.contains(addr) && Arc::ptr_eq(other, slot) {
                    self.unmap_page(gfn, part, visit);
                }
            }
        }
    }

    /// Unmaps one page of `part`: visits the word at every level.
    fn unmap_page(&self, gfn: Gfn, part: GfnRange, visit: &mut Visit<'_, '_, F, StepCounter>) {
        visit.counter.steps.words += 2;
        self.cut(visit.cursor, visit.rmap, part);
        if let InBlock::Huge(at) = visit.rmap.block(gfn) {
            visit.counter.steps.entries += 1;
            self.unmap_leaf(at, gfn, visit);
        }
        if let Some(at) = visit.rmap.place(gfn) {
            visit.counter.steps.entries += 1;
            if self.stage2.has_leaf(at) {
                self.unmap_leaf(at, gfn, visit);
            }
        }
    }
}
