//! The soft backend: a hypervisor in user space, without `/dev/kvm`.
//!
//! It connects crates that do not import each other: a software processor (`lacuna-x86` or
//! `lacuna-arm64`), and its [`Bus`](lacuna_cpu::Bus), which is the fault path of `lacuna-mmu`.
//!
//! | file | job |
//! |---|---|
//! | `vm`, `boot`, `meter`, `stall` | one VM: its shared state; its vCPUs; their counters |
//! | `bus`, `entry` | a vCPU's memory: stage-2 walk, faults; a processor between quiescent points |
//! | `vcpu`, `step`, `either`, `mmu` | one step of a vCPU, its loop; of any architecture |
//! | `code`, `frame_set`, `exclusive` | writes to decoded pages; all vCPUs stopped at once |
//! | `seeded` | all vCPUs of one or more VMs on one thread, under a virtual clock and a seed |
//! | `interface`, `eventfds`, `ioeventfd`, `builder`, `error`, `kind` | the backend interface |
//! | `memory`, `dirty`, `layout`, `balloon` | guest memory as bytes, pages written, slots |
//! | `missing`, `tokens` | exits on missing memory, and pages that the VMM provides |
//! | `platform`, `x86`, `arm64`, `state` | the additions of an architecture to its processor |
//!
//! # Unsafe
//! One `unsafe impl` (in `bus`): by the shoot-down protocol of `lacuna_sync::Qsbr`, a processor's
//! page stays valid until the vCPU's next quiescent point.
#![deny(unsafe_code)]

mod apf;
mod arm64;
mod balloon;
mod boot;
mod builder;
mod bus;
mod code;
mod dirty;
mod either;
mod entry;
mod error;
mod eventfds;
mod exclusive;
mod frame_set;
mod interface;
mod ioeventfd;
mod kind;
mod layout;
mod memory;
mod meter;
mod missing;
mod mmu;
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

pub use builder::{RunSummary, VmBuilder};
pub use either::Vcpu;
pub use entry::Entry;
pub use error::SoftError;
pub use lacuna_apf::Stats as ApfStats;
pub use lacuna_host::{
    Background, Host, HostError, HostStats, HugePages, LatencySetting, LinuxBacking, LinuxError,
    LogNormal, MemoryKind, MmuNotifier, PrivateFile, SharedFill, SharedMemory, Swap,
};
pub use lacuna_machine::{Apf, CpuModel, ErrorKind, VmConfig};
pub use lacuna_mmu::{
    Backup, Delivery, Detection, DirtyError, DirtyStats, HugeLeaves, Initially, Logging, Mmu,
    MmuError, RingSize, SlotSpec,
};
#[cfg(feature = "comparisons")]
pub use lacuna_mmu::{Recovery, RmapWalk, Steps};
pub use lacuna_slots::{SlotError, SlotFlags, SlotId};
pub use lacuna_stage2::{Arm64, Ept};
pub use mmu::{Format, VmMmu};
pub use platform::{Platform, Power};
pub use seeded::{SimulatedVm, Simulator, SimulatorConfig, Timed, Trace};
pub use stall::Stalls;
pub use step::{Step, Wait};
pub use vcpu::VcpuOf;
pub use vm::{BootMemory, Vm};
