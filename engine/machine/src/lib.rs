//! The outside of a virtual machine: exits, devices, images and the machine that runs a guest.
//!
//! * [`Vm`], [`Builder`]: the interface that every backend implements, and its optional powers.
//! * [`Vcpu`], [`Exit`]: one processor and its returns to the VMM; [`SaveRestore`]: its whole state
//!   as one value ([`VcpuState`]). [`SharedState`] belongs to the VM.
//! * [`GuestMemory`], [`MemorySlots`], [`DirtyTracking`]: memory as bytes, as slots, as written
//!   pages. [`LogReader`]s share the log of writes.
//! * [`MissingMemory`]: pages that the VMM provides to a running guest.
//! * [`Image`], [`Boot`], [`boot::arm64::Boot`]: a PVH or arm64 kernel becomes writes and a state.
//! * [`PlatformDevices`]: the devices of every guest, and the VMM's own [`Device`]s.
//!   [`Interrupts`]: their [`Line`]s and messages. [`IoEventFd`]: a write signals an eventfd.
//! * [`Machine`], [`Running`]: a VM with its devices and a thread for each vCPU.
//! * [`ErrorKind`]: whether an error is due to the request, the guest or the host.
//!
//! This crate knows no processor, no tables and no memory manager, and not `lacuna-mmu`.
#![forbid(unsafe_code)]

mod arch;
pub mod boot;
mod devices;
mod dirty;
mod exit;
mod image;
mod interrupts;
mod ioeventfd;
mod kick;
mod kind;
mod log_reader;
mod machine;
mod memory;
mod missing;
mod pause;
mod run;
pub mod settings;
mod slots;
mod state;
mod token_life;
mod tokens;
mod vm;

pub use arch::Arch;
pub use boot::{BootError, Layout, x86::Boot};
pub use devices::{
    Access, Console, Device, DeviceError, DeviceState, DevicesState, Ending, PausedDevices,
    PlatformDevices, SerialRegisters, check_reserved, mmio, port,
};
pub use dirty::{
    DetectionChoice, DirtyRings, DirtyTracking, TwoStepLog, harvest, set_logging_everywhere,
};
pub use exit::counts::{ExitCounters, ExitCounts, ExitKind};
pub use exit::{Exit, MemoryFaultFlags, Vcpu, VcpuError, Width};
pub use image::{Image, ImageError, Segment};
pub use interrupts::{
    EventFd, Input, InterruptController, InterruptError, InterruptLines, Interrupts, Line, Msi,
};
pub use ioeventfd::{GuestWrite, IoAddress, IoBus, IoEventFd, IoEventFdError, WriteMatch};
pub use kick::Kick;
pub use kind::ErrorKind;
pub use lacuna_slots::{
    Backup, ClearError, Delivery, DetectedBy, Detection, DirtyError, DirtyStats, HugeLeaves,
    Initially, Logging, RingSize, RingSizeError, SlotError, SlotFlags, SlotId,
};
pub use lacuna_source::{
    Answer, External, FailureKind, HandlerError, HandlerRegion, PageRequest, PageSource, Policy,
    SourcePage, WhenGone,
};
pub use lacuna_state::{Apf, ProcessorFeatures, SharedState, StateError, VcpuState, arm64, x86};
pub use log_reader::{LogReader, LogReaders};
pub use machine::{Machine, MachineError, Running};
pub use memory::{Balloon, GuestMemory, MemoryError, PageMap, PageOut};
pub use missing::{FaultToken, MissingMemory, Provided, ReadyOutcome, TokenError};
pub use pause::Paused;
pub use run::{Next, dispatch};
pub use slots::{MemorySlot, MemorySlotError, MemorySlots};
pub use state::SaveRestore;
pub use tokens::Tokens;
pub use vm::{
    ApfSwitch, Backend, BackendError, Builder, CpuModel, HugePagePolicy, RunEnd, SharedFile,
    VCPUS_MAX, VcpuStats, VcpuTimes, Vm, VmConfig, VmStats,
};
