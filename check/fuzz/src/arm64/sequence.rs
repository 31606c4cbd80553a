//! Sequences of random A64 instructions, in acts as on x86-64 ([`program`](crate::program)).

use super::pte::{AF, BLOCK, READ_ONLY, SHARED, TABLE, USER, UXN};
use super::{
    BASE, ENTRY, PAGE, PLAY_VA, SCTLR_VALUE, SDEI_HANDLER, STAGE_1, USER_SEQUENCES, function,
};
use crate::place::{
    ACTS, AREA, EXTRA, EXTRA_STEP, EXTRAS, HOLE, PER_CPU, PLAY, PLAY_TABLES, SEQUENCE_COUNT,
    SEQUENCE_SIZE, SEQUENCES,
};
use crate::program::{Labels, Sequence};
use crate::runtime::words;
use crate::values::{self, pick};
use fastrand::Rng;
use lacuna_a64::{Asm, DSB, ERET, ISB, NOP, Reg, SVC, UDF, sysreg};
use lacuna_machine::mmio;

/// Registers that hold addresses in a sequence.
const POINTERS: [Reg; 6] = [1, 2, 3, 4, 5, 6];
/// Registers that an act sets for itself.
const ADDRESS: Reg = 16;
const VALUE: Reg = 17;
/// The last offset at which an act may begin.
const LIMIT: u64 = SEQUENCE_SIZE - 160;

/// Functions that guests call, and a few missing ones.
const FUNCTIONS: [u64; 18] = [
    0x8000_0000,
    0x8000_0001,
    0x8400_0000,
    0xc400_0001,
    0x8400_0002,
    function::CPU_ON,
    0xc400_0004,
    0x8400_0008,
    0x8400_0009,
    0x8400_000a,
    0x8600_ff01,
    0x8600_0000,
    function::ABORT,
    function::SDEI,
    function::EVENT_REGISTER,
    function::EVENT_ENABLE,
    function::EVENT_COMPLETE,
    0xbeef_0000,
];

/// System registers: SCTLR, TTBR0, TTBR1, TCR, SPSR, ELR, SP_EL0, ESR, FAR, PAR, MAIR, VBAR,
/// CONTEXTIDR, TPIDR of EL1, CNTKCTL, TPIDR of EL0, CNTVCT, ICC_PMR, ICC_IAR1, ICC_EOIR1,
/// ICC_CTLR, ICC_SRE.
const REGISTERS: [[u16; 5]; 22] = [
    [3, 0, 1, 0, 0],
    [3, 0, 2, 0, 0],
    [3, 0, 2, 0, 1],
    [3, 0, 2, 0, 2],
    [3, 0, 4, 0, 0],
    [3, 0, 4, 0, 1],
    [3, 0, 4, 1, 0],
    [3, 0, 5, 2, 0],
    [3, 0, 6, 0, 0],
    [3, 0, 7, 4, 0],
    [3, 0, 10, 2, 0],
    [3, 0, 12, 0, 0],
    [3, 0, 13, 0, 1],
    [3, 0, 13, 0, 4],
    [3, 0, 14, 1, 0],
    [3, 3, 13, 0, 2],
    [3, 3, 14, 0, 2],
    [3, 0, 4, 6, 0],
    [3, 0, 12, 12, 0],
    [3, 0, 12, 12, 1],
    [3, 0, 12, 12, 4],
    [3, 0, 12, 12, 5],
];

/// Loads and stores with the base in bits 9 to 5 and the register in bits 4 to 0.
const ACCESSES: [u32; 7] = [
    0x3900_0000, // unsigned offset
    0x3800_0000, // unscaled
    0x3800_0400, // post-index
    0x3800_0c00, // pre-index
    0x3800_0800, // unprivileged
    0x3820_6800, // register offset
    0x2900_0000, // pair
];
/// Atomic instructions, without their size. The second register is in bits 20 to 16.
const ATOMICS: [u32; 8] = [
    0x3820_0000, // LDADD, and by bits 14 to 12 the others
    0x3820_8000, // SWP
    0x08a0_7c00, // CAS
    0x085f_7c00, // LDXR
    0x0800_7c00, // STXR
    0x08df_fc00, // LDAR
    0x089f_fc00, // STLR
    0x0820_7c00, // CASP, or an exclusive pair
];

/// Generates sequences.
pub struct Author<'a> {
    /// The random source.
    pub rng: &'a mut Rng,
    /// Bytes of the map.
    pub memory: u64,
    /// The acts so far.
    pub labels: &'a mut Labels,
}

/// A virtual address likely to find a bug.
pub fn address(rng: &mut Rng, memory: u64) -> u64 {
    match rng.u8(..32) {
        0 => BASE + memory - rng.u64(..16),
        1 => BASE + memory + rng.u64(..16) * 8,
        2..5 => EXTRA + rng.u64(..EXTRAS) * EXTRA_STEP + rng.u64(..300 * PAGE),
        5 => HOLE + rng.u64(..64),
        6 => mmio::DISTRIBUTOR.get() + rng.u64(..0x1000),
        7 => mmio::REDISTRIBUTORS.get() + rng.u64(..0x6_0000),
        8 => mmio::UART.get() + rng.u64(..64),
        9 => pick(
            rng,
            &[0, u64::MAX - 6, 1 << 39, (1 << 39) - 4, !0 << 39, 1 << 55],
        ),
        10 => BASE + SEQUENCES + rng.u64(..SEQUENCE_COUNT * SEQUENCE_SIZE),
        11 => USER_SEQUENCES + rng.u64(..SEQUENCE_COUNT * SEQUENCE_SIZE),
        12..15 => PLAY_VA + rng.u64(..7 * 512 * PAGE),
        15 => BASE + values::play_entry(rng),
        16 => (4 << 30) + rng.u64(..64 * PAGE),
        17 => values::number(rng),
        _ => BASE + values::data(rng, memory),
    }
}

/// A descriptor: mostly valid, sometimes with reserved bits, loops or missing memory.
fn descriptor(rng: &mut Rng, memory: u64) -> u64 {
    let frame = match rng.u8(..10) {
        0 => BASE + PLAY + rng.u64(..PLAY_TABLES) * PAGE,
        1 => HOLE,
        2 => BASE + memory,
        3 => EXTRA + rng.u64(..EXTRAS) * EXTRA_STEP + rng.u64(..300) * PAGE,
        4 => rng.u64(..) & 0xffff_ffff_f000 >> rng.u32(..16) & !(PAGE - 1),
        5 => rng.u64(..1 << 11) << 21,
        _ => (BASE + values::data(rng, memory)) & !(PAGE - 1),
    };
    let mut bits = pick(rng, &[TABLE, TABLE, TABLE, BLOCK, 0]) | SHARED;
    for (bit, odds) in [(USER, 4), (AF, 4)] {
        bits |= if rng.u8(..odds) == 0 { 0 } else { bit };
    }
    for bit in [READ_ONLY, UXN, 1 << 53, 1 << 51, 1 << 11, 1 << 52] {
        bits |= if rng.u8(..4) == 0 { bit } else { 0 };
    }
    match rng.u8(..8) {
        0 => frame | bits ^ 1 << rng.u32(..64),
        _ => frame | bits,
    }
}

impl Author<'_> {
    /// Generates the sequence for `index`.
    pub fn sequence(&mut self, index: u64) -> Sequence {
        let is_user = self.rng.u8(..8) < 3;
        let has_stage_1 = self.rng.u8(..4) != 0;
        let mut a = Asm::at(0);
        for reg in POINTERS {
            if self.rng.u8(..4) != 0 {
                let at = address(self.rng, self.memory);
                a.set(reg, at);
            }
        }
        let mut acts = self.rng.u8(2..12);
        while acts > 0 && a.here() < LIMIT {
            self.act(&mut a);
            acts -= 1;
        }
        a.raw(SVC);
        debug_assert!(a.here() <= SEQUENCE_SIZE, "{}", a.here());
        let at = index * SEQUENCE_SIZE;
        let pc = match is_user && has_stage_1 {
            true => USER_SEQUENCES + at,
            false => BASE + SEQUENCES + at,
        };
        // EL0, or EL1 with either stack pointer. Interrupts are masked now and then.
        let mode = if is_user {
            0
        } else {
            pick(self.rng, &[5, 5, 4])
        };
        let mut flags = self.rng.u64(..16) << 28;
        for (bit, odds) in [(6, 8), (7, 4), (8, 8), (9, 8), (22, 8)] {
            flags |= u64::from(self.rng.u8(..odds) == 0) << bit;
        }
        let stack = (BASE + values::data(self.rng, self.memory)) & !15;
        let sctlr = SCTLR_VALUE | if has_stage_1 { STAGE_1 } else { 0 };
        Sequence {
            code: a.bytes(),
            state: words(&[pc, flags | mode, stack, sctlr]),
        }
    }

    fn act(&mut self, a: &mut Asm) {
        let label = match self.rng.u8(..100) {
            ..12 => self.process_data(a),
            12..34 => self.access(a),
            34..44 => self.atomic(a),
            44..48 => self.branch(a),
            48..54 => self.modify_code(a),
            54..62 => self.change_table(a),
            62..70 => self.system_register(a),
            70..74 => self.maintain(a),
            74..80 => self.call(a),
            80..86 => self.async_faults(a),
            86..90 => self.interrupt(a),
            90..93 => self.wait(a),
            93..96 => self.except(a),
            _ => {
                let word = self.rng.u32(..);
                a.raw(word);
                "arm64 random word"
            }
        };
        if let Some(number) = self.labels.number(label) {
            a.set(ADDRESS, BASE + ACTS + 8 * number as u64)
                .count(8, VALUE, ADDRESS, 0);
        }
    }

    /// A register that an act may change.
    fn free(&mut self) -> Reg {
        self.rng.u32(..16)
    }

    /// A register that most likely holds an address, in its place as a base.
    fn base(&mut self) -> u32 {
        pick(self.rng, &POINTERS) << 5
    }

    fn process_data(&mut self, a: &mut Asm) -> &'static str {
        for _ in 0..self.rng.u8(1..4) {
            let word = self.rng.u32(..) & !0x1f | self.free();
            match self.rng.bool() {
                true => a.raw(word & !(7 << 26) | 4 << 26),
                false => a.raw(word & !(7 << 25) | 5 << 25),
            };
        }
        "arm64 data processing"
    }

    fn access(&mut self, a: &mut Asm) -> &'static str {
        for _ in 0..self.rng.u8(1..4) {
            let form = pick(self.rng, &ACCESSES);
            let size = self.rng.u32(..4) << 30;
            let load = self.rng.u32(..4) << 22;
            let offset = match form {
                0x3820_6800 => self.free() << 16,
                0x2900_0000 => self.rng.u32(..1 << 14) << 10 & 0x1f_fc00,
                0x3900_0000 => self.rng.u32(..64) << 10,
                _ => self.rng.u32(..512) << 12,
            };
            a.raw(form | size | load | offset | self.base() | self.free());
        }
        "arm64 load or store"
    }

    fn atomic(&mut self, a: &mut Asm) -> &'static str {
        for _ in 0..self.rng.u8(1..4) {
            let form = pick(self.rng, &ATOMICS);
            let (size, order) = (self.rng.u32(..4) << 30, self.rng.u32(..4) << 22);
            let second = self.free() << 16;
            let word = match form {
                0x3820_0000 => form | order | second | self.rng.u32(..8) << 12,
                0x3820_8000 => form | order | second,
                0x085f_7c00 | 0x08df_fc00 | 0x089f_fc00 => form,
                _ => form | second,
            };
            a.raw(word | size | self.base() | self.free());
        }
        "arm64 atomic"
    }

    /// A branch over the next instruction, taken or not.
    fn branch(&mut self, a: &mut Asm) -> &'static str {
        let word = match self.rng.u8(..4) {
            0 => 0x5400_0040 | self.rng.u32(..16),
            1 => 0x3400_0040 | self.rng.u32(..4) << 30 & 1 << 31 | self.free(),
            2 => 0x3600_0040 | self.rng.u32(..32) << 19 | self.free(),
            _ => 0x1400_0002,
        };
        let skipped = self.rng.u32(..) & !(7 << 26) | 4 << 26;
        a.raw(word).raw(skipped);
        "arm64 branch"
    }

    /// Writes an instruction into a sequence, and mostly makes it visible as the architecture
    /// requires.
    fn modify_code(&mut self, a: &mut Asm) -> &'static str {
        let at = self.rng.u64(..SEQUENCE_COUNT * SEQUENCE_SIZE / 4) * 4;
        let alias = pick(self.rng, &[BASE + SEQUENCES, USER_SEQUENCES]);
        let word = pick(self.rng, &[SVC, NOP, UDF, self.rng.clone().u32(..)]);
        a.set(ADDRESS, alias + at).set(VALUE, word.into());
        a.store(4, VALUE, ADDRESS, 0);
        if self.rng.u8(..4) != 0 {
            // IC IVAU.
            a.raw(0xd50b_7520 | ADDRESS).raw(DSB).raw(ISB);
        }
        "arm64 code"
    }

    fn change_table(&mut self, a: &mut Asm) -> &'static str {
        let at = BASE + values::play_entry(self.rng);
        let value = descriptor(self.rng, self.memory);
        a.set(ADDRESS, at)
            .set(VALUE, value)
            .store(8, VALUE, ADDRESS, 0);
        if self.rng.bool() {
            // TLBI VMALLE1IS or VMALLE1.
            let all = pick(self.rng, &[0xd508_831f, 0xd508_871f]);
            a.raw(all).raw(DSB);
        }
        "arm64 page table"
    }

    fn system_register(&mut self, a: &mut Asm) -> &'static str {
        let value = match self.rng.bool() {
            true => address(self.rng, self.memory),
            false => values::number(self.rng),
        };
        let word = match self.rng.u8(..4) {
            0 => 0xd518_0000 | self.rng.u32(..) & 0x0027_ffe0,
            _ => sysreg(pick(self.rng, &REGISTERS)) | self.rng.u32(..) & 1 << 21,
        };
        a.set(VALUE, value).raw(word | VALUE);
        "arm64 system register"
    }

    /// TLBI, AT, DC and IC; most encodings exist.
    fn maintain(&mut self, a: &mut Asm) -> &'static str {
        let word = match self.rng.u8(..3) {
            0 => 0xd508_8300 | self.rng.u32(..8) << 5 | pick(self.rng, &[0, 0x400]),
            1 => pick(
                self.rng,
                &[0xd50b_7420, 0xd50b_7a20, 0xd50b_7e20, 0xd508_7800],
            ),
            _ => 0xd508_0000 | self.rng.u32(..) & 0x0003_ffe0,
        };
        a.raw(word | pick(self.rng, &POINTERS));
        "arm64 maintenance"
    }

    fn call(&mut self, a: &mut Asm) -> &'static str {
        let mut values = vec![pick(self.rng, &FUNCTIONS)];
        for _ in 0..self.rng.u8(1..5) {
            values.push(match self.rng.u8(..4) {
                0 => address(self.rng, self.memory),
                1 => ENTRY,
                2 => values::number(self.rng),
                _ => self.rng.u64(..4),
            });
        }
        a.call(&values);
        "arm64 hypercall"
    }

    /// A call for async faults, in either form.
    fn async_faults(&mut self, a: &mut Asm) -> &'static str {
        let area = match self.rng.u8(..4) {
            0 => address(self.rng, self.memory) & !63,
            _ => BASE + PER_CPU + self.rng.u64(..3) * PAGE + AREA as u64,
        };
        let flags = self.rng.u64(..4);
        let (low, high) = (area & 0xffff_ffff | flags, area >> 32);
        let values: &[u64] = match self.rng.u8(..8) {
            0..3 => &[function::ABORT, low, 1 << 31 | high],
            3 => &[function::ABORT, self.rng.u64(..0x4000), 1 << 30],
            4 => &[function::EVENT_REGISTER, 0x4040_0001, SDEI_HANDLER, area, 0],
            5 => &[function::EVENT_ENABLE, 0x4040_0001],
            6 => &[function::PE_UNMASK],
            _ => &[function::SDEI, 4, low, high],
        };
        a.call(values);
        "arm64 async faults"
    }

    /// Software-generated interrupts, timers, and registers of the interrupt controller.
    fn interrupt(&mut self, a: &mut Asm) -> &'static str {
        let soon = self.rng.u64(..50_000);
        match self.rng.u8(..3) {
            0 => {
                let target = self.rng.u64(..16) << 24 | self.rng.u64(..16);
                a.set(VALUE, target).msr(sysreg([3, 0, 12, 11, 5]), VALUE);
            }
            1 => {
                let timer = pick(self.rng, &[2, 3]);
                a.set(VALUE, soon).msr(sysreg([3, 3, 14, timer, 0]), VALUE);
                a.set(VALUE, 1).msr(sysreg([3, 3, 14, timer, 1]), VALUE);
            }
            _ => {
                let base = pick(self.rng, &[mmio::DISTRIBUTOR, mmio::REDISTRIBUTORS]);
                let at = self.rng.u64(..0x400) * 4;
                a.set(ADDRESS, base.get() + at);
                a.set(VALUE, values::number(self.rng));
                a.store(4, VALUE, ADDRESS, 0);
            }
        }
        "arm64 interrupt"
    }

    /// WFI, WFE, YIELD, SEV.
    fn wait(&mut self, a: &mut Asm) -> &'static str {
        a.raw(NOP | pick(self.rng, &[1, 2, 3, 3, 4]) << 5);
        "arm64 wait"
    }

    /// SVC, BRK, HLT, SMC, ERET, UDF.
    fn except(&mut self, a: &mut Asm) -> &'static str {
        let number = self.rng.u32(..1 << 16) << 5;
        let word = pick(
            self.rng,
            &[
                SVC | number,
                0xd420_0000 | number,
                0xd440_0000 | number,
                0xd400_0003,
                ERET,
                UDF,
            ],
        );
        a.raw(word);
        "arm64 exception"
    }
}
