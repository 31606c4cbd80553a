//! What is behind guest memory: slots, the kinds of host memory, and swap.
//!
//! # Memory shared with another process
//! The VMM gives the VM a memory file, its own ([`SharedMemory::of_file`]) or a new one. Another
//! process gets the descriptor ([`Vm::shared_file`](crate::Vm::shared_file)) and maps it.
//! [`SharedFile`] says how its writes get into a snapshot or a migration.
//!
//! ```
//! use lacuna::memory::{LinuxBacking, SharedFill, SharedMemory};
//! use lacuna::{Builder, PageCount, Vm, soft};
//!
//! let size = PageCount::from_bytes(16 << 20);
//! let memory = SharedMemory::new(size, SharedFill::CopiedIn)?;
//! let mut builder = soft::VmBuilder::new(size, size);
//! builder.backing = Some(LinuxBacking::Shared(memory));
//! let vm = builder.build()?;
//! let shared = vm.shared_file().ok_or("it was made with a file")?;
//! println!("its memory begins at byte {} of {:?}", shared.offset, shared.file);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Signals
//! The host manager handles `SIGBUS`, for pages that the kernel takes away. It calls the earlier
//! handler for any other, and a handler installed later has to call it. Where another process fills
//! a guest's memory, threads that wait for pages are interrupted by the first real-time signal from
//! `SIGRTMIN+5` on that has no handler. Kicks of vCPUs are another signal's:
//! [`kvm`](crate::kvm#signals).

pub use lacuna_addr::{NoRoom, PageStates};
pub use lacuna_host::{
    Host, HostError, HostStats, HugePages, LatencySetting, LinuxBacking, LinuxError, LogNormal,
    MemoryKind, PrivateFile, SetupFailed, SharedFill, SharedMemory, Swap, SwapFile,
};
pub use lacuna_machine::{
    Balloon, HugePagePolicy, MemoryError, MemoryFaultFlags, MemorySlot, MemorySlotError, PageMap,
    PageOut, SharedFile, SlotError, SlotFlags, SlotId,
};
