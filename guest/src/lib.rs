//! The guest: a small kernel and its workloads, as images. Other machines can boot them too.
//!
//! [`Arch::images`] has them, by architecture. The build script compiles the x86-64 images with the
//! host's compiler; if it cannot, [`unavailable`] has the reason. The AArch64 images are committed
//! beside their sources, because few machines have the cross compiler.
//! ```text
//! x86-64    ELF64     PVH note   32-bit, paging off, EBX = hvm_start_info      QEMU, ...
//!                     e_entry    64-bit long mode, CPL0, IF = 0, identity map,
//!                                RBX = hvm_start_info                          Lacuna
//! AArch64   `Image`   EL1, MMU off, x0 = device tree (Linux's boot protocol)   QEMU, Lacuna
//! ```
//! The segments of an ELF file are loaded at their physical addresses (1 MiB and up), an `Image` at
//! any multiple of 2 MiB. The loader's own data (boot information, command line, its page tables)
//! lies below the kernel, which does not use that memory. Parameters are words `name=value` of the
//! command line. [`Image`] lists a workload's parameters, [`Arch::kernel_params`] the kernel's.
//!
//! While it runs, the kernel keeps a *status page* that the host may read at any time: [`status`].
#![forbid(unsafe_code)]

mod arm64;
mod catalog;
mod image;
pub mod status;
mod x86;

pub use catalog::{Arch, image, images, is_known, unavailable};
pub use image::{Image, Param};
pub use x86::KERNEL_PARAMS;

/// The `compatible` of the device-tree node with the host's two registers, on AArch64.
pub const HOST_COMPATIBLE: &str = "lacuna,host";
/// Offset of the register for the exit code: a 32-bit write ends the machine. AArch64.
pub const HOST_EXIT: u64 = 0;
/// Offset of the register for the status page: a 32-bit write announces its page frame number.
/// AArch64.
pub const HOST_STATUS: u64 = 4;
/// Port of the console (COM1). Each byte written to it is output.
pub const PORT_CONSOLE: u16 = 0x3f8;
/// Port for the exit code: a 32-bit write ends the machine. QEMU's `isa-debug-exit`.
pub const PORT_EXIT: u16 = 0xf4;
/// Port for the status page: a 32-bit write announces its page frame number.
pub const PORT_STATUS: u16 = 0x5c0;
/// The most vCPUs of the kernel; with a larger `smp=` it panics.
pub const MAX_CPUS: u32 = 256;
/// The most memory, in bytes, for the kernel's page tables; with more it panics.
pub const MAX_MEMORY: u64 = 511 << 30;
/// Exit code when the guest kernel panicked; the console has the reason.
pub const EXIT_PANIC: u32 = 125;
/// Exit code if an exception killed the first process: this number plus the vector on x86-64, plus
/// the exception class of ESR_EL1 on AArch64.
pub const EXIT_FAULT: u32 = 128;

/// The `cpubench` workload as an executable for the host, to run without any hypervisor.
///
/// It takes the same parameters as arguments (`test=alu iters=..`) and prints the same lines.
/// Empty if the crate was not built on x86-64 Linux for that same machine.
pub fn native_cpubench() -> &'static [u8] {
    include_bytes!(concat!(env!("OUT_DIR"), "/cpubench-native"))
}
