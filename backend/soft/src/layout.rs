//! Changes of memory slots in a running VM: the calls of `lacuna_mmu`. In addition every vCPU drops
//! its decoded code, because another page may now be behind the same guest address.
//!
//! Backing may be in two slots at once, for data. If code is written through one alias and executed
//! through the other, the change is not detected.

use crate::vm::Vm;
use lacuna_addr::{Gfn, GfnRange, Gpa, PAGE_SIZE, PageCount};
use lacuna_machine::{MemorySlot, MemorySlotError, MemorySlots};
use lacuna_mmu::SlotSpec;
use lacuna_slots::{SlotError, SlotFlags, SlotId};

impl Vm {
    /// Adds a slot over backing from [`lacuna_host::Host::add_region`].
    ///
    /// # Errors
    /// As [`lacuna_slots::Slots::add`]; nothing has changed then.
    pub fn add_slot(&self, spec: SlotSpec) -> Result<(), SlotError> {
        self.mmu.add_slot(spec)
    }

    /// Deletes a slot and its mappings. The backing keeps its content.
    ///
    /// # Errors
    /// [`SlotError::Unknown`].
    pub fn delete_slot(&self, id: SlotId) -> Result<(), SlotError> {
        self.mmu.delete_slot(id)?;
        self.forget_code();
        Ok(())
    }

    /// Moves a slot, with its content, to another guest address.
    ///
    /// # Errors
    /// As [`lacuna_slots::Slots::add`]; nothing has changed then.
    pub fn move_slot(&self, id: SlotId, guest: Gpa) -> Result<(), SlotError> {
        self.mmu.move_slot(id, guest)?;
        self.forget_code();
        Ok(())
    }

    /// Makes a slot read-only (its writes become MMIO) or writable.
    ///
    /// # Errors
    /// [`SlotError::Unknown`].
    pub fn set_slot_flags(&self, id: SlotId, flags: SlotFlags) -> Result<(), SlotError> {
        self.mmu.set_slot_flags(id, flags)
    }

    fn forget_code(&self) {
        self.code.forget_all(self.qsbr());
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
        let backing = self.add_backing(PageCount::new(gfns.pages()));
        let backing = backing.map_err(|error| MemorySlotError::Host {
            id,
            cause: error.to_string(),
        })?;
        let added = self.mmu.add_slot(SlotSpec {
            id,
            guest: gfns.start().gpa().get(),
            backing: backing.start(),
            bytes: gfns.pages() * PAGE_SIZE as u64,
            flags,
        });
        if let Err(error) = added {
            let removed = self.host.remove_region(backing);
            debug_assert!(removed.is_ok(), "it was just added");
            return Err(error.into());
        }
        self.keep_backing(Some(id), backing);
        Ok(())
    }

    fn remove_slot(&self, id: SlotId) -> Result<(), MemorySlotError> {
        self.delete_slot(id)?;
        let mut all = self.backing.lock().expect("no panic under this lock");
        let place = all.iter().position(|(slot, _)| *slot == Some(id));
        let backing = place.map(|place| all.swap_remove(place).1);
        drop(all);
        if let Some(backing) = backing {
            let removed = self.host.remove_region(backing);
            debug_assert!(removed.is_ok(), "this VM added it");
        }
        Ok(())
    }

    fn move_slot(&self, id: SlotId, start: Gfn) -> Result<(), MemorySlotError> {
        Ok(Vm::move_slot(self, id, start.gpa())?)
    }

    fn set_slot_flags(&self, id: SlotId, flags: SlotFlags) -> Result<(), MemorySlotError> {
        Ok(Vm::set_slot_flags(self, id, flags)?)
    }
}
