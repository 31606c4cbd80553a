//! Operands of ops, and results longer than an expression.

use crate::flags::Width;
use crate::op::Op;
use crate::processor::Core;
use lacuna_cpu::Word;

/// The address of a load or store with a displacement.
#[inline(always)]
pub(crate) fn displaced(core: &Core, op: &Op) -> u64 {
    core.r[op.base as usize].wrapping_add(op.disp as i64 as u64)
}

/// The address of a load or store with an index.
#[inline(always)]
pub(crate) fn indexed(core: &Core, op: &Op) -> u64 {
    core.r[op.base as usize].wrapping_add(core.r[op.index as usize] << (op.form & 3))
}

/// The low bits of a slot.
#[inline(always)]
pub(crate) fn get<T: Word>(core: &Core, slot: u8) -> T {
    T::narrow(core.r[slot as usize])
}

/// The immediate, sign-extended or cut.
#[inline(always)]
pub(crate) fn imm<T: Word>(op: &Op) -> T {
    T::narrow(op.imm64())
}

/// The 64-bit immediate, cut.
#[inline(always)]
pub(crate) fn wide<T: Word>(op: &Op) -> T {
    T::narrow(op.wide())
}

/// ADDS of the immediate.
#[inline(always)]
pub(crate) fn adds_immediate<T: Width>(core: &mut Core, op: &Op) -> T {
    let b = imm::<T>(op);
    let result = T::narrow(core.r[op.src as usize].wrapping_add(b.widen()));
    core.flags.set_add(result, b);
    result
}

/// MOVK of the 16 bits in `imm` at bit `aux`.
#[inline(always)]
pub(crate) fn moved(value: u64, op: &Op) -> u64 {
    let keep = !0xffff_u64.wrapping_shl(op.aux.into());
    value & keep | u64::from(op.imm as u32).wrapping_shl(op.aux.into())
}

/// `count` ones, 1 to 64.
#[inline(always)]
pub(crate) fn ones(count: u8) -> u64 {
    u64::MAX.wrapping_shr(64 - u32::from(count))
}

/// The value shifted up by `aux`, and then down with its sign by the immediate.
#[inline(always)]
pub(crate) fn sign_field(value: u64, op: &Op) -> u64 {
    (value.wrapping_shl(op.aux.into()) as i64).wrapping_shr(op.imm as u32) as u64
}

/// The product of the low halves as signed numbers.
#[inline(always)]
pub(crate) fn signed_product(core: &Core, op: &Op) -> u64 {
    let factor = |slot| i64::from(get::<u32>(core, slot) as i32);
    factor(op.base).wrapping_mul(factor(op.src)) as u64
}

/// The product of the low halves.
#[inline(always)]
pub(crate) fn product(core: &Core, op: &Op) -> u64 {
    get::<u32>(core, op.base).widen() * get::<u32>(core, op.src).widen()
}
