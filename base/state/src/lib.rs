//! The whole state of a vCPU as one value: saved by one backend, restored by the same or another.
//! The state shared by a VM's vCPUs is a second value. A processor in software saves into these
//! types, a backend fills them from the hypervisor below, and snapshots and streams contain them.
//!
//! | file | job |
//! |---|---|
//! | `x86`, `x86/cpuid` | an x86-64 vCPU, its VM, and the features that its guest sees |
//! | `arm64`, `arm64/sysreg`, `arm64/id` | an AArch64 vCPU, its VM, and the features likewise |
//! | `tagged` | the same with the architecture as a tag |
//! | `error` | why a state is refused |
#![forbid(unsafe_code)]

mod apf;
pub mod arm64;
mod error;
mod tagged;
mod words;
pub mod x86;

pub use apf::Apf;
pub use error::StateError;
pub use tagged::{ProcessorFeatures, SharedState, VcpuState};
