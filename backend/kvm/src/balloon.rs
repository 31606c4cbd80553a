//! Discarded pages of the boot layout: the VMM takes them back, or makes them missing again.

use crate::memory::Page;
use crate::missing::backing;
use crate::vm::Vm;
use lacuna_addr::{BackingRange, GfnRange};
use lacuna_host::{Host, HostError};
use lacuna_machine::{Balloon, MemoryError};

/// What the host manager does with the pages: [`Host::discard`], or [`Host::make_missing`].
type Discard = fn(&Host, BackingRange) -> Result<(), HostError>;

impl Balloon for Vm {
    fn discard(&self, gfns: GfnRange) -> Result<(), MemoryError> {
        self.discard_by(gfns, Host::discard)
    }
}

impl Vm {
    /// Discards the pages of `gfns` by `discard`.
    pub(crate) fn discard_by(&self, gfns: GfnRange, discard: Discard) -> Result<(), MemoryError> {
        let mut next = Some(gfns.start());
        while let Some(gfn) = next.filter(|gfn| gfns.contains(*gfn)) {
            let gpa = gfn.gpa();
            let slot = self.slot_at(gpa)?;
            let refused = |cause: String| MemoryError::Refused { gpa, cause };
            if !slot.attach.is_of_boot() {
                return Err(refused("the slot was added after boot".into()));
            }
            if slot.attach.is_logging() && !self.dirty.delivery().has_bitmaps() {
                return Err(refused(lacuna_slots::DirtyError::NoBitmap.to_string()));
            }
            let part = slot.gfns.intersect(gfns).expect("the slot has the page");
            let part = GfnRange::new(gfn, part.end_raw() - gfn.get()).expect("its end is later");
            let first = self.page_at(slot.backing_of(gfn));
            let range = BackingRange::new(self.memory.backing(first), part.pages());
            let range = range.expect("pages of the region");
            let discarded = discard(&self.memory.host, range);
            // A mark before the change could be harvested before it. After an error, some pages may
            // be discarded.
            for gfn in part.iter() {
                let _ = slot.attach.host_writes.mark(slot.page(gfn));
            }
            let pages = first..first + part.pages() as Page;
            self.faults.state.discarded(pages);
            discarded.map_err(|error| backing(gpa, &error))?;
            next = gfn.checked_add(part.pages());
        }
        Ok(())
    }
}
