//! What is behind guest memory: slots, the kinds of host memory, and swap.

pub use lacuna_host::{
    Host, HostError, HostStats, HugePages, LatencySetting, LinuxBacking, LogNormal, MemoryKind,
    PrivateFile, SharedFill, SharedMemory, Swap,
};
pub use lacuna_machine::{
    Balloon, HugePagePolicy, MemoryError, MemoryFaultFlags, MemorySlot, MemorySlotError,
    SharedFile, SlotError, SlotFlags, SlotId,
};
