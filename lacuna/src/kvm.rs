//! The backend on Linux's `/dev/kvm`. The host manager has the guests' memory, as on
//! [`soft`](crate::soft): pages beyond the budget ([`VmBuilder::resident`]) go to the swap device
//! ([`VmBuilder::swap`](crate::kvm::VmBuilder::swap)).
//!
//! [`available`] returns whether this machine can run it, and if not, why. On a host without
//! hardware support for guests (`kvm_pvm`), KVM emulates the instructions of guest kernels one by
//! one: work at CPL 0 is far slower there than on [`soft`](crate::soft).
//!
//! # Signals
//! A real-time signal makes a vCPU's thread leave `KVM_RUN`: `SIGRTMIN+4`, or the one of
//! [`set_kick_signal`]. Its handler does nothing, and replaces any other. The threads of vCPUs must
//! not block this signal.
#![cfg(feature = "kvm")]

pub use lacuna_kvm::{
    KickSignalError, KvmError, MemoryCapability, Tracker, Unavailable, Vcpu, Vm, VmBuilder,
    available, memory_capabilities, set_kick_signal, tsc_khz,
};
