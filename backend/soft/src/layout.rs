//! Memory slots of a running VM: what `lacuna_mmu` does, and every vCPU forgets the code it has
//! decoded, because another page may be behind the same guest address now.
//!
//! Backing that is in two slots at once is allowed, for data: code that is written through one
//! alias and executed through the other is not seen to change.

use crate::Vm;
use lacuna_addr::Gpa;
use lacuna_slots::{SlotError, SlotFlags, SlotId, SlotSpec};

impl Vm {
    /// Adds a slot over backing from [`lacuna_host::Host::add_region`].
    ///
    /// # Errors
    /// As [`lacuna_slots::Slots::add`]; nothing has changed then.
    pub fn add_slot(&self, spec: SlotSpec) -> Result<(), SlotError> {
        self.mmu.add_slot(spec)
    }

    /// Deletes a slot with its mappings. The backing keeps its content.
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
