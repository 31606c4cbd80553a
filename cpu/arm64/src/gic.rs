//! The interrupt controller: GICv3 with affinity routing, one security state, no LPIs (Arm IHI
//! 0069). The guest reaches its CPU interface by system registers.
//!
//! ```text
//! any thread                 Gic (shared, one lock)                   CpuInterface (a vCPU's own)
//! set_spi, set_ppi, post --> distributor: SPIs 32..127
//!                            redistributor i: SGIs 0..15, PPIs 16..31
//! ICC_SGI1R of vCPU j -----> pending, enabled, not active, the most urgent
//!   + Wake::wake(i)            `---> signal word of vCPU i ----------> PMR, running priority:
//! GICD_*, GICR_* accesses ->                                           IRQ or FIQ?
//!                            pending -> active <---------------------- ICC_IAR1
//!                            active -> inactive <--------------------- ICC_EOIR1, ICC_DIR
//! ```
//! | file | job |
//! |---|---|
//! | `bank` | 32 interrupts: a word of bits for each property |
//! | `fabric` | the shared part, its lock and its signals |
//! | `mmio` | the pages of the distributor and the redistributors |
//! | `interface` | the CPU interface |
//!
//! A vCPU with a newly signalled interrupt is woken after the lock is released. One thread can do
//! all of this, so a seeded run repeats.
//!
//! Left out on purpose: a second security state, LPIs and the ITS (no device sends messages),
//! message-based SPIs, 1-of-N routing, the range selector, legacy operation without affinity
//! routing. Registers of these read as zero and ignore writes.

mod bank;
mod fabric;
mod interface;
mod mmio;

pub use bank::{Group, Line};
pub(crate) use fabric::index_of as affinity_index;
pub use fabric::{Gic, affinity};
pub(crate) use interface::{CpuInterface, Reach, SRE, check};
pub use mmio::{
    DISTRIBUTOR, FIRST_REGION_VCPUS, MAX_VCPUS, REDISTRIBUTOR_STRIDE, REDISTRIBUTORS,
    REDISTRIBUTORS_2, REGISTER_PAGE,
};

#[cfg(test)]
mod tests;
