//! The kvm backend: x86-64 guests on `/dev/kvm`, with memory by userfaultfd.
//!
//! A [`VmBuilder`] makes a [`Vm`] or runs an image. KVM runs the vCPUs. The memory is the host
//! manager's (`lacuna_host`), as on the soft backend: it asks page sources, keeps the budget of
//! resident pages, and swaps. KVM is the host side of asynchronous page faults, so an image for the
//! soft backend runs here with KVM's own ABI. In a VM with its own source of pages, this crate is
//! the host side.
//!
//! | file | job |
//! |---|---|
//! | `error`, `available` | why a run cannot start; what this machine and its KVM can do |
//! | `memory` | the guest's memory: pages of the host manager, and where KVM sees them |
//! | `window` | pages of a budget: moved between their frames and the guest's addresses |
//! | `mapping` | mappings of this process, and copies from and to guest memory |
//! | `faults` | threads on userfaultfds that bring missing pages |
//! | `provider` | pages that the VM's own source, or its VMM, provides |
//! | `balloon` | pages that the VMM takes back |
//! | `arch` | the parts that depend on the architecture, for x86-64 and for others |
//! | `arch/x86/apf`, `msrs`, `interrupts` | events of async page faults; MSRs; the I/O APIC |
//! | `arch/x86/setup` | a vCPU's first state: CPUID, registers |
//! | `eventfds`, `ioeventfd` | eventfds that interrupt a guest; eventfds that its writes signal |
//! | `apf` | the host side of async page faults, for VMs with a page source |
//! | `vcpu`, `stopped` | `KVM_RUN` and its exits; messages for the stops of a vCPU |
//! | `kick` and its folder | makes vCPUs leave `KVM_RUN`; for a missing page; by which signal |
//! | `missing`, `tokens` | exits on missing memory, and pages that the VMM provides |
//! | `arch/x86/state` | a vCPU's whole state, saved and restored |
//! | `slots` | memory slots: this process's table, and KVM's |
//! | `interface` | the backend interface of `lacuna_machine` |
//! | `vm`, `boot` | one VM: descriptors, slots, memory, readers of faults; its vCPUs |
//! | `dirty`, `tracker` | dirty tracking: KVM's bitmap, its rings, Linux's page table; the choice |
//! | `ring` | a vCPU's dirty ring, as KVM maps it |
//! | `builder` | describes a VM, makes it, runs an image in it |
//!
//! # Unsafe
//! This crate may hold `unsafe` because KVM and userfaultfd act on this process's memory by
//! address. Pointers are in `mapping` (the guest's bytes, as atomics), `vcpu` and `kick` (a vCPU's
//! shared page), `ring` (its dirty ring), `vm`, `dirty`, `memory`, `window`, `eventfds` and
//! `ioeventfd` (registered ranges, moves, descriptors). Each file's header has its reason.

mod apf;
mod arch;
mod available;
mod balloon;
mod boot;
mod builder;
mod dirty;
mod error;
mod eventfds;
mod faults;
mod interface;
mod ioeventfd;
mod kick;
mod mapping;
mod memory;
mod missing;
mod provider;
mod ring;
mod slots;
mod stopped;
mod tokens;
mod tracker;
mod vcpu;
mod vm;
mod window;

pub use available::{MemoryCapability, available, memory_capabilities, tsc_khz};
pub use builder::VmBuilder;
pub use error::{KvmError, Unavailable};
pub use kick::{KickSignalError, set_kick_signal};
pub use lacuna_host::{
    HugePages, LinuxBacking, MemoryKind, PrivateFile, SharedFill, SharedMemory, Swap,
};
pub use lacuna_machine::{Apf, CpuModel, VmConfig};
pub use lacuna_slots::{
    Backup, ClearError, Delivery, DirtyError, Logging, RingSize, RingSizeError, SlotId,
};
pub use lacuna_sync::LatencySetting;
pub use tracker::Tracker;
pub use vcpu::Vcpu;
pub use vm::Vm;
