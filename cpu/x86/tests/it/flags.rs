//! Flags without a reader are not computed (quiet.rs); a reader gets the right ones.
//!
//! A random program runs twice: as one basic block, and with every instruction in its own basic
//! block, so that all flags are computed. In its middle it accesses a device. The exit for this
//! access shows the flags.

use crate::support;

use fastrand::Rng;
use iced_x86::code_asm::*;
use lacuna_x86::Exit;
use support::Machine;

const LENGTH: usize = 40;
const WIDE: [AsmRegister64; 4] = [rax, rcx, rdx, rbx];
const NARROW: [AsmRegister32; 4] = [eax, ecx, edx, ebx];
const BYTES: [AsmRegister8; 4] = [al, cl, dl, bl];

/// A random instruction on the four registers that changes or reads flags.
fn instruction(a: &mut CodeAssembler, rng: &mut Rng) {
    let (x, y) = (rng.usize(..4), rng.usize(..4));
    let (small, count) = (rng.i32(..), rng.u32(..64));
    macro_rules! either {
        (|$r:ident| $wide:expr) => {
            match rng.bool() {
                true => {
                    let $r = WIDE;
                    $wide
                }
                false => {
                    let $r = NARROW;
                    $wide
                }
            }
        };
    }
    let done = match rng.u32(..26) {
        0 => either!(|r| a.add(r[x], r[y])),
        1 => either!(|r| a.sub(r[x], r[y])),
        2 => either!(|r| a.and(r[x], r[y])),
        3 => either!(|r| a.or(r[x], r[y])),
        4 => either!(|r| a.xor(r[x], r[y])),
        5 => either!(|r| a.add(r[x], small)),
        6 => either!(|r| a.sub(r[x], small)),
        7 => either!(|r| a.sub(r[x], i32::MIN)),
        8 => either!(|r| a.and(r[x], small)),
        9 => either!(|r| a.or(r[x], small)),
        10 => either!(|r| a.xor(r[x], small)),
        11 => either!(|r| a.shl(r[x], count)),
        12 => either!(|r| a.shr(r[x], count)),
        13 => either!(|r| a.sar(r[x], count)),
        14 => either!(|r| a.rol(r[x], count)),
        15 => either!(|r| a.ror(r[x], count)),
        16 => either!(|r| a.inc(r[x])),
        17 => either!(|r| a.dec(r[x])),
        18 => either!(|r| a.imul_2(r[x], r[y])),
        19 => either!(|r| a.imul_3(r[x], r[y], small)),
        20 => either!(|r| a.neg(r[x])),
        21 => either!(|r| a.mov(r[x], r[y])),
        22 => either!(|r| a.cmovb(r[x], r[y])),
        23 => either!(|r| a.adc(r[x], r[y])),
        24 => a.setl(BYTES[x]),
        _ => a.test(BYTES[x], small & 0x7f),
    };
    done.unwrap();
}

/// A count or compare, and a conditional branch behind it.
fn branch(a: &mut CodeAssembler, rng: &mut Rng) {
    let small = rng.i32(0..3);
    match rng.u32(..6) {
        0 => a.dec(rcx),
        1 => a.dec(edx),
        2 => a.sub(rax, small),
        3 => a.sub(ebx, small),
        4 => a.cmp(al, small),
        _ => a.test(bl, bl),
    }
    .unwrap();
    let mut over = a.create_label();
    match rng.bool() {
        true => a.je(over),
        false => a.jne(over),
    }
    .unwrap();
    a.lea(rsi, rsi + 1).unwrap();
    a.set_label(&mut over).unwrap();
    a.nop().unwrap();
}

/// The program of `seed`; `apart` ends the basic block behind every instruction.
fn machine(seed: u64, apart: impl Fn(&mut CodeAssembler)) -> Machine {
    let mut rng = Rng::with_seed(seed);
    let middle = rng.usize(..LENGTH);
    let mut m = Machine::with(16 << 20, |a| {
        for n in 0..LENGTH {
            instruction(a, &mut rng);
            apart(a);
            if n == middle {
                a.mov(qword_ptr(rdi), rax).unwrap();
            }
        }
        branch(a, &mut rng);
        a.hlt().unwrap();
    });
    let device = m.device().get();
    m.set_regs(|r| {
        for gpr in &mut r.gpr[..4] {
            *gpr = rng.u64(..) >> rng.u32(..64);
        }
        r.gpr[7] = device;
    });
    m
}

#[test]
fn one_block_and_many_show_the_same_flags() {
    for seed in 0..300 {
        let mut together = machine(seed, |_| {});
        let mut apart = machine(seed, |a| {
            let mut next = a.create_label();
            a.jmp(next).unwrap();
            a.set_label(&mut next).unwrap();
        });
        for exit in ["device", "halt"] {
            let exits = [&mut together, &mut apart].map(|m| m.run(1_000_000));
            assert_eq!(exits[0], exits[1], "seed {seed}, {exit}");
            assert_eq!(exits[0] == Exit::Halt, exit == "halt", "seed {seed}");
            let [a, b] = [&together, &apart].map(|m| m.cpu.regs());
            assert_eq!((a.gpr, a.rflags), (b.gpr, b.rflags), "seed {seed}, {exit}");
        }
    }
}
