//! The registers of a processor, and its exceptions.

use lacuna_cpu::{Privilege, Stop};

/// Bits of PSTATE, in their places in SPSR_EL1 (Arm ARM C5.2.19).
pub mod pstate {
    /// The stack pointer is SP_EL1: EL1h. Clear: SP_EL0.
    pub const SP: u64 = 1 << 0;
    /// The exception level, two bits. 0 and 1 exist.
    pub const EL: u64 = 3 << 2;
    /// Exception level 1.
    pub const EL1: u64 = 1 << 2;
    /// FIQs are masked.
    pub const F: u64 = 1 << 6;
    /// IRQs are masked.
    pub const I: u64 = 1 << 7;
    /// SErrors are masked.
    pub const A: u64 = 1 << 8;
    /// Debug exceptions are masked.
    pub const D: u64 = 1 << 9;
    /// D, A, I and F.
    pub const DAIF: u64 = D | A | I | F;
    /// Illegal execution state.
    pub const IL: u64 = 1 << 20;
    /// Software step.
    pub const SS: u64 = 1 << 21;
    /// Privileged access never.
    pub const PAN: u64 = 1 << 22;
    /// After a reset: EL1h, everything masked.
    pub const RESET: u64 = DAIF | EL1 | SP;
}

/// The privilege of code with PSTATE `pstate`.
#[inline(always)]
pub(crate) const fn privilege(pstate: u64) -> Privilege {
    if pstate & pstate::EL == 0 {
        Privilege::User
    } else {
        Privilege::Supervisor
    }
}

/// Why an instruction cannot continue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Trap {
    /// An exception for the guest.
    Exception(Exception),
    /// A stop of the machine: the run loop leaves, and the instruction is executed again later.
    Stop(Stop),
    /// Every other vCPU must stop (`Exit::Exclusive`). Then the instruction is executed again.
    Exclusive,
}

impl From<Stop> for Trap {
    fn from(stop: Stop) -> Self {
        Self::Stop(stop)
    }
}

impl From<Exception> for Trap {
    fn from(exception: Exception) -> Self {
        Self::Exception(exception)
    }
}

/// A synchronous exception taken to EL1. An abort and a fault at PC have the class for "lower
/// exception level"; the entry adds 1 to it for an exception from EL1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Exception {
    /// ESR_EL1.EC.
    pub class: u8,
    /// ESR_EL1.ISS, 25 bits.
    pub iss: u32,
    /// The value for FAR_EL1, in classes that write it.
    pub far: Option<u64>,
}

impl Exception {
    /// An undefined instruction: class 0, unknown reason.
    pub const UNDEFINED: Self = Self::plain(0);
    /// PSTATE.IL is set: class 0x0e.
    pub const ILLEGAL_STATE: Self = Self::plain(0x0e);
    /// SP is not aligned to 16 bytes: class 0x26.
    pub const SP_ALIGNMENT: Self = Self::plain(0x26);

    /// An exception without syndrome or address.
    pub const fn plain(class: u8) -> Self {
        Self {
            class,
            iss: 0,
            far: None,
        }
    }

    /// The system instruction or register access `word` is trapped: class 0x18.
    pub fn system_trap(word: u32) -> Self {
        let field = |low: u32, width: u32| word >> low & ((1 << width) - 1);
        let (op0, op1, op2) = (field(19, 2), field(16, 3), field(5, 3));
        let (crn, crm, rt, read) = (field(12, 4), field(8, 4), field(0, 5), field(21, 1));
        Self {
            iss: op0 << 20 | op2 << 17 | op1 << 14 | crn << 10 | rt << 5 | crm << 1 | read,
            ..Self::plain(0x18)
        }
    }

    /// PC is not aligned to 4 bytes.
    pub const fn pc_alignment(pc: u64) -> Self {
        Self {
            class: 0x22,
            iss: 0,
            far: Some(pc),
        }
    }

    /// A data abort at `va` with the fault status code `dfsc`. `access` becomes ISS.WnR.
    pub const fn data_abort(va: u64, dfsc: u32, access: lacuna_addr::Access) -> Self {
        let write = if access.is_write() { 1 << 6 } else { 0 };
        Self {
            class: 0x24,
            iss: dfsc | write,
            far: Some(va),
        }
    }

    /// An instruction abort at `va` with the fault status code `ifsc`.
    pub const fn instruction_abort(va: u64, ifsc: u32) -> Self {
        Self {
            class: 0x20,
            iss: ifsc,
            far: Some(va),
        }
    }
}

/// Fault status codes of aborts that no table walk raises (Arm ARM D17.2.37, ISS of a data abort).
pub(crate) mod status {
    /// Synchronous external abort, not on a table walk.
    pub(crate) const EXTERNAL: u32 = 0x10;
    /// Alignment fault.
    pub(crate) const ALIGNMENT: u32 = 0x21;
    /// An exclusive or atomic access to memory that does not support it.
    pub(crate) const UNSUPPORTED_EXCLUSIVE: u32 = 0x35;
}
