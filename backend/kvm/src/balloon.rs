//! Pages that the VMM takes back: Linux memory of the boot layout.

use crate::missing::backing;
use crate::vm::Vm;
use lacuna_addr::{BackingRange, GfnRange};
use lacuna_machine::{Balloon, MemoryError};

impl Balloon for Vm {
    fn discard(&self, gfns: GfnRange) -> Result<(), MemoryError> {
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
            let first = self.memory.backing(self.page_at(slot.backing_of(gfn)));
            let range = BackingRange::new(first, part.pages()).expect("pages of the region");
            let discarded = self.memory.host.discard(range);
            // A mark before the change could be harvested before it. After an error, some pages may
            // be discarded.
            for gfn in part.iter() {
                let _ = slot.attach.host_writes.mark(slot.page(gfn));
            }
            // A thread may wait for one of them, which no source and no VMM will provide now.
            self.faults.slots_changed();
            discarded.map_err(|error| backing(gpa, &error))?;
            next = gfn.checked_add(part.pages());
        }
        Ok(())
    }
}
