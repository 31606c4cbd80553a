//! The parts of the backend on unsupported architectures. [`check`] refuses first, so no VM and no
//! vCPU exists.

use crate::error::{KvmError, Unavailable};
use kvm_ioctls::{Error, Kvm, VcpuFd, VmFd};
use lacuna_machine::{Boot, StateError, VcpuState, VmConfig};
use std::convert::Infallible;

/// Refuses every VM.
pub fn check() -> Result<(), Unavailable> {
    Err(Unavailable::Architecture)
}

/// Makes nothing.
pub fn make_controllers(_: &VmFd, _: usize) -> Result<(), KvmError> {
    Err(Unavailable::Architecture.into())
}

/// Knows no register.
pub fn program_counter(_: &VcpuFd) -> Result<String, Error> {
    Err(Error::new(libc::EOPNOTSUPP))
}

/// Knows no TSC.
pub fn tsc_khz(_: &VcpuFd) -> Option<u32> {
    None
}

/// The features of a guest's processors. There is no value of this type.
pub struct Features(Infallible);

/// The registers of a new vCPU.
pub struct Fresh;

impl Features {
    pub fn of(_: &Kvm, _: &VmConfig) -> Result<Self, Error> {
        Err(Error::new(libc::EOPNOTSUPP))
    }

    pub fn missing(&self) -> Option<&'static str> {
        match self.0 {}
    }

    pub fn set_tsc(&self, _: &VcpuFd, _: usize, _: u32) -> Result<bool, Error> {
        match self.0 {}
    }

    pub fn has_apf(&self) -> bool {
        match self.0 {}
    }

    pub fn address_bits(&self) -> u32 {
        match self.0 {}
    }

    pub fn kvm_features(&self) -> u32 {
        match self.0 {}
    }

    pub fn start(&self, _: &VcpuFd, _: usize, _: Option<&Boot>) -> Result<(), Error> {
        match self.0 {}
    }

    pub fn fresh(&self, _: &VcpuFd) -> Fresh {
        Fresh
    }
}

/// Saves nothing.
pub fn save(_: &VcpuFd, _: &Features, _: &Fresh) -> Result<VcpuState, StateError> {
    Err(StateError::Architecture)
}

/// An accepted state. There is no value of this type.
pub struct Accepted(Infallible);

/// Accepts no state.
pub fn accept(
    _: &VcpuFd,
    _: usize,
    _: &Features,
    _: &Fresh,
    _: &VcpuState,
) -> Result<Accepted, StateError> {
    Err(StateError::Architecture)
}

/// Restores nothing.
pub fn restore(_: &VcpuFd, _: &Fresh, state: Accepted) -> Result<(), StateError> {
    match state.0 {}
}

/// No guest gets an event.
pub mod apf {
    use crate::error::{KvmError, Unavailable};
    use kvm_ioctls::{Error, VcpuFd, VmFd};
    use lacuna_apf::x86::CpuState;
    use lacuna_machine::StateError;

    fn refused<T>() -> Result<T, Error> {
        Err(Error::new(libc::EOPNOTSUPP))
    }

    pub fn take(_: &VmFd) -> Result<(), KvmError> {
        Err(Unavailable::Architecture.into())
    }

    pub fn is_interruptible(_: &VcpuFd) -> Result<bool, Error> {
        refused()
    }

    pub fn state(_: &VcpuFd) -> Result<CpuState, Error> {
        refused()
    }

    pub fn inject_page_fault(_: &VcpuFd, _: u64) -> Result<(), Error> {
        refused()
    }

    pub fn interrupt(_: &VmFd, _: usize, _: u8) -> Result<(), Error> {
        refused()
    }

    pub fn is_halted(_: &VcpuFd) -> Result<bool, Error> {
        refused()
    }

    pub fn unhalt(_: &VcpuFd) -> Result<(), Error> {
        refused()
    }

    pub fn remember(_: &VcpuFd) -> Result<(), StateError> {
        Err(StateError::Architecture)
    }

    pub fn has_forgotten(_: &VcpuFd) -> bool {
        false
    }

    #[cfg(test)]
    pub fn latch_init(_: &VcpuFd) -> Result<(), Error> {
        refused()
    }
}

/// No VM has an interrupt controller.
pub mod interrupts {
    use kvm_ioctls::{Error, VmFd};
    use lacuna_machine::{Arch, InterruptError, Msi, SharedState, StateError};

    /// The number of lines.
    pub const PINS: u32 = 0;

    pub fn connect(_: &VmFd, _: impl IntoIterator<Item = (u32, Msi)>) -> Result<(), Error> {
        Err(Error::new(libc::EOPNOTSUPP))
    }

    pub fn set_line(_: &VmFd, _: u32, _: bool) {}

    pub fn send_msi(_: &VmFd, _: Msi) -> Result<(), InterruptError> {
        Err(InterruptError::NoMessages(Arch::Arm64))
    }

    pub fn save_shared(_: &VmFd) -> Result<SharedState, StateError> {
        Err(StateError::Architecture)
    }

    pub fn restore_shared(_: &VmFd, _: &SharedState) -> Result<(), StateError> {
        Err(StateError::Architecture)
    }
}
