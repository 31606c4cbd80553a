//! What is behind guest memory: slots, the kinds of host memory, and swap.
//!
//! # Signals
//! The host manager handles `SIGBUS`, for pages that the kernel takes away. It calls the earlier
//! handler for any other, and a handler installed later has to call it. Where another process fills
//! a guest's memory, threads that wait for pages are interrupted by the first real-time signal from
//! `SIGRTMIN+5` on that has no handler. Kicks of vCPUs are another signal's:
//! [`kvm`](crate::kvm#signals).

pub use lacuna_host::{
    Host, HostError, HostStats, HugePages, LatencySetting, LinuxBacking, LogNormal, MemoryKind,
    PrivateFile, SharedFill, SharedMemory, Swap,
};
pub use lacuna_machine::{
    Balloon, HugePagePolicy, MemoryError, MemoryFaultFlags, MemorySlot, MemorySlotError,
    SharedFile, SlotError, SlotFlags, SlotId,
};
