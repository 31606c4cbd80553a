//! Discarded pages: the VMM takes them back, or makes them missing again. Pages that the VMM pages
//! out.

use crate::missing::backing;
use crate::vm::Vm;
use lacuna_addr::{BackingRange, Gfn, GfnRange, PageCount};
use lacuna_host::{Host, HostError};
use lacuna_machine::{Balloon, MemoryError, PageOut};
use lacuna_mmu::Rmap;
use lacuna_slots::Slot;
use std::sync::Arc;

/// A part of a request, in one slot.
type Part = (Arc<Slot<Rmap>>, GfnRange);

/// What the host manager does with the pages: [`Host::discard`], or [`Host::make_missing`].
pub type Discard = fn(&Host, BackingRange) -> Result<(), HostError>;

impl Vm {
    /// Splits `gfns` at the ends of slots.
    fn parts(&self, gfns: GfnRange) -> Result<Vec<Part>, MemoryError> {
        let slots = self.mmu.slots();
        let mut parts = Vec::new();
        let mut next = Some(gfns.start());
        while let Some(gfn) = next.filter(|gfn| gfns.contains(*gfn)) {
            let slot = slots.find(gfn).ok_or(MemoryError::NoSlot(gfn.gpa()))?;
            let rest = gfns.start().get() + gfns.pages() - gfn.get();
            let pages = rest.min(slot.gfns.end_raw() - gfn.get());
            parts.push((
                Arc::clone(slot),
                GfnRange::new(gfn, pages).expect("a part of the request"),
            ));
            next = gfn.checked_add(pages);
        }
        Ok(parts)
    }

    /// Reports the page at `gfn` to dirty tracking: its bytes have changed.
    fn mark_changed(&self, slot: &Arc<Slot<Rmap>>, gfn: Gfn) -> Result<(), MemoryError> {
        let writing = self.mmu.host_write(slot, gfn);
        let writing = writing.map_err(|error| MemoryError::Refused {
            gpa: gfn.gpa(),
            cause: error.to_string(),
        })?;
        writing.done();
        Ok(())
    }

    fn discard_part(&self, (slot, part): &Part, discard: Discard) -> Result<(), MemoryError> {
        let first = part.start();
        // If a log cannot take the marks, refuse here, before a byte has changed.
        self.mark_changed(slot, first)?;
        let range = BackingRange::new(slot.backing_of(first), part.pages());
        let discarded = discard(&self.host, range.expect("a part of the slot"));
        discarded.map_err(|error| backing(first.gpa(), &error))?;
        // Mark after the change: if a harvest misses this mark, the next one has it, and the page
        // is copied then.
        let mut pages = (0..part.pages()).filter_map(|page| first.checked_add(page));
        pages.try_for_each(|gfn| self.mark_changed(slot, gfn))
    }

    /// Discards the pages of `gfns` by `discard`.
    pub fn discard_by(&self, gfns: GfnRange, discard: Discard) -> Result<(), MemoryError> {
        let parts = self.parts(gfns)?;
        let each = |part| self.discard_part(part, discard);
        let discarded = parts.iter().try_for_each(each);
        // The pages may have held code.
        self.forget_code();
        discarded
    }
}

impl Balloon for Vm {
    fn discard(&self, gfns: GfnRange) -> Result<(), MemoryError> {
        self.discard_by(gfns, Host::discard)
    }
}

impl PageOut for Vm {
    fn page_out(&self, gfns: GfnRange) -> Result<PageCount, MemoryError> {
        let parts = self.parts(gfns)?;
        let each = |(slot, part): &Part| {
            let first = part.start();
            let range = BackingRange::new(slot.backing_of(first), part.pages());
            let left = self.host.page_out(range.expect("a part of the slot"));
            left.map_err(|error| backing(first.gpa(), &error))
        };
        let mut left = parts.iter().map(|part| each(part).map(PageCount::get));
        left.try_fold(0, |sum, left| Ok(sum + left?))
            .map(PageCount::new)
    }
}
