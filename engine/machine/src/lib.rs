//! What a virtual machine looks like from outside: exits, devices, images and the run loop.
//!
//! * [`Vcpu`], [`Exit`]: the seam that every backend implements, named after `kvm-ioctls`.
//! * [`GuestMemory`]: bytes of the guest, for whoever loads or inspects it.
//! * [`Image`], [`Boot`]: an ELF64 kernel with the PVH note becomes a plan of writes and an entry
//!   state.
//! * [`PlatformDevices`]: what a guest sees (serial line, exit port, status-page port).
//! * [`run`]: one thread per vCPU until the guest ends.
//! * [`ErrorKind`]: whether an error is due to the request, the guest or the host.
//!
//! This crate knows no processor, no tables and no memory manager: it and `lacuna-mmu` are
//! strangers.
#![forbid(unsafe_code)]

mod apf;
mod arch;
pub mod boot;
mod devices;
mod exit;
mod image;
mod kind;
mod memory;
mod run;

pub use apf::Apf;
pub use arch::Arch;
pub use boot::x86::Boot;
pub use boot::{BootError, Layout};
pub use devices::{Console, Ending, PlatformDevices, port};
pub use exit::{Exit, Vcpu, VcpuError, Width};
pub use image::{Image, ImageError, Segment};
pub use kind::ErrorKind;
pub use memory::{GuestMemory, MemoryError};
pub use run::{Kick, Next, dispatch, run};
