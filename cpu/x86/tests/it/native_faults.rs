//! Faults and traps of user mode, compared with the host's own processor: the exception, its
//! instruction, and all other state, which must be as before that instruction.
//!
//! Each program runs to a fault here, at CPL 3 under a minimal kernel, and natively under signal
//! handlers (support/signals.rs), at the same addresses. The exception and its error code, all
//! registers, the trap flag's traps before it, the data and the stack must agree.
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]

use crate::support;
use crate::support::is_intel;

use fastrand::Rng;
use iced_x86::code_asm::*;
use lacuna_cpu::Processor;
use lacuna_x86::Exit;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use support::kernel::{HANDLERS, USER, USER_STACK, handle, kernel};
use support::signals::{self, Ended, Registers};
use support::{DATA, Machine, STACK, assemble};

/// Linux's highest page for programs.
const TOP: u64 = 0x7fff_ffff_e000;
const NON_CANONICAL: u64 = 1 << 63;
const NON_CANONICAL_LOW: u64 = 1 << 47;
/// A jump target of programs in the page.
const BEHIND: u64 = USER + 0x800;
/// The stack segment's selector, here and under Linux: programs may leave it in RAX.
const SS: u64 = 0x1b;
const LINUX_SS: u64 = 0x2b;
const FLAGS: u64 = 0xfd5;
const CF: u64 = 1;
const ZF: u64 = 1 << 6;
type Program = fn(&mut CodeAssembler);

/// The number of stack bytes to compare around its start.
const STACK_BYTES: u64 = 256;

/// The two processors, for one test at a time; `None` if the addresses are in use natively.
struct Processors {
    software: Machine,
    _turn: MutexGuard<'static, ()>,
}

impl Processors {
    fn new() -> Option<Self> {
        static TURN: Mutex<()> = Mutex::new(());
        static READY: OnceLock<Option<()>> = OnceLock::new();
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let ready = READY.get_or_init(|| {
            for (at, bytes) in [(USER, 4096), (DATA, 4096), (USER_STACK - 4096, 8192)] {
                signals::map(at, bytes)?;
            }
            signals::map(TOP, 4096)?;
            signals::install()
        });
        if ready.is_none() {
            lacuna_skip::skip("the addresses that the programs need are taken");
            return None;
        }
        let mut software = kernel(|a| a.hlt().unwrap());
        for vector in [1, 6, 12, 13, 14] {
            handle(&mut software, vector, |a| {
                a.hlt().unwrap();
                a.iretq().unwrap();
            });
        }
        map_top(&mut software);
        Some(Self {
            software,
            _turn: turn,
        })
    }

    /// Runs `code` on both processors, from `registers`. The results must be the same. Only the
    /// RFLAGS bits in `flags` are compared.
    fn compare(&mut self, name: &str, code: &[u8], registers: Registers, flags: u64) -> Ended {
        let memory = &mut self.software.memory;
        let page = if registers.rip >= TOP { FRAME } else { USER };
        let blank = [0x90; 4096];
        let behind = [0x0f, 0x0b];
        memory.write(page, &blank);
        memory.write(page + (registers.rip & 0xfff), code);
        signals::write(registers.rip & !0xfff, &blank);
        signals::write(registers.rip, code);
        if page == USER {
            memory.write(BEHIND, &behind);
            signals::write(BEHIND, &behind);
        }
        let data: Vec<u8> = (0..64_u8).map(|i| i.wrapping_mul(37)).collect();
        let words = [
            NON_CANONICAL,
            BEHIND,
            NON_CANONICAL_LOW,
            0x1111,
            NON_CANONICAL,
            0x2222,
        ];
        let stack: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        let floor = USER_STACK - STACK_BYTES / 2;
        for (at, bytes) in [(DATA, &data), (USER_STACK, &stack)] {
            memory.write(at, bytes);
            signals::write(at, bytes);
        }
        memory.write(floor, &[0x55; STACK_BYTES as usize / 2]);
        signals::write(floor, &[0x55; STACK_BYTES as usize / 2]);

        let mut ours = run_here(&mut self.software, registers);
        let mut theirs = signals::run(registers);
        if theirs.registers.gpr[0] == LINUX_SS {
            theirs.registers.gpr[0] = SS;
        }
        ours.registers.flags &= flags;
        theirs.registers.flags &= flags;
        assert_eq!(ours, theirs, "{name} ({code:02x?})");
        let memory = &mut self.software.memory;
        // A CALL that faults leaves its return address below RSP on a processor of Intel.
        let below = theirs.registers.gpr[4].wrapping_sub(8);
        let is_call = name.starts_with("call") || code.first() == Some(&0xe8);
        if is_intel() && is_call && (floor..USER_STACK + STACK_BYTES / 2).contains(&below) {
            signals::write(below, &memory.read(below, 8));
        }
        for (at, len) in [(DATA, 64), (floor, STACK_BYTES as usize)] {
            assert_eq!(
                memory.read(at, len),
                signals::read(at, len),
                "{name}: at {at:#x}"
            );
        }
        ours
    }

    /// Runs a program at [`USER`], followed by UD2, from the common registers.
    fn program(&mut self, name: &str, program: impl FnOnce(&mut CodeAssembler)) -> Ended {
        let code = assemble(USER, |a| {
            program(a);
            a.ud2().unwrap();
        });
        self.compare(name, &code, common(USER), FLAGS)
    }

    fn bytes(&mut self, bytes: &[u8]) -> Ended {
        self.program(&format!("{bytes:02x?}"), |a| a.db(bytes).unwrap())
    }
}

/// The frame behind [`TOP`].
const FRAME: u64 = DATA + 0x40_0000;

fn map_top(m: &mut Machine) {
    let tables = FRAME + 0x1000;
    for (table, index, entry) in [
        (0x1000, 255, tables),
        (tables, 511, tables + 0x1000),
        (tables + 0x1000, 511, tables + 0x2000),
        (tables + 0x2000, 510, FRAME),
    ] {
        m.memory
            .write_u64(table + 8 * index, entry | support::RIGHTS);
    }
}

/// The initial registers of most programs.
fn common(rip: u64) -> Registers {
    let mut gpr = std::array::from_fn(|i| 0x1111_0000_2222_0000 + i as u64);
    (gpr[0], gpr[1], gpr[2], gpr[3]) = (NON_CANONICAL, 3, 5, NON_CANONICAL_LOW);
    (gpr[4], gpr[5], gpr[7]) = (USER_STACK, NON_CANONICAL_LOW, DATA);
    (gpr[12], gpr[13]) = (NON_CANONICAL, NON_CANONICAL_LOW);
    Registers {
        gpr,
        rip,
        flags: 0x202 | CF,
    }
}

/// Runs to a fault at CPL 3 on the software processor.
fn run_here(m: &mut Machine, registers: Registers) -> Ended {
    let mut system = m.cpu.system().clone();
    system.cpl = 3;
    system.halted = false;
    system.selectors = [0, 0x23, SS as u16, 0, 0, 0];
    m.cpu.set_system(system);
    m.cpu.drop_all_code();
    m.set_regs(|r| {
        (r.gpr, r.rip, r.rflags) = (registers.gpr, registers.rip, registers.flags);
    });
    let mut steps = Vec::new();
    loop {
        match m.run(10_000) {
            Exit::Halt => {}
            Exit::Exclusive => {
                assert_eq!(m.run_exclusive(), Exit::Fuel);
                continue;
            }
            exit => panic!("{exit:?} at {:#x}", m.cpu.regs().rip),
        }
        let vector = (m.cpu.regs().rip - HANDLERS) / 0x100;
        let has_error = matches!(vector, 12..=14);
        let mut at = m.reg(4);
        let error = if has_error { m.memory.read_u64(at) } else { 0 };
        at += 8 * u64::from(has_error);
        let [rip, flags, stack] = [0, 2, 3].map(|word| m.memory.read_u64(at + 8 * word));
        if vector == 1 {
            steps.push(rip);
            m.cpu.unhalt();
            continue;
        }
        assert_eq!(at, STACK + 0x4000 - 40);
        let mut registers = Registers {
            gpr: m.cpu.regs().gpr,
            rip,
            flags,
        };
        registers.gpr[4] = stack;
        return Ended {
            vector,
            error,
            registers,
            steps,
        };
    }
}

#[test]
fn an_indirect_branch_to_a_non_canonical_address_faults_at_the_branch() {
    let Some(mut both) = Processors::new() else {
        return;
    };
    let programs: [(&str, Program); 12] = [
        ("jmp", |a| a.jmp(rax).unwrap()),
        ("jmp behind others", |a| {
            a.inc(rcx).unwrap();
            a.inc(rdx).unwrap();
            a.jmp(rbx).unwrap();
        }),
        ("jmp memory", |a| a.jmp(qword_ptr(rsp)).unwrap()),
        ("call", |a| a.call(rax).unwrap()),
        ("call memory", |a| a.call(qword_ptr(rsp + 16)).unwrap()),
        ("call relative to the stack it changes", |a| {
            a.call(qword_ptr(rsp + 8)).unwrap()
        }),
        ("call without a stack", |a| {
            a.mov(rsp, rax).unwrap();
            a.call(rdi).unwrap();
        }),
        ("ret", |a| a.ret().unwrap()),
        ("ret and arguments", |a| a.ret_1(0x20).unwrap()),
        ("ret behind others", |a| {
            a.pop(rcx).unwrap();
            a.pop(rcx).unwrap();
            a.ret_1(8).unwrap();
        }),
        ("ret somewhere", |a| {
            a.pop(rcx).unwrap();
            a.ret().unwrap();
        }),
        ("ret without a stack", |a| {
            a.mov(rsp, rbx).unwrap();
            a.ret().unwrap();
        }),
    ];
    for (name, program) in programs {
        let ended = both.program(name, program);
        assert_ne!(ended.registers.rip, NON_CANONICAL, "{name}");
    }
}

/// There is one page above the highest page, and then nothing.
#[test]
fn a_direct_branch_to_a_non_canonical_address_faults_at_the_branch() {
    let Some(mut both) = Processors::new() else {
        return;
    };
    // Branches taken and not, with CF set and RCX 3. Some are fused with the instruction before.
    let branches: [&[u8]; 9] = [
        &[0xe9],
        &[0xe8],
        &[0x0f, 0x82],
        &[0x0f, 0x83],
        &[0x48, 0x83, 0xf9, 0x03, 0x0f, 0x84],
        &[0x48, 0x83, 0xf9, 0x03, 0x0f, 0x85],
        &[0x48, 0xff, 0xc9, 0x0f, 0x85],
        &[0x48, 0x83, 0xe9, 0x03, 0x0f, 0x84],
        &[0x85, 0xc9, 0x0f, 0x85],
    ];
    for opcode in branches {
        let code = [opcode, &0x2000_i32.to_le_bytes(), &[0x0f, 0x0b]].concat();
        both.compare("near", &code, common(TOP + 0x100), FLAGS);
    }
}

/// Opcode with prefixes, and the middle of ModRM.
const ACCESSES: [(&[u8], u8); 24] = [
    (&[0x48, 0x8b], 0),
    (&[0x8a], 0),
    (&[0x48, 0x89], 0),
    (&[0x0f, 0xb7], 0),
    (&[0x48, 0xff], 0),
    (&[0xf0, 0x48, 0xff], 0),
    (&[0xf0, 0xfe], 0),
    (&[0x66, 0xf0, 0x01], 0),
    (&[0xf0, 0x0f, 0xb1], 1),
    (&[0xf0, 0x0f, 0xc1], 1),
    (&[0x87], 1),
    (&[0x0f, 0xc7], 1),
    (&[0xf0, 0x0f, 0xc7], 1),
    (&[0x0f, 0xab], 2),
    (&[0xf0, 0x48, 0x0f, 0xab], 2),
    (&[0xf0, 0x0f, 0xba], 5),
    (&[0xff], 2),
    (&[0xff], 4),
    (&[0xff], 6),
    (&[0x8f], 0),
    (&[0x8e], 2),
    (&[0x8c], 2),
    (&[0xff], 5),
    (&[0xf6], 3),
];
/// Non-canonical operands, as ModRM, SIB, and the extensions in REX: by RAX, RBX, RBP, R12, R13,
/// RSP, RAX with RBP as index, RBP as index alone.
const OPERANDS: [(u8, &[u8], u8); 8] = [
    (0x40, &[], 0),
    (0x43, &[], 0),
    (0x45, &[], 0),
    (0x44, &[0x0c], 1),
    (0x45, &[], 1),
    (0x44, &[0x24], 0),
    (0x44, &[0x28], 0),
    (0x04, &[0x2d, 0, 0, 0], 0),
];

/// An instruction of [`ACCESSES`] with one of [`OPERANDS`].
fn with_operand(
    segment: Option<u8>,
    opcode: &[u8],
    middle: u8,
    (modrm, sib, extension): (u8, &[u8], u8),
) -> Vec<u8> {
    let mut code: Vec<u8> = segment.into_iter().collect();
    let is_prefix = |byte: &&u8| matches!(**byte, 0x66 | 0xf0);
    let legacy = opcode.iter().take_while(is_prefix).count();
    let (prefixes, opcode) = opcode.split_at(legacy);
    let (wide, opcode) = match opcode {
        [0x48, rest @ ..] => (0x48, rest),
        rest => (0x40, rest),
    };
    code.extend(prefixes);
    code.push(wide | extension);
    code.extend(opcode);
    code.push(modrm | middle << 3);
    code.extend(sib);
    // The displacement or the last of its four bytes, an immediate if there is one, and UD2.
    code.extend([0, 0x0f, 0x0b]);
    code
}

/// The accesses of many instructions, by the stack's registers and by others, with prefixes that
/// may change the fault of a bad address.
#[test]
fn the_base_register_decides_whether_a_bad_address_is_a_stack_fault() {
    let Some(mut both) = Processors::new() else {
        return;
    };
    for (opcode, middle) in ACCESSES {
        for (modrm, sib, extension) in OPERANDS {
            for segment in [None, Some(0x3e), Some(0x36), Some(0x64)] {
                let code = with_operand(segment, opcode, middle, (modrm, sib, extension));
                let mut registers = common(USER);
                if (modrm, sib) == (0x44, &[0x24]) {
                    registers.gpr[4] = NON_CANONICAL;
                }
                both.compare("operand", &code, registers, FLAGS);
            }
        }
    }
    // An absolute address with the stack's prefix.
    for segment in [0x36, 0x3e, 0x26, 0x2e, 0x64] {
        both.bytes(&[segment, 0x48, 0xa1, 0, 0, 0, 0, 0, 0x80, 0, 0]);
    }
}

#[test]
fn a_bad_stack_pointer_raises_a_stack_fault() {
    let Some(mut both) = Processors::new() else {
        return;
    };
    let instructions: [&[u8]; 12] = [
        &[0x50],
        &[0x58],
        &[0x9c],
        &[0x9d],
        &[0x66, 0x9d],
        &[0xc9],
        &[0xc8, 8, 0, 0],
        &[0x48, 0xcb],
        &[0x48, 0xcf],
        &[0x0f, 0xa1],
        &[0x0f, 0xa0],
        &[0xe8, 0, 0, 0, 0],
    ];
    for instruction in instructions {
        let code = [instruction, &[0x0f, 0x0b]].concat();
        let mut registers = common(USER);
        registers.gpr[4] = NON_CANONICAL_LOW + 0x1000;
        both.compare("stack", &code, registers, FLAGS);
    }
    for instruction in [0xa4, 0xa5, 0xac, 0xaa, 0xae, 0xa6] {
        for prefix in [0x36, 0x3e, 0x64, 0xf3] {
            let mut registers = common(USER);
            (registers.gpr[6], registers.gpr[7]) = (NON_CANONICAL, NON_CANONICAL);
            let code = [prefix, instruction, 0x0f, 0x0b];
            both.compare("string", &code, registers, FLAGS);
        }
    }
}

#[test]
fn an_offset_of_32_bits_wraps_before_the_segment_and_after_everything_else() {
    let Some(mut both) = Processors::new() else {
        return;
    };
    let mut rng = Rng::with_seed(17);
    for _ in 0..3000 {
        let width = rng.usize(..3);
        let (bytes, bits) = (2 << width, 16_i64 << width);
        let offset = rng.i64(..) >> rng.u32(..64);
        let narrow = match width {
            0 => i64::from(offset as i16),
            1 => i64::from(offset as i32),
            _ => offset,
        };
        let words = narrow.div_euclid(bits).wrapping_mul(bytes) as u32;
        let (to, small) = (DATA as u32 + 8 * rng.u32(..7), rng.i8(..));
        let base = to.wrapping_sub(words).wrapping_sub(small as u32);
        let mut registers = common(USER);
        (registers.gpr[6], registers.gpr[2]) = (rng.u64(..) << 32 | u64::from(base), offset as u64);
        let opcode = [0xa3, 0xab, 0xb3, 0xbb][rng.usize(..4)];
        let lock = if opcode != 0xa3 && rng.bool() {
            &[0xf0][..]
        } else {
            &[]
        };
        let prefix: &[u8] = [&[0x66, 0x67][..], &[0x67], &[0x67, 0x48]][width];
        // bt [esi + small], rdx
        let code = [&[0x0f, opcode, 0x56, small as u8][..], &[0x0f, 0x0b]].concat();
        let code = [lock, prefix, &code].concat();
        let ended = both.compare("bit", &code, registers, CF | ZF);
        assert_eq!(ended.vector, 6, "{code:02x?} went elsewhere");
    }
    // pop [esp + 8] and [rsp + 8]: the address uses the value after the pop.
    both.bytes(&[0x67, 0x8f, 0x44, 0x24, 8]);
    both.bytes(&[0x8f, 0x44, 0x24, 8]);
    both.bytes(&[0x66, 0x67, 0x8f, 0x44, 0x24, 8]);
    both.bytes(&[0x67, 0x8f, 0x47, 8]);
}

/// Programs behind [`trap_flag`], and the number of traps before their fault.
const STEPPED: [(&str, usize, Program); 10] = [
    ("nop", 2, |a| {
        a.nop().unwrap();
        a.nop().unwrap();
    }),
    ("mov ss", 4, |a| {
        a.mov(eax, ss).unwrap();
        a.mov(ss, eax).unwrap();
        a.nop().unwrap();
        a.nop().unwrap();
        a.mov(eax, 1).unwrap();
    }),
    ("mov ds", 4, |a| {
        a.mov(eax, ss).unwrap();
        a.mov(ds, eax).unwrap();
        a.mov(eax, 1).unwrap();
        a.nop().unwrap();
    }),
    ("a fault behind mov ss", 1, |a| {
        a.mov(eax, ss).unwrap();
        a.mov(ss, eax).unwrap();
        a.db(&[0x0f, 0x0b]).unwrap();
    }),
    ("rep stosb", 4, |a| {
        a.rep().stosb().unwrap();
        a.nop().unwrap();
    }),
    ("repe cmpsb", 2, |a| {
        a.lea(rsi, qword_ptr(rdi + 1)).unwrap();
        a.repe().cmpsb().unwrap();
    }),
    ("rep of nothing", 3, |a| {
        a.xor(ecx, ecx).unwrap();
        a.rep().movsb().unwrap();
        a.nop().unwrap();
    }),
    ("to itself", 4, |a| {
        a.db(&[0xe2, 0xfe]).unwrap();
        a.nop().unwrap();
    }),
    ("popf", 3, |a| {
        a.pushfq().unwrap();
        a.and(qword_ptr(rsp), 0xfeff_i32 - 0x1_0000).unwrap();
        a.popfq().unwrap();
        a.nop().unwrap();
        a.nop().unwrap();
    }),
    ("a branch that faults", 0, |a| a.jmp(rbx).unwrap()),
];

/// PUSHF, then the trap flag on.
fn trap_flag(a: &mut CodeAssembler) {
    a.pushfq().unwrap();
    a.or(dword_ptr(rsp), 0x100).unwrap();
    a.popfq().unwrap();
}

#[test]
fn the_trap_flag_s_traps_come_where_the_processor_has_them() {
    let Some(mut both) = Processors::new() else {
        return;
    };
    for (name, traps, program) in STEPPED {
        let ended = both.program(name, |a| {
            trap_flag(a);
            program(a);
        });
        assert_eq!(ended.steps.len(), traps, "{name}: {:x?}", ended.steps);
    }
    // A locked access over two cache lines.
    both.program("exclusive", |a| {
        trap_flag(a);
        a.lock().inc(qword_ptr(rdi + 61)).unwrap();
        a.sub(qword_ptr(rdi + 61), 1).unwrap();
    });
}

#[test]
fn reserved_nops_do_nothing_and_others_are_refused() {
    let Some(mut both) = Processors::new() else {
        return;
    };
    // RDSSPD, RDSSPQ, ENDBR, CLDEMOTE of an invalid address, NOPs by their other opcodes.
    let nops: [&[u8]; 12] = [
        &[0xf3, 0x0f, 0x1e, 0xc8],
        &[0xf3, 0x48, 0x0f, 0x1e, 0xc8],
        &[0xf3, 0x0f, 0x1e, 0xfa],
        &[0x0f, 0x1c, 0x00],
        &[0x0f, 0x1c, 0x45, 8],
        &[0x0f, 0x1c, 0xc1],
        &[0x0f, 0x19, 0xc1],
        &[0x0f, 0x1d, 0x00],
        &[0x66, 0x0f, 0x1a, 0xc1],
        &[0xf2, 0x0f, 0x1b, 0x00],
        &[0x0f, 0x1f, 0x84, 0x28, 0, 0, 0, 0],
        &[0x0f, 0x18, 0x00],
    ];
    for nop in nops {
        let ended = both.bytes(nop);
        let end = USER + nop.len() as u64;
        assert_eq!((ended.vector, ended.registers.rip), (6, end), "{nop:02x?}");
    }
    // RDPMC; instructions of 15, 16 and 17 bytes; undefined ones within 15, and locked.
    let ended = both.bytes(&[0x0f, 0x33]);
    assert_eq!(ended.vector, 13);
    for prefixes in 12..17 {
        for prefix in [0x66, 0x3e, 0xf3, 0xf0] {
            for opcode in [
                &[0x90][..],
                &[0x06],
                &[0x89, 0x07],
                &[0x0f, 0x0b],
                &[0x0f, 0x04],
            ] {
                let code = [&vec![prefix; prefixes][..], opcode].concat();
                both.bytes(&code);
            }
        }
    }
}
