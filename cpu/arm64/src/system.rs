//! Instructions that end a basic block, executed by the run loop: SVC, HVC, SMC, BRK, HLT, WFI,
//! DSB, ERET, MSR and SYS. Also MRS, which ends none.
//!
//! maintenance.rs has the SYS instructions: TLBI, IC, DC and AT.

mod maintenance;

use crate::exception;
use crate::mem::{Touch, View};
use crate::op::{Op, ZERO};
use crate::processor::Core;
use crate::seam::{Exit, Own};
use crate::smccc::Call;
use crate::state::{Exception, Trap, pstate};
use crate::sysreg::{self, Encoding, Written, sctlr};
use lacuna_cpu::{Bus, Privilege, Retain, Space, Stop};
use lacuna_sync::shim::{Ordering, fence};

/// The run loop's action after such an instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Done {
    /// It is complete. PC goes to the next instruction.
    Next,
    /// It is complete, and has set PC.
    Jumped,
    /// As `Jumped`, into the illegal execution state: cached code must be looked up again.
    Illegal,
    /// It is complete, and translations may have changed.
    Flush(Flush),
    /// It is complete, and the run ends.
    Exit(Exit),
    /// It is complete, and raises an exception with PC behind it: SVC.
    Raise(Exception),
}

/// The effect of a system instruction on translations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Flush {
    /// All of them may have changed.
    All,
    /// Translations of this virtual address, in every address space.
    Address(u64),
    /// Non-global translations of this address space.
    Forget(Space),
    /// The address space has changed.
    Space(Space, Retain),
}

/// Executes the instruction `word` at PC. An `Err` leaves PC unchanged.
pub(crate) fn execute<B: Bus>(view: &mut View<'_, B>, word: u32) -> Result<Done, Trap> {
    let core = &mut *view.core;
    match word >> 24 {
        0xd4 => Ok(generate(core, word)?),
        0xd6 => Ok(exception::exception_return(core)?),
        _ if word & 0x00c0_0000 != 0 => Err(Exception::UNDEFINED.into()),
        _ => match (word >> 19 & 3, word >> 21 & 1) {
            (0, 0) => without_register(core, word),
            (1, 0) => maintenance::execute(view, word),
            // There is no SYSL. MRS ends no basic block: `read_register`.
            (0 | 1, _) | (_, 1) => Err(Exception::UNDEFINED.into()),
            _ => {
                let value = x(core, word);
                let written = sysreg::write(core, word, value)?;
                Ok(done(core, written))
            }
        },
    }
}

/// MRS.
pub(crate) fn read_register(core: &mut Core, op: &Op) -> Touch<()> {
    match sysreg::read(core, op.imm as u32) {
        Ok(value) => {
            core.r[op.dst as usize] = value;
            Ok(())
        }
        Err(exception) => core.raise(exception),
    }
}

/// Rt of `word`. Number 31 is zero.
fn x(core: &Core, word: u32) -> u64 {
    match word & 31 {
        31 => core.r[ZERO as usize],
        n => core.r[n as usize],
    }
}

fn done(core: &Core, written: Written) -> Done {
    match written {
        Written::Nothing => Done::Next,
        Written::Space => Done::Flush(Flush::Space(core.sys.space(), Retain::Keep)),
        Written::Translations => Done::Flush(Flush::All),
    }
}

/// SVC, HVC, SMC, BRK, HLT (C4.1.66).
fn generate(core: &Core, word: u32) -> Result<Done, Exception> {
    let immediate = (word >> 5) as u16;
    let numbered = |class| Exception {
        iss: immediate.into(),
        ..Exception::plain(class)
    };
    match (word >> 21 & 7, word & 3) {
        (0, 1) => Ok(Done::Raise(numbered(0x15))),
        (0, 2) if core.user == Privilege::Supervisor => {
            let args = std::array::from_fn(|n| core.r[n + 1]);
            let call = Call {
                function: core.r[0] as u32,
                args,
                immediate,
            };
            Ok(Done::Exit(Exit::Own(Own::Hypercall(call))))
        }
        (1, 0) => Err(numbered(0x3c)),
        // There is no EL3 for SMC, and HLT enters no debugger.
        _ => Err(Exception::UNDEFINED),
    }
}

/// WFI, DSB, and MSR (immediate).
fn without_register(core: &mut Core, word: u32) -> Result<Done, Trap> {
    let encoding = Encoding::of(word);
    match (encoding.op1(), encoding.crn()) {
        (3, 2) => Ok(wait(core, encoding)?),
        (3, 3) if encoding.op2() == 4 => data_barrier(core),
        (_, 4) => Ok(set_pstate(core, word)?),
        _ => Err(Exception::UNDEFINED.into()),
    }
}

/// WFI (D1.16). WFE is a NOP: `encoding.rs`.
fn wait(core: &mut Core, encoding: Encoding) -> Result<Done, Exception> {
    if encoding.op2() != 3 {
        return Err(Exception::UNDEFINED);
    }
    core.tick();
    let waits = core.interface.signalled().is_none();
    if waits && core.user == Privilege::User && core.sys.sctlr & sctlr::NTWI == 0 {
        // Class 1: trapped, with the condition "always" for an instruction without one.
        return Err(Exception {
            iss: 1 << 24 | 0xe << 20,
            ..Exception::plain(1)
        });
    }
    core.halted = waits;
    Ok(Done::Next)
}

/// DSB: earlier stores are visible, and no vCPU uses an invalidated translation.
fn data_barrier(core: &Core) -> Result<Done, Trap> {
    fence(Ordering::SeqCst);
    if core.fabric.shootdown.is_done(core.interface.index()) {
        Ok(Done::Next)
    } else {
        Err(Stop::Again.into())
    }
}

/// MSR (immediate): SPSel, PAN, DAIFSet, DAIFClr (C5.1.4).
fn set_pstate(core: &mut Core, word: u32) -> Result<Done, Exception> {
    let encoding = Encoding::of(word);
    let immediate = u64::from(encoding.crm());
    match (encoding.op1(), encoding.op2(), core.user) {
        (0, 4, Privilege::Supervisor) if immediate < 2 => {
            core.set_field(pstate::PAN, immediate << 22);
        }
        (0, 5, Privilege::Supervisor) if immediate < 2 => core.set_field(pstate::SP, immediate),
        (3, op2 @ (6 | 7), user) => {
            if user == Privilege::User && core.sys.sctlr & sctlr::UMA == 0 {
                return Err(Exception::system_trap(word));
            }
            // D, A, I and F are bits 3 to 0 here, and 9 to 6 of PSTATE.
            let bits = immediate << 6;
            let masks = core.pstate() & pstate::DAIF;
            core.set_field(
                pstate::DAIF,
                if op2 == 6 {
                    masks | bits
                } else {
                    masks & !bits
                },
            );
        }
        _ => return Err(Exception::UNDEFINED),
    }
    Ok(Done::Next)
}

#[cfg(test)]
mod tests;
