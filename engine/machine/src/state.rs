//! The whole state of a vCPU as one value: saved by one backend, restored by the same or another.
//! The state shared by a VM's vCPUs is a second value.

pub mod arm64;
mod words;
pub mod x86;

use crate::{DeviceError, Vcpu};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The state of a vCPU, tagged by its architecture.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub enum VcpuState {
    /// An x86-64 processor.
    X86(Box<x86::State>),
    /// An AArch64 processor.
    Arm64(Box<arm64::State>),
}

/// The features of a processor that its guest sees, tagged by the architecture.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ProcessorFeatures {
    /// An x86-64 processor.
    X86(x86::cpuid::Features),
    /// The ID registers of an AArch64 processor.
    Arm64(BTreeMap<arm64::SysReg, u64>),
}

/// The state of a VM that belongs to none of its vCPUs, tagged by the architecture. The VMM's
/// devices and the memory are not part of it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub enum SharedState {
    /// An x86-64 VM whose I/O APIC is as after a reset. Earlier versions saved no other.
    X86,
    /// An x86-64 VM.
    X86Shared(Box<x86::Shared>),
    /// An AArch64 VM.
    Arm64(Box<arm64::Shared>),
}

impl SharedState {
    /// The state of an x86-64 VM, with possible values.
    ///
    /// # Errors
    /// [`StateError`]: it is another VM's, or a field is wrong.
    pub fn x86(&self) -> Result<x86::Shared, StateError> {
        match self {
            Self::X86 => Ok(x86::Shared::default()),
            Self::X86Shared(shared) => shared.io_apic.check().map(|()| **shared),
            Self::Arm64(_) => Err(StateError::Architecture),
        }
    }
}

impl VcpuState {
    /// The features of the processor that the guest sees.
    pub fn features(&self) -> ProcessorFeatures {
        match self {
            Self::X86(state) => ProcessorFeatures::X86(state.features),
            Self::Arm64(state) => ProcessorFeatures::Arm64(state.id.clone()),
        }
    }
}

impl ProcessorFeatures {
    /// Checks that a processor with the features `own` can resume such a guest.
    ///
    /// # Errors
    /// [`StateError::Feature`], [`StateError::SystemRegister`] or [`StateError::Architecture`].
    pub fn check_in(&self, own: &Self) -> Result<(), StateError> {
        match (self, own) {
            (Self::X86(features), Self::X86(own)) => features.check_in(own),
            (Self::Arm64(id), Self::Arm64(own)) => arm64::check_id(id, own),
            _ => Err(StateError::Architecture),
        }
    }
}

/// A refused value in words. The VMM cannot change the value now: it chooses the processor of the
/// guest when the guest starts.
fn unsupported(field: &str, value: u64) -> String {
    match field {
        "tsc.khz" => format!(
            "tsc.khz: the guest's TSC runs at {value} kHz, and no TSC of this host does: start a \
             guest that will move here with `CpuModel::Common` and the frequency `kvm::tsc_khz` of \
             this host"
        ),
        _ => format!("{field}: this backend cannot take over {value:#x}"),
    }
}

/// Why a state is not saved or not restored.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum StateError {
    /// The vCPU waits for a device's answer in the middle of an instruction.
    #[error(
        "vCPU {vcpu} has left for a device, and its instruction is not complete: answer it, reset \
         a full dirty ring, kick the vCPU, and enter it until it returns `Interrupted`"
    )]
    MidInstruction {
        /// Which vCPU.
        vcpu: usize,
    },
    /// The state is of another architecture.
    #[error("this state is of another architecture than the vCPU or VM that restores it")]
    Architecture,
    /// The VM was made without an image, and lacks the state shared by its vCPUs.
    #[error(
        "vCPU {vcpu}: give the VM its own state first (`Vm::restore_shared`), then the states of \
         its vCPUs"
    )]
    SharedFirst {
        /// Which vCPU.
        vcpu: usize,
    },
    /// No processor of this kind can have that value.
    #[error("{field}: {value:#x} is no valid value")]
    Invalid {
        /// Which field.
        field: &'static str,
        /// Its value, or the wrong bits.
        value: u64,
    },
    /// A valid value that this backend does not support.
    #[error("{}", unsupported(field, *value))]
    Unsupported {
        /// Which field.
        field: &'static str,
        /// Its value, or the unsupported bits.
        value: u64,
    },
    /// The guest sees a feature that this processor lacks.
    #[error(
        "the guest sees {field} ({bits:#x}), which the processor here lacks: start a guest that \
         will move to another processor or backend with the common one (`CpuModel::Common`)"
    )]
    Feature {
        /// Which feature, or which word of features without names.
        field: &'static str,
        /// Its bits.
        bits: u64,
    },
    /// A model-specific register that this backend does not have.
    #[error("MSR {index:#x}: this backend cannot take over {value:#x}")]
    Msr {
        /// Which register.
        index: u32,
        /// Its value.
        value: u64,
    },
    /// A system register of AArch64 that this backend does not have, or not with that value: an ID
    /// register (`ID_AA64*_EL1`) has features that the processor here lacks.
    #[error("system register {register}: this backend cannot take over {value:#x}")]
    SystemRegister {
        /// Which register.
        register: arm64::SysReg,
        /// Its value.
        value: u64,
    },
    /// A device of the VMM's.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The hypervisor below refused.
    #[error("cannot {step}: {cause}")]
    Host {
        /// The refused step of the backend.
        step: &'static str,
        /// The message of the hypervisor.
        cause: String,
    },
}

/// Saves and restores the state of a vCPU, between two runs.
///
/// ```text
/// save      stop all vCPUs ─► Vm::save_shared ─► SaveRestore::save of each vCPU; memory
/// restore   Vm::bare_vcpus ─► memory ─► Vm::restore_shared ─► SaveRestore::restore of each vCPU
/// ```
///
/// A state is data. It may come from a file or a peer, damaged or hostile. A backend that restores
/// it checks every field. If a field is wrong, the error names it, and the vCPU keeps its state.
/// Only the hypervisor below can refuse half-way ([`StateError::Host`]); the vCPU must then be
/// restored again or dropped.
///
/// The vCPU's owning thread calls this: see [`Running::pause`](crate::Running::pause) for running
/// vCPUs.
///
/// Pages on their way to the guest are not part of a state. If the guest has enabled asynchronous
/// page faults, it gets a *wake-all* after a restore: every thread waiting for a page retries its
/// access.
pub trait SaveRestore: Vcpu {
    /// The vCPU's present state. The vCPU does not change, and may be entered again.
    ///
    /// # Errors
    /// [`StateError::MidInstruction`], or the hypervisor below refuses.
    fn save(&mut self) -> Result<VcpuState, StateError>;

    /// Puts the vCPU into `state`. Restore the guest's memory and the VM's own state first.
    ///
    /// # Errors
    /// [`StateError`], with the name of the field; the vCPU keeps its state. A hypervisor below
    /// that cannot forget a half-done instruction refuses with [`StateError::MidInstruction`].
    fn restore(&mut self, state: &VcpuState) -> Result<(), StateError>;
}
