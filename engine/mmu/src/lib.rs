//! The memory-management unit of one VM: connects faults with the slots, the host's memory and the
//! tables.
//!
//! | file | job |
//! |---|---|
//! | `fault` | from a stage-2 violation to an installed leaf, or to something to wait for |
//! | `vcpu_mmu` | the MMU context of one vCPU, and how it marks the pages that it writes |
//! | `install` | at which level a page is mapped, and what happens to existing leaves |
//! | `rmap` | from a page or block of a slot to its leaf |
//! | `notifier` | the requests of the host's memory manager |
//! | `invalidate` | the host takes pages back |
//! | `rmap_walk` | older rmap walk strategies: feature `comparisons` |
//! | `level` | where huge leaves are forbidden for a while |
//! | `dirty` | dirty tracking: states and rules |
//! | `logging` | turns a slot's log on and off; how writes are detected |
//! | `recovery` | the older way to end logging: feature `comparisons` |
//! | `host_write` | writes that go past the TLBs |
//! | `harvest` | takes the marks |
//! | `rearm` | rearms the harvested pages |
//! | `layout` | adds, removes and moves slots |
//! | `verify` | slots, rmap and tables agree |
//!
//! The feature `comparisons` adds what only the lab, the benches and the fuzzer use: the older
//! ways, counters of their steps, and `Mmu::end_logging_as`.
//!
//! `docs/locking.md` draws the protocol that keeps a fault and an invalidation apart. This crate
//! knows no vCPU: the code that puts pages into TLBs gives it a
//! [`Shootdown`](lacuna_stage2::Shootdown).
#![forbid(unsafe_code)]

mod dirty;
mod fault;
mod harvest;
mod host_write;
mod install;
mod invalidate;
mod layout;
mod level;
mod logging;
mod mmu;
mod notifier;
mod rearm;
#[cfg(any(test, feature = "comparisons"))]
mod recovery;
mod rmap;
#[cfg(any(test, feature = "comparisons"))]
mod rmap_walk;
mod vcpu_mmu;
mod verify;

#[cfg(test)]
mod tests;

pub use dirty::{
    Backup, Delivery, Detection, DirtyError, DirtyStats, HugeLeaves, Initially, Logging,
};
pub use fault::{Outcome, Page};
pub use host_write::Writing;
pub use invalidate::Invalidation;
pub use mmu::{Mmu, MmuError};
#[cfg(any(test, feature = "comparisons"))]
pub use recovery::Recovery;
pub use rmap::Rmap;
#[cfg(any(test, feature = "comparisons"))]
pub use rmap_walk::{RmapWalk, Steps};
pub use vcpu_mmu::VcpuMmu;

pub use lacuna_slots::{ClearError, RingSize, RingSizeError, Room};

use rmap::InBlock;
