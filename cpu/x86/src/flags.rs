//! The arithmetic flags, computed when an instruction reads them.
//!
//! Most instructions set flags that the next one overwrites. So an instruction stores three words,
//! and a reader derives its flags from these:
//!
//! ```text
//!   kind          result            other
//!   Add  width    a + b             b                          CF = result < b
//!   Sub  width    a - b             b                          CF = result + b < b
//!   Given width   any result        CF, OF, AF as RFLAGS bits  logic, shifts, INC, MUL, ...
//!   Explicit      0 if ZF, else 1   all six as RFLAGS bits     POPF, SAHF, BT, ...
//! ```
//! ZF is `result == 0` in every kind, so the most frequently read flag does not depend on the kind.
//! Results and `b` are kept zero-extended. Architecturally undefined flags are zero or unchanged.

use lacuna_cpu::Word;

pub(crate) const CF: u64 = 1 << 0;
pub(crate) const PF: u64 = 1 << 2;
pub(crate) const AF: u64 = 1 << 4;
pub(crate) const ZF: u64 = 1 << 6;
pub(crate) const SF: u64 = 1 << 7;
pub(crate) const OF: u64 = 1 << 11;
/// The six flags that arithmetic sets.
pub(crate) const ARITHMETIC: u64 = CF | PF | AF | ZF | SF | OF;

pub(crate) const TF: u64 = 1 << 8;
pub(crate) const IF: u64 = 1 << 9;
pub(crate) const DF: u64 = 1 << 10;
pub(crate) const IOPL: u64 = 3 << 12;
pub(crate) const NT: u64 = 1 << 14;
pub(crate) const RF: u64 = 1 << 16;
pub(crate) const AC: u64 = 1 << 18;
pub(crate) const ID: u64 = 1 << 21;
/// Bit 1 reads as one.
pub(crate) const ALWAYS: u64 = 1 << 1;

const ADD: u8 = 0;
const SUB: u8 = 4;
const GIVEN: u8 = 8;
const EXPLICIT: u8 = 12;

/// The lazily kept arithmetic flags.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flags {
    result: u64,
    other: u64,
    /// Family, plus log2 of the width in bytes.
    kind: u8,
}

impl Default for Flags {
    fn default() -> Self {
        Self {
            result: 1,
            other: 0,
            kind: EXPLICIT,
        }
    }
}

impl Flags {
    /// After `result = a + b`.
    #[inline(always)]
    pub(crate) fn set_add<T: Word>(&mut self, result: T, b: T) {
        *self = Self {
            result: result.widen(),
            other: b.widen(),
            kind: ADD | log2::<T>(),
        };
    }

    /// After `result = a - b`.
    #[inline(always)]
    pub(crate) fn set_sub<T: Word>(&mut self, result: T, b: T) {
        *self = Self {
            result: result.widen(),
            other: b.widen(),
            kind: SUB | log2::<T>(),
        };
    }

    /// After an operation with `result` for ZF, SF and PF, and CF, OF and AF as given.
    #[inline(always)]
    pub(crate) fn set_given<T: Word>(&mut self, result: T, carries: u64) {
        *self = Self {
            result: result.widen(),
            other: carries,
            kind: GIVEN | log2::<T>(),
        };
    }

    /// [`Flags::set_add`] for a width given as log2 of its bytes.
    pub(crate) fn set_add_wide(&mut self, width: u8, result: u64, b: u64) {
        *self = Self {
            result,
            other: b,
            kind: ADD | width,
        };
    }

    /// [`Flags::set_sub`] for a width given as log2 of its bytes.
    pub(crate) fn set_sub_wide(&mut self, width: u8, result: u64, b: u64) {
        *self = Self {
            result,
            other: b,
            kind: SUB | width,
        };
    }

    /// [`Flags::set_given`] for a width given as log2 of its bytes.
    pub(crate) fn set_given_wide(&mut self, width: u8, result: u64, carries: u64) {
        *self = Self {
            result,
            other: carries,
            kind: GIVEN | width,
        };
    }

    /// All six from RFLAGS bits.
    pub(crate) fn set_bits(&mut self, bits: u64) {
        *self = Self {
            result: u64::from(bits & ZF == 0),
            other: bits,
            kind: EXPLICIT,
        };
    }

    /// Replaces the flags in `which` and keeps the others.
    pub(crate) fn replace(&mut self, which: u64, bits: u64) {
        self.set_bits(self.bits() & !which | bits & which);
    }

    #[inline(always)]
    fn sign(&self) -> u64 {
        0x80 << (8 * ((1 << (self.kind & 3)) - 1))
    }

    #[inline(always)]
    fn mask(&self) -> u64 {
        u64::MAX >> (64 - (8 << (self.kind & 3)))
    }

    /// Zero.
    #[inline(always)]
    pub(crate) fn zf(&self) -> bool {
        self.result == 0
    }

    /// Carry.
    #[inline]
    pub(crate) fn cf(&self) -> bool {
        match self.kind & 12 {
            ADD => self.result < self.other,
            SUB => self.minuend() < self.other,
            _ => self.other & CF != 0,
        }
    }

    #[inline(always)]
    fn minuend(&self) -> u64 {
        self.result.wrapping_add(self.other) & self.mask()
    }

    fn sf(&self) -> bool {
        match self.kind & 12 {
            EXPLICIT => self.other & SF != 0,
            _ => self.result & self.sign() != 0,
        }
    }

    fn of(&self) -> bool {
        let (r, b) = (self.result, self.other);
        match self.kind & 12 {
            ADD => (r.wrapping_sub(b) ^ r) & (b ^ r) & self.sign() != 0,
            SUB => (r.wrapping_add(b) ^ b) & (r.wrapping_add(b) ^ r) & self.sign() != 0,
            _ => b & OF != 0,
        }
    }

    fn pf(&self) -> bool {
        match self.kind & 12 {
            EXPLICIT => self.other & PF != 0,
            _ => (self.result as u8).count_ones() & 1 == 0,
        }
    }

    fn af(&self) -> bool {
        let (r, b) = (self.result, self.other);
        match self.kind & 12 {
            ADD => (r.wrapping_sub(b) ^ b ^ r) & AF != 0,
            SUB => (r.wrapping_add(b) ^ b ^ r) & AF != 0,
            _ => b & AF != 0,
        }
    }

    /// The six as RFLAGS bits.
    pub(crate) fn bits(&self) -> u64 {
        let bit = |on: bool, flag: u64| if on { flag } else { 0 };
        bit(self.cf(), CF)
            | bit(self.pf(), PF)
            | bit(self.af(), AF)
            | bit(self.zf(), ZF)
            | bit(self.sf(), SF)
            | bit(self.of(), OF)
    }

    /// Whether condition `cc` (the low four bits of Jcc, SETcc, CMOVcc opcodes) holds.
    #[inline]
    pub(crate) fn condition(&self, cc: u8) -> bool {
        let holds = match (cc >> 1) & 7 {
            0 => self.of(),
            1 => self.cf(),
            2 => self.zf(),
            3 => self.zf() || self.cf(),
            4 => self.sf(),
            5 => self.pf(),
            6 => self.less(),
            _ => self.zf() || self.less(),
        };
        holds ^ (cc & 1 != 0)
    }

    /// SF != OF.
    #[inline]
    fn less(&self) -> bool {
        if self.kind & 12 == SUB {
            // Both operands are shifted up to bit 63, where they compare as signed numbers.
            let up = 64 - (8 << (self.kind & 3));
            return ((self.minuend() << up) as i64) < ((self.other << up) as i64);
        }
        self.sf() != self.of()
    }
}

const fn log2<T: Word>() -> u8 {
    T::BYTES.trailing_zeros() as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares every byte pair with the definition by wider arithmetic.
    #[test]
    fn add_and_sub_agree_with_wide_arithmetic() {
        for a in 0..=255_u8 {
            for b in 0..=255_u8 {
                let mut f = Flags::default();
                let r = a.wrapping_add(b);
                f.set_add(r, b);
                let signed = i16::from(a as i8) + i16::from(b as i8);
                check(f, r, u16::from(a) + u16::from(b) > 255, signed, a ^ b ^ r);
                let r = a.wrapping_sub(b);
                f.set_sub(r, b);
                let signed = i16::from(a as i8) - i16::from(b as i8);
                check(f, r, a < b, signed, a ^ b ^ r);
                assert_eq!(f.condition(12), (a as i8) < (b as i8), "L");
                assert_eq!(f.condition(14), (a as i8) <= (b as i8), "LE");
                assert_eq!(f.condition(7), a > b, "A");
            }
        }
    }

    fn check(f: Flags, r: u8, carry: bool, signed: i16, half: u8) {
        assert_eq!(f.cf(), carry);
        assert_eq!(f.of(), i16::from(signed as i8) != signed);
        assert_eq!(f.zf(), r == 0);
        assert_eq!(f.sf(), r > 127);
        assert_eq!(f.pf(), r.count_ones().is_multiple_of(2));
        assert_eq!(f.af(), half & 16 != 0);
        let mut copy = Flags::default();
        copy.set_bits(f.bits());
        assert_eq!(copy.bits(), f.bits());
        for cc in 0..16 {
            assert_eq!(copy.condition(cc), f.condition(cc), "condition {cc}");
        }
    }

    #[test]
    fn replace_keeps_the_others() {
        let mut f = Flags::default();
        f.set_bits(ARITHMETIC);
        f.replace(CF | OF, OF);
        assert_eq!(f.bits(), ARITHMETIC & !CF);
    }
}
