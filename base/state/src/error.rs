//! Why a state is not saved or not restored.

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
        register: crate::arm64::SysReg,
        /// Its value.
        value: u64,
    },
    /// The hypervisor below refused.
    #[error("cannot {step}: {cause}")]
    Host {
        /// The refused step of the backend.
        step: &'static str,
        /// The message of the hypervisor.
        cause: String,
    },
}

impl StateError {
    /// Refuses `value`, or its wrong bits, as [`StateError::Invalid`].
    ///
    /// # Errors
    /// Always.
    pub fn invalid<T>(field: &'static str, value: impl Into<u64>) -> Result<T, Self> {
        let value = value.into();
        Err(Self::Invalid { field, value })
    }

    /// Refuses `value`, or its unsupported bits, as [`StateError::Unsupported`].
    ///
    /// # Errors
    /// Always.
    pub fn unsupported<T>(field: &'static str, value: impl Into<u64>) -> Result<T, Self> {
        let value = value.into();
        Err(Self::Unsupported { field, value })
    }
}
