//! Memory slots: which guest frames have which backing.
//!
//! All slots of a VM are one immutable [`Snapshot`]; a change replaces it by a new one. Readers
//! never wait and never see half a change. A change copies the few small indices, and shares the
//! slots that it does not touch.
//!
//! ```text
//! Slots ---- current ----> Snapshot, generation n
//!   |                        by gfn     [slot 3][slot 0][slot 7]   sorted, disjoint: binary search
//!   add, remove              by backing [0: ..][7: ..][3: ..]     sorted, may overlap: links
//!   v
//! Snapshot, generation n+1  (the old one lives until its last reader has read the new one)
//! ```
//!
//! # Why there is no "update in progress"
//! KVM marks the generation during an update, because its readers see slots and dependent caches
//! change at different times, and waits for all readers (SRCU) before it unmaps what it removed.
//! Here the swap is one store, and the reader that could still act on the old snapshot is a fault,
//! which cannot install anything without its invalidation snapshot being admitted. So the order is:
//!
//! ```text
//! fault:   s = stage2.invalidate_seq(gfn)    reader.find(gfn)    resolve    lock, retry(s)?, map
//! remover: begin    unmap the range    flush    slots.remove(id)    end
//! ```
//! A fault that found the removed slot took `s` before `end`, so it is refused, or its mapping is
//! found by the unmap. Taking `s` *after* `find` would be the bug.
//!
//! Imports `addr`, `sync`. No `unsafe`.
#![forbid(unsafe_code)]

mod by_backing;
mod dirty_bitmap;
mod dirty_log;
mod dirty_ring;
mod error;
mod reader;
mod slot;
mod slots;
mod snapshot;

pub use dirty_bitmap::{ClearError, DirtyBitmap, Marked};
pub use dirty_log::{
    Backup, Delivery, Detection, DirtyError, DirtyStats, HugeLeaves, Initially, Logging,
};
pub use dirty_ring::{RingConsumer, RingProducer, RingSize, RingSizeError, Room, dirty_ring};
pub use error::SlotError;
pub use reader::Reader;
pub use slot::{Slot, SlotData, SlotFlags, SlotId, SlotSpec};
pub use slots::{Limits, Slots};
pub use snapshot::{Generation, Overlap, Snapshot, assert_invariants};
