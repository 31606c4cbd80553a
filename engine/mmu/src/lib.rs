//! The memory-management unit of one VM: where a fault meets the slots, the host's memory and the
//! tables.
//!
//! | file | job |
//! |---|---|
//! | `fault` | from a stage-2 violation to an installed leaf, or to what there is to wait for |
//! | `rmap` | from a page of a slot to its leaf |
//! | `notifier` | the host takes pages back, or asks whether they were used |
//! | `layout` | slots come, go and move |
//! | `verify` | slots, rmap and tables agree |
//!
//! The protocol that keeps a fault and an invalidation apart is drawn in `docs/locking.md`. This
//! crate knows no vCPU: whoever maps pages into TLBs gives it a
//! [`Shootdown`](lacuna_stage2::Shootdown).
#![forbid(unsafe_code)]

mod fault;
mod layout;
mod mmu;
mod notifier;
mod rmap;
mod verify;

pub use fault::{Faulter, Outcome, Page};
pub use mmu::{Mmu, MmuError};
pub use rmap::Rmap;
