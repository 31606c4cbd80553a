//! Arithmetic whose flags take more than one line. Hot forms are generic over the type; rare ones
//! take the width as an argument.

use crate::flags::{AF, CF, Flags, OF};
use lacuna_cpu::Word;

/// Hot operations on 32 and 64 bits. Each returns its result and sets its flags.
pub(crate) trait Arith: Word {
    /// `count` is 1 to the width - 1.
    fn shl(self, flags: &mut Flags, count: u32) -> Self;
    /// `count` is 1 to the width - 1.
    fn shr(self, flags: &mut Flags, count: u32) -> Self;
    /// `count` is 1 to the width - 1.
    fn sar(self, flags: &mut Flags, count: u32) -> Self;
    fn inc(self, flags: &mut Flags) -> Self;
    fn dec(self, flags: &mut Flags) -> Self;
    /// Signed multiplication: the low half. CF and OF are set unless the low half is the whole
    /// product.
    fn multiply(self, by: Self, flags: &mut Flags) -> Self;
}

/// The RFLAGS bits of the two flags.
#[inline(always)]
fn carries(cf: bool, of: bool) -> u64 {
    (u64::from(cf) * CF) | (u64::from(of) * OF)
}

macro_rules! arith {
    ($int:ident, $signed:ident) => {
        impl Arith for $int {
            #[inline(always)]
            fn shl(self, flags: &mut Flags, count: u32) -> Self {
                let before = self.wrapping_shl(count.wrapping_sub(1));
                let result = before << 1;
                let cf = (before as $signed) < 0;
                flags.set_given(result, carries(cf, cf != ((result as $signed) < 0)));
                result
            }

            #[inline(always)]
            fn shr(self, flags: &mut Flags, count: u32) -> Self {
                let before = self.wrapping_shr(count.wrapping_sub(1));
                let result = before >> 1;
                flags.set_given(result, carries(before & 1 != 0, (before as $signed) < 0));
                result
            }

            #[inline(always)]
            fn sar(self, flags: &mut Flags, count: u32) -> Self {
                let before = (self as $signed).wrapping_shr(count.wrapping_sub(1));
                let result = (before >> 1) as $int;
                flags.set_given(result, carries(before & 1 != 0, false));
                result
            }

            #[inline(always)]
            fn inc(self, flags: &mut Flags) -> Self {
                let result = self.wrapping_add(1);
                let half = if result & 15 == 0 { AF } else { 0 };
                let of = result == $signed::MIN as $int;
                flags.set_given(result, carries(flags.cf(), of) | half);
                result
            }

            #[inline(always)]
            fn dec(self, flags: &mut Flags) -> Self {
                let result = self.wrapping_sub(1);
                let half = if result & 15 == 15 { AF } else { 0 };
                let of = result == $signed::MAX as $int;
                flags.set_given(result, carries(flags.cf(), of) | half);
                result
            }

            #[inline(always)]
            fn multiply(self, by: Self, flags: &mut Flags) -> Self {
                let (result, over) = (self as $signed).overflowing_mul(by as $signed);
                flags.set_given(result as $int, carries(over, over));
                result as $int
            }
        }
    };
}

arith!(u32, i32);
arith!(u64, i64);

/// All ones in a width given as log2 of its bytes.
#[inline(always)]
pub(crate) const fn mask(width: u8) -> u64 {
    u64::MAX >> (64 - bits(width))
}

/// Bits in a width given as log2 of its bytes.
#[inline(always)]
pub(crate) const fn bits(width: u8) -> u32 {
    8 << width
}

/// The width's highest bit.
pub(crate) const fn sign(width: u8) -> u64 {
    1 << (bits(width) - 1)
}

/// Sign-extends from `width` to 64 bits.
pub(crate) const fn extend(width: u8, value: u64) -> u64 {
    let up = 64 - bits(width);
    ((value << up) as i64 >> up) as u64
}

/// Two-operand arithmetic, in the order of x86's opcode groups, then TEST.
pub(crate) mod alu {
    pub(crate) const ADD: u8 = 0;
    pub(crate) const OR: u8 = 1;
    pub(crate) const ADC: u8 = 2;
    pub(crate) const SBB: u8 = 3;
    pub(crate) const AND: u8 = 4;
    pub(crate) const SUB: u8 = 5;
    pub(crate) const XOR: u8 = 6;
    pub(crate) const CMP: u8 = 7;
    pub(crate) const TEST: u8 = 8;
}

/// `a kind b` at `width`. Only ADC and SBB use `carry`.
pub(crate) fn alu_result(kind: u8, width: u8, a: u64, b: u64, carry: bool) -> u64 {
    let carry = u64::from(carry);
    let result = match kind {
        alu::ADD => a.wrapping_add(b),
        alu::OR => a | b,
        alu::ADC => a.wrapping_add(b).wrapping_add(carry),
        alu::SBB => a.wrapping_sub(b).wrapping_sub(carry),
        alu::AND | alu::TEST => a & b,
        alu::XOR => a ^ b,
        _ => a.wrapping_sub(b),
    };
    result & mask(width)
}

/// The flags of [`alu_result`].
pub(crate) fn alu_flags(flags: &mut Flags, kind: u8, width: u8, a: u64, b: u64, carry: bool) {
    let r = alu_result(kind, width, a, b, carry);
    let half = (a ^ b ^ r) & AF;
    match kind {
        alu::ADD => flags.set_add_wide(width, r, b),
        alu::SUB | alu::CMP => flags.set_sub_wide(width, r, b),
        alu::ADC => {
            let cf = r < a || (carry && r == a);
            let of = (a ^ r) & (b ^ r) & sign(width) != 0;
            flags.set_given_wide(width, r, carries(cf, of) | half);
        }
        alu::SBB => {
            let cf = a < b || (carry && a == b);
            let of = (a ^ b) & (a ^ r) & sign(width) != 0;
            flags.set_given_wide(width, r, carries(cf, of) | half);
        }
        _ => flags.set_given_wide(width, r, 0),
    }
}

/// Shifts and rotates, in the order of x86's opcode group 2.
pub(crate) mod shift {
    pub(crate) const ROL: u8 = 0;
    pub(crate) const ROR: u8 = 1;
    pub(crate) const RCL: u8 = 2;
    pub(crate) const RCR: u8 = 3;
    pub(crate) const SHL: u8 = 4;
    pub(crate) const SHR: u8 = 5;
    pub(crate) const SAR: u8 = 7;
}

/// The count of a shift or rotate, masked as the processor does.
pub(crate) const fn shift_count(width: u8, count: u64) -> u32 {
    (count & if width == 3 { 63 } else { 31 }) as u32
}

/// `a` shifted or rotated by a masked `count`, with CF and OF. A count of zero leaves `a`.
pub(crate) fn shifted(kind: u8, width: u8, a: u64, count: u32, carry: bool) -> (u64, u64) {
    let (n, top) = (bits(width), sign(width));
    let m = mask(width);
    if count == 0 {
        return (a, 0);
    }
    match kind {
        shift::ROL | shift::ROR => {
            let by = count % n;
            let left = if kind == shift::ROL { by } else { (n - by) % n };
            let r = if left == 0 {
                a
            } else {
                (a << left | a >> (n - left)) & m
            };
            if kind == shift::ROL {
                (r, carries(r & 1 != 0, (r & top != 0) != (r & 1 != 0)))
            } else {
                (r, carries(r & top != 0, (r ^ r << 1) & top != 0))
            }
        }
        shift::RCL | shift::RCR => rotate_through_carry(kind, width, a, count, carry),
        shift::SHR => {
            let r = if count < n { a >> count } else { 0 };
            let cf = count <= n && a >> (count - 1) & 1 != 0;
            (r, carries(cf, a & top != 0))
        }
        shift::SAR => {
            let wide = extend(width, a) as i64;
            let r = (wide >> count.min(63)) as u64 & m;
            (r, carries(wide >> (count - 1).min(63) & 1 != 0, false))
        }
        _ => {
            let r = if count < n { a << count & m } else { 0 };
            let cf = count <= n && a >> (n - count) & 1 != 0;
            (r, carries(cf, (r & top != 0) != cf))
        }
    }
}

fn rotate_through_carry(kind: u8, width: u8, a: u64, count: u32, carry: bool) -> (u64, u64) {
    let (n, top) = (bits(width), sign(width));
    let by = count % (n + 1);
    let left = if kind == shift::RCL {
        by
    } else {
        (n + 1 - by) % (n + 1)
    };
    let ring = u128::from(carry) << n | u128::from(a);
    let ring = ring << left | ring >> (n + 1 - left);
    let (r, cf) = (ring as u64 & mask(width), ring >> n & 1 != 0);
    let of = if kind == shift::RCL {
        (r & top != 0) != cf
    } else {
        (r ^ r << 1) & top != 0
    };
    (r, carries(cf, of))
}
