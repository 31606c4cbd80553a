//! The backend on Linux's `/dev/kvm`. Its memory is Linux's; its pages come by userfaultfd.
//!
//! A budget of resident pages ([`VmBuilder::resident`]) saves no memory of the host here: evicted
//! pages stay in this process, in a second mapping. [`soft`](crate::soft) swaps pages out.
//!
//! [`available`] returns whether this machine can run it, and if not, why. On a host without
//! hardware support for guests (`kvm_pvm`), KVM emulates the instructions of guest kernels one by
//! one: work at CPL 0 is far slower there than on [`soft`](crate::soft).

pub use lacuna_kvm::{
    FirstTouch, KvmError, LatencySetting, MapError, SourceConfig, SourceStats, Tracker,
    Unavailable, Vcpu, Vm, VmBuilder, available,
};
