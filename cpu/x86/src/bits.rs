//! Instructions on single bits: BT and its kin, BSF and its kin.

use crate::arith::{bits, extend};
use crate::dispatch::address;
use crate::flags::{ARITHMETIC, CF, ZF};
use crate::general::{load, modify_at, read, reg, set_reg, source};
use crate::mem::Touch;
use crate::op::{IMMEDIATE, MEMORY, Op};
use crate::processor::Core;
use lacuna_cpu::Bus;

/// In the `aux` of BT and its kin: the address includes the bit offset's words.
pub(crate) const OFFSET_ADDED: u8 = 1 << 2;

/// The bytes from a bit operand's address to the word of the bit that register `slot` numbers.
fn word_offset(core: &Core, slot: u8, width: u8) -> u64 {
    let index = extend(width, reg(core, slot, width)) as i64;
    (index >> bits(width).trailing_zeros() << width) as u64
}

/// Leaves [`word_offset`] of `src` in `dst`.
pub(crate) fn bit_offset(core: &mut Core, op: &Op) {
    core.r[op.dst as usize] = word_offset(core, op.src, op.width());
}

/// BT, BTS, BTR, BTC (`aux` 0 to 3). With memory and a register, the bit may lie anywhere.
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

/// BSF, BSR, TZCNT, LZCNT, POPCNT (`aux` 0 to 4): G from E.
#[inline(never)]
pub(crate) fn bit_scan(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    let width = op.width();
    let value = read(core, bus, op)?;
    let leading = u64::from(value.leading_zeros()) - u64::from(64 - bits(width));
    let trailing = u64::from(value.trailing_zeros().min(bits(width)));
    let result = match op.aux {
        // BSF and BSR of zero leave the destination as it is.
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
