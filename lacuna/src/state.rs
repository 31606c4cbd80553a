//! The state of vCPUs and of their VM, as values: see [`SaveRestore`](crate::SaveRestore).

pub use lacuna_machine::{ProcessorFeatures, SharedState, StateError, VcpuState, arm64, x86};
