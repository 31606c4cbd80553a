//! The assembler.

use crate::{HVC, UDF};

/// The number of a general register; 31 is XZR, or SP as a base.
pub type Reg = u32;

/// A place in the code. Branches to it may be written before it.
#[derive(Clone, Copy, Debug)]
pub struct Label(usize);

/// Code under construction.
#[derive(Clone, Debug)]
pub struct Asm {
    origin: u64,
    words: Vec<u32>,
    /// The address of each label that has one.
    places: Vec<Option<u64>>,
    /// The index of each branch, and its label.
    branches: Vec<(usize, Label)>,
}

impl Asm {
    /// Code for this address.
    pub const fn at(origin: u64) -> Self {
        Self {
            origin,
            words: Vec::new(),
            places: Vec::new(),
            branches: Vec::new(),
        }
    }

    /// The instructions, with the displacements of branches.
    ///
    /// # Panics
    /// A branch has a label that was not placed, or that it does not reach.
    pub fn words(&self) -> Vec<u32> {
        let mut words = self.words.clone();
        for &(index, label) in &self.branches {
            let from = self.origin + 4 * index as u64;
            let distance = self.address(label).wrapping_sub(from) as i64 / 4;
            let word = &mut words[index];
            // B and BL have 26 bits. The others have 19 bits above the register or condition.
            let (bits, low) = match *word >> 26 & 0x1f {
                5 => (26, 0),
                _ => (19, 5),
            };
            let range = -(1 << (bits - 1))..1 << (bits - 1);
            assert!(
                range.contains(&distance),
                "a branch over {distance} instructions"
            );
            *word |= (distance as u32 & ((1 << bits) - 1)) << low;
        }
        words
    }

    /// The bytes of [`Self::words`].
    pub fn bytes(&self) -> Vec<u8> {
        self.words().iter().flat_map(|w| w.to_le_bytes()).collect()
    }

    /// The address of the next instruction.
    pub const fn here(&self) -> u64 {
        self.origin + 4 * self.words.len() as u64
    }

    /// Any instruction.
    pub fn raw(&mut self, word: u32) -> &mut Self {
        self.words.push(word);
        self
    }

    /// Zeros (undefined instructions) up to `address`.
    ///
    /// # Panics
    /// The code so far is longer.
    pub fn pad_to(&mut self, address: u64) -> &mut Self {
        assert!(self.here() <= address, "the code before is too long");
        self.words.resize((address - self.origin) as usize / 4, UDF);
        self
    }

    /// A new label.
    pub fn label(&mut self) -> Label {
        self.places.push(None);
        Label(self.places.len() - 1)
    }

    /// Places `label` at the next instruction.
    pub fn place(&mut self, label: Label) -> &mut Self {
        self.places[label.0] = Some(self.here());
        self
    }

    /// The address of `label`.
    ///
    /// # Panics
    /// It was not placed.
    pub fn address(&self, label: Label) -> u64 {
        self.places[label.0].expect("a label that was placed")
    }

    /// The branch `word` to `label`.
    pub fn branch(&mut self, word: u32, label: Label) -> &mut Self {
        self.branches.push((self.words.len(), label));
        self.raw(word)
    }

    /// `to := value`: MOVZ, then MOVK for each other nonzero part.
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

    /// The instruction `word` with three registers.
    pub fn three(&mut self, word: u32, to: Reg, first: Reg, second: Reg) -> &mut Self {
        self.raw(word | second << 16 | first << 5 | to)
    }

    /// `to := from + value`, which is at most 4096.
    pub fn add(&mut self, to: Reg, from: Reg, value: u32) -> &mut Self {
        assert!(value <= 4096, "{value}");
        // Bit 22 shifts the value by 12.
        let field = match value {
            4096 => 1 << 22 | 1 << 10,
            _ => value << 10,
        };
        self.raw(0x9100_0000 | field | from << 5 | to)
    }

    /// `to := to + (from << shift)`.
    pub fn add_shifted(&mut self, to: Reg, from: Reg, shift: u32) -> &mut Self {
        self.three(0x8b00_0000 | shift << 10, to, to, from)
    }

    /// Keeps the lowest `bits` bits (UBFX).
    pub fn low_bits(&mut self, register: Reg, bits: u32) -> &mut Self {
        self.raw(0xd340_0000 | (bits - 1) << 10 | register << 5 | register)
    }

    /// LDR of `size` bytes (immediate, unsigned offset).
    pub fn load(&mut self, size: u32, to: Reg, base: Reg, offset: u32) -> &mut Self {
        self.access(0x3940_0000, size, to, base, offset)
    }

    /// STR of `size` bytes.
    pub fn store(&mut self, size: u32, from: Reg, base: Reg, offset: u32) -> &mut Self {
        self.access(0x3900_0000, size, from, base, offset)
    }

    fn access(&mut self, word: u32, size: u32, register: Reg, base: Reg, offset: u32) -> &mut Self {
        assert!(
            offset.is_multiple_of(size) && offset / size < 4096,
            "{offset}"
        );
        let word = word | size.trailing_zeros() << 30 | (offset / size) << 10;
        self.raw(word | base << 5 | register)
    }

    /// Adds 1 to the `size` bytes at `base` and `offset`, through the register `value`. If another
    /// vCPU counts at the same time, one count is lost.
    pub fn count(&mut self, size: u32, value: Reg, base: Reg, offset: u32) -> &mut Self {
        self.load(size, value, base, offset)
            .add(value, value, 1)
            .store(size, value, base, offset)
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ADR, B, B_COND, CBNZ, VBAR};

    #[test]
    fn encodings_are_those_of_the_manual() {
        let mut a = Asm::at(0x1000);
        let (start, end) = (a.label(), a.label());
        a.place(start).branch(ADR | 2, end);
        a.set(3, 0x1_0002).low_bits(13, 4).add_shifted(15, 12, 6);
        a.msr(VBAR, 1).mrs(VBAR, 1);
        a.load(8, 4, 31, 16).store(2, 5, 6, 2).add(7, 8, 4096);
        a.branch(CBNZ | 9, end).branch(B_COND | 1, start);
        a.branch(B, start).place(end);
        let expected = [
            0x1000_01a2, // adr x2, .+52
            0xd280_0043, // movz x3, #2
            0xf2a0_0023, // movk x3, #1, lsl #16
            0xd340_0dad, // ubfx x13, x13, #0, #4
            0x8b0c_19ef, // add x15, x15, x12, lsl #6
            0xd518_c001, // msr vbar_el1, x1
            0xd538_c001, // mrs x1, vbar_el1
            0xf940_0be4, // ldr x4, [sp, #16]
            0x7900_04c5, // strh w5, [x6, #2]
            0x9140_0507, // add x7, x8, #1, lsl #12
            0xb500_0069, // cbnz x9, .+12
            0x54ff_fea1, // b.ne .-44
            0x17ff_fff4, // b .-48
        ];
        assert_eq!(a.words(), expected);
    }
}
