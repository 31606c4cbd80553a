//! Lacuna manages guest memory for a VMM: overcommit, swap, dirty logging, and asynchronous page
//! faults. With these, a guest can run another process while a page arrives.
//!
//! # Start a guest
//! ```no_run
//! use lacuna::{Builder, Image, PageCount, PlatformDevices, soft};
//!
//! let file = std::fs::read("kernel.elf")?;
//! let image = Image::parse(&file)?;
//! // A guest with 256 MiB of memory, at most 64 MiB of it in this host's memory.
//! let (memory, resident) = (PageCount::from_bytes(256 << 20), PageCount::from_bytes(64 << 20));
//! let builder = soft::VmBuilder::new(memory, resident);
//! let devices = PlatformDevices::new(|line: &str| println!("{line}"));
//! let guest = builder.start(&image, devices)?;
//! println!("{}", guest.wait().ending);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//! [`soft`] has software processors. [`kvm`] runs the same images on `/dev/kvm`. A VMM generic over
//! [`Builder`] runs on both, as `examples/vmm.rs` does.
//! [`Builder::start`] boots a [`Vm`] in a [`Machine`], which has a thread for each [`Vcpu`] and
//! sends accesses to [`PlatformDevices`]. With more to do, call [`Builder::build`],
//! [`Machine::new`], [`Vm::boot`] or a restore, and [`Machine::start`]. The [`Running`] guest is
//! paused, saved, moved and watched, and ends when it is dropped. In a loop of your own,
//! [`Vcpu::run`] returns an [`Exit`] when the VMM must act.
//!
//! # What a VMM can do
//!
//! | to | a VMM uses |
//! |---|---|
//! | answer a guest's port or MMIO access | [`Device`], or its own loop over [`Exit`]: [`device`] |
//! | add a device, and move it with the guest | [`PlatformDevices::add_mmio`], [`Device::save`] |
//! | give the guest a disk, a network, a console, a balloon or entropy | [`virtio`] |
//! | interrupt the guest | [`Vm::interrupts`], [`interrupt`] |
//! | read and write guest memory | [`GuestMemory`]; by rust-vmm's traits: [`vm_memory`] |
//! | add, move or remove memory; share it with another process | [`MemorySlots`]; [`memory`] |
//! | learn which pages the guest has written | [`LogReader`], [`dirty`] |
//! | read or export the counters; change settings of a running VM | [`Vm::metrics`]; [`settings`] |
//! | start a guest whose memory is elsewhere | a page [`source`], [`MissingMemory`] |
//! | hold all vCPUs for a while, make them return, end the guest | [`Running`]; [`Kick`] |
//! | save a vCPU, and restore it here or elsewhere | [`SaveRestore`], [`state`] |
//! | save a guest; move it to another process, or the other backend | [`migrate`]; [`CpuModel`] |
//!
//! # Threads
//! A vCPU belongs to one thread at a time, which calls its functions. Any other thread, and any
//! [`Device`], may use the VM meanwhile: read and write guest memory, change slots, harvest the
//! log, provide pages, kick. A change of slots and a harvest wait until every vCPU has left the
//! guest. A pause waits for the vCPUs' threads, so a device must not begin one.
//! [`DirtyTracking`], [`MissingMemory`] and [`Running`] have the rules of their calls.
//!
//! # Features
//! Without the default features `soft`, `kvm`, `migrate`, `virtio` and `vm-memory`, their modules
//! are absent; without `zstd`, migrations compress with LZ4 alone; without `arm64`, soft has x86-64
//! only. `objects`: snapshots in S3 stores; `tls`: moves over TLS. [`soft`] has settings for speed.
#![forbid(unsafe_code)]

pub mod boot;
pub mod device;
pub mod dirty;
pub mod interrupt;
pub mod kvm;
pub mod memory;
pub mod metrics;
pub mod migrate;
pub mod missing;
pub mod objects;
pub mod settings;
pub mod soft;
pub mod source;
pub mod state;
pub mod virtio;
pub mod vm_memory;

pub use lacuna_addr::{Gfn, GfnRange, Gpa, PAGE_SIZE, PageCount};
pub use lacuna_machine::{
    Apf, ApfSwitch, Arch, Backend, BackendError, Boot, Builder, CpuModel, Device, DirtyTracking,
    Ending, ErrorKind, Exit, ExitCounts, ExitKind, GuestMemory, Image, Interrupts, Kick, Layout,
    LogReader, Machine, MachineError, MemorySlots, MissingMemory, Paused, PlatformDevices, RunEnd,
    Running, SaveRestore, VCPUS_MAX, Vcpu, VcpuError, VcpuStats, Vm, VmConfig, VmStats,
};
pub use lacuna_sync::{Clock, HostClock, Nanos};
