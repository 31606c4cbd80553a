//! Bit instructions: BT, BTS, BTR, BTC; BSF, BSR, TZCNT, LZCNT, POPCNT.

use crate::arith::{bits, extend};
use crate::dispatch::address;
use crate::flags::{ARITHMETIC, CF, ZF};
use crate::general::{load, modify_at, read, reg, set_reg, source};
use crate::mem::Touch;
use crate::op::{IMMEDIATE, MEMORY, Op, Operand};
use crate::processor::Core;
use lacuna_cpu::Bus;

/// In `aux` of BT, BTS, BTR, BTC: the address already includes the offset of the bit's word.
pub(crate) const OFFSET_ADDED: u8 = 1 << 2;

/// Offset in bytes of the bit's word from the memory operand's address. Register `slot` has the
/// bit's signed index, so the offset may be negative.
fn word_offset(core: &Core, slot: u8, width: u8) -> u64 {
    let index = extend(width, reg(core, slot, width)) as i64;
    (index >> bits(width).trailing_zeros() << width) as u64
}

/// `dst` = [`word_offset`] of `src`. This is a separate op, for addresses with their own op: that
/// op adds the offset before it wraps the address.
pub(crate) fn bit_offset(core: &mut Core, op: &Op) {
    core.r[op.dst as usize] = word_offset(core, op.src, op.width());
}

/// BT, BTS, BTR, BTC (the low two bits of `aux`: 0 to 3). With a memory operand and an index in a
/// register, the bit may be outside the word at the operand's address; otherwise the index is taken
/// modulo the operand width.
#[inline(never)]
pub(crate) fn bit_test(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    let width = op.width();
    let index = source(core, op);
    let bit = 1_u64 << (index & u64::from(bits(width) - 1));
    let kind = op.aux & 3;
    let new = |a: u64| match kind {
        0 => a,
        1 => a | bit,
        2 => a & !bit,
        _ => a ^ bit,
    };
    let old = if !op.has(MEMORY) {
        let old = reg(core, op.dst, width);
        if kind != 0 {
            set_reg(core, op.dst, width, new(old));
        }
        old
    } else {
        let mut at = address(core, op);
        if !op.has(IMMEDIATE) && op.aux & OFFSET_ADDED == 0 {
            at = at.wrapping_add(word_offset(core, op.src, width));
        }
        match kind {
            0 => load(core, bus, at, width)?,
            _ => modify_at(core, bus, op, at, new)?,
        }
    };
    core.flags.replace(CF, if old & bit != 0 { CF } else { 0 });
    Ok(())
}

/// BSF, BSR, TZCNT, LZCNT, POPCNT (`aux` 0 to 4). The source is E, the r/m operand; the destination
/// is G, the register in `src`.
#[inline(never)]
pub(crate) fn bit_scan(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    let width = op.width();
    let value = read(core, bus, op)?;
    let leading = u64::from(value.leading_zeros()) - u64::from(64 - bits(width));
    let trailing = u64::from(value.trailing_zeros().min(bits(width)));
    let result = match op.aux {
        // BSF and BSR of zero leave the destination unchanged, as AMD's manual says.
        0 | 1 if value == 0 => {
            core.flags.replace(ARITHMETIC, ZF);
            return Ok(());
        }
        0 | 2 => trailing,
        1 => u64::from(bits(width)) - 1 - leading,
        3 => leading,
        _ => value.count_ones().into(),
    };
    set_reg(core, op.src, width, result);
    let flag = |on: bool, bit: u64| if on { bit } else { 0 };
    core.flags.set_bits(match op.aux {
        0 | 1 => 0,
        2 | 3 => flag(value == 0, CF) | flag(result == 0, ZF),
        _ => flag(value == 0, ZF),
    });
    Ok(())
}
