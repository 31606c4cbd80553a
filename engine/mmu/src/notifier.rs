//! What the host's memory manager asks of a VM: give pages back, and say whether they were used.

use crate::{Mmu, Rmap};
use lacuna_addr::{Gfn, Hva, HvaRange};
use lacuna_host::MmuNotifier;
use lacuna_slots::{Overlap, Slot};
use lacuna_stage2::{Age, Flush, Shootdown};

impl MmuNotifier for Mmu {
    /// Three passes: unmap each page under its stripe, one shoot-down for all, then admit faults
    /// again. A page that nothing maps is excluded like any other.
    fn invalidate(&self, pages: &[Hva]) {
        let slots = self.slots.snapshot();
        let mut flush = Flush::none(&self.stage2);
        let mut begun = Vec::with_capacity(pages.len());
        for &hva in pages {
            slots.overlapping(page_range(hva), |Overlap { slot, gfns }| {
                begun.push(gfns.start());
                flush.join(self.begin_page(slot, gfns.start()));
            });
        }
        // Even if this call has unmapped nothing: somebody else may have, a moment ago, and not
        // have waited yet (a slot change). The caller will reuse the frames when *this* returns.
        if flush.is_empty() {
            Shootdown::wait(&*self.quiescence, self.quiescence.request());
        } else {
            flush.finish(&*self.quiescence);
        }
        for gfn in begun {
            self.stage2.fault_cursor(gfn).end();
        }
    }

    fn age(&self, pages: &[Hva], young: &mut [bool]) {
        let slots = self.slots.snapshot();
        for (&hva, young) in pages.iter().zip(young) {
            *young = false;
            slots.overlapping(page_range(hva), |Overlap { slot, gfns }| {
                *young |= self.age_page(slot, gfns.start());
            });
        }
    }

    /// Nobody waits for it: a vCPU that runs on with old TLB entries for a while only delays an A
    /// bit.
    fn end_of_aging(&self) {
        let _ = self.quiescence.request();
    }
}

impl Mmu {
    fn begin_page(&self, slot: &Slot<Rmap>, gfn: Gfn) -> Flush<'_> {
        let mut cursor = self.stage2.fault_cursor(gfn);
        cursor.begin();
        let page = slot.page(gfn);
        let at = slot.attach.get(page);
        let Some((removed, flush)) = at.and_then(|at| cursor.unmap_at(at, gfn)) else {
            return Flush::none(&self.stage2);
        };
        slot.attach.clear(page);
        if removed.leaf.dirty {
            self.host.mark_dirty(removed.leaf.pfn);
        }
        flush
    }

    fn age_page(&self, slot: &Slot<Rmap>, gfn: Gfn) -> bool {
        let mut cursor = self.stage2.fault_cursor(gfn);
        let at = slot.attach.get(slot.page(gfn));
        at.is_some_and(|at| cursor.age_at(at, gfn) == Age::Young)
    }
}

fn page_range(hva: Hva) -> HvaRange {
    HvaRange::new(hva.page(), 1).expect("one aligned page")
}
