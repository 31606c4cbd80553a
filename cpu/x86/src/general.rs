//! The rarer instructions inside a basic block: any width, any operand form.
//!
//! Operands: E is the r/m operand (`dst`, or memory with [`MEMORY`]), G the other one (`src`, or
//! `imm` with [`IMMEDIATE`]). Values are kept zero-extended in a `u64` beside `width`, log2 of
//! their bytes.

use crate::arith::{
    alu, alu_flags, alu_result, bits, extend, mask, shift, shift_count, shifted, sign,
};
use crate::dispatch::address;
use crate::flags::{AF, CF, DF, OF, PF, SF, ZF};
use crate::mem::{Memory, Touch};
use crate::op::{Code, HIGH, IMMEDIATE, LOCKED, MEMORY, Op, Operand};
use crate::processor::Core;
use crate::state::Exception;
use crate::state::bits::{CR0_EM, CR0_TS};
use lacuna_cpu::Bus;

const RAX: u8 = 0;
const RCX: u8 = 1;
const RDX: u8 = 2;
const RBX: u8 = 3;

/// NOT and NEG.
pub(crate) fn unary(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    let (width, m) = (op.width(), mask(op.width()));
    if op.code == Code::Not {
        return modify(core, bus, op, |a| !a & m).map(drop);
    }
    let old = modify(core, bus, op, |a| a.wrapping_neg() & m)?;
    core.flags.set_sub_wide(width, old.wrapping_neg() & m, old);
    Ok(())
}

/// MOV: copies G to E.
pub(crate) fn move_e(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    write(core, bus, op, source(core, op))
}

/// MOV: copies E to G.
pub(crate) fn move_g(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    let value = read(core, bus, op)?;
    set_reg(core, op.src, op.width(), value);
    Ok(())
}

/// MOVZX and MOVSX: extends E to G. `aux` is the width of G.
pub(crate) fn extend_g(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    let value = read(core, bus, op)?;
    let value = if op.code == Code::MovSx {
        extend(op.width(), value)
    } else {
        value
    };
    set_reg(core, op.src, op.aux, value & mask(op.aux));
    Ok(())
}

/// CMOVcc: E is read under any condition.
pub(crate) fn move_conditional(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    let value = read(core, bus, op)?;
    let keep = reg(core, op.src, op.width());
    let taken = core.flags.condition(op.aux);
    set_reg(core, op.src, op.width(), if taken { value } else { keep });
    Ok(())
}

/// SETcc.
pub(crate) fn set_condition(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    write(core, bus, op, core.flags.condition(op.aux).into())
}

/// XCHG.
pub(crate) fn exchange(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    let value = source(core, op);
    let old = modify(core, bus, op, |_| value)?;
    set_reg(core, op.src, op.width(), old);
    Ok(())
}

/// BSWAP; CBW, CWDE and CDQE; CWD, CDQ and CQO.
pub(crate) fn registers(core: &mut Core, op: &Op) {
    let width = op.width();
    match op.code {
        Code::Bswap => {
            let swapped = reg(core, op.dst, width).swap_bytes() >> (64 - bits(width));
            // On 16 bits the result is undefined; processors clear them.
            set_reg(core, op.dst, width, if width == 1 { 0 } else { swapped });
        }
        Code::Widen => {
            let half = extend(width - 1, reg(core, RAX, width - 1));
            set_reg(core, RAX, width, half & mask(width));
        }
        _ => {
            let negative = reg(core, RAX, width) & sign(width) != 0;
            set_reg(core, RDX, width, if negative { mask(width) } else { 0 });
        }
    }
}

/// LAHF, SAHF, CLC, STC, CMC (`aux` 0 to 2), CLD, STD (`aux` 0, 1).
pub(crate) fn flags(core: &mut Core, op: &Op) {
    match op.code {
        Code::Lahf => {
            let flags = core.flags.bits() & 0xff | 2;
            set_reg(core, HIGH, 0, flags);
        }
        Code::Sahf => {
            let image = reg(core, HIGH, 0);
            core.flags.replace(SF | ZF | AF | PF | CF, image);
        }
        Code::Carry => {
            let carry = match op.aux {
                0 => false,
                1 => true,
                _ => !core.flags.cf(),
            };
            core.flags.replace(CF, if carry { CF } else { 0 });
        }
        _ => core.rflags = core.rflags & !DF | if op.aux == 0 { 0 } else { DF },
    }
}

/// Unimplemented instructions, and the instructions of the absent x87
/// (docs/decisions/0002-no-sse.md). `aux` 1: instructions that always raise #GP(0).
pub(crate) fn undefined(core: &mut Core, op: &Op) -> Touch<()> {
    match op.code {
        Code::Undefined if op.aux != 0 => core.raise(Exception::GP0),
        Code::Float if core.sys.cr0 & (CR0_EM | CR0_TS) != 0 => core.raise(Exception::NM),
        _ => core.raise(Exception::UD),
    }
}

/// Jcc to a non-canonical target: falls through, or faults.
pub(crate) fn refuse_if(core: &mut Core, op: &Op) -> Touch<()> {
    if core.flags.condition(op.aux) {
        return core.raise(Exception::GP0);
    }
    Ok(())
}

/// The value of [`Code::Address`]: segment base and 32-bit address size included. `aux` bit 0:
/// 32-bit addresses; `src`: 1 for FS, 2 for GS.
pub(crate) fn far_address(core: &Core, op: &Op) -> u64 {
    let offset = address(core, op);
    let offset = if op.aux & 1 != 0 {
        offset & mask(2)
    } else {
        offset
    };
    offset.wrapping_add(segment_base(core, op.src))
}

/// The base of a segment override: 1 for FS, 2 for GS.
pub(crate) fn segment_base(core: &Core, segment: u8) -> u64 {
    match segment {
        1 => core.sys.fs_base,
        2 => core.sys.gs_base,
        _ => 0,
    }
}

/// A register's value; `slot` may name a second byte.
pub(crate) fn reg(core: &Core, slot: u8, width: u8) -> u64 {
    if slot >= HIGH {
        return core.r[(slot - HIGH) as usize] >> 8 & 0xff;
    }
    core.r[slot as usize] & mask(width)
}

/// Writes a register as x86 does: 32 bits clear the upper half, 8 and 16 bits keep the rest.
pub(crate) fn set_reg(core: &mut Core, slot: u8, width: u8, value: u64) {
    if slot >= HIGH {
        let whole = &mut core.r[(slot - HIGH) as usize];
        *whole = *whole & !0xff00 | (value & 0xff) << 8;
        return;
    }
    let whole = &mut core.r[slot as usize];
    *whole = match width {
        0 | 1 => *whole & !mask(width) | value & mask(width),
        _ => value & mask(width),
    };
}

/// The value of G or the immediate.
pub(crate) fn source(core: &Core, op: &Op) -> u64 {
    if op.has(IMMEDIATE) {
        op.imm64() & mask(op.width())
    } else {
        reg(core, op.src, op.width())
    }
}

/// Loads `1 << width` bytes.
pub(crate) fn load(core: &mut Core, bus: &mut impl Bus, va: u64, width: u8) -> Touch<u64> {
    match width {
        0 => core.load::<u8>(bus, va).map(u64::from),
        1 => core.load::<u16>(bus, va).map(u64::from),
        2 => core.load::<u32>(bus, va).map(u64::from),
        _ => core.load::<u64>(bus, va),
    }
}

/// Stores the low `1 << width` bytes.
pub(crate) fn store(
    core: &mut Core,
    bus: &mut impl Bus,
    va: u64,
    width: u8,
    value: u64,
) -> Touch<()> {
    match width {
        0 => core.store(bus, va, value as u8),
        1 => core.store(bus, va, value as u16),
        2 => core.store(bus, va, value as u32),
        _ => core.store(bus, va, value),
    }
}

/// Reads E.
pub(crate) fn read(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<u64> {
    if op.has(MEMORY) {
        return load(core, bus, address(core, op), op.width());
    }
    Ok(reg(core, op.dst, op.width()))
}

fn write(core: &mut Core, bus: &mut impl Bus, op: &Op, value: u64) -> Touch<()> {
    if op.has(MEMORY) {
        return store(core, bus, address(core, op), op.width(), value);
    }
    set_reg(core, op.dst, op.width(), value);
    Ok(())
}

/// Replaces E by `new(E)`; returns the old value.
fn modify(core: &mut Core, bus: &mut impl Bus, op: &Op, new: impl Fn(u64) -> u64) -> Touch<u64> {
    if !op.has(MEMORY) {
        let old = reg(core, op.dst, op.width());
        set_reg(core, op.dst, op.width(), new(old));
        return Ok(old);
    }
    modify_at(core, bus, op, address(core, op), new)
}

/// Replaces the memory operand at `va` by `new(old)`; returns the old value.
pub(crate) fn modify_at(
    core: &mut Core,
    bus: &mut impl Bus,
    op: &Op,
    va: u64,
    new: impl Fn(u64) -> u64,
) -> Touch<u64> {
    match (op.has(LOCKED), op.width()) {
        (false, 0) => core
            .update(bus, va, |a: u8| new(a.into()) as u8)
            .map(u64::from),
        (false, 1) => core
            .update(bus, va, |a: u16| new(a.into()) as u16)
            .map(u64::from),
        (false, 2) => core
            .update(bus, va, |a: u32| new(a.into()) as u32)
            .map(u64::from),
        (false, _) => core.update(bus, va, new),
        (true, 0) => core
            .update_locked(bus, va, |a: u8| new(a.into()) as u8)
            .map(u64::from),
        (true, 1) => core
            .update_locked(bus, va, |a: u16| new(a.into()) as u16)
            .map(u64::from),
        (true, 2) => core
            .update_locked(bus, va, |a: u32| new(a.into()) as u32)
            .map(u64::from),
        (true, _) => core.update_locked(bus, va, new),
    }
}

#[inline(never)]
pub(crate) fn alu_e(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    let (kind, width, b) = (op.aux, op.width(), source(core, op));
    let carry = core.flags.cf();
    let a = match kind {
        alu::CMP | alu::TEST => read(core, bus, op)?,
        _ => modify(core, bus, op, |a| alu_result(kind, width, a, b, carry))?,
    };
    alu_flags(&mut core.flags, kind, width, a, b, carry);
    Ok(())
}

#[inline(never)]
pub(crate) fn alu_g(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    let (kind, width) = (op.aux, op.width());
    let b = read(core, bus, op)?;
    let (a, carry) = (reg(core, op.src, width), core.flags.cf());
    if kind != alu::CMP {
        set_reg(core, op.src, width, alu_result(kind, width, a, b, carry));
    }
    alu_flags(&mut core.flags, kind, width, a, b, carry);
    Ok(())
}

/// INC and DEC, which keep CF.
#[inline(never)]
pub(crate) fn step(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    let (width, m, carry) = (op.width(), mask(op.width()), core.flags.cf());
    let kind = if op.code == Code::Inc {
        alu::ADD
    } else {
        alu::SUB
    };
    let old = modify(core, bus, op, |a| alu_result(kind, width, a, 1, false) & m)?;
    alu_flags(&mut core.flags, kind, width, old, 1, false);
    core.flags.replace(CF, if carry { CF } else { 0 });
    Ok(())
}

#[inline(never)]
pub(crate) fn shift_e(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    let (kind, width, carry) = (op.aux, op.width(), core.flags.cf());
    let count = if op.has(IMMEDIATE) {
        op.imm64()
    } else {
        core.r[RCX as usize]
    };
    let count = shift_count(width, count);
    let old = modify(core, bus, op, |a| shifted(kind, width, a, count, carry).0)?;
    let (result, carries) = shifted(kind, width, old, count, carry);
    match (count, kind) {
        (0, _) => {}
        (_, shift::ROL | shift::ROR | shift::RCL | shift::RCR) => {
            core.flags.replace(CF | OF, carries);
        }
        _ => core.flags.set_given_wide(width, result, carries),
    }
    Ok(())
}

/// SHLD (`aux` 0) and SHRD (1). A count above the width leaves an undefined result.
#[inline(never)]
pub(crate) fn double_shift(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    let (width, n) = (op.width(), bits(op.width()));
    let count = if op.has(IMMEDIATE) {
        op.imm64()
    } else {
        core.r[RCX as usize]
    };
    let count = shift_count(width, count);
    let fill = reg(core, op.src, width);
    let left = op.aux == 0;
    let shift = move |a: u64| {
        let (a, fill) = (u128::from(a), u128::from(fill));
        let by = if count <= n { count } else { count - n };
        let wide = if left {
            (a << n | fill) << by >> n
        } else {
            (fill << n | a) >> by
        };
        wide as u64 & mask(width)
    };
    let old = modify(core, bus, op, |a| if count == 0 { a } else { shift(a) })?;
    if count != 0 {
        let last = if left {
            n.wrapping_sub(count)
        } else {
            count - 1
        } % n;
        let cf = if old >> last & 1 != 0 { CF } else { 0 };
        let of = if (old ^ shift(old)) & sign(width) != 0 {
            OF
        } else {
            0
        };
        core.flags.set_given_wide(width, shift(old), cf | of);
    }
    Ok(())
}

#[inline(never)]
pub(crate) fn exchange_add(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    let (width, b) = (op.width(), reg(core, op.src, op.width()));
    let add = |a: u64| a.wrapping_add(b) & mask(width);
    if op.has(MEMORY) {
        let old = modify(core, bus, op, add)?;
        set_reg(core, op.src, width, old);
        core.flags.set_add_wide(width, add(old), b);
        return Ok(());
    }
    // The destination is written last: if both operands are one register, it holds the sum.
    let old = reg(core, op.dst, width);
    set_reg(core, op.src, width, old);
    set_reg(core, op.dst, width, add(old));
    core.flags.set_add_wide(width, add(old), b);
    Ok(())
}

#[inline(never)]
pub(crate) fn compare_exchange(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    let width = op.width();
    let (expected, value) = (reg(core, RAX, width), reg(core, op.src, width));
    let old = if op.has(MEMORY) {
        modify(core, bus, op, |a| if a == expected { value } else { a })?
    } else {
        let old = reg(core, op.dst, width);
        if old == expected {
            set_reg(core, op.dst, width, value);
        }
        old
    };
    if old != expected {
        set_reg(core, RAX, width, old);
    }
    core.flags
        .set_sub_wide(width, expected.wrapping_sub(old) & mask(width), old);
    Ok(())
}

#[inline(never)]
pub(crate) fn compare_exchange_8(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    let pair = |high, low| reg(core, high, 2) << 32 | reg(core, low, 2);
    let (expected, value) = (pair(RDX, RAX), pair(RCX, RBX));
    let at = address(core, op);
    let old = modify_at(core, bus, op, at, |a| if a == expected { value } else { a })?;
    if old != expected {
        set_reg(core, RAX, 2, old & mask(2));
        set_reg(core, RDX, 2, old >> 32);
    }
    core.flags.replace(ZF, if old == expected { ZF } else { 0 });
    Ok(())
}

/// LOOPcc and JRCXZ: writes 1 to `dst` if the next branch must jump, else 0. `aux`: 0 LOOPNE, 1
/// LOOPE, 2 LOOP, 3 JRCXZ. The width is the address size. If `imm` is set, the target is not
/// canonical: instead of a jump this raises #GP(0), and RCX keeps its value.
pub(crate) fn loop_count(core: &mut Core, op: &Op) -> Touch<()> {
    let width = op.width();
    let count = reg(core, RCX, width);
    let left = count.wrapping_sub(1) & mask(width);
    let jump = match op.aux {
        3 => count == 0,
        kind => left != 0 && (kind == 2 || core.flags.zf() == (kind == 1)),
    };
    if jump && op.imm != 0 {
        return core.raise(Exception::GP0);
    }
    if op.aux != 3 {
        set_reg(core, RCX, width, left);
    }
    core.r[op.dst as usize] = jump.into();
    Ok(())
}
