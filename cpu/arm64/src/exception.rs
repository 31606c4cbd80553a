//! Exception entry, interrupts, and the return from them (Arm ARM D1.10, D1.11).
//!
//! ```text
//! VBAR_EL1 + 0x000  from EL1 with SP_EL0      + 0x000  synchronous
//!          + 0x200  from EL1 with SP_EL1      + 0x080  IRQ
//!          + 0x400  from EL0                  + 0x100  FIQ
//!          + 0x600  (AArch32: never)          + 0x180  SError (never)
//! ```

use crate::flags::NZCV;
use crate::gic::Group;
use crate::processor::Core;
use crate::seam::{Exit, Own};
use crate::state::{Exception, pstate};
use crate::sysreg::sctlr;
use crate::system::Done;
use crate::walk::untagged;
use lacuna_cpu::Privilege;

/// ESR_EL1.IL: an instruction of 32 bits, or no instruction at all.
const IL: u64 = 1 << 25;
/// Offsets from the vector of synchronous exceptions.
const IRQ: u64 = 0x80;
const FIQ: u64 = 0x100;
const SYNCHRONOUS: u64 = 0;

/// The event before the processor's next instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Interrupt {
    /// An injected abort.
    Injected(Exception),
    /// An interrupt of group 1 of the interrupt controller.
    Irq,
    /// An interrupt of group 0.
    Fiq,
}

/// The interrupt that the processor would take before its next instruction. PSTATE masks no abort.
#[inline(always)]
pub(crate) fn pending(core: &Core) -> Option<Interrupt> {
    if let Some(exception) = core.injected {
        return Some(Interrupt::Injected(exception));
    }
    match core.interface.signalled()? {
        Group::One if core.pstate() & pstate::I == 0 => Some(Interrupt::Irq),
        Group::Zero if core.pstate() & pstate::F == 0 => Some(Interrupt::Fiq),
        _ => None,
    }
}

/// Takes `interrupt` at PC.
pub(crate) fn interrupt(core: &mut Core, interrupt: Interrupt) -> Option<Exit> {
    match interrupt {
        Interrupt::Injected(exception) => {
            core.injected = None;
            enter(core, exception)
        }
        Interrupt::Irq => {
            enter_vector(core, IRQ);
            None
        }
        Interrupt::Fiq => {
            enter_vector(core, FIQ);
            None
        }
    }
}

/// Takes `exception` at PC. The run ends if no progress is possible: the processor cannot fetch the
/// instruction to handle this very exception.
pub(crate) fn enter(core: &mut Core, exception: Exception) -> Option<Exit> {
    let from_el1 = core.user == Privilege::Supervisor;
    if from_el1 && exception.class == 0x20 && core.pc == vector(core) {
        return Some(Exit::Own(Own::Exception(exception)));
    }
    // The classes of an abort from EL1 follow the classes of an abort from EL0.
    let same_level = from_el1 && matches!(exception.class, 0x20 | 0x24);
    let class = u64::from(exception.class) + u64::from(same_level);
    core.sys.esr = class << 26 | IL | u64::from(exception.iss);
    if let Some(far) = exception.far {
        core.sys.far = far;
    }
    enter_vector(core, SYNCHRONOUS);
    None
}

/// The vector of a synchronous exception.
fn vector(core: &Core) -> u64 {
    let from = match (core.user, core.pstate() & pstate::SP) {
        (Privilege::User, _) => 0x400,
        (Privilege::Supervisor, 0) => 0x000,
        (Privilege::Supervisor, _) => 0x200,
    };
    core.sys.vbar.wrapping_add(from)
}

/// AArch64.TakeException: saves PC and PSTATE, and enters the handler at `kind` from the vector.
fn enter_vector(core: &mut Core, kind: u64) {
    let old = core.pstate();
    let pan = match core.sys.sctlr & sctlr::SPAN {
        0 => pstate::PAN,
        _ => old & pstate::PAN,
    };
    let handler = vector(core).wrapping_add(kind);
    core.sys.spsr = old;
    core.sys.elr = core.pc;
    core.set_control(pstate::RESET | pan);
    core.pc = handler;
    core.halted = false;
}

/// ERET: restores PC and PSTATE from ELR_EL1 and SPSR_EL1.
///
/// # Errors
/// At EL0 it is undefined.
pub(crate) fn exception_return(core: &mut Core) -> Result<Done, Exception> {
    if core.user == Privilege::User {
        return Err(Exception::UNDEFINED);
    }
    core.monitor.clear();
    let (elr, spsr) = (core.sys.elr, core.sys.spsr);
    Ok(return_to(core, elr, spsr))
}

/// Continues at `pc` with a PSTATE in the format of SPSR_EL1. An illegal value sets PSTATE.IL.
pub(crate) fn return_to(core: &mut Core, pc: u64, spsr: u64) -> Done {
    if is_legal_return(spsr) {
        core.set_pstate(spsr & SPSR_VALID);
        core.pc = untagged(&core.sys, pc);
        return if spsr & pstate::IL == 0 {
            Done::Jumped
        } else {
            Done::Illegal
        };
    }
    // The exception level and the stack pointer stay (D1.11.4).
    let stays = core.pstate() & (pstate::EL | pstate::SP);
    let restored = spsr & (NZCV | pstate::DAIF | pstate::PAN);
    core.set_pstate(restored | stays | pstate::IL);
    core.pc = pc;
    Done::Illegal
}

/// The bits of SPSR_EL1 that a return restores. There is no software step.
pub(crate) const SPSR_VALID: u64 =
    NZCV | pstate::DAIF | pstate::PAN | pstate::IL | pstate::EL | pstate::SP;

/// Whether EL1 may return to the state in SPSR_EL1: EL0 with its stack pointer, or EL1 with either
/// one, in AArch64.
pub(crate) const fn is_legal_return(spsr: u64) -> bool {
    matches!(spsr & 0x1f, 0b0_0000 | 0b0_0100 | 0b0_0101)
}

#[cfg(test)]
mod tests;
