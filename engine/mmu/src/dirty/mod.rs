//! Dirty tracking of slots: its states and rules.
//!
//! | file | job |
//! |---|---|
//! | `state` | the states of a VM's tracking and of a slot's log |
//! | `logging` | turns a slot's log on and off; how writes are detected |
//! | `recovery` | the older way to end logging: feature `comparisons` |
//! | `host_write` | writes that go past the TLBs |
//! | `harvest` | takes the marks |
//! | `rearm` | rearms the harvested pages |
//!
//! ```text
//! vCPU                                     monitor, holding `layout`
//! W or D appears: by a fault under the     kick: vCPUs in the guest flush their logs
//!   range lock, a fast page fault or         into bitmap or ring
//!   a logging walk                         take the marks
//! then the page is marked: bitmap, ring,   rearm under the range lock: clear W, or D
//!   or first the log, which is flushed     one targeted shoot-down, waited for
//!   before the vCPU counts as offline      copy the pages
//! ```
//! Wherever vCPUs walk without logging, a leaf with W also has D. Leaves without D exist only in
//! slots that log, while every vCPU logs.

mod harvest;
mod host_write;
mod logging;
mod rearm;
#[cfg(any(test, feature = "comparisons"))]
mod recovery;
mod state;

pub use host_write::Writing;
pub use lacuna_slots::{
    Backup, Delivery, Detection, DirtyError, DirtyStats, HugeLeaves, Initially, Logging,
};
#[cfg(any(test, feature = "comparisons"))]
pub use recovery::Recovery;
pub(crate) use state::{Count, Counts, SlotLog, Tracking, bitmap_of};
