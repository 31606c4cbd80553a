//! The backend for any host: software processors, reclaim, swap and huge pages.
//!
//! The processors execute integer instructions only: a guest is compiled with
//! `-mgeneral-regs-only`, and Linux does not boot.
//!
//! # A run loop of your own
//! [`Builder::build`](crate::Builder::build) makes a VM for a [`Machine`](crate::Machine), or for a
//! VMM that calls [`Vcpu::run`](crate::Vcpu::run) itself. A thread of the VM reclaims memory in the
//! background until the VM is dropped.
//!
//! ```
//! use lacuna::{Builder, PageCount, soft};
//!
//! let (memory, resident) = (PageCount::from_bytes(64 << 20), PageCount::from_bytes(16 << 20));
//! let vm = soft::VmBuilder::new(memory, resident).build()?;
//! // Boot `vm` and run its vCPUs here.
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//! Both need a builder without [`VmBuilder::seed`]. Only [`VmBuilder::run_seeded`] moves the time
//! of a VM with a seed: it runs all vCPUs on the calling thread, and each run is the same.
//! Elsewhere, a vCPU that waits for time to pass fails with
//! [`VcpuError::TimeStandsStill`](crate::VcpuError::TimeStandsStill).
//!
//! # Speed
//! Two settings of the program that depends on this crate matter for this backend. Cargo reads
//! neither of them from a dependency.
//!
//! * Optimise. Without it, a guest runs at a sixth to an eighth of its speed. A program that is
//!   also run or tested in the `dev` profile needs this in its `Cargo.toml`:
//!   ```toml
//!   [profile.dev.package."*"]
//!   opt-level = 2
//!   ```
//! * Duplicate the dispatch. The software processor is one `match` over decoded operations. With
//!   the compiler's defaults, all operations share one indirect jump, which the host's processor
//!   may mispredict. Put these options into the program's `.cargo/config.toml`, and do not set the
//!   environment variable `RUSTFLAGS`, which replaces them:
//!   ```toml
//!   [build]
//!   rustflags = [
//!       "-Cllvm-args=-tail-dup-pred-size=10000 -tail-dup-succ-size=10000 -enable-tail-merge=0",
//!   ]
//!   ```
//!   They gave 7 to 35 % more speed to three loops of x86-64 code, none to a fourth that waits for
//!   memory, and 10 to 15 % to a VMM outside of Lacuna's workspace (`docs/speed-x86.md`). A crate
//!   cannot set them for its dependents, and stable Rust has no guaranteed tail call, which would
//!   give each operation its own jump too.
#![cfg(feature = "soft")]

pub use lacuna_soft::{
    ApfStats, Background, BootMemory, MmuError, RunSummary, SoftError, Stalls, Trace, Vcpu, Vm,
    VmBuilder,
};
