//! Programs in A64 (Arm ARM C4.1, C6.2).

use super::{ASK_AT, Assembler, Condition, Interrupts, Op, REPORT_AT, Reg, STACK, ram};
use lacuna_a64::*;
use lacuna_machine::{Arch, Width, mmio};

/// Registers that hold a value within one operation.
const ADDRESS: u32 = 16;
const VALUE: u32 = 17;

/// MSR DAIFClr, #2: interrupts are not masked.
const UNMASK: u32 = 0xd503_42ff;
/// The vendor service of RFCv2. Its argument is in two halves.
const ASYNC_FAULTS: u64 = 0x8600_0001;
/// T0SZ is 25, walks are cacheable and inner shareable, TTBR1 is not walked; 48 bits of output.
const TCR_VALUE: u64 = 5 << 32 | 1 << 23 | 0b11_01_01 << 8 | 25;
/// M, and the always-1 bits. A is 0.
const SCTLR_VALUE: u64 = 0x30d0_0801;
/// PSCI's `CPU_ON`, with 64-bit arguments.
const CPU_ON: u64 = 0xc400_0003;
/// The offsets of the vectors in a program that enables asynchronous page faults, and of the vector
/// for the first contract's events at EL1. The event after the enabling means nothing to a program,
/// so its handler returns. In other programs VBAR_EL1 is 0, where there is no memory.
const VECTORS: u64 = 0x800;
const FROM_EL1: u64 = 0x200;

/// The number of a register: X19 to X26.
pub(super) const fn number(reg: Reg) -> u32 {
    19 + reg as u32
}

/// The machine code of `program`.
pub(super) fn encode(program: &Assembler) -> Vec<u8> {
    finish(begin(), program)
}

/// The same of a program of [`super::assemble_user`]. It switches vCPU 1 on, which begins behind
/// the call. A VM without that vCPU refuses the call.
pub(super) fn encode_user(interrupts: Interrupts, program: &Assembler) -> Vec<u8> {
    let mut a = begin();
    let behind = a.label();
    a.set(0, CPU_ON).set(1, 1).branch(ADR | 2, behind).set(3, 0);
    a.raw(HVC).place(behind);
    if interrupts == Interrupts::On {
        a.raw(UNMASK);
    }
    finish(a, program)
}

fn begin() -> Asm {
    Asm::at(super::code(Arch::Arm64).get())
}

fn finish(mut a: Asm, program: &Assembler) -> Vec<u8> {
    let labels: Vec<_> = (0..program.labels).map(|_| a.label()).collect();
    for op in &program.ops {
        one(*op, &mut a, &labels);
    }
    let has_async_faults = |op: &Op| matches!(op, Op::EnableAsyncFaults(_));
    if program.ops.iter().any(has_async_faults) {
        let vectors = super::code(Arch::Arm64).get() + VECTORS;
        a.pad_to(vectors + FROM_EL1).raw(ERET);
    }
    a.bytes()
}

fn one(op: Op, a: &mut Asm, labels: &[Label]) {
    match op {
        Op::Set(to, value) => a.set(number(to), value),
        Op::Load(width, to, base, offset) => a.load(width as u32, number(to), number(base), offset),
        Op::Store(width, base, offset, from) => {
            a.store(width as u32, number(from), number(base), offset)
        }
        Op::Increment(base, offset) => a.count(4, VALUE, number(base), offset),
        Op::Add(to, from) => a.add_shifted(number(to), number(from), 0),
        Op::AddImmediate(to, value) => a.add(number(to), number(to), value),
        // ORN with XZR: MVN.
        Op::Not(to) => a.three(0xaa20_0000, number(to), 31, number(to)),
        // UBFM: LSR (immediate).
        Op::ShiftRight(to, bits) => {
            let word = 0xd340_fc00 | u32::from(bits) << 16;
            a.three(word, number(to), number(to), 0)
        }
        Op::Label(label) => a.place(labels[label.0]),
        Op::Jump(label) => a.branch(B, labels[label.0]),
        Op::Branch(condition, x, y, label) => {
            // SUBS with XZR: CMP.
            a.three(0xeb00_0000, 31, number(x), number(y));
            let condition = match condition {
                Condition::Equal => 0,
                Condition::NotEqual => 1,
                Condition::Less => 3,
            };
            a.branch(B_COND | condition, labels[label.0])
        }
        Op::Report(value) => write_device(a, Width::Long, REPORT_AT, value),
        Op::Ask(to) => a.set(ADDRESS, ASK_AT).load(4, number(to), ADDRESS, 0),
        Op::Print(byte) => write_device(a, Width::Byte, mmio::UART.get(), byte),
        Op::Exit(code) => {
            let at = mmio::HOST.get() + mmio::HOST_EXIT;
            write_device(a, Width::Long, at, code)
        }
        Op::EnableAsyncFaults(value) => {
            a.set(VALUE, super::code(Arch::Arm64).get() + VECTORS);
            a.msr(VBAR, VALUE);
            a.call(&[ASYNC_FAULTS, value & 0xffff_ffff, value >> 32])
        }
        Op::AllowUnaligned => switch_stage_1_on(a),
        Op::Halt => a.raw(WFI),
        Op::Crash => a.raw(UDF),
    };
}

/// One table of level 1 with a block of 1 GiB for each of its first four entries, all normal
/// memory, and 39 bits of address. Attribute 0 of MAIR_EL1 is normal write-back.
fn switch_stage_1_on(a: &mut Asm) -> &mut Asm {
    let table = ram(Arch::Arm64, STACK);
    a.set(ADDRESS, table);
    for block in 0..4 {
        // A valid block with AF, inner shareable.
        a.set(VALUE, block << 30 | 0x701);
        a.store(8, VALUE, ADDRESS, 8 * block as u32);
    }
    for (register, value) in [
        (TTBR0, table),
        (MAIR, 0xff),
        (TCR, TCR_VALUE),
        (SCTLR, SCTLR_VALUE),
    ] {
        a.set(VALUE, value).msr(register, VALUE);
    }
    a.raw(ISB)
}

fn write_device(a: &mut Asm, width: Width, at: u64, from: Reg) -> &mut Asm {
    a.set(ADDRESS, at)
        .store(width as u32, number(from), ADDRESS, 0)
}
