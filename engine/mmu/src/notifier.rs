//! The requests of the host's memory manager: give pages back, report whether they were accessed,
//! split them. Changes of protection are here too, because they visit the same leaves.

use crate::rmap::{BLOCK, parts};
use crate::{InBlock, Mmu, MmuFormat, Rmap};
use lacuna_addr::{BackingRange, Gfn, GfnRange};
use lacuna_host::MmuNotifier;
use lacuna_slots::Overlap;
use lacuna_stage2::{Age, Cursor, EntryRef, Flush};
use tracing::trace_span;

impl<F: MmuFormat> MmuNotifier for Mmu<F> {
    fn invalidate(&self, ranges: &[BackingRange]) {
        let pages = || BackingRange::pages_in(ranges);
        let _span = trace_span!(target: "lacuna::mmu", "invalidate", pages = pages());
        self.begin_invalidation(ranges).finish();
    }

    fn age(&self, ranges: &[BackingRange], young: &mut [bool]) {
        let _span =
            trace_span!(target: "lacuna::mmu", "age", pages = BackingRange::pages_in(ranges));
        for (&range, young) in ranges.iter().zip(young) {
            *young = false;
            self.each_part(range, |cursor, rmap, part| {
                *young |= self.age_part(cursor, rmap, part);
            });
        }
    }

    /// Does not wait for the flush: a vCPU that still uses its old TLB entries only sets an A bit
    /// later.
    fn end_of_aging(&self) {
        let _ = self.qsbr.request();
    }

    fn split_huge(&self, range: BackingRange) {
        self.each_part(range, |cursor, rmap, part| {
            // If no table is free, the leaf stays huge, and its A and D continue to stand for all
            // pages.
            let _ = self.split(cursor, rmap, part.start());
        });
    }
}

impl<F: MmuFormat> Mmu<F> {
    /// Whether a page of `part` was accessed. The A bit of a huge leaf stands for all of its pages,
    /// so a clear for one page would lose the bit for the others. So if `part` is only a part of
    /// the leaf, the leaf is split; if no table is free for that, the bit stays.
    fn age_part(&self, cursor: &mut Cursor<'_, F>, rmap: &Rmap, part: GfnRange) -> bool {
        self.cut(cursor, rmap, part);
        let spare = part.pages() < BLOCK && matches!(rmap.block(part.start()), InBlock::Huge(_));
        let mut young = false;
        rmap.leaves(&self.stage2, part, |at, gfn| {
            let age = if spare {
                cursor.test_young_at(at, gfn)
            } else {
                cursor.age_at(at, gfn)
            };
            young |= age == Age::Young;
        });
        young
    }

    /// Whether a page of `range` was accessed since it was last aged. Clears nothing.
    pub fn test_young(&self, range: BackingRange) -> bool {
        self.any_leaf(range, |cursor, at, gfn| cursor.test_young_at(at, gfn))
    }

    /// Clears W and D in every leaf that maps a page of `range`, and reports the written pages to
    /// the host. On return no vCPU writes there without a fault. A huge leaf that reaches beyond
    /// the range is split first, or protected whole if no table is free.
    pub fn write_protect(&self, range: BackingRange) {
        // No harvest may run meanwhile, because of this race: this thread clears W; before its
        // flush, a harvest finds W clear, so it flushes nothing, and its caller copies the page; a
        // vCPU writes to the page through its TLB. The copy lacks that write.
        let _no_harvest = self.lock_layout();
        let mut flush = Flush::none(&self.stage2);
        self.each_part(range, |cursor, rmap, part| {
            flush.join(cursor.unsettled());
            if rmap.block(part.start()) == InBlock::Nothing {
                return;
            }
            self.cut(cursor, rmap, part);
            flush.join(cursor.protect([part], |was| {
                if was.leaf.dirty {
                    self.host.mark_dirty(was.leaf.pfn, was.leaf.level);
                }
            }));
        });
        flush.finish(&*self.qsbr);
    }

    /// Whether `look` finds a young leaf among those that map pages of `range`. Calls `look` with
    /// each leaf, also after the first young one.
    fn any_leaf(
        &self,
        range: BackingRange,
        mut look: impl FnMut(&mut Cursor<'_, F>, EntryRef, Gfn) -> Age,
    ) -> bool {
        let mut young = false;
        self.slots
            .read()
            .overlapping(range, |Overlap { slot, gfns }| {
                for part in parts(gfns) {
                    let (rmap, first) = (&slot.attach, part.start());
                    let mut cursor = self.stage2.fault_cursor(first);
                    let mut visit = |at, gfn| young |= look(&mut cursor, at, gfn) == Age::Young;
                    match rmap.gib(first) {
                        Some(at) => visit(at, first),
                        None => _ = rmap.leaves(&self.stage2, part, visit),
                    }
                }
            });
        young
    }

    /// Calls `visit` for each part of a block whose backing is in `range`, under its range lock. A
    /// 1 GiB leaf there is split first.
    fn each_part<'s>(
        &'s self,
        range: BackingRange,
        mut visit: impl FnMut(&mut Cursor<'s, F>, &Rmap, GfnRange),
    ) {
        self.slots
            .read()
            .overlapping(range, |Overlap { slot, gfns }| {
                for part in parts(gfns) {
                    let mut cursor = self.block_cursor(&slot.attach, part.start());
                    visit(&mut cursor, &slot.attach, part);
                }
            });
    }
}
