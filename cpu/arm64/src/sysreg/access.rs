//! Reads and writes of system registers by MRS and MSR.

use super::table::{Changes, El0, Icc, Kind, Row, Special};
use super::{Encoding, sctlr};
use crate::gic::{Group, Reach, SRE};
use crate::processor::Core;
use crate::state::{Exception, pstate};
use lacuna_cpu::Privilege;

/// The change by a write, beside the register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Written {
    /// No cached value.
    Nothing,
    /// Perhaps the number of the address space.
    Space,
    /// Perhaps every translation.
    Translations,
}

impl From<Changes> for Written {
    fn from(changes: Changes) -> Self {
        match changes {
            Changes::Nothing => Self::Nothing,
            Changes::Space => Self::Space,
            Changes::Translations => Self::Translations,
        }
    }
}

/// DCZID_EL0 as EL1 reads it: blocks of 64 bytes.
pub(super) const DCZID: u64 = 4;

/// MDSCR_EL1: EL0 may not access the debugger's channel.
const TDCC: u64 = 1 << 12;

/// The direction of an access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Direction {
    Write,
    Read,
}

/// Executes MRS: the value of the register that `word` names.
///
/// # Errors
/// The undefined-instruction exception, or a trapped access of EL0.
pub(crate) fn read(core: &mut Core, word: u32) -> Result<u64, Exception> {
    let row = row(core, word, Direction::Read)?;
    Ok(match row.kind {
        Kind::Constant(value) => value,
        Kind::Ignored => 0,
        Kind::Value { place, .. } => *place(&mut core.sys),
        Kind::Special(special) => return read_special(core, special),
    })
}

/// Executes MSR (register): writes `value` to the register that `word` names.
///
/// # Errors
/// As for [`read`].
pub(crate) fn write(core: &mut Core, word: u32, value: u64) -> Result<Written, Exception> {
    let row = row(core, word, Direction::Write)?;
    match row.kind {
        Kind::Constant(_) => Err(Exception::UNDEFINED),
        Kind::Ignored => Ok(Written::Nothing),
        Kind::Value {
            place,
            writable,
            changes,
        } => {
            let old = core.sys.space();
            let register = place(&mut core.sys);
            *register = *register & !writable | value & writable;
            match changes.into() {
                Written::Space if core.sys.space() == old => Ok(Written::Nothing),
                written => Ok(written),
            }
        }
        Kind::Special(special) => write_special(core, special, value).map(|()| Written::Nothing),
    }
}

/// The register that `word` names, if the current exception level may access it.
fn row(core: &Core, word: u32, direction: Direction) -> Result<&'static Row, Exception> {
    let row = super::find(Encoding::of(word)).ok_or(Exception::UNDEFINED)?;
    if core.user == Privilege::Supervisor {
        return Ok(row);
    }
    let (writes, condition) = match row.el0 {
        El0::No => return Err(Exception::UNDEFINED),
        El0::Reads => (false, true),
        El0::Accesses => (true, true),
        El0::ReadsIf(bits) => (false, core.sys.sctlr & bits != 0),
        El0::AccessesIf(bits) => (true, core.sys.sctlr & bits != 0),
        El0::ReadsIfTimer(bits) => (false, core.sys.cntkctl & bits != 0),
        El0::AccessesIfTimer(bits) => (true, core.sys.cntkctl & bits != 0),
        El0::AccessesDebugger => {
            let writes = !matches!(row.kind, Kind::Constant(_));
            (writes, core.sys.mdscr & TDCC == 0)
        }
    };
    match (direction, writes, condition) {
        (Direction::Write, false, _) => Err(Exception::UNDEFINED),
        (_, _, false) => Err(Exception::system_trap(word)),
        (_, _, true) => Ok(row),
    }
}

fn read_special(core: &mut Core, special: Special) -> Result<u64, Exception> {
    Ok(match special {
        Special::Mpidr => core.sys.mpidr,
        Special::CurrentEl => core.pstate() & pstate::EL,
        Special::SpSel => core.pstate() & pstate::SP,
        Special::SpEl0 => return stack_pointer(core).map(|()| core.stack_pointers()[0]),
        Special::Daif => core.pstate() & pstate::DAIF,
        Special::Nzcv => core.flags.bits(),
        Special::Pan => core.pstate() & pstate::PAN,
        Special::Isr => {
            core.tick();
            match core.interface.signalled() {
                Some(Group::One) => pstate::I,
                Some(Group::Zero) => pstate::F,
                None => 0,
            }
        }
        // DC ZVA is prohibited at EL0 without SCTLR_EL1.DZE.
        Special::Dczid => {
            let user = core.user == Privilege::User;
            let prohibited = user && core.sys.sctlr & sctlr::DZE == 0;
            DCZID | u64::from(prohibited) << 4
        }
        Special::OsLar => return Err(Exception::UNDEFINED),
        Special::OsLsr => 1 << 3 | core.sys.os_lock << 1,
        Special::Counter => core.sys.timers.count(core.clock.now()),
        Special::Timer(which, register) => {
            let now = core.clock.now();
            core.sys.timers.read(which, register, now)
        }
        Special::Icc(register) => return read_icc(core, register),
    })
}

fn write_special(core: &mut Core, special: Special, value: u64) -> Result<(), Exception> {
    match special {
        Special::SpSel => core.set_field(pstate::SP, value & 1),
        Special::SpEl0 => {
            stack_pointer(core)?;
            let [_, sp_el1] = core.stack_pointers();
            core.set_stack_pointers([value, sp_el1]);
        }
        Special::Daif => core.set_field(pstate::DAIF, value),
        Special::Nzcv => core.flags.set_bits(value),
        Special::Pan => core.set_field(pstate::PAN, value),
        Special::OsLar => core.sys.os_lock = value & 1,
        Special::Timer(which, register) => {
            let now = core.clock.now();
            core.sys.timers.write(which, register, value, now);
            core.tick();
        }
        Special::Icc(register) => return write_icc(core, register, value),
        Special::Mpidr
        | Special::CurrentEl
        | Special::Isr
        | Special::Dczid
        | Special::OsLsr
        | Special::Counter => return Err(Exception::UNDEFINED),
    }
    Ok(())
}

/// SP_EL0 cannot be accessed by its name while it is the stack pointer (C5.2.18).
fn stack_pointer(core: &Core) -> Result<(), Exception> {
    match core.pstate() & pstate::SP {
        0 => Err(Exception::UNDEFINED),
        _ => Ok(()),
    }
}

fn read_icc(core: &mut Core, register: Icc) -> Result<u64, Exception> {
    core.tick();
    let interface = &mut core.interface;
    Ok(match register {
        Icc::Iar(group) => interface.acknowledge(group),
        Icc::Hppir(group) => interface.highest_pending(group),
        Icc::Bpr(group) => interface.bpr(group),
        Icc::ActivePriorities(group) => interface.registers().active[group as usize][0].into(),
        Icc::GroupEnable(group) => interface.registers().enabled[group as usize].into(),
        Icc::Pmr => interface.registers().pmr.into(),
        Icc::Ctlr => interface.ctlr(),
        Icc::Sre => SRE,
        Icc::Rpr => interface.running_priority(),
        Icc::Eoir(_) | Icc::Dir | Icc::Sgi | Icc::SgiGroup0 => return Err(Exception::UNDEFINED),
    })
}

fn write_icc(core: &mut Core, register: Icc, value: u64) -> Result<(), Exception> {
    let interface = &mut core.interface;
    match register {
        Icc::Eoir(group) => interface.end(group, value),
        Icc::Bpr(group) => interface.set_bpr(group, value),
        Icc::ActivePriorities(group) => interface.set_active(group, value),
        Icc::GroupEnable(group) => interface.set_enabled(group, value),
        Icc::Pmr => interface.set_pmr(value),
        Icc::Ctlr => interface.set_ctlr(value),
        Icc::Sre => {}
        Icc::Dir => interface.deactivate(value),
        Icc::Sgi => interface.send(value, Reach::Both),
        Icc::SgiGroup0 => interface.send(value, Reach::Zero),
        Icc::Iar(_) | Icc::Hppir(_) | Icc::Rpr => return Err(Exception::UNDEFINED),
    }
    Ok(())
}
