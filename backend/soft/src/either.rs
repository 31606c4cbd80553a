//! A virtual processor of any architecture, for callers that choose the architecture at run time.
//!
//! Each call has one `match`. Guest code runs inside a call, so its accesses do not pay for it.

use crate::error::SoftError;
use crate::platform::Platform;
use crate::step::Step;
use crate::vcpu::VcpuOf;
use crate::vm::Vm;
use lacuna_machine::{
    Exit, FaultToken, Image, MissingMemory, SaveRestore, SharedState, StateError, TokenError,
    VcpuError, VcpuState,
};
use std::sync::Arc;

/// A virtual processor of the soft backend.
#[allow(
    clippy::large_enum_variant,
    reason = "a VM has few vCPUs, and each moves once, to its thread"
)]
pub enum Vcpu {
    /// An x86-64 processor.
    X86(VcpuOf<lacuna_x86::Cpu>),
    /// An AArch64 processor.
    #[cfg(feature = "arm64")]
    Arm64(VcpuOf<lacuna_arm64::Cpu>),
}

macro_rules! each {
    ($self:expr, $vcpu:ident => $body:expr) => {
        match $self {
            Vcpu::X86($vcpu) => $body,
            #[cfg(feature = "arm64")]
            Vcpu::Arm64($vcpu) => $body,
        }
    };
}

impl Vcpu {
    /// The processor, if it is an x86-64 one.
    pub fn as_x86(&self) -> Option<&VcpuOf<lacuna_x86::Cpu>> {
        match self {
            Self::X86(vcpu) => Some(vcpu),
            #[cfg(feature = "arm64")]
            Self::Arm64(_) => None,
        }
    }

    /// The processor, if it is an AArch64 one.
    #[cfg(feature = "arm64")]
    pub fn as_arm64(&self) -> Option<&VcpuOf<lacuna_arm64::Cpu>> {
        match self {
            Self::X86(_) => None,
            Self::Arm64(vcpu) => Some(vcpu),
        }
    }

    /// As [`VcpuOf::reset`].
    pub fn reset(&mut self) {
        each!(self, vcpu => vcpu.reset());
    }

    /// As [`VcpuOf::step`].
    pub fn step(&mut self, fuel: u64) -> Step {
        each!(self, vcpu => vcpu.step(fuel))
    }

    /// As [`VcpuOf::retired`].
    pub fn retired(&self) -> u64 {
        each!(self, vcpu => vcpu.retired())
    }

    /// As [`VcpuOf::verify`].
    ///
    /// # Panics
    /// If an invariant is broken.
    pub fn verify(&self) {
        each!(self, vcpu => vcpu.verify());
    }

    /// As [`VcpuOf::reclaim`].
    ///
    /// # Errors
    /// There is no memory.
    pub fn reclaim(&mut self) -> Result<(), VcpuError> {
        each!(self, vcpu => vcpu.reclaim())
    }

    /// Calls `note` with the program counter, the flags and the general registers, for traces.
    pub fn note_registers(&self, note: impl FnMut(u64)) {
        each!(self, vcpu => vcpu.entry.cpu.note_registers(note));
    }

    pub(crate) fn is_poked(&self) -> bool {
        each!(self, vcpu => vcpu.is_poked())
    }
}

impl lacuna_machine::Vcpu for Vcpu {
    fn index(&self) -> usize {
        each!(self, vcpu => vcpu.index())
    }

    fn run(&mut self) -> Result<Exit, VcpuError> {
        each!(self, vcpu => vcpu.run())
    }

    fn complete_read(&mut self, value: u64) {
        each!(self, vcpu => vcpu.complete_read(value));
    }

    fn missing_memory(&self) -> Option<&dyn MissingMemory> {
        each!(self, vcpu => vcpu.missing_memory())
    }

    fn accept(&mut self, token: FaultToken) -> Result<(), TokenError> {
        each!(self, vcpu => vcpu.accept(token))
    }
}

impl SaveRestore for Vcpu {
    fn save(&mut self) -> Result<VcpuState, StateError> {
        each!(self, vcpu => vcpu.save())
    }

    fn restore(&mut self, state: &VcpuState) -> Result<(), StateError> {
        each!(self, vcpu => vcpu.restore(state))
    }
}

fn all<P: Platform>(vcpus: Vec<VcpuOf<P>>, of: impl Fn(VcpuOf<P>) -> Vcpu) -> Vec<Vcpu> {
    vcpus.into_iter().map(of).collect()
}

impl Vm {
    /// [`lacuna_machine::Vm::boot`].
    pub(crate) fn boot_any(
        self: &Arc<Self>,
        image: &Image<'_>,
        command_line: &str,
    ) -> Result<Vec<Vcpu>, SoftError> {
        Ok(match self.config.arch {
            #[cfg(feature = "arm64")]
            lacuna_machine::Arch::Arm64 => all(self.boot_on(image, command_line)?, Vcpu::Arm64),
            _ => all(self.boot_on(image, command_line)?, Vcpu::X86),
        })
    }

    /// [`lacuna_machine::Vm::save_shared`].
    pub(crate) fn save_any(&self) -> SharedState {
        match self.config.arch {
            #[cfg(feature = "arm64")]
            lacuna_machine::Arch::Arm64 => self.save_arm64(),
            _ => self.save_x86(),
        }
    }

    /// [`lacuna_machine::Vm::restore_shared`].
    pub(crate) fn restore_any(&self, state: &SharedState) -> Result<(), StateError> {
        match self.config.arch {
            #[cfg(feature = "arm64")]
            lacuna_machine::Arch::Arm64 => self.restore_arm64(state),
            _ => self.restore_x86(state),
        }
    }

    /// [`lacuna_machine::Vm::bare_vcpus`].
    pub(crate) fn bare(self: &Arc<Self>) -> Result<Vec<Vcpu>, SoftError> {
        self.make_once(|| {
            Ok(match self.config.arch {
                #[cfg(feature = "arm64")]
                lacuna_machine::Arch::Arm64 => all(self.make_vcpus(None)?, Vcpu::Arm64),
                _ => all(self.make_vcpus(None)?, Vcpu::X86),
            })
        })
    }
}
