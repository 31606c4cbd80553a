//! Changes of memory slots in a running VM: the calls of `lacuna_mmu`. In addition, every vCPU
//! drops its decoded code, because a guest address may have another page now.
//!
//! Backing may be in two slots at once, but only for data: if code is written through one alias and
//! executed through the other, the change is not detected.

use crate::vm::Vm;
use lacuna_addr::{BackingRange, Gfn, GfnRange, Gpa, PAGE_SIZE, PageCount};
use lacuna_machine::{MemorySlot, MemorySlotError, MemorySlots, check_reserved};
use lacuna_mmu::SlotSpec;
use lacuna_slots::{SlotError, SlotFlags, SlotId};

impl Vm {
    /// Adds a slot over backing from [`lacuna_host::Host::add_region`]. The backing belongs to the
    /// caller: [`MemorySlots::remove_slot`] neither frees nor clears it.
    ///
    /// # Errors
    /// As [`lacuna_slots::Slots::add`], and [`SlotError::Reserved`]; nothing has changed then.
    pub fn add_slot(&self, spec: SlotSpec) -> Result<(), SlotError> {
        let (start, pages) = (Gpa::new(spec.guest), spec.bytes / PAGE_SIZE as u64);
        if let Some(gfns) = start.and_then(|start| GfnRange::new(start.gfn(), pages)) {
            check_reserved(self.config.arch, spec.id, gfns)?;
        }
        self.mmu.add_slot(spec)
    }

    pub(crate) fn forget_code(&self) {
        self.code.forget_all(self.qsbr());
    }

    /// Frees `backing` if it was made for slot `id`. The number alone does not identify the
    /// backing: another thread may have added a slot with the same number.
    fn free_backing(&self, id: SlotId, backing: BackingRange) {
        let mut all = self.regions.lock().expect("no panic under this lock");
        let place = all.iter().position(|entry| *entry == (Some(id), backing));
        let found = place.map(|place| all.swap_remove(place));
        drop(all);
        if found.is_some() {
            let removed = self.host.remove_region(backing);
            debug_assert!(removed.is_ok(), "this VM added it");
        }
    }
}

impl MemorySlots for Vm {
    fn memory_slots(&self) -> Vec<MemorySlot> {
        let slots = self.mmu.slots();
        let slot = |slot: &std::sync::Arc<lacuna_slots::Slot<_>>| MemorySlot {
            id: slot.id,
            gfns: slot.gfns,
            flags: slot.flags,
        };
        slots.iter().map(slot).collect()
    }

    fn add_memory(
        &self,
        id: SlotId,
        gfns: GfnRange,
        flags: SlotFlags,
    ) -> Result<(), MemorySlotError> {
        check_reserved(self.config.arch, id, gfns)?;
        let backing = self.add_backing(None, PageCount::new(gfns.pages()), None);
        let backing = backing.map_err(|error| MemorySlotError::Host {
            id,
            cause: error.to_string(),
        })?;
        // Record the backing before the slot exists: another thread may remove the slot at once,
        // and then finds this entry.
        self.keep_backing(Some(id), backing);
        let added = self.mmu.add_slot(SlotSpec {
            id,
            guest: gfns.start().gpa().get(),
            backing: backing.start(),
            bytes: gfns.pages() * PAGE_SIZE as u64,
            flags,
        });
        added.inspect_err(|_| self.free_backing(id, backing))?;
        Ok(())
    }

    fn remove_slot(&self, id: SlotId) -> Result<(), MemorySlotError> {
        let backing = self.mmu.delete_slot(id)?;
        self.forget_code();
        self.free_backing(id, backing);
        Ok(())
    }

    fn move_slot(&self, id: SlotId, start: Gfn) -> Result<(), MemorySlotError> {
        let slots = self.mmu.slots();
        let moved = slots.get(id).map(|slot| slot.gfns.pages());
        // The MMU refuses a missing slot, and a slot beyond the guest's addresses.
        if let Some(gfns) = moved.and_then(|pages| GfnRange::new(start, pages)) {
            check_reserved(self.config.arch, id, gfns)?;
        }
        self.mmu.move_slot(id, start.gpa())?;
        self.forget_code();
        Ok(())
    }

    fn set_slot_flags(&self, id: SlotId, flags: SlotFlags) -> Result<(), MemorySlotError> {
        Ok(self.mmu.set_slot_flags(id, flags)?)
    }
}
