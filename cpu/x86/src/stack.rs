//! Stack instructions beyond PUSH and POP of a 64-bit register.

use crate::arith::mask;
use crate::dispatch::{RSP, address};
use crate::flags::RF;
use crate::general::{load, read, reg, set_reg, store};
use crate::mem::Touch;
use crate::op::{Code, IMMEDIATE, MEMORY, Op, Operand};
use crate::processor::Core;
use crate::state::is_canonical;
use lacuna_cpu::Bus;

const RBP: u8 = 5;

/// Pushes `1 << width` bytes.
pub(crate) fn push(core: &mut Core, bus: &mut impl Bus, width: u8, value: u64) -> Touch<()> {
    let rsp = core.r[RSP].wrapping_sub(1 << width);
    store(core, bus, rsp, width, value)?;
    core.r[RSP] = rsp;
    Ok(())
}

/// PUSH of E or an immediate. `aux` 1 and 2: the FS and GS selectors.
pub(crate) fn push_operand(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    let value = match op.aux {
        1 => core.sys.selectors[4].into(),
        2 => core.sys.selectors[5].into(),
        _ if op.has(IMMEDIATE) => op.imm64() & mask(op.width()),
        _ => read(core, bus, op)?,
    };
    push(core, bus, op.width(), value)
}

/// POP into E. An address with RSP uses the value after the pop. If an earlier op computes the
/// address, that op has added the change of RSP.
pub(crate) fn pop_operand(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    let (width, rsp) = (op.width(), core.r[RSP]);
    let value = load(core, bus, rsp, width)?;
    core.r[RSP] = rsp.wrapping_add(1 << width);
    if !op.has(MEMORY) {
        set_reg(core, op.dst, width, value);
        return Ok(());
    }
    let at = address(core, op);
    store(core, bus, at, width, value).inspect_err(|_| core.r[RSP] = rsp)
}

/// PUSHF.
pub(crate) fn push_flags(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    let image = core.rflags() & !RF;
    push(core, bus, op.width(), image)
}

/// LEAVE.
pub(crate) fn leave(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    let frame = core.r[RBP as usize];
    let value = load(core, bus, frame, op.width())?;
    core.r[RSP] = frame.wrapping_add(1 << op.width());
    set_reg(core, RBP, op.width(), value);
    Ok(())
}

/// ENTER: `imm` is the frame's size, `aux` the nesting level (0 to 31).
pub(crate) fn enter(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    let (width, saved) = (op.width(), core.r[RSP]);
    let size = 1_u64 << width;
    let mut copy = core.r[RBP as usize];
    let built = (|| {
        let old = reg(core, RBP, width);
        push(core, bus, width, old)?;
        let frame = core.r[RSP];
        for _ in 1..op.aux {
            copy = copy.wrapping_sub(size);
            let outer = load(core, bus, copy, width)?;
            push(core, bus, width, outer)?;
        }
        if op.aux != 0 {
            push(core, bus, width, frame)?;
        }
        // The new top must be writable, though nothing is written (SDM vol 2, ENTER).
        let top = core.r[RSP].wrapping_sub(op.imm as u16 as u64);
        core.update(bus, top, |byte: u8| byte)?;
        core.r[RSP] = top;
        set_reg(core, RBP, width, frame);
        Ok(())
    })();
    built.inspect_err(|_| core.r[RSP] = saved)
}

/// Whether a non-canonical address in this op belongs to the stack segment: then it raises #SS,
/// else
/// #GP. For an explicit address, the base register decides. Of the segment prefixes only FS and GS
/// matter; earlier ops compute such addresses into scratch slots.
pub(crate) fn is_stack_access(core: &Core, op: &Op) -> bool {
    let implicit = matches!(
        op.code,
        Code::PushR
            | Code::PushI
            | Code::PopR
            | Code::Ret
            | Code::PushE
            | Code::PopE
            | Code::Pushf
            | Code::Leave
            | Code::Enter
    );
    let explicit = matches!(op.base, 4 | 5);
    match op.code {
        // POP accesses the stack first; PUSH and CALL access their operand first.
        Code::PopE if !is_canonical(core.r[RSP]) => true,
        _ if op.has(MEMORY) && !(implicit && is_canonical(address(core, op))) => explicit,
        _ => implicit,
    }
}
