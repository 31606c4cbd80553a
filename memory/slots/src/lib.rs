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
//! In KVM, readers see slots and dependent caches change at different times. So KVM marks the
//! generation during an update, and waits for all readers (SRCU) before it unmaps what it removed.
//! Here a change is one store. Only a fault can still act on the old snapshot, and a fault installs
//! nothing if its invalidation sequence has moved. So the order is:
//!
//! ```text
//! fault:   s = stage2.invalidate_seq(gfn)    reader.find(gfn)    resolve    lock, retry(s)?, map
//! remover: begin    unmap the range    flush    slots.remove(id)    end
//! ```
//! A fault that found the removed slot has read `s` before `end`. If it maps before `begin`, the
//! unmap finds its leaf. If it locks later, `retry` refuses it. A fault that read `s` *after*
//! `find` could map a page of the removed slot: `find`, then the whole removal, then `s`.
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
    Backup, Delivery, DetectedBy, Detection, DirtyError, DirtyStats, HugeLeaves, Initially, Logging,
};
pub use dirty_ring::{RingConsumer, RingProducer, RingSize, RingSizeError, RingSpace, dirty_ring};
pub use error::SlotError;
pub use reader::Reader;
pub use slot::{Slot, SlotData, SlotFlags, SlotId, SlotSpec};
pub use slots::{CurrentSlots, Limits, Slots};
pub use snapshot::{Generation, Overlap, Snapshot, assert_invariants};
