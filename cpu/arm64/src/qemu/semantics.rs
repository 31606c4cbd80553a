//! Instruction semantics.
//!
//! One program executes every case. `qemu-aarch64` runs it as a Linux program, the processor here
//! with stage 1 off. For each instruction and each set of operands the program loads the registers
//! and the scratch memory, executes the instruction, and mixes the registers, the flags and the
//! scratch memory into a hash for the instruction.
//!
//! ```text
//! stub of an instruction   ccmp xzr, xzr, #nzcv, ne     the flags: Z is set before
//!                          the instruction
//!                          a second one: a NOP, or STXR behind LDXR
//!                          add x9, x9, #1               a branch jumps over it
//!                          br x29
//! registers at the stub    x0-x6 data, x7 a small number under random high bits, x8 and SP an
//!                          address in the scratch memory, SP an aligned one, x9 a small signed
//!                          number
//! ```

use super::kinds::{KINDS, random_word};
use super::{BASE, HEADER, bytes_of, elf_header, is_defined, is_installed, run, words_of};
use crate::state::pstate;
use crate::{Cpu, Fabric};
use fastrand::Rng;
use lacuna_a64::{ADR, Asm, B_COND, BR, NOP, Reg, SVC};
use lacuna_addr::{Gpa, PAGE_SIZE};
use lacuna_cpu::Processor;
use lacuna_cpu::testing::{Ram, Wakes};
use lacuna_state::arm64::Regs;
use lacuna_sync::{Qsbr, VirtualClock};
use std::sync::Arc;

/// Words of scratch memory, and the offset in it at which base addresses are.
const SCRATCH: usize = 48;
const MIDDLE: u64 = 160;
/// Words of a set of operands: x0 to x9, SP, one unused, scratch memory.
const SET: usize = 12 + SCRATCH;
const SETS: usize = 64;
/// Words of a stub.
const STUB: usize = 5;

/// One instruction and its surroundings.
#[derive(Clone, Copy)]
struct Case {
    kind: &'static str,
    nzcv: u32,
    words: [u32; 2],
}

impl Case {
    fn random(rng: &mut Rng) -> Self {
        loop {
            let (kind, pattern) = KINDS[rng.usize(..KINDS.len())];
            let mut words = pattern.split('|').map(|fields| random_word(fields, rng));
            let words = [words.next().unwrap(), words.next().unwrap_or(NOP)];
            if words
                .iter()
                .all(|&word| is_defined(word) && is_predictable(word))
            {
                let nzcv = rng.u32(..16);
                return Self { kind, nzcv, words };
            }
        }
    }

    fn stub(&self) -> [u32; STUB] {
        let [first, second] = self.words;
        let ccmp = 0xfa40_13e0 | 31 << 16 | self.nzcv;
        // add x9, x9, #1
        [ccmp, first, second, 0x9100_0529, BR | 29 << 5]
    }
}

/// Loads of a pair into one register are constrained unpredictable.
fn is_predictable(word: u32) -> bool {
    let pair = word >> 25 & 0x1f == 0b10100 && word >> 22 & 1 != 0;
    !(pair && word & 31 == word >> 10 & 31)
}

/// The addresses of the program's parts.
struct Layout {
    sets: u64,
    scratch: u64,
    stubs: u64,
    output: u64,
    end: u64,
}

impl Layout {
    fn new(cases: usize) -> Self {
        let sets = BASE + 0x3000;
        let scratch = (sets + 8 * (SET * SETS) as u64).next_multiple_of(64);
        let stubs = scratch + 8 * SCRATCH as u64;
        let output = (stubs + 4 * (cases * STUB) as u64).next_multiple_of(4096) + 4096;
        let end = output + 8 * cases as u64;
        Self {
            sets,
            scratch,
            stubs,
            output,
            end,
        }
    }
}

/// LDP and STP of `first` and the next register.
const LOAD_PAIR: u32 = 0xa940_0000;
const STORE_PAIR: u32 = 0xa900_0000;

fn pair(a: &mut Asm, word: u32, first: Reg, base: Reg, offset: usize) {
    let offset = (offset / 8) as u32;
    a.raw(word | offset << 15 | (first + 1) << 10 | base << 5 | first);
}

/// x26 = (x26 ^ register) * x19
fn mix(a: &mut Asm, register: Reg) {
    a.three(0xca00_0000, 26, 26, register);
    a.three(0x9b00_7c00, 26, 26, 19);
}

/// The instructions around the stubs.
fn harness(layout: &Layout, cases: usize) -> Vec<u8> {
    let mut a = Asm::at(BASE + HEADER as u64);
    let [outer, inner, returned] = [(); 3].map(|()| a.label());
    let constants = [
        (20, layout.stubs),
        (21, layout.output),
        (22, cases as u64),
        (25, layout.scratch),
        (28, layout.sets),
        (27, layout.sets + 8 * (SET * SETS) as u64),
        (19, 0x9e37_79b9_7f4a_7c15),
    ];
    for (register, value) in constants {
        a.set(register, value);
    }
    a.branch(ADR | 29, returned);
    a.place(outer).set(26, 0).add(23, 28, 0).place(inner);
    for at in (0..SCRATCH).step_by(2) {
        pair(&mut a, LOAD_PAIR, 10, 23, 8 * (12 + at));
        pair(&mut a, STORE_PAIR, 10, 25, 8 * at);
    }
    pair(&mut a, LOAD_PAIR, 10, 23, 80);
    a.add(31, 10, 0);
    for register in (0..10).step_by(2) {
        pair(&mut a, LOAD_PAIR, register, 23, 8 * register as usize);
    }
    // cmp xzr, xzr
    a.raw(0xeb1f_03ff).set(30, 0).raw(BR | 20 << 5);
    a.place(returned);
    // cset x10 to x13: mi, eq, cs, vs
    for (register, condition) in [(10, 4), (11, 0), (12, 2), (13, 6)] {
        a.raw(0x9a9f_07e0 | (condition ^ 1) << 12 | register);
    }
    a.add(14, 31, 0);
    for register in (0..15).chain([30]) {
        mix(&mut a, register);
    }
    for at in (0..SCRATCH).step_by(2) {
        pair(&mut a, LOAD_PAIR, 10, 25, 8 * at);
        mix(&mut a, 10);
        mix(&mut a, 11);
    }
    a.add(23, 23, 8 * SET as u32);
    // cmp x23, x27; b.ne inner; str x26, [x21], #8
    a.three(0xeb00_0000, 31, 23, 27).branch(B_COND | 1, inner);
    a.raw(0xf800_8400 | 21 << 5 | 26);
    a.add(20, 20, 4 * STUB as u32);
    // subs x22, x22, #1; b.ne outer
    a.raw(0xf100_0400 | 22 << 5 | 22).branch(B_COND | 1, outer);
    // write(1, output, length), exit(0)
    for (register, value) in [(0, 1), (1, layout.output), (2, 8 * cases as u64), (8, 64)] {
        a.set(register, value);
    }
    a.raw(SVC).set(0, 0).set(8, 93).raw(SVC);
    a.bytes()
}

/// Operands: random ones, or edge values.
fn operand(rng: &mut Rng) -> u64 {
    let special = [
        0,
        1,
        u64::MAX,
        1 << 63,
        i64::MAX as u64,
        1 << 31,
        0x7fff_ffff,
        0xffff_ffff,
    ];
    match rng.u32(..4) {
        0 => special[rng.usize(..special.len())],
        1 => rng.u64(..64),
        2 => rng.u32(..).into(),
        _ => rng.u64(..),
    }
}

fn operands(layout: &Layout, rng: &mut Rng) -> Vec<u64> {
    let mut set: Vec<u64> = (0..SET).map(|_| operand(rng)).collect();
    set[7] = rng.u64(..) << 32 | rng.u64(..15);
    set[8] = layout.scratch + MIDDLE + rng.u64(..16);
    set[9] = rng.u64(..31).wrapping_sub(15);
    set[10] = layout.scratch + MIDDLE + 16 * rng.u64(..2);
    // Exclusive and compare-and-swap accesses find the compared value.
    if rng.bool() {
        let at = 12 + (set[10] - layout.scratch) as usize / 8;
        set[0] = set[at];
        set[1] = set[at + 1];
    }
    set
}

/// The file for `qemu-aarch64`, which is also the memory image from [`BASE`] on.
fn image(layout: &Layout, cases: &[Case], rng: &mut Rng) -> Vec<u8> {
    let length = (layout.end - BASE) as usize;
    let mut image = vec![0; length.next_multiple_of(PAGE_SIZE)];
    let mut put = |at: u64, bytes: &[u8]| {
        let at = (at - BASE) as usize;
        image[at..at + bytes.len()].copy_from_slice(bytes);
    };
    put(BASE, &elf_header(length as u64));
    put(BASE + HEADER as u64, &harness(layout, cases.len()));
    for set in 0..SETS as u64 {
        let set_at = layout.sets + 8 * SET as u64 * set;
        let set = operands(layout, rng);
        put(
            set_at,
            &set.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<_>>(),
        );
    }
    let stubs: Vec<u32> = cases.iter().flat_map(Case::stub).collect();
    put(layout.stubs, &bytes_of(&stubs));
    image
}

/// The results of the processor here.
fn executed(layout: &Layout, image: &[u8]) -> Vec<u64> {
    let mut ram = Ram::default();
    let gfn = |at: u64| Gpa::new(at).unwrap().gfn();
    for (n, bytes) in image.chunks(PAGE_SIZE).enumerate() {
        let page = ram.add(gfn(BASE + (n * PAGE_SIZE) as u64));
        for (at, word) in words_of(bytes).into_iter().enumerate() {
            page.store_u64(8 * at, word);
        }
    }
    let fabric = Arc::new(Fabric::new(1, Arc::new(Wakes::default())));
    let mut cpu = Cpu::new(0, fabric, Arc::new(VirtualClock::default()));
    cpu.set_regs(&Regs {
        pc: BASE + HEADER as u64,
        pstate: pstate::RESET,
        ..Regs::default()
    });
    let qsbr = Qsbr::new(1);
    let read = |ram: &mut Ram, at: u64| ram.add(gfn(at)).load_u64(at as usize % PAGE_SIZE);
    let mut exit = crate::Exit::Fuel;
    while read(&mut ram, layout.end - 8) == 0 {
        assert_eq!(exit, crate::Exit::Fuel, "at {:#x}", cpu.regs().pc);
        exit = cpu.run(&mut ram, qsbr.vcpu(0), 1 << 20);
    }
    let output = layout.output..layout.end;
    output.step_by(8).map(|at| read(&mut ram, at)).collect()
}

fn compare(seed: u64, count: usize) {
    let mut rng = Rng::with_seed(seed);
    let cases: Vec<Case> = (0..count).map(|_| Case::random(&mut rng)).collect();
    let layout = Layout::new(count);
    let image = image(&layout, &cases, &mut rng);
    let expected = run(&image, &seed.to_string());
    assert_eq!(expected.len(), count, "qemu-aarch64 wrote less");
    let found = executed(&layout, &image);
    let differ = |n: &usize| found[*n] != expected[*n];
    let wrong: Vec<_> = (0..count).filter(differ).map(|n| cases[n]).collect();
    for case in wrong.iter().take(20) {
        let [first, second] = case.words;
        let kind = case.kind;
        println!("{kind}: {first:08x} {second:08x}, flags {:04b}", case.nzcv);
    }
    assert!(
        wrong.is_empty(),
        "{} of {count} instructions differ",
        wrong.len()
    );
}

/// 2^20 cases: 4 times 4096 instructions, each with 64 sets of operands.
#[test]
fn instructions_agree_with_qemu() {
    if !is_installed() {
        return;
    }
    for seed in 0..4 {
        compare(seed, 4096);
    }
}
