//! Slots come, go and move.
//!
//! ```text
//! begin over every gfn concerned      faults there are refused from here on
//! unmap, shoot down                   nothing of the old layout is mapped or in a TLB
//! publish                             readers see the new snapshot
//! end                                 faults there see the new layout
//! ```
//! A slot that moves or changes its flags gets a fresh reverse map: a notifier that still works
//! with the old snapshot then finds an empty one, never a leaf under another gfn's lock.

use crate::{Mmu, Rmap};
use lacuna_addr::{GfnRange, Gpa};
use lacuna_slots::{Slot, SlotError, SlotFlags, SlotId, SlotSpec};
use std::sync::Arc;

impl Mmu {
    /// Adds a slot.
    ///
    /// # Errors
    /// As [`lacuna_slots::Slots::add`]; nothing has changed then.
    pub fn add_slot(&self, spec: SlotSpec) -> Result<(), SlotError> {
        let _change = self
            .layout
            .lock()
            .expect("no panic while the layout changes");
        // `add` refuses what no slot can be: such a size must not become an allocation first.
        let bytes = spec.bytes.min(1 << lacuna_addr::GPA_BITS);
        let rmap = Rmap::new(bytes / lacuna_addr::PAGE_SIZE as u64);
        self.slots.add(spec, rmap).map(|_| ())
    }

    /// Deletes a slot with its mappings. The backing keeps its content.
    ///
    /// # Errors
    /// [`SlotError::Unknown`].
    pub fn delete_slot(&self, id: SlotId) -> Result<(), SlotError> {
        let _change = self
            .layout
            .lock()
            .expect("no panic while the layout changes");
        let gfns = self.slot(id)?.gfns;
        self.exclude(&[gfns], || self.slots.remove(id).map(|_| ()))
    }

    /// Moves a slot, with its content, to another guest address.
    ///
    /// # Errors
    /// As [`lacuna_slots::Slots::add`]; nothing has changed then.
    pub fn move_slot(&self, id: SlotId, guest: Gpa) -> Result<(), SlotError> {
        self.replace(id, |spec| SlotSpec {
            guest: guest.get(),
            ..spec
        })
    }

    /// Makes a slot read-only or writable.
    ///
    /// # Errors
    /// [`SlotError::Unknown`].
    pub fn set_slot_flags(&self, id: SlotId, flags: SlotFlags) -> Result<(), SlotError> {
        self.replace(id, |spec| SlotSpec { flags, ..spec })
    }

    fn replace(
        &self,
        id: SlotId,
        edit: impl FnOnce(SlotSpec) -> SlotSpec,
    ) -> Result<(), SlotError> {
        let _change = self
            .layout
            .lock()
            .expect("no panic while the layout changes");
        let old = self.slot(id)?;
        let spec = spec_of(&old);
        let wanted = edit(spec);
        let pages = old.gfns.pages();
        // Where nothing can be, `add` refuses; excluding the old place alone will do.
        let target = Gpa::new(wanted.guest).and_then(|gpa| GfnRange::new(gpa.gfn(), pages));
        let ranges: Vec<_> = [Some(old.gfns), target].into_iter().flatten().collect();
        self.exclude(&ranges, || {
            self.slots.remove(id)?;
            let done = self.slots.add(wanted, Rmap::new(pages));
            if done.is_err() {
                self.slots
                    .add(spec, Rmap::new(pages))
                    .expect("it was there a moment ago");
            }
            done.map(|_| ())
        })
    }

    /// Runs `publish` while no fault in `ranges` is admitted and nothing there is mapped.
    fn exclude<T>(&self, ranges: &[GfnRange], publish: impl FnOnce() -> T) -> T {
        for &range in ranges {
            self.stage2.cursor(range).begin();
        }
        for &range in ranges {
            self.zap(range);
        }
        let done = publish();
        for &range in ranges {
            self.stage2.cursor(range).end();
        }
        done
    }

    /// Unmaps everything in `range` and shoots it down.
    fn zap(&self, range: GfnRange) {
        let slots = self.slots.snapshot();
        let mut cursor = self.stage2.cursor(range);
        let flush = cursor.unmap(range, |removed| {
            let slot = slots
                .find(removed.gfn)
                .expect("only slots' pages are mapped");
            slot.attach.clear(slot.page(removed.gfn));
            if removed.leaf.dirty {
                self.host.mark_dirty(removed.leaf.pfn);
            }
        });
        drop(cursor);
        flush.finish(&*self.quiescence);
    }

    fn slot(&self, id: SlotId) -> Result<Arc<Slot<Rmap>>, SlotError> {
        self.slots
            .snapshot()
            .get(id)
            .cloned()
            .ok_or(SlotError::Unknown { id })
    }
}

fn spec_of(slot: &Slot<Rmap>) -> SlotSpec {
    SlotSpec {
        id: slot.id,
        guest: slot.gfns.start().gpa().get(),
        host: slot.hvas.start(),
        bytes: slot.hvas.pages() * lacuna_addr::PAGE_SIZE as u64,
        flags: slot.flags,
    }
}
