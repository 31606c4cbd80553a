//! Why a change of slots was refused. Nothing has changed then.

use crate::{SlotFlags, SlotId};
use lacuna_addr::{BackingAddr, GfnRange, NoRoom};

/// A refused change, with what to do about it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SlotError {
    /// Two slots would have the same guest frames.
    #[error(
        "{id} (gfn {:#x}..{:#x}) would overlap {other} (gfn {:#x}..{:#x}): \
         remove or move one of them first",
        gfns.start().get(), gfns.end_raw(), other_gfns.start().get(), other_gfns.end_raw()
    )]
    Overlap {
        /// The slot to be added or moved.
        id: SlotId,
        /// Its frames.
        gfns: GfnRange,
        /// The slot that has some of them.
        other: SlotId,
        /// The frames of that slot.
        other_gfns: GfnRange,
    },
    /// The guest's machine has an interrupt controller or a device there.
    #[error(
        "{id} would lie over an interrupt controller or a device of the guest's machine, at \
         {first:#x} to {last:#x}: place it elsewhere, or add two slots, below and above"
    )]
    Reserved {
        /// The slot to be added or moved.
        id: SlotId,
        /// The first address of the controller or device.
        first: u64,
        /// Its last address.
        last: u64,
    },
    /// An address or size is not in whole pages.
    #[error("{id}: its {what} {value:#x} is not a multiple of 4 KiB: align it")]
    Misaligned {
        /// The slot.
        id: SlotId,
        /// The name of the number.
        what: &'static str,
        /// The number.
        value: u64,
    },
    /// The size is zero.
    #[error("{id} would have no pages: give it a size, or remove the slot")]
    Empty {
        /// The slot.
        id: SlotId,
    },
    /// The slot reaches beyond the guest's address space.
    #[error(
        "{id} reaches beyond the guest's physical addresses, which end at {limit:#x}: \
         place it lower"
    )]
    BeyondWidth {
        /// The slot.
        id: SlotId,
        /// One past the last byte that the guest can address.
        limit: u64,
    },
    /// The backing wraps around.
    #[error(
        "{id}: {bytes:#x} bytes from backing address {start:#x} wrap around: check both numbers"
    )]
    BackingWraps {
        /// The slot.
        id: SlotId,
        /// The first address.
        start: u64,
        /// The size.
        bytes: u64,
    },
    /// The backing was not added for this VM, so its removal would not be reported to this VM.
    #[error(
        "{id}: the backing at {backing} was not added for this VM: give it a range that \
         `Host::add_region` has returned for its MMU"
    )]
    ForeignBacking {
        /// The slot.
        id: SlotId,
        /// The first address.
        backing: BackingAddr,
    },
    /// The slot number is in use.
    #[error("{id} exists already: remove it first, or choose another number")]
    InUse {
        /// The slot.
        id: SlotId,
    },
    /// There is no such slot.
    #[error("there is no {id}: add it first")]
    Unknown {
        /// The slot.
        id: SlotId,
    },
    /// The memory of this process has no room for the slot's tables.
    #[error("{id}: {room}")]
    NoRoom {
        /// The slot.
        id: SlotId,
        /// The requested size.
        room: NoRoom,
    },
    /// The backend does not know some of the flags.
    #[error("{id}: this backend does not support the flags {:#x}: clear them", flags.bits())]
    UnsupportedFlags {
        /// The slot.
        id: SlotId,
        /// The flags that it does not support.
        flags: SlotFlags,
    },
    /// The slot would both be read-only and exit on missing memory.
    #[error(
        "{id}: a read-only slot cannot exit on missing memory: clear `READONLY`, or \
         `EXIT_ON_MISSING` and `EXIT_ON_NONRESIDENT`"
    )]
    ReadOnlyExits {
        /// The slot.
        id: SlotId,
    },
    /// The slot would exit on missing memory, but no page of it is ever missing.
    #[error(
        "{id}: it has no page source, which a slot that exits needs: clear `EXIT_ON_MISSING` and \
         `EXIT_ON_NONRESIDENT`, or give the VM a page source"
    )]
    NoSource {
        /// The slot.
        id: SlotId,
    },
    /// The limit is reached.
    #[error("{id} would be one slot more than the {limit} that this VM may have: remove one first")]
    TooMany {
        /// The slot.
        id: SlotId,
        /// The limit.
        limit: usize,
    },
}
