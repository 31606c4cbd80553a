//! Lacuna gives a VMM its guests' memory: overcommitted, swapped, logged, and with asynchronous
//! page faults, so that a guest works on while a page comes.
//!
//! # Start a guest
//! ```no_run
//! use lacuna::{Builder, Console, Image, PageCount, soft};
//!
//! let file = std::fs::read("kernel.elf")?;
//! let image = Image::parse(&file)?;
//! // A guest that believes it has 256 MiB, in 64 MiB of this host's memory.
//! let builder = soft::VmBuilder::new(PageCount::new(65_536), PageCount::new(16_384));
//! let console = |line: &str| println!("{line}");
//! let end = builder.run_with_console(&image, console, &mut |_| {})?;
//! println!("{:?}", end.ending);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//! [`soft`] needs nothing of the host: its processors are software. [`kvm`] runs the same images on
//! `/dev/kvm`. Both sides of the interface are in this crate's root: a [`Builder`] makes a [`Vm`],
//! [`Vm::boot`] makes its [`Vcpu`]s, and [`Vcpu::run`] returns an [`Exit`] when the guest needs
//! its monitor. [`run`] does that on a thread for each vCPU and sends accesses to
//! [`PlatformDevices`].
//!
//! # What a monitor can do
//!
//! | it wants to | it uses |
//! |---|---|
//! | answer a guest's port or memory-mapped access | [`Device`], or its own loop over [`Exit`] |
//! | read and write guest memory | [`GuestMemory`] |
//! | add, move or remove memory while the guest runs | [`MemorySlots`] |
//! | learn which pages the guest has written | [`set_logging_everywhere`], then [`harvest`] |
//! | get vCPUs out of the guest | [`Kick`] |
//! | save a vCPU, and restore it here or elsewhere | [`SaveRestore`] |
//!
//! `examples/` has programs: `boot`, `devices`, `dirty_pages`, `vm_memory`.
//!
//! # Guest memory by `vm-memory`'s traits
//! With the default feature `vm-memory`, [`vm_memory::View`] lets code for rust-vmm's
//! `Bytes<GuestAddress>` access a guest of this crate, and [`vm_memory::Foreign`] lets the loaders
//! of this crate write into the memory of another monitor.
//!
//! # Speed
//! A program that depends on this crate is built with its own settings. Two matter:
//!
//! * The software processor is one `match` over decoded operations. With the compiler's defaults
//!   all operations share one indirect jump, which the host's processor predicts badly. Put these
//!   options into `.cargo/config.toml` of the program:
//!   ```toml
//!   [build]
//!   rustflags = [
//!       "-Cllvm-args=-tail-dup-pred-size=10000 -tail-dup-succ-size=10000 -enable-tail-merge=0",
//!   ]
//!   ```
//! * Link-time optimisation, because an access crosses four crates: `lto = "thin"` in
//!   `[profile.release]`.
//!
//! The [`kvm`] backend needs neither.
#![forbid(unsafe_code)]

#[cfg(feature = "vm-memory")]
pub mod vm_memory;

pub use lacuna_addr::{Gfn, GfnRange, Gpa, PAGE_SIZE, PageCount};
pub use lacuna_machine::*;
pub use lacuna_sync::{Clock, HostClock, Nanos};

/// The backend that runs anywhere: software processors, reclaim, swap and huge pages.
pub mod soft {
    pub use lacuna_soft::{
        ApfStats, HostError, HostStats, HugePages, LatencySetting, SoftError, Stalls, Swap, Vcpu,
        Vm, VmBuilder,
    };
}

/// The backend on Linux's `/dev/kvm`.
pub mod kvm {
    pub use lacuna_kvm::{
        FirstTouch, KvmError, LatencySetting, SourceStats, Unavailable, Vcpu, Vm, VmBuilder,
        available,
    };
}
