//! The soft backend: a hypervisor in user space, without `/dev/kvm`.
//!
//! It connects crates that do not import each other. A software processor (`lacuna-x86`) accesses
//! memory through a [`Bus`](lacuna_cpu::Bus). Here the bus is stage 2 and the fault path
//! (`lacuna-mmu`). Outside, a vCPU implements the traits of `lacuna-machine`.
//!
//! | file | job |
//! |---|---|
//! | `vm`, `boot` | one VM: what its vCPUs share; from a VM to its vCPUs |
//! | `meter`, `stall` | counters of a vCPU that other threads read |
//! | `bus` | a vCPU's view of memory: stage-2 walk, faults |
//! | `entry` | a processor and its bus, between two quiescent points |
//! | `vcpu`, `step` | one step of a vCPU, and the thread-mode loop around it |
//! | `code`, `frame_set` | write tracking of pages that hold decoded instructions |
//! | `exclusive` | stops all vCPUs for split locks |
//! | `seeded` | all vCPUs of one or more VMs on one thread, under a virtual clock and a seed |
//! | `interface` | the backend interface of `lacuna_machine` |
//! | `error`, `kind`, `builder` | from a description of a run to its end, or why not |
//! | `layout`, `balloon` | memory slots of a running VM, and pages that are taken back |
//! | `platform`, `x86` | what an architecture adds to its processor |
//! | `missing`, `tokens` | exits on missing memory, and pages that the VMM provides |
//! | `memory`, `dirty` | guest memory for loaders, devices and viewers; dirty tracking |
//! | `state` | a vCPU's whole state, saved and restored |
//!
//! # Unsafe
//! One `unsafe impl` (in `bus`): a page given to a processor stays valid until the vCPU's next
//! quiescent point. The shoot-down protocol of `lacuna_sync::Qsbr` ensures this.
#![deny(unsafe_code)]

mod apf;
mod balloon;
mod boot;
mod builder;
mod bus;
mod code;
mod dirty;
mod entry;
mod error;
mod exclusive;
mod frame_set;
mod interface;
mod kind;
mod layout;
mod memory;
mod meter;
mod missing;
mod park;
mod platform;
mod seeded;
mod stall;
mod state;
mod step;
mod tokens;
mod vcpu;
mod vm;
mod x86;

pub use builder::{RunSummary, Swap, VmBuilder};
pub use entry::Entry;
pub use error::SoftError;
pub use lacuna_apf::Stats as ApfStats;
pub use lacuna_host::{
    Background, Host, HostError, HostStats, HugePages, LatencySetting, MmuNotifier,
};
pub use lacuna_machine::{Apf, CpuModel, ErrorKind, Observed, VmConfig};
pub use lacuna_mmu::{
    Backup, Delivery, Detection, DirtyError, DirtyStats, HugeLeaves, Initially, Logging, RingSize,
    Room,
};
pub use lacuna_mmu::{Mmu, MmuError, Outcome as Fault, SlotSpec, VcpuMmu};
#[cfg(feature = "comparisons")]
pub use lacuna_mmu::{Recovery, RmapWalk, Steps};
pub use lacuna_slots::{SlotError, SlotFlags, SlotId};
pub use lacuna_stage2::Walk;
pub use platform::Platform;
pub use seeded::{SimulatedVm, Simulator, SimulatorConfig, Timed, Trace};
pub use stall::Stalls;
pub use step::{Step, Wait};
pub use vcpu::{Vcpu, VcpuOf};
pub use vm::{BootMemory, MemoryKind, Vm};
