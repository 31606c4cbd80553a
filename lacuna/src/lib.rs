//! Lacuna manages guest memory for a VMM: overcommit, swap, dirty logging, and asynchronous page
//! faults, by which a guest can run another process while a page arrives.
//!
//! # Start a guest
//! ```no_run
//! use lacuna::{Builder, Console, Image, PageCount, soft};
//!
//! let file = std::fs::read("kernel.elf")?;
//! let image = Image::parse(&file)?;
//! // A guest with 256 MiB of memory, of which at most 64 MiB are in this host's memory.
//! let builder = soft::VmBuilder::new(PageCount::new(65_536), PageCount::new(16_384));
//! let console = |line: &str| println!("{line}");
//! let end = builder.run_with_console(&image, console, &mut |_| {})?;
//! println!("{:?}", end.ending);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//! [`soft`] has software processors and needs nothing of the host. [`kvm`] runs the same images on
//! `/dev/kvm`. A [`Builder`] makes a [`Vm`], [`Vm::boot`] makes its [`Vcpu`]s, and [`Vcpu::run`]
//! returns an [`Exit`] when the VMM must act. [`run`] does that on a thread for each vCPU and sends
//! accesses to [`PlatformDevices`]. Both backends implement these traits.
//!
//! # What a VMM can do
//!
//! | to | a VMM uses |
//! |---|---|
//! | answer a guest's port or MMIO access | [`Device`], or its own loop over [`Exit`] |
//! | read and write guest memory | [`GuestMemory`] |
//! | add, move or remove memory while the guest runs | [`MemorySlots`] |
//! | learn which pages the guest has written | [`set_logging_everywhere`], then [`harvest`] |
//! | make vCPUs leave the guest and return to the VMM | [`Kick`] |
//! | save a vCPU, and restore it here or elsewhere | [`SaveRestore`] |
//!
//! `examples/` has programs: `boot`, `boot_kvm`, `devices`, `dirty_pages`, `vm_memory`.
//!
//! # Guest memory by `vm-memory`'s traits
//! The default feature `vm-memory` adds two adapters. [`vm_memory::View`] gives code for rust-vmm's
//! `Bytes<GuestAddress>` access to a guest of this crate. [`vm_memory::Foreign`] lets the loaders
//! of this crate write into guest memory of another VMM.
//!
//! # Speed
//! Two build settings of the program that depends on this crate matter for [`soft`]:
//!
//! * The software processor is one `match` over decoded operations. With the compiler's defaults,
//!   all operations share one indirect jump, which the host's processor often mispredicts. Put
//!   these options into the program's `.cargo/config.toml`:
//!   ```toml
//!   [build]
//!   rustflags = [
//!       "-Cllvm-args=-tail-dup-pred-size=10000 -tail-dup-succ-size=10000 -enable-tail-merge=0",
//!   ]
//!   ```
//! * A guest's memory access calls functions of several crates, so use link-time optimisation:
//!   `lto = "thin"` in `[profile.release]`.
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
