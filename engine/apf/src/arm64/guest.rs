//! The arm64 ABI's interface to a vCPU, besides the words in its memory.

use lacuna_state::arm64::Context;

/// The exception level of the guest's code.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExceptionLevel {
    /// A program.
    El0,
    /// The kernel.
    El1,
}

/// The part of an arm64 vCPU's state that decides whether an event may be delivered, besides
/// [`crate::Guest::is_interruptible`]. It is the state between two instructions, or at a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CpuState {
    /// PSTATE.EL.
    pub level: ExceptionLevel,
    /// The address of the next instruction, or of the faulting one.
    pub pc: u64,
    /// VBAR_EL1.
    pub vbar: u64,
}

/// The level of an interrupt's input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Line {
    /// Not asserted.
    Low,
    /// Asserted.
    High,
}

/// A change of the vCPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effect {
    /// Takes a data abort to EL1. The processor sets ELR_EL1 and SPSR_EL1, and goes to the vector.
    DataAbort {
        /// ESR_EL1: a synchronous external abort.
        esr: u64,
        /// FAR_EL1: the token.
        far: u64,
    },
    /// Sets the input of a private peripheral interrupt of this vCPU.
    Interrupt {
        /// INTID, 16 to 31.
        number: u32,
        /// The input is level-sensitive.
        line: Line,
    },
    /// Replaces the registers: an SDEI event is taken, or its handler ends.
    Context(Context),
    /// Sets ELR_EL1 and SPSR_EL1, as if the exception had been taken there.
    ExceptionReturn {
        /// ELR_EL1.
        elr: u64,
        /// SPSR_EL1.
        spsr: u64,
    },
}

/// An arm64 guest on one vCPU. The vCPU's thread makes all calls, and holds no lock.
///
/// Neither event is masked by PSTATE.DAIF: a data abort is synchronous, and an SDEI event is masked
/// by the SDEI's own calls. So [`crate::Guest::is_interruptible`] must not look at PSTATE.DAIF. It
/// is false while an exception is about to be taken, and while an instruction waits for a device.
pub trait Guest: crate::Guest + crate::SharedWords {
    /// The vCPU's present state.
    fn state(&self) -> CpuState;

    /// The registers of [`Context`].
    fn context(&self) -> Context;

    /// Changes the vCPU. [`Effect::DataAbort`] and the start of an SDEI event are applied only
    /// while the vCPU is interruptible. After a data abort the vCPU is not interruptible until it
    /// has taken the exception.
    fn apply(&mut self, effect: Effect);
}
