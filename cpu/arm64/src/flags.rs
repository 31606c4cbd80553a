//! N, Z, C and V, computed when an instruction reads them.
//!
//! An instruction that sets flags stores three words. A reader derives its flags from these:
//!
//! ```text
//!   kind      result            other
//!   Add       a + b             b             C = result < b
//!   Sub       a - b             b             C = no borrow = a >= b
//!   Logic     any               not used      C = V = 0
//!   Explicit  sign N, zero Z    NZCV bits     ADC, SBC, CCMP with a false condition, MSR NZCV
//! ```
//! 32-bit operands and results are kept shifted up by 32 bits. There they carry, overflow, and are
//! zero and negative exactly as in 32 bits. So no reader needs the width.

/// PSTATE.N, in its place in SPSR.
pub(crate) const N: u64 = 1 << 31;
/// PSTATE.Z.
pub(crate) const Z: u64 = 1 << 30;
/// PSTATE.C.
pub(crate) const C: u64 = 1 << 29;
/// PSTATE.V.
pub(crate) const V: u64 = 1 << 28;
/// All four.
pub(crate) const NZCV: u64 = N | Z | C | V;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
enum Kind {
    Add,
    Sub,
    Logic,
    Explicit,
}

/// The lazily kept flags.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flags {
    result: u64,
    other: u64,
    kind: Kind,
}

impl Default for Flags {
    fn default() -> Self {
        let mut flags = Self {
            result: 0,
            other: 0,
            kind: Kind::Explicit,
        };
        flags.set_bits(0);
        flags
    }
}

/// An operand width of data processing.
pub(crate) trait Width: Copy + lacuna_cpu::Word {
    /// The value in the highest bits of 64.
    fn high(self) -> u64;
}

impl Width for u32 {
    #[inline(always)]
    fn high(self) -> u64 {
        u64::from(self) << 32
    }
}

impl Width for u64 {
    #[inline(always)]
    fn high(self) -> u64 {
        self
    }
}

impl Flags {
    /// After `result = a + b`.
    #[inline(always)]
    pub(crate) fn set_add<T: Width>(&mut self, result: T, b: T) {
        *self = Self {
            result: result.high(),
            other: b.high(),
            kind: Kind::Add,
        };
    }

    /// After `result = a - b`.
    #[inline(always)]
    pub(crate) fn set_sub<T: Width>(&mut self, result: T, b: T) {
        *self = Self {
            result: result.high(),
            other: b.high(),
            kind: Kind::Sub,
        };
    }

    /// After a logical operation.
    #[inline(always)]
    pub(crate) fn set_logic<T: Width>(&mut self, result: T) {
        self.result = result.high();
        self.kind = Kind::Logic;
    }

    /// From bits in the places of SPSR; the others are ignored.
    pub(crate) fn set_bits(&mut self, bits: u64) {
        let (n, z) = (bits & N != 0, bits & Z != 0);
        // N and Z together cannot be a result: `Explicit` reads them from the bits.
        let result = if z { 0 } else { u64::from(n) << 63 | 1 };
        *self = Self {
            result,
            other: bits & NZCV,
            kind: Kind::Explicit,
        };
    }

    /// Zero.
    #[inline(always)]
    pub(crate) fn z(&self) -> bool {
        self.result == 0
    }

    /// Carry: no borrow, after a subtraction.
    #[inline]
    pub(crate) fn c(&self) -> bool {
        match self.kind {
            Kind::Add => self.result < self.other,
            Kind::Sub => self.minuend() >= self.other,
            Kind::Logic => false,
            Kind::Explicit => self.other & C != 0,
        }
    }

    /// Negative.
    #[inline]
    pub(crate) fn n(&self) -> bool {
        match self.kind {
            Kind::Explicit => self.other & N != 0,
            _ => (self.result as i64) < 0,
        }
    }

    /// Overflow.
    #[inline]
    pub(crate) fn v(&self) -> bool {
        let (r, b) = (self.result, self.other);
        match self.kind {
            Kind::Add => ((r.wrapping_sub(b) ^ r) & (b ^ r)) >> 63 != 0,
            Kind::Sub => ((self.minuend() ^ b) & (self.minuend() ^ r)) >> 63 != 0,
            Kind::Logic => false,
            Kind::Explicit => b & V != 0,
        }
    }

    #[inline(always)]
    fn minuend(&self) -> u64 {
        self.result.wrapping_add(self.other)
    }

    /// N != V: less than, signed.
    #[inline]
    fn less(&self) -> bool {
        match self.kind {
            Kind::Sub => (self.minuend() as i64) < (self.other as i64),
            _ => self.n() != self.v(),
        }
    }

    /// The four in the places of SPSR.
    pub(crate) fn bits(&self) -> u64 {
        let bit = |on: bool, flag: u64| if on { flag } else { 0 };
        bit(self.n(), N) | bit(self.z(), Z) | bit(self.c(), C) | bit(self.v(), V)
    }

    /// Whether condition `cond` (Arm ARM C1.2.4) holds. 14 and 15 are both "always".
    #[inline]
    pub(crate) fn condition(&self, cond: u8) -> bool {
        let holds = match cond >> 1 {
            0 => self.z(),
            1 => self.c(),
            2 => self.n(),
            3 => self.v(),
            4 => self.c() && !self.z(),
            5 => !self.less(),
            6 => !self.less() && !self.z(),
            _ => return true,
        };
        holds != (cond & 1 != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares every pair of small values with the definition by wider arithmetic. Operands of 32
    /// bits whose low bits are zero behave as bytes do.
    #[test]
    fn add_and_sub_agree_with_wide_arithmetic() {
        for a in 0..=255_u32 {
            for b in 0..=255_u32 {
                let (wide_a, wide_b) = (a << 24, b << 24);
                let signed = |x: u32| i32::from(x as u8 as i8);
                let mut f = Flags::default();
                f.set_add(wide_a.wrapping_add(wide_b), wide_b);
                check(
                    f,
                    a.wrapping_add(b) as u8,
                    a + b > 255,
                    signed(a) + signed(b),
                );
                f.set_sub(wide_a.wrapping_sub(wide_b), wide_b);
                check(f, a.wrapping_sub(b) as u8, a >= b, signed(a) - signed(b));
                assert_eq!(f.condition(8), a > b, "HI");
                assert_eq!(f.condition(11), signed(a) < signed(b), "LT");
                assert_eq!(f.condition(12), signed(a) > signed(b), "GT");
            }
        }
    }

    fn check(f: Flags, result: u8, carry: bool, signed: i32) {
        assert_eq!(f.n(), result > 127);
        assert_eq!(f.z(), result == 0);
        assert_eq!(f.c(), carry);
        assert_eq!(f.v(), i32::from(signed as i8) != signed);
        let mut copy = Flags::default();
        copy.set_bits(f.bits());
        assert_eq!(copy.bits(), f.bits());
        for cond in 0..16 {
            assert_eq!(copy.condition(cond), f.condition(cond), "condition {cond}");
        }
    }

    #[test]
    fn every_combination_of_bits_is_kept() {
        for nzcv in 0..16_u64 {
            let mut f = Flags::default();
            f.set_bits(nzcv << 28);
            assert_eq!(f.bits(), nzcv << 28);
            let (n, v) = (nzcv & 8 != 0, nzcv & 1 != 0);
            assert_eq!(f.condition(10), n == v, "GE");
        }
    }
}
