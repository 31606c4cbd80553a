//! Multiplication and division.

use crate::arith::{bits, extend, mask};
use crate::flags::{CF, OF};
use crate::general::{read, reg, set_reg};
use crate::mem::Touch;
use crate::op::{Code, HIGH, Op, Operand};
use crate::processor::Core;
use crate::state::Exception;
use lacuna_cpu::Bus;

const RAX: u8 = 0;
const RDX: u8 = 2;

/// The slot of a double-width value's upper half: AH for bytes.
fn upper(width: u8) -> u8 {
    if width == 0 { HIGH } else { RDX }
}

/// MUL and IMUL with one operand: the double-width product of the accumulator and E.
pub(crate) fn multiply(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    let width = op.width();
    let (a, b) = (reg(core, RAX, width), read(core, bus, op)?);
    let (low, high, over) = if op.code == Code::Mul {
        let product = u128::from(a) * u128::from(b);
        let high = (product >> bits(width)) as u64;
        (product as u64 & mask(width), high, high != 0)
    } else {
        let product = signed(width, a) * signed(width, b);
        let low = product as u64 & mask(width);
        (
            low,
            (product >> bits(width)) as u64 & mask(width),
            product != signed(width, low),
        )
    };
    set_reg(core, RAX, width, low);
    set_reg(core, upper(width), width, high);
    core.flags
        .set_given_wide(width, low, if over { CF | OF } else { 0 });
    Ok(())
}

/// IMUL with a destination: G = G * E, or G = E * imm.
pub(crate) fn multiply_into(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    let width = op.width();
    let e = read(core, bus, op)?;
    let by = match op.code {
        Code::ImulGImm => op.imm64() & mask(width),
        _ => reg(core, op.src, width),
    };
    let product = signed(width, e) * signed(width, by);
    let low = product as u64 & mask(width);
    set_reg(core, op.src, width, low);
    let over = product != signed(width, low);
    core.flags
        .set_given_wide(width, low, if over { CF | OF } else { 0 });
    Ok(())
}

/// DIV and IDIV: the double-width accumulator by E. Flags are undefined and kept.
pub(crate) fn divide(core: &mut Core, bus: &mut impl Bus, op: &Op) -> Touch<()> {
    let (width, n) = (op.width(), bits(op.width()));
    let by = read(core, bus, op)?;
    let low = reg(core, RAX, width);
    let high = reg(core, upper(width), width);
    let whole = u128::from(high) << n | u128::from(low);
    let quotient = if by == 0 {
        None
    } else if op.code == Code::Div {
        let quotient = whole / u128::from(by);
        let remainder = whole % u128::from(by);
        (quotient >> n == 0).then_some((quotient as u64, remainder as u64))
    } else {
        divide_signed(width, whole, by)
    };
    let Some((quotient, remainder)) = quotient else {
        return core.raise(Exception::DE);
    };
    set_reg(core, RAX, width, quotient);
    set_reg(core, upper(width), width, remainder);
    Ok(())
}

fn divide_signed(width: u8, whole: u128, by: u64) -> Option<(u64, u64)> {
    let up = 128 - 2 * bits(width);
    let whole = (whole << up) as i128 >> up;
    let by = signed(width, by);
    // Only i128::MIN / -1 overflows here; the quotient would not fit anyway.
    let quotient = whole.checked_div(by)?;
    let low = quotient as u64 & mask(width);
    let remainder = whole.checked_rem(by)? as u64 & mask(width);
    (signed(width, low) == quotient).then_some((low, remainder))
}

fn signed(width: u8, value: u64) -> i128 {
    i128::from(extend(width, value) as i64)
}
