//! Memory slots: the guest frames with memory behind them.

use crate::ErrorKind;
use lacuna_addr::{Gfn, GfnRange, PageCount};
use lacuna_slots::{SlotError, SlotFlags, SlotId};

/// A memory slot of a VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemorySlot {
    /// Its number in calls.
    pub id: SlotId,
    /// The guest frames.
    pub gfns: GfnRange,
    /// Its properties, such as read-only.
    pub flags: SlotFlags,
}

impl MemorySlot {
    /// The guest frame of the slot's page `index`, as [`harvest`](crate::harvest) hands it out.
    pub fn gfn(&self, index: usize) -> Option<Gfn> {
        let index = u64::try_from(index).ok()?;
        let gfn = Gfn::new(self.gfns.start().get().checked_add(index)?)?;
        self.gfns.contains(gfn).then_some(gfn)
    }
}

/// Why a change of memory slots is refused. Nothing has changed then.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemorySlotError {
    /// The slot table refuses the change.
    #[error(transparent)]
    Slot(#[from] SlotError),
    /// The backend has no slot with such a number.
    #[error("{id}: this backend has slots 0 to {last}: choose one of these numbers")]
    Number {
        /// The slot.
        id: SlotId,
        /// The last number.
        last: u16,
    },
    /// The backend has no slot of such a size.
    #[error("{id}: {pages} pages are more than the {max} of this backend's slots: add several")]
    Size {
        /// The slot.
        id: SlotId,
        /// Its size.
        pages: PageCount,
        /// The largest size.
        max: PageCount,
    },
    /// The guest's processors have no such address.
    #[error("{id}: the guest's physical addresses have {bits} bits here: choose a lower address")]
    Address {
        /// The slot.
        id: SlotId,
        /// The number of bits of a guest-physical address.
        bits: u32,
    },
    /// The host has no memory for the slot, or the host's kernel refuses.
    #[error("{id}: {cause}")]
    Host {
        /// The slot.
        id: SlotId,
        /// The message of the backend.
        cause: String,
    },
}

impl MemorySlotError {
    /// The kind of the cause.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Slot(SlotError::NoRoom { .. }) | Self::Host { .. } => ErrorKind::Host,
            Self::Slot(_) | Self::Number { .. } | Self::Size { .. } | Self::Address { .. } => {
                ErrorKind::Request
            }
        }
    }
}

/// The memory slots of a VM. They change while the vCPUs run. A change waits until no vCPU can use
/// the removed memory; [`DirtyTracking`](crate::DirtyTracking) says which threads may call.
pub trait MemorySlots {
    /// All slots, in ascending order of their guest frames.
    fn memory_slots(&self) -> Vec<MemorySlot>;

    /// Adds a slot with new memory behind it, all zeros. The memory is freed with the slot.
    ///
    /// # Errors
    /// [`MemorySlotError`]; [`SlotError::Reserved`] over an interrupt controller of the guest.
    fn add_memory(
        &self,
        id: SlotId,
        gfns: GfnRange,
        flags: SlotFlags,
    ) -> Result<(), MemorySlotError>;

    /// Removes a slot. Memory that [`MemorySlots::add_memory`] made is freed; the guest's accesses
    /// to those frames become MMIO.
    ///
    /// # Errors
    /// [`MemorySlotError`].
    fn remove_slot(&self, id: SlotId) -> Result<(), MemorySlotError>;

    /// Moves a slot with its content and its dirty log, so that it begins at `start`.
    ///
    /// # Errors
    /// As [`MemorySlots::add_memory`].
    fn move_slot(&self, id: SlotId, start: Gfn) -> Result<(), MemorySlotError>;

    /// Replaces a slot's flags.
    ///
    /// # Errors
    /// [`MemorySlotError`].
    fn set_slot_flags(&self, id: SlotId, flags: SlotFlags) -> Result<(), MemorySlotError>;
}
