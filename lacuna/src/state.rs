//! The state of vCPUs and of their VM, as values: see [`SaveRestore`](crate::SaveRestore).

pub use lacuna_machine::{SharedState, StateError, VcpuState, arm64, x86};
