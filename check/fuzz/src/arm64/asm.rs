//! A small encoder of A64 instructions for the runtime and the generator (Arm ARM C4.1).

/// The number of a general register; 31 is XZR, or SP as a base.
pub type Reg = u32;

/// SVC #0.
pub const SVC: u32 = 0xd400_0001;
/// HVC #0.
pub const HVC: u32 = 0xd400_0002;
/// ERET.
pub const ERET: u32 = 0xd69f_03e0;
/// ISB.
pub const ISB: u32 = 0xd503_3fdf;

/// MSR from X0 to the register that op0, op1, CRn, CRm and op2 name.
pub const fn sysreg([op0, op1, crn, crm, op2]: [u32; 5]) -> u32 {
    0xd500_0000 | op0 << 19 | op1 << 16 | crn << 12 | crm << 8 | op2 << 5
}

/// Code under construction, for a known address.
#[derive(Clone, Debug)]
pub struct Asm {
    origin: u64,
    words: Vec<u32>,
}

/// A branch without a target yet.
#[must_use]
pub struct Hole(usize);

impl Asm {
    /// Code for this address.
    pub fn at(origin: u64) -> Self {
        Self {
            origin,
            words: Vec::new(),
        }
    }

    /// The bytes.
    pub fn bytes(&self) -> Vec<u8> {
        self.words.iter().flat_map(|w| w.to_le_bytes()).collect()
    }

    /// The number of instructions so far.
    pub fn len(&self) -> usize {
        self.words.len()
    }

    fn here(&self) -> u64 {
        self.origin + 4 * self.words.len() as u64
    }

    /// Any instruction.
    pub fn raw(&mut self, word: u32) -> &mut Self {
        self.words.push(word);
        self
    }

    /// Zeros (undefined instructions) up to `address`.
    pub fn pad_to(&mut self, address: u64) {
        assert!(self.here() <= address, "the code before is too long");
        self.words.resize((address - self.origin) as usize / 4, 0);
    }

    /// `to := value`.
    pub fn set(&mut self, to: Reg, value: u64) -> &mut Self {
        self.raw(0xd280_0000 | (value as u32 & 0xffff) << 5 | to);
        for part in 1..4 {
            let bits = (value >> (16 * part)) as u32 & 0xffff;
            if bits != 0 {
                self.raw(0xf280_0000 | part << 21 | bits << 5 | to);
            }
        }
        self
    }

    /// LDR of 64 bits.
    pub fn load(&mut self, to: Reg, base: Reg, offset: u32) -> &mut Self {
        self.raw(0xf940_0000 | (offset / 8) << 10 | base << 5 | to)
    }

    /// STR of 64 bits.
    pub fn store(&mut self, from: Reg, base: Reg, offset: u32) -> &mut Self {
        self.raw(0xf900_0000 | (offset / 8) << 10 | base << 5 | from)
    }

    /// STR of 32 bits.
    pub fn store32(&mut self, from: Reg, base: Reg, offset: u32) -> &mut Self {
        self.raw(0xb900_0000 | (offset / 4) << 10 | base << 5 | from)
    }

    /// `to := to + value`.
    pub fn add(&mut self, to: Reg, value: u32) -> &mut Self {
        self.raw(0x9100_0000 | value << 10 | to << 5 | to)
    }

    /// `to := to + (from << shift)`.
    pub fn add_shifted(&mut self, to: Reg, from: Reg, shift: u32) -> &mut Self {
        self.raw(0x8b00_0000 | from << 16 | shift << 10 | to << 5 | to)
    }

    /// Keeps the lowest `bits` bits (UBFX).
    pub fn low_bits(&mut self, register: Reg, bits: u32) -> &mut Self {
        self.raw(0xd340_0000 | (bits - 1) << 10 | register << 5 | register)
    }

    /// Adds 1 to the word at `base`; X12 changes. If another vCPU counts at the same time, one
    /// count is lost.
    pub fn count(&mut self, base: Reg) -> &mut Self {
        self.load(12, base, 0).add(12, 1).store(12, base, 0)
    }

    /// MSR.
    pub fn msr(&mut self, register: u32, from: Reg) -> &mut Self {
        self.raw(register | from)
    }

    /// MRS.
    pub fn mrs(&mut self, register: u32, to: Reg) -> &mut Self {
        self.raw(register | 1 << 21 | to)
    }

    /// HVC with these values in X0 and so on.
    pub fn call(&mut self, values: &[u64]) -> &mut Self {
        for (register, value) in (0..).zip(values) {
            self.set(register, *value);
        }
        self.raw(HVC)
    }

    /// B.
    pub fn branch(&mut self, target: u64) -> &mut Self {
        let distance = (target.wrapping_sub(self.here()) / 4) as u32;
        self.raw(0x1400_0000 | distance & 0x3ff_ffff)
    }

    /// CBNZ; [`Asm::land`] sets its target later.
    pub fn branch_if_not_zero(&mut self, register: Reg) -> Hole {
        self.raw(0xb500_0000 | register);
        Hole(self.words.len() - 1)
    }

    /// Makes the end of the code so far the target of `hole`.
    pub fn land(&mut self, hole: Hole) {
        let distance = (self.words.len() - hole.0) as u32;
        self.words[hole.0] |= distance << 5;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encodings_are_those_of_the_manual() {
        let mut a = Asm::at(0x1000);
        a.set(3, 0x1_0002).low_bits(13, 4).add_shifted(15, 12, 6);
        a.msr(sysreg([3, 0, 12, 0, 0]), 1).branch(0x1000);
        let expected = [
            0xd280_0043, // movz x3, #2
            0xf2a0_0023, // movk x3, #1, lsl #16
            0xd340_0dad, // ubfx x13, x13, #0, #4
            0x8b0c_19ef, // add x15, x15, x12, lsl #6
            0xd518_c001, // msr vbar_el1, x1
            0x17ff_fffb, // b .-20
        ];
        assert_eq!(a.words, expected);
    }
}
