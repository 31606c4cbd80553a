//! The kvm backend, in a minimal form: x86-64 guests on `/dev/kvm`, their memory from userfaultfd.
//!
//! KVM runs the vCPUs and is the host side of asynchronous page faults; Linux is the memory
//! manager. What is ours is the far end of a page fault: a [page source](SourceConfig) of chosen
//! latency, with a budget of pages that may be in place. So the guest image that runs on the soft
//! backend meets the real ABI here.
//!
//! | file | job |
//! |---|---|
//! | `available` | whether this machine can, and if not, why |
//! | `memory` | the guest's memory in this process |
//! | `pages` | which page is where, and which one leaves: decisions |
//! | `source` | the page source: a thread on userfaultfd that carries them out |
//! | `setup` | a vCPU's first state: CPUID, registers |
//! | `vcpu` | `KVM_RUN` and its exits |
//! | `kick` | getting vCPUs out of it |
//! | `vm` | one VM: descriptors, slots, memory, source |
//! | `launch` | from a description of a run to its end |
//!
//! # Unsafe
//! An unsafe room: KVM and userfaultfd act on this process's memory by address. Pointers are in
//! `memory` (the guest's bytes, as atomics), `vcpu` and `kick` (a vCPU's shared page), `vm` and
//! `source` (registration of ranges). Each file's header has its reason.

mod available;
mod error;
mod kick;
mod launch;
mod memory;
mod pages;
mod setup;
mod source;
mod vcpu;
mod vm;

pub use available::{Unavailable, available};
pub use error::KvmError;
pub use lacuna_machine::Apf;
pub use lacuna_sync::Dial;
pub use launch::{Launch, Observed, Outcome};
pub use memory::MapError;
pub use pages::FirstTouch;
pub use source::{SourceConfig, SourceStats};
pub use vcpu::Vcpu;
pub use vm::{Vm, VmConfig};
