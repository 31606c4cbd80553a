//! Programs in A64 (Arm ARM C4.1, C6.2).

use super::{ASK_AT, Assembler, Condition, Interrupts, Op, REPORT_AT, Reg, STACK, ram};
use lacuna_machine::{Arch, Width, mmio};

/// Registers that hold a value within one operation.
const ADDRESS: u32 = 16;
const VALUE: u32 = 17;

/// MSR DAIFClr, #2: interrupts are not masked.
const UNMASK: u32 = 0xd503_42ff;
const WFI: u32 = 0xd503_207f;
const HVC: u32 = 0xd400_0002;
/// The vendor service of RFCv2. Its argument is in two halves.
const ASYNC_FAULTS: u64 = 0x8600_0001;
const ISB: u32 = 0xd503_3fdf;
/// MSR of a register of EL1.
const MSR_TTBR0: u32 = 0xd518_2000;
const MSR_MAIR: u32 = 0xd518_a200;
const MSR_TCR: u32 = 0xd518_2040;
const MSR_VBAR: u32 = 0xd518_c000;
const MSR_SCTLR: u32 = 0xd518_1000;
/// T0SZ is 25, walks are cacheable and inner shareable, TTBR1 is not walked; 48 bits of output.
const TCR: u64 = 5 << 32 | 1 << 23 | 0b11_01_01 << 8 | 25;
/// M, and the always-1 bits. A is 0.
const SCTLR: u64 = 0x30d0_0801;
const ERET: u32 = 0xd69f_03e0;
/// PSCI's `CPU_ON`, with 64-bit arguments.
const CPU_ON: u64 = 0xc400_0003;
/// The offsets of the vectors in a program that enables asynchronous page faults, and of the vector
/// for the first contract's events at EL1. The event after the enabling means nothing to a program,
/// so its handler returns.
const VECTORS: u64 = 0x800;
const FROM_EL1: u64 = 0x200;
/// UDF #0. VBAR_EL1 is 0, where there is no memory.
const UDF: u32 = 0;

/// The number of a register: X19 to X26.
pub(super) const fn number(reg: Reg) -> u32 {
    19 + reg as u32
}

/// The code in front of a program of [`super::assemble_user`]. It switches vCPU 1 on, which begins
/// behind the call. A VM without that vCPU refuses the call.
pub(super) fn prologue(interrupts: Interrupts) -> Vec<u32> {
    let call = |entry| {
        let mut words = Words::default();
        for (register, value) in (0..).zip([CPU_ON, 1, entry, 0]) {
            words.set(register, value);
        }
        words.words.push(HVC);
        words.words
    };
    let begin = super::code(Arch::Arm64).get();
    let mut words = call(begin + 4 * call(begin).len() as u64);
    if interrupts == Interrupts::On {
        words.push(UNMASK);
    }
    words
}

/// A branch with a distance still to fill in: the word, the lowest bit and the size of its field,
/// and the label.
struct Fixup {
    at: usize,
    shift: u32,
    bits: u32,
    label: usize,
}

#[derive(Default)]
struct Words {
    words: Vec<u32>,
    places: Vec<Option<usize>>,
    fixups: Vec<Fixup>,
}

/// The machine code of `program` behind `prologue`.
pub(super) fn encode(program: &Assembler, prologue: Vec<u32>) -> Vec<u8> {
    let mut words = Words {
        words: prologue,
        places: vec![None; program.labels],
        fixups: Vec::new(),
    };
    program.ops.iter().for_each(|op| words.emit(*op));
    words.resolve();
    let has_async_faults = |op: &Op| matches!(op, Op::EnableAsyncFaults(_));
    if program.ops.iter().any(has_async_faults) {
        words.pad_to(VECTORS + FROM_EL1);
        words.words.push(ERET);
    }
    words.words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

/// Log2 of the bytes.
const fn log2(width: Width) -> u32 {
    (width as u32).trailing_zeros()
}

impl Words {
    fn emit(&mut self, op: Op) {
        match op {
            Op::Set(to, value) => self.set(number(to), value),
            Op::Load(width, to, base, offset) => {
                self.load(width, number(to), number(base), offset);
            }
            Op::Store(width, base, offset, from) => {
                self.store(width, number(from), number(base), offset);
            }
            Op::Increment(base, offset) => {
                self.load(Width::Long, VALUE, number(base), offset);
                self.add_immediate(VALUE, 1);
                self.store(Width::Long, VALUE, number(base), offset);
            }
            // ADD (shifted register).
            Op::Add(to, from) => self.three(0x8b00_0000, number(to), number(to), number(from)),
            Op::AddImmediate(to, value) => self.add_immediate(number(to), value),
            // ORN with XZR: MVN.
            Op::Not(to) => self.three(0xaa20_0000, number(to), 31, number(to)),
            // UBFM: LSR (immediate).
            Op::ShiftRight(to, bits) => {
                let word = 0xd340_fc00 | u32::from(bits) << 16;
                self.words.push(word | number(to) << 5 | number(to));
            }
            Op::Label(label) => self.places[label.0] = Some(self.words.len()),
            Op::Jump(label) => self.branch(0x1400_0000, 0, 26, label.0),
            Op::Branch(condition, a, b, label) => {
                // SUBS with XZR: CMP.
                self.three(0xeb00_0000, 31, number(a), number(b));
                let condition = match condition {
                    Condition::Equal => 0,
                    Condition::NotEqual => 1,
                    Condition::Less => 3,
                };
                self.branch(0x5400_0000 | condition, 5, 19, label.0);
            }
            Op::Report(value) => self.write_device(Width::Long, REPORT_AT, number(value)),
            Op::Ask(to) => {
                self.set(ADDRESS, ASK_AT);
                self.load(Width::Long, number(to), ADDRESS, 0);
            }
            Op::Print(byte) => self.write_device(Width::Byte, mmio::UART.get(), number(byte)),
            Op::Exit(code) => {
                let at = mmio::HOST.get() + mmio::HOST_EXIT;
                self.write_device(Width::Long, at, number(code));
            }
            Op::EnableAsyncFaults(value) => {
                self.set(VALUE, super::code(Arch::Arm64).get() + VECTORS);
                self.words.push(MSR_VBAR | VALUE);
                self.set(0, ASYNC_FAULTS);
                self.set(1, value & 0xffff_ffff);
                self.set(2, value >> 32);
                self.words.push(HVC);
            }
            Op::AllowUnaligned => self.switch_stage_1_on(),
            Op::Halt => self.words.push(WFI),
            Op::Crash => self.words.push(UDF),
        }
    }

    /// One table of level 1 with a block of 1 GiB for each of its first four entries, all normal
    /// memory, and 39 bits of address. Attribute 0 of MAIR_EL1 is normal write-back.
    fn switch_stage_1_on(&mut self) {
        let table = ram(Arch::Arm64, STACK);
        self.set(ADDRESS, table);
        for block in 0..4 {
            // A valid block with AF, inner shareable.
            self.set(VALUE, block << 30 | 0x701);
            self.store(Width::Quad, VALUE, ADDRESS, 8 * block as u32);
        }
        for (msr, value) in [
            (MSR_TTBR0, table),
            (MSR_MAIR, 0xff),
            (MSR_TCR, TCR),
            (MSR_SCTLR, SCTLR),
        ] {
            self.set(VALUE, value);
            self.words.push(msr | VALUE);
        }
        self.words.push(ISB);
    }

    /// MOVZ, then MOVK for each other nonzero part.
    fn set(&mut self, to: u32, value: u64) {
        self.words
            .push(0xd280_0000 | (value as u32 & 0xffff) << 5 | to);
        for part in 1..4 {
            let bits = (value >> (16 * part)) as u32 & 0xffff;
            if bits != 0 {
                self.words.push(0xf280_0000 | part << 21 | bits << 5 | to);
            }
        }
    }

    /// LDR and STR (immediate, unsigned offset).
    fn access(&mut self, base_word: u32, width: Width, register: u32, base: u32, offset: u32) {
        let (size, scaled) = (log2(width), offset >> log2(width));
        assert!(scaled << size == offset && scaled < 4096, "{offset}");
        self.words
            .push(base_word | size << 30 | scaled << 10 | base << 5 | register);
    }

    fn load(&mut self, width: Width, to: u32, base: u32, offset: u32) {
        self.access(0x3940_0000, width, to, base, offset);
    }

    fn store(&mut self, width: Width, from: u32, base: u32, offset: u32) {
        self.access(0x3900_0000, width, from, base, offset);
    }

    fn write_device(&mut self, width: Width, at: u64, from: u32) {
        self.set(ADDRESS, at);
        self.store(width, from, ADDRESS, 0);
    }

    fn pad_to(&mut self, offset: u64) {
        let words = offset as usize / 4;
        assert!(self.words.len() <= words, "too long");
        self.words.resize(words, UDF);
    }

    fn three(&mut self, word: u32, to: u32, first: u32, second: u32) {
        self.words.push(word | second << 16 | first << 5 | to);
    }

    /// ADD (immediate); bit 22 shifts the value by 12.
    fn add_immediate(&mut self, to: u32, value: u32) {
        let field = match value {
            4096 => 1 << 22 | 1 << 10,
            _ => value << 10,
        };
        assert!(value <= 4096, "{value}");
        self.words.push(0x9100_0000 | field | to << 5 | to);
    }

    fn branch(&mut self, word: u32, shift: u32, bits: u32, label: usize) {
        self.fixups.push(Fixup {
            at: self.words.len(),
            shift,
            bits,
            label,
        });
        self.words.push(word);
    }

    fn resolve(&mut self) {
        for fixup in &self.fixups {
            let place = self.places[fixup.label].expect("a label that was placed");
            let distance = place as i64 - fixup.at as i64;
            let field = (distance as u32) & ((1 << fixup.bits) - 1);
            self.words[fixup.at] |= field << fixup.shift;
        }
    }
}
