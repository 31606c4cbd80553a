//! The memory-management unit of one VM: connects faults with the slots, the host's memory and the
//! tables.
//!
//! | file | job |
//! |---|---|
//! | `fault` | from a stage-2 violation to an installed leaf, or to something to wait for |
//! | `vcpu_mmu` | the MMU context of one vCPU, and how it marks the pages that it writes |
//! | `install` | at which level a page is mapped, and what happens to existing leaves |
//! | `gib` | leaves of 1 GiB |
//! | `slow` | the rare ends of the fault path, compiled here for each table format |
//! | `rmap` | from a page or block of a slot to its leaf |
//! | `notifier` | the requests of the host's memory manager |
//! | `invalidate` | unmaps pages that the host takes back |
//! | `rmap_walk` | older rmap walk strategies: feature `comparisons` |
//! | `level` | where huge leaves are forbidden for a while |
//! | `dirty` | dirty tracking: finds the pages that the guest and its devices write |
//! | `layout` | adds, removes and moves slots |
//! | `verify` | asserts that slots, rmap and tables agree |
//!
//! The feature `comparisons` adds code for the lab, the benches and the fuzzer alone: the older
//! rmap walk strategies, counters of their steps, and `Mmu::end_logging_as`.
//!
//! `docs/locking.md` draws the protocol between a fault and an invalidation. This crate does not
//! run vCPUs. The code that runs them gives [`Mmu::new`] a [`Qsbr`](lacuna_sync::Qsbr): through it
//! the MMU requests TLB flushes, and waits for them.
#![forbid(unsafe_code)]

mod dirty;
mod fault;
mod gib;
mod install;
mod invalidate;
mod layout;
mod level;
mod mmu;
mod notifier;
mod rmap;
#[cfg(any(test, feature = "comparisons"))]
mod rmap_walk;
mod slow;
mod vcpu_mmu;
mod verify;

#[cfg(test)]
mod tests;

#[cfg(any(test, feature = "comparisons"))]
pub use dirty::Recovery;
pub use dirty::{
    Backup, Delivery, Detection, DirtyError, DirtyStats, HugeLeaves, Initially, Logging, Writing,
};
pub use fault::{Outcome, Page};
pub use invalidate::Invalidation;
pub use mmu::{Mmu, MmuError};
pub use rmap::Rmap;
#[cfg(any(test, feature = "comparisons"))]
pub use rmap_walk::{RmapWalk, StepCounter, Steps};
pub use slow::MmuFormat;
pub use vcpu_mmu::VcpuMmu;

pub use lacuna_slots::{ClearError, RingSize, RingSizeError, RingSpace};

/// The VMM's description of a slot. Its backing is a part of a region of the MMU's host.
pub type SlotSpec = lacuna_slots::SlotSpec<lacuna_addr::BackingAddr>;

use rmap::InBlock;
