//! Instruction semantics, compared with the host's own processor.
//!
//! Each case is one instruction with random operands. It runs here on a [`Cpu`], and natively in a
//! small executable buffer, between code that loads and stores all registers. General registers,
//! the defined flags, and the operands' 64 bytes of memory must agree.
#![cfg(target_arch = "x86_64")]

use crate::support;
use crate::support::is_intel;

use fastrand::Rng;
use iced_x86::code_asm::*;
use iced_x86::{Code, Decoder, DecoderOptions, Instruction, Mnemonic};
use lacuna_cpu::Processor;
use lacuna_x86::Exit;
use std::ptr::NonNull;
use support::{CODE, DATA, Machine, assemble};

const CF: u64 = 1;
const PF: u64 = 4;
const AF: u64 = 16;
const ZF: u64 = 64;
const SF: u64 = 128;
const OF: u64 = 2048;
const ALL: u64 = CF | PF | AF | ZF | SF | OF;

/// Registers and memory around an instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
struct State {
    gpr: [u64; 16],
    flags: u64,
    memory: [u64; 8],
}

/// A page of native code that runs one instruction on a [`State`].
struct Native {
    page: NonNull<u8>,
}

impl Native {
    fn new() -> Self {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let rights = ProtFlags::READ | ProtFlags::WRITE | ProtFlags::EXEC;
        // SAFETY: a fresh private mapping.
        let page = unsafe { mmap_anonymous(std::ptr::null_mut(), 4096, rights, MapFlags::PRIVATE) };
        Self {
            page: NonNull::new(page.expect("executable memory").cast()).expect("not null"),
        }
    }

    /// Runs `instruction`. Its memory operand is `[rdi]`, so RDI must hold the address of
    /// `state.memory`. RSP is kept.
    fn run(&self, instruction: &[u8], state: &mut State) {
        let at = self.page.as_ptr() as u64;
        let stack = state.gpr[4];
        let head = assemble(at, prologue);
        let tail = assemble(at + (head.len() + instruction.len()) as u64, |a| {
            epilogue(a)
        });
        let code = [&head[..], instruction, &tail].concat();
        assert!(code.len() <= 4096);
        // SAFETY: the code fits the page; it is a function of the C ABI that saves what it must,
        // and touches only the state and its own stack.
        unsafe {
            self.page
                .copy_from_nonoverlapping(NonNull::from(&code[..]).cast(), code.len());
            let run: extern "C" fn(*mut State) = std::mem::transmute(self.page.as_ptr());
            run(state);
        }
        state.gpr[4] = stack;
    }
}

const GPRS: [AsmRegister64; 16] = [
    rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15,
];

/// Saves the C ABI's registers and the state's address, then loads the state.
fn prologue(a: &mut CodeAssembler) {
    for r in [rbx, rbp, r12, r13, r14, r15] {
        a.push(r).unwrap();
    }
    a.push(rdi).unwrap();
    a.mov(rax, rdi).unwrap();
    a.push(qword_ptr(rax + 128)).unwrap();
    a.popfq().unwrap();
    for (i, r) in GPRS
        .into_iter()
        .enumerate()
        .filter(|(i, _)| ![0, 4].contains(i))
    {
        a.mov(r, qword_ptr(rax + 8 * i as i32)).unwrap();
    }
    a.mov(rax, qword_ptr(rax)).unwrap();
}

fn epilogue(a: &mut CodeAssembler) {
    a.push(rax).unwrap();
    a.mov(rax, qword_ptr(rsp + 8)).unwrap();
    for (i, r) in GPRS
        .into_iter()
        .enumerate()
        .filter(|(i, _)| ![0, 4].contains(i))
    {
        a.mov(qword_ptr(rax + 8 * i as i32), r).unwrap();
    }
    a.pop(rcx).unwrap();
    a.mov(qword_ptr(rax), rcx).unwrap();
    a.pushfq().unwrap();
    a.pop(qword_ptr(rax + 128)).unwrap();
    a.cld().unwrap();
    a.pop(rdi).unwrap();
    for r in [r15, r14, r13, r12, rbp, rbx] {
        a.pop(r).unwrap();
    }
    a.ret().unwrap();
}

/// Runs the instruction on the software processor; `None` if it raises an exception.
fn software(machine: &mut Machine, instruction: &[u8], state: &mut State) -> Option<()> {
    machine.memory.write(CODE, instruction);
    machine
        .memory
        .write(CODE + instruction.len() as u64, &[0xf4]);
    machine.cpu.drop_all_code();
    for (i, word) in state.memory.iter().enumerate() {
        machine.memory.write_u64(DATA + i as u64 * 8, *word);
    }
    machine.set_regs(|r| {
        r.gpr = state.gpr;
        r.gpr[4] = support::STACK;
        r.rip = CODE;
        r.rflags = state.flags;
    });
    let mut system = machine.cpu.system().clone();
    system.halted = false;
    machine.cpu.set_system(system);
    let mut exit = machine.run(10);
    if exit == Exit::Exclusive {
        // A misaligned locked access.
        assert_eq!(machine.run_exclusive(), Exit::Fuel);
        exit = machine.run(10);
    }
    if exit != Exit::Halt {
        return None;
    }
    let regs = machine.cpu.regs();
    assert_eq!(regs.rip, CODE + instruction.len() as u64 + 1);
    let stack = state.gpr[4];
    state.gpr = regs.gpr;
    state.gpr[4] = stack;
    state.flags = regs.rflags;
    for (i, word) in state.memory.iter_mut().enumerate() {
        *word = machine.memory.read_u64(DATA + i as u64 * 8);
    }
    Some(())
}

/// Numbers at the edges of widths, and random ones.
fn number(rng: &mut Rng) -> u64 {
    const EDGES: [u64; 12] = [
        0,
        1,
        2,
        0x7f,
        0x80,
        0xff,
        0x7fff,
        0x8000,
        0x7fff_ffff,
        0x8000_0000,
        1 << 63,
        u64::MAX,
    ];
    match rng.u32(..4) {
        0 => EDGES[rng.usize(..EDGES.len())],
        1 => EDGES[rng.usize(..EDGES.len())]
            .wrapping_add(rng.u64(..4))
            .wrapping_sub(2),
        2 => rng.u64(..) >> rng.u32(..64),
        _ => rng.u64(..),
    }
}

fn random_state(rng: &mut Rng) -> State {
    State {
        gpr: std::array::from_fn(|_| number(rng)),
        flags: rng.u64(..) & ALL | 2,
        memory: std::array::from_fn(|_| number(rng)),
    }
}

/// The tested opcodes: one byte, or after 0F. ModRM and immediates are random.
#[rustfmt::skip]
const ONE: [u8; 105] = [
    0x00, 0x01, 0x02, 0x03, 0x04, 0x05, 0x08, 0x09, 0x0a, 0x0b, 0x0c, 0x0d, 0x10, 0x11, 0x12,
    0x13, 0x14, 0x15, 0x18, 0x19, 0x1a, 0x1b, 0x1c, 0x1d, 0x20, 0x21, 0x22, 0x23, 0x24, 0x25,
    0x28, 0x29, 0x2a, 0x2b, 0x2c, 0x2d, 0x30, 0x31, 0x32, 0x33, 0x34, 0x35, 0x38, 0x39, 0x3a,
    0x3b, 0x3c, 0x3d, 0x63, 0x69, 0x6b, 0x80, 0x81, 0x83, 0x84, 0x85, 0x86, 0x87, 0x88, 0x89,
    0x8a, 0x8b, 0x8d, 0x90, 0x91, 0x98, 0x99, 0x9e, 0x9f, 0xa8, 0xa9, 0xb0, 0xb4, 0xb8, 0xb9,
    0xc0, 0xc1, 0xc6, 0xc7, 0xd0, 0xd1, 0xd2, 0xd3, 0xf5, 0xf6, 0xf7, 0xf8, 0xf9, 0xfc, 0xfe,
    0xff, 0xc0, 0xc1, 0xd2, 0xd3, 0xf6, 0xf7, 0x0f, 0x0f, 0x0f, 0x0f, 0x0f, 0x0f, 0x0f, 0x0f,
];
#[rustfmt::skip]
const TWO: [u8; 58] = [
    0x40, 0x41, 0x42, 0x43, 0x44, 0x45, 0x46, 0x47, 0x48, 0x49, 0x4a, 0x4b, 0x4c, 0x4d, 0x4e,
    0x4f, 0x90, 0x91, 0x92, 0x93, 0x94, 0x95, 0x96, 0x97, 0x98, 0x99, 0x9a, 0x9b, 0x9c, 0x9d,
    0x9e, 0x9f, 0xa3, 0xa4, 0xa5, 0xab, 0xac, 0xad, 0xaf, 0xb0, 0xb1, 0xb3, 0xb6, 0xb7, 0xb8,
    0xba, 0xbb, 0xbc, 0xbd, 0xbe, 0xbf, 0xc0, 0xc1, 0xc7, 0xc8, 0xcf, 0x1f, 0x18,
];

/// A random instruction of the table. Memory operands become `[rdi + disp8]`.
fn random_instruction(rng: &mut Rng) -> Option<(Vec<u8>, Instruction)> {
    let mut bytes = Vec::new();
    // Prefixes without effect on most instructions: repetition, and segments without a base.
    while rng.u32(..8) == 0 && bytes.len() < 3 {
        bytes.push([0xf2, 0xf3, 0x2e, 0x3e][rng.usize(..4)]);
    }
    if rng.u32(..5) == 0 {
        bytes.push(0x66);
    }
    let opcode = ONE[rng.usize(..ONE.len())];
    let second = TWO[rng.usize(..TWO.len())];
    if opcode == 0x0f && matches!(second, 0xb8 | 0xbc | 0xbd) && (second == 0xb8 || rng.bool()) {
        bytes.push(0xf3);
    }
    if rng.bool() {
        bytes.push(0x48 | rng.u8(..8) & if rng.bool() { 5 } else { 0 });
    }
    bytes.push(opcode);
    if opcode == 0x0f {
        bytes.push(second);
    }
    let modrm = rng.u8(..);
    let memory = rng.bool();
    bytes.push(if memory {
        modrm & 0x38 | 0x47
    } else {
        modrm | 0xc0
    });
    if memory {
        bytes.push(rng.u8(..7) * 8 + if rng.u32(..4) == 0 { rng.u8(..8) } else { 0 });
    }
    bytes.extend((0..8).map(|_| rng.u8(..)));
    let instruction = Decoder::with_ip(64, &bytes, CODE, DecoderOptions::NONE)
        .iter()
        .next()
        .filter(|i| !i.is_invalid() && is_fair(i))?;
    bytes.truncate(instruction.len());
    Some((bytes, instruction))
}

/// Whether the instruction can run natively: without the stack pointer, control flow or other
/// memory.
fn is_fair(i: &Instruction) -> bool {
    use iced_x86::{FlowControl, InstructionInfoFactory, OpAccess, Register as R};
    let memory_ok =
        i.memory_base() == R::None && i.memory_index() == R::None && i.memory_displacement64() == 0
            || i.memory_base() == R::RDI
                && i.memory_index() == R::None
                && i.memory_displacement64() < 57
            || i.mnemonic() == Mnemonic::Lea
            || i.mnemonic() == Mnemonic::Nop;
    let mut factory = InstructionInfoFactory::new();
    let info = factory.info(i);
    let stack = info.used_registers().iter().any(|r| {
        r.register().full_register() == R::RSP
            || i.memory_base() == R::RDI
                && r.register().full_register() == R::RDI
                && !matches!(r.access(), OpAccess::Read | OpAccess::CondRead)
    });
    let address_as_data = i.memory_base() == R::RDI
        && (0..i.op_count()).any(|n| i.op_register(n).full_register() == R::RDI);
    memory_ok
        && !stack
        && !address_as_data
        && i.flow_control() == FlowControl::Next
        && !i.is_privileged()
        && !i.is_save_restore_instruction()
        && !matches!(i.segment_prefix(), R::FS | R::GS)
        // A bit offset in a register reaches any address.
        && !(matches!(i.mnemonic(), Mnemonic::Bt | Mnemonic::Bts | Mnemonic::Btr | Mnemonic::Btc)
            && i.memory_base() == R::RDI && i.op1_register() != R::None)
        && !matches!(i.mnemonic(), Mnemonic::Rdrand | Mnemonic::Rdseed | Mnemonic::Rdpid
            | Mnemonic::Cmpxchg16b | Mnemonic::Xsavec | Mnemonic::Xsaves | Mnemonic::Xrstors)
}

/// The architecturally defined flags after the instruction on `before`.
fn defined_flags(i: &Instruction, before: &State) -> u64 {
    let count = match i.op_count() {
        n if n >= 2 && i.op_kind(n - 1) == iced_x86::OpKind::Immediate8 => i.immediate8().into(),
        _ => before.gpr[1],
    };
    let wide = i.op0_register().is_gpr64() || i.memory_size().size() == 8;
    let count = count & if wide { 63 } else { 31 };
    let bits = if wide { 64 } else { 8 * size(i) };
    match i.mnemonic() {
        Mnemonic::Shl | Mnemonic::Shr | Mnemonic::Sar | Mnemonic::Sal => match count {
            0 => ALL,
            1 => ALL & !AF,
            n if n <= bits => ALL & !(AF | OF),
            _ => ALL & !(AF | OF | CF),
        },
        Mnemonic::Shld | Mnemonic::Shrd => match count {
            0 => ALL,
            1 => ALL & !AF,
            n if n <= bits => ALL & !(AF | OF),
            _ => 0,
        },
        Mnemonic::Rol | Mnemonic::Ror | Mnemonic::Rcl | Mnemonic::Rcr => match count {
            0 | 1 => ALL,
            _ => ALL & !OF,
        },
        Mnemonic::And | Mnemonic::Or | Mnemonic::Xor | Mnemonic::Test => ALL & !AF,
        Mnemonic::Mul | Mnemonic::Imul => CF | OF,
        Mnemonic::Div | Mnemonic::Idiv => 0,
        Mnemonic::Bt | Mnemonic::Bts | Mnemonic::Btr | Mnemonic::Btc => CF | ZF,
        Mnemonic::Bsf | Mnemonic::Bsr => ZF,
        Mnemonic::Tzcnt | Mnemonic::Lzcnt => CF | ZF,
        _ => ALL,
    }
}

fn size(i: &Instruction) -> u64 {
    let memory = i.memory_size().size() as u64;
    if memory != 0 {
        memory
    } else {
        i.op0_register().size() as u64
    }
}

/// Whether the results are architecturally undefined, and so not compared.
fn is_undefined(i: &Instruction, before: &State) -> bool {
    let count = match i.op2_kind() {
        iced_x86::OpKind::Immediate8 => u64::from(i.immediate8()),
        _ => before.gpr[1],
    };
    match i.code() {
        Code::Shld_rm16_r16_imm8 | Code::Shrd_rm16_r16_imm8 => count & 31 > 16,
        Code::Shld_rm16_r16_CL | Code::Shrd_rm16_r16_CL => count & 31 > 16,
        Code::Bswap_r16 => true,
        // With REX.B it exchanges registers on a processor of AMD, and nothing on one of Intel.
        Code::Pause => is_intel(),
        _ => false,
    }
}

/// The number of instructions to compare: `LACUNA_INSTRUCTIONS`.
fn instructions() -> u64 {
    let wanted = std::env::var("LACUNA_INSTRUCTIONS");
    wanted.map_or(60_000, |number| number.parse().expect("a number"))
}

#[test]
fn random_instructions_agree_with_the_processor() {
    let native = Native::new();
    let mut machine = Machine::new(16 << 20);
    let mut rng = Rng::with_seed(0x1ac0_0a5e);
    let mut seen = std::collections::BTreeMap::new();
    let (mut compared, wanted) = (0, instructions());
    while compared < wanted {
        let Some((bytes, i)) = random_instruction(&mut rng) else {
            continue;
        };
        let mut before = random_state(&mut rng);
        let uses_memory = i.memory_base() == iced_x86::Register::RDI;
        if uses_memory {
            before.gpr[7] = DATA;
        }
        let mut ours = before;
        if software(&mut machine, &bytes, &mut ours).is_none() {
            // A native #DE would end the test. Other tests check its causes.
            assert!(
                matches!(i.mnemonic(), Mnemonic::Div | Mnemonic::Idiv),
                "{i:?} raised an exception"
            );
            machine = Machine::new(16 << 20);
            continue;
        }
        if is_undefined(&i, &before) {
            continue;
        }
        let mut theirs = Box::new(before);
        if uses_memory {
            theirs.gpr[7] = theirs.memory.as_ptr() as u64;
        }
        native.run(&bytes, &mut theirs);
        if uses_memory {
            let address = theirs.memory.as_ptr() as u64;
            if i.mnemonic() == Mnemonic::Lea {
                continue;
            }
            assert_eq!(theirs.gpr[7], address, "{i:?}");
            theirs.gpr[7] = DATA;
        }
        let flags = defined_flags(&i, &before);
        ours.flags &= flags;
        theirs.flags &= flags;
        assert_eq!(
            ours,
            *theirs,
            "{:?} ({bytes:02x?})\nbefore: {before:x?}\nours {ours:x?}\ntheirs {theirs:x?}",
            i.code()
        );
        compared += 1;
        *seen.entry(format!("{:?}", i.mnemonic())).or_insert(0) += 1;
    }
    assert!(
        seen.len() > 70,
        "only {} kinds of instruction: {seen:?}",
        seen.len()
    );
}

/// Runs the instruction here and natively, from one state. Its memory operand, if any, is `[rdi]`.
fn compare(machine: &mut Machine, native: &Native, instruction: &[u8], before: &State) {
    let (mut ours, mut theirs) = (*before, Box::new(*before));
    ours.gpr[7] = DATA;
    theirs.gpr[7] = theirs.memory.as_ptr() as u64;
    let address = theirs.gpr[7];
    assert!(
        software(machine, instruction, &mut ours).is_some(),
        "{instruction:02x?} raised an exception"
    );
    native.run(instruction, &mut theirs);
    assert_eq!((ours.gpr[7], theirs.gpr[7]), (DATA, address));
    theirs.gpr[7] = DATA;
    (ours.flags, theirs.flags) = (ours.flags & ALL, theirs.flags & ALL);
    assert_eq!(ours, *theirs, "{instruction:02x?}, before: {before:x?}");
}

/// 90 is NOP, PAUSE or XCHG with RAX by its prefixes. FWAIT does nothing without an FPU. F3 before
/// REX.B and 90 is PAUSE on a processor of Intel; ours is AMD's, with XCHG.
#[test]
fn what_is_no_operation_agrees_with_the_processor() {
    let (native, mut machine) = (Native::new(), Machine::new(16 << 20));
    let before = random_state(&mut Rng::with_seed(0x90));
    for legacy in [
        &[][..],
        &[0x66],
        &[0xf2],
        &[0xf3],
        &[0x66, 0xf3],
        &[0xf3, 0x66],
        &[0xf3, 0xf2],
        &[0x41, 0xf3],
        &[0xf3, 0xf3, 0x2e],
    ] {
        for rex in [None].into_iter().chain((0x40..=0x4f).map(Some)) {
            for opcode in [0x90, 0x9b] {
                let instruction: Vec<u8> =
                    legacy.iter().copied().chain(rex).chain([opcode]).collect();
                let is_extended = rex.is_some_and(|rex| rex & 1 == 1);
                if is_intel() && is_extended && opcode == 0x90 && legacy.contains(&0xf3) {
                    continue;
                }
                compare(&mut machine, &native, &instruction, &before);
            }
        }
    }
}

/// VERR, VERW, LAR, LSL and LGS on Linux's segments for programs.
#[test]
fn selectors_are_examined_and_loaded_as_by_the_processor() {
    const GDT: u64 = DATA + 0x1000;
    let (native, mut machine) = (Native::new(), Machine::new(16 << 20));
    let mut system = machine.cpu.system().clone();
    (system.gdtr.base, system.gdtr.limit) = (GDT, 0x7f);
    machine.cpu.set_system(system);
    let segments = [
        (0x08, 0x00cf_9b00_0000_ffff),
        (0x10, 0x00af_9b00_0000_ffff),
        (0x18, 0x00cf_9300_0000_ffff),
        (0x20, 0x00cf_fb00_0000_ffff),
        (0x28, 0x00cf_f300_0000_ffff),
        (0x30, 0x00af_fb00_0000_ffff),
    ];
    for (selector, descriptor) in segments {
        machine.memory.write_u64(GDT + selector, descriptor);
    }
    let mut before = random_state(&mut Rng::with_seed(0x0f00));
    // Null, the kernel's, the user's, behind the table, and in a missing LDT.
    for selector in [0, 3, 0x0b, 0x13, 0x1b, 0x23, 0x2b, 0x33, 0xfffb, 0x2f] {
        before.gpr[1] = before.gpr[1] & !0xffff | selector;
        before.memory[0] = before.memory[0] & !0xffff | selector;
        for modrm in [0xc1, 0x07] {
            for verify in [0x20, 0x28] {
                compare(
                    &mut machine,
                    &native,
                    &[0x0f, 0x00, verify | modrm],
                    &before,
                );
            }
            for (prefix, opcode) in [0x66, 0x40, 0x48].map(|p| [(p, 2), (p, 3)]).concat() {
                compare(
                    &mut machine,
                    &native,
                    &[prefix, 0x0f, opcode, modrm],
                    &before,
                );
            }
        }
    }
    // AMD's processors ignore REX.W here, so an offset of 8 bytes is not compared.
    for (prefix, bytes) in [(0x66, 2), (0x40, 4)] {
        for selector in [0, 0x23, 0x2b, 0x33_u64] {
            let mut memory: Vec<u8> = before.memory.iter().flat_map(|w| w.to_le_bytes()).collect();
            memory[bytes..bytes + 2].copy_from_slice(&selector.to_le_bytes()[..2]);
            for (word, bytes) in before.memory.iter_mut().zip(memory.chunks(8)) {
                *word = u64::from_le_bytes(bytes.try_into().unwrap());
            }
            compare(&mut machine, &native, &[prefix, 0x0f, 0xb5, 0x07], &before);
            let loaded = machine.cpu.system().selectors[5];
            assert_eq!(u64::from(loaded), selector);
        }
    }
}
