//! The backend on Linux's `/dev/kvm`. Its memory is Linux's; its pages come by userfaultfd.
//!
//! [`available`] says whether this machine can run it, and if not, what is missing.

pub use lacuna_kvm::{
    FirstTouch, KvmError, LatencySetting, MapError, RunSummary, SourceConfig, SourceStats, Tracker,
    Unavailable, Vcpu, Vm, VmBuilder, available,
};
