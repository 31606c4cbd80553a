//! States with the architecture as a tag.

use crate::{StateError, arm64, x86};
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
