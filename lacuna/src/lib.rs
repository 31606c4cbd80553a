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
//! [`soft`] has software processors and needs nothing of the host. [`kvm`] runs the same images on
//! `/dev/kvm`. A VMM generic over [`Builder`] runs on both, as `examples/vmm.rs` does.
//!
//! [`Builder::start`] boots a [`Vm`] in a [`Machine`], which has a thread for each [`Vcpu`] and
//! sends accesses to [`PlatformDevices`]. With more to do, call [`Builder::build`],
//! [`Machine::new`], [`Vm::boot`] or a restore, and [`Machine::start`]. The [`Running`] guest is
//! paused, saved, moved and watched, and ends when it is dropped. In a loop of your own,
//! [`Vcpu::run`] returns an [`Exit`] when the VMM must act.
//!
//! # The guest
//! `guest/build-guest.sh` of Lacuna's repository makes an image of one C file with a `main`. It
//! runs as a process on Lacuna's guest kernel. For a kernel of your own, [`Image`] describes the
//! file, [`Boot`] the state in which it starts, [`Layout`] the addresses of its memory, and
//! [`PlatformDevices`] the devices. A workspace with the path dependency `lacuna-guest` has the
//! built-in guests: `lacuna_guest::image("churn")`.
//!
//! # What a VMM can do
//!
//! | to | a VMM uses |
//! |---|---|
//! | answer a guest's port or MMIO access | [`Device`], or its own loop over [`Exit`] |
//! | add a device, and move it with the guest | [`PlatformDevices::add_mmio`], [`Device::save`] |
//! | give the guest a disk, a console, a balloon or entropy | [`virtio`] |
//! | interrupt the guest | [`Vm::interrupts`]: a [`Line`], or an [`Msi`] |
//! | read and write guest memory | [`GuestMemory`] |
//! | add, move or remove memory while the guest runs | [`MemorySlots`] |
//! | learn which pages the guest has written | [`LogReader`] |
//! | hold all vCPUs for a while | [`Running::pause`] |
//! | start a guest whose memory is elsewhere | [`PageSource`], [`MissingMemory`] |
//! | make vCPUs leave the guest and return to the VMM | [`Kick`] |
//! | end the guest | [`Running::stop`], [`PlatformDevices::end`] |
//! | save a vCPU, and restore it here or elsewhere | [`SaveRestore`], [`Vm::save_shared`] |
//! | save a whole guest, or move it to another process | [`migrate`] |
//!
//! # Threads
//! A vCPU belongs to one thread at a time, which calls its functions. Any other thread may use the
//! VM meanwhile: read and write guest memory, change slots, harvest the log, provide pages, kick.
//! A change of slots, a harvest and a pause wait until every vCPU has left the guest, so the thread
//! of a vCPU must not call them. [`MemorySlots`], [`DirtyTracking`], [`LogReader`],
//! [`MissingMemory`] and [`Running`] have the rules of their calls.
//!
//! # Guest memory by `vm-memory`'s traits
//! The default feature `vm-memory` adds two adapters. [`vm_memory::View`] gives code for rust-vmm's
//! `Bytes<GuestAddress>` access to a guest of this crate. [`vm_memory::Foreign`] lets the loaders
//! of this crate write into guest memory of another VMM.
//!
//! # Speed
//! A program that depends on this crate has to set three things itself: see [`soft`]. The [`kvm`]
//! backend needs none of them.
#![forbid(unsafe_code)]

pub mod kvm;
pub mod migrate;
pub mod soft;
#[cfg(feature = "virtio")]
pub mod virtio;
#[cfg(feature = "vm-memory")]
pub mod vm_memory;

pub use lacuna_addr::{Gfn, GfnRange, Gpa, PAGE_SIZE, PageCount};
pub use lacuna_machine::*;
pub use lacuna_sync::{Clock, HostClock, Nanos};
