//! System instructions beyond a comparison in user mode: far jumps, branches at the end of the
//! canonical half, operands in devices, the trap flag around exits and system calls, and a deadline
//! in the past.

use crate::support;

use iced_x86::code_asm::*;
use lacuna_cpu::Processor;
use lacuna_x86::{Exit, Own};
use support::kernel::{HANDLERS, USER, handle, kernel, start_apic};
use support::{CODE, DATA, Machine, RIGHTS, STACK, assemble};

const GP: u64 = 13;
const DB: u64 = 1;
const UD: u64 = 6;
const TF: u64 = 1 << 8;
/// Bits of DR6: single step.
const BS: u64 = 1 << 14;
const NON_CANONICAL: u64 = 1 << 47;

/// Makes every handler of these vectors stop at once.
fn stop_at(m: &mut Machine, vectors: &[u64]) {
    for &vector in vectors {
        handle(m, vector, |a| a.hlt().unwrap());
    }
}

/// The vector of the handler that stopped the machine, and the RIP and RSP in its frame.
fn stopped(m: &mut Machine, has_error: bool) -> (u64, u64, u64) {
    let at = m.reg(4) + 8 * u64::from(has_error);
    let vector = (m.cpu.regs().rip - HANDLERS) / 0x100;
    (vector, m.memory.read_u64(at), m.memory.read_u64(at + 24))
}

#[test]
fn a_far_jump_goes_through_memory_by_any_operand_size() {
    let to = CODE + 0x800;
    // The REX or operand-size prefix, and the bytes of the offset.
    for (prefix, bytes) in [(Some(0x48), 8), (None, 4)] {
        let mut m = kernel(|a| {
            a.mov(rdi, DATA).unwrap();
            a.db(&prefix.into_iter().chain([0xff, 0x2f]).collect::<Vec<u8>>())
                .unwrap();
        });
        m.memory.write_u64(DATA, to);
        m.memory.write(DATA + bytes, &[0x08, 0]);
        let there = assemble(to, |a| {
            a.mov(eax, cs).unwrap();
            a.hlt().unwrap();
        });
        m.memory.write(to, &there);
        assert_eq!(m.run(100), Exit::Halt);
        assert_eq!((m.reg(0), m.cpu.regs().rip), (8, to + there.len() as u64));
    }
}

#[test]
fn a_far_jump_to_a_non_canonical_address_faults_at_the_jump() {
    let mut m = kernel(|a| {
        a.mov(rdi, DATA).unwrap();
        a.db(&[0x48, 0xff, 0x2f]).unwrap();
    });
    stop_at(&mut m, &[GP]);
    m.memory.write_u64(DATA, NON_CANONICAL);
    m.memory.write(DATA + 8, &[0x08, 0]);
    assert_eq!(m.run(100), Exit::Halt);
    let length = assemble(CODE, |a| a.mov(rdi, DATA).unwrap()).len() as u64;
    assert_eq!(stopped(&mut m, true), (GP, CODE + length, STACK));
}

/// Maps the last page below the hole to the frame at [`USER`], and begins at `offset` in it.
fn at_the_end(code: &[u8], offset: u64) -> (Machine, u64) {
    const LAST: u64 = 0x7fff_ffff_f000;
    let mut m = kernel(|_| ());
    stop_at(&mut m, &[GP]);
    let tables = DATA + 0x40_0000;
    for (table, index, entry) in [
        (0x1000, 255, tables),
        (tables, 511, tables + 0x1000),
        (tables + 0x1000, 511, tables + 0x2000),
        (tables + 0x2000, 511, USER),
    ] {
        m.memory.write_u64(table + 8 * index, entry | RIGHTS);
    }
    m.memory.write(USER + offset, code);
    let rip = LAST + offset;
    m.set_regs(|r| (r.rip, r.gpr[1], r.rflags) = (rip, 3, 2));
    (m, rip)
}

#[test]
fn short_branches_to_non_canonical_addresses_fault_at_the_branch() {
    let jumps: [&[u8]; 6] = [
        &[0xeb, 0x70],
        &[0x75, 0x70],
        &[0xe2, 0x70],
        &[0xe0, 0x70],
        &[0x67, 0xe2, 0x70],
        &[0xe8, 0x70, 0, 0, 0],
    ];
    for code in jumps {
        let (mut m, rip) = at_the_end(code, 0xff0);
        assert_eq!(m.run(100), Exit::Halt, "{code:02x?}");
        assert_eq!(stopped(&mut m, true), (GP, rip, STACK), "{code:02x?}");
        assert_eq!(m.reg(1), 3, "{code:02x?}");
    }
    let halts: [&[u8]; 4] = [&[0x74, 0x70], &[0xe1, 0x70], &[0xe3, 0x70], &[0x72, 0x70]];
    for code in halts {
        let (mut m, rip) = at_the_end(&[code, &[0xf4]].concat(), 0xff0);
        assert_eq!(m.run(100), Exit::Halt, "{code:02x?}");
        assert_eq!(m.cpu.regs().rip, rip + 3, "{code:02x?} fell through");
        assert_eq!(m.reg(1), if code[0] == 0xe1 { 2 } else { 3 });
    }
}

/// Execution past the end of the canonical half faults at the first non-canonical address.
#[test]
fn running_past_the_canonical_half_faults_behind_it() {
    for code in [
        &[0x90; 8][..],
        &[0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x74, 0x00],
    ] {
        let (mut m, _) = at_the_end(code, 0xff8);
        assert_eq!(m.run(100), Exit::Halt);
        assert_eq!(stopped(&mut m, true), (GP, NON_CANONICAL, STACK));
    }
}

/// SMSW, SLDT, STR, MOV from SS; then SGDT, which stores its operand in two pieces.
#[test]
fn what_system_instructions_store_to_a_device_reaches_it() {
    for opcode in [
        &[0x0f, 0x01, 0x27][..],
        &[0x0f, 0x00, 0x07],
        &[0x0f, 0x00, 0x0f],
        &[0x8c, 0x17],
    ] {
        let mut m = kernel(|a| {
            a.db(opcode).unwrap();
            a.hlt().unwrap();
        });
        let device = m.device();
        m.set_regs(|r| r.gpr[7] = device.get());
        let value = match opcode {
            [0x0f, 0x01, _] => m.cpu.system().cr0 & 0xffff,
            [0x0f, 0x00, 0x07] => 0,
            [0x0f, ..] => 0x28,
            _ => 0x10,
        };
        let written = Exit::MmioWrite {
            gpa: device,
            size: 2,
            value,
        };
        assert_eq!(m.run(100), written, "{opcode:02x?}");
        assert_eq!(m.run(100), Exit::Halt, "{opcode:02x?}");
    }
    let mut m = kernel(|a| {
        a.db(&[0x0f, 0x01, 0x07]).unwrap();
        a.hlt().unwrap();
    });
    let device = m.device().get();
    m.set_regs(|r| r.gpr[7] = device);
    for size in [8, 2] {
        let exit = m.run(100);
        assert!(
            matches!(exit, Exit::MmioWrite { size: s, .. } if s == size),
            "{exit:?}"
        );
    }
    assert_eq!(m.run(100), Exit::Halt);
}

#[test]
fn what_system_instructions_load_from_a_device_is_asked_for() {
    // MOV SS, LMSW, LGDT, LJMP, POPF, POP FS, IRET.
    let instructions: [(&[u8], &[u64]); 7] = [
        (&[0x8e, 0x17], &[0x10]),
        (&[0x0f, 0x01, 0x37], &[1]),
        (&[0x0f, 0x01, 0x17], &[0x27, DATA + 0x10_0000]),
        (&[0x48, 0xff, 0x2f], &[CODE + 0x100, 8]),
        (&[0x9d], &[2]),
        (&[0x0f, 0xa1], &[0]),
        (&[0x48, 0xcf], &[CODE + 0x100, 8, 2, STACK, 0x10]),
    ];
    for (opcode, answers) in instructions {
        let mut m = kernel(|a| a.db(opcode).unwrap());
        m.memory.write(CODE + opcode.len() as u64, &[0xf4]);
        m.memory.write(CODE + 0x100, &[0xf4]);
        let device = m.device().get();
        m.set_regs(|r| (r.gpr[7], r.gpr[4]) = (device, device));
        for answer in answers {
            let exit = m.run(100);
            assert!(
                matches!(exit, Exit::MmioRead { .. }),
                "{opcode:02x?}: {exit:?}"
            );
            m.cpu.complete_read(*answer);
        }
        assert_eq!(m.run(100), Exit::Halt, "{opcode:02x?}");
    }
}

/// Above CPL 0 the processor refuses them before it reads an operand.
#[test]
fn privileged_loads_do_not_look_at_their_operand() {
    for opcode in [
        [0x0f, 0x01, 0x37],
        [0x0f, 0x00, 0x17],
        [0x0f, 0x00, 0x1f],
        [0x0f, 0x01, 0x17],
    ] {
        let mut m = kernel(|a| a.db(&opcode).unwrap());
        stop_at(&mut m, &[GP]);
        let mut system = m.cpu.system().clone();
        (system.cpl, system.selectors) = (3, [0, 0x23, 0x1b, 0, 0, 0]);
        m.cpu.set_system(system);
        let device = m.device().get();
        m.set_regs(|r| r.gpr[7] = device);
        assert_eq!(m.run(100), Exit::Halt, "{opcode:02x?}");
        assert_eq!(stopped(&mut m, true).0, GP);
    }
}

#[test]
fn the_trap_flag_traps_behind_out_and_in() {
    let mut m = kernel(|a| {
        a.out(0x80, al).unwrap();
        a.in_(al, 0x80).unwrap();
        a.nop().unwrap();
        a.ud2().unwrap();
    });
    stop_at(&mut m, &[UD]);
    handle(&mut m, DB, |a| {
        a.inc(rbx).unwrap();
        a.mov(rcx, qword_ptr(rsp)).unwrap();
        a.iretq().unwrap();
    });
    m.set_regs(|r| r.rflags |= TF);
    assert!(matches!(m.run(1), Exit::Own(Own::IoOut { .. })));
    assert!(!m.cpu.is_interruptible(), "the trap is pending");
    assert!(matches!(m.run(100), Exit::Own(Own::IoIn { .. })));
    assert_eq!((m.reg(3), m.reg(1)), (1, CODE + 2), "behind OUT");
    assert_eq!(m.cpu.system().dr6 & BS, BS);
    m.cpu.complete_read(0);
    assert_eq!(m.run(100), Exit::Halt);
    assert_eq!((m.reg(3), m.reg(1)), (3, CODE + 5), "behind IN and NOP");
}

/// SYSCALL traps by the TF after FMASK, SYSRET by the loaded TF.
#[test]
fn the_trap_flag_of_system_calls_is_the_one_they_load() {
    for (masked, traps) in [(0x200, 1), (0x200 | TF, 0)] {
        let mut m = kernel(|_| ());
        stop_at(&mut m, &[DB]);
        m.memory.write(USER, &[0x0f, 0x05]);
        m.memory.write(HANDLERS, &[0xf4]);
        let mut system = m.cpu.system().clone();
        (system.cpl, system.selectors) = (3, [0, 0x23, 0x1b, 0, 0, 0]);
        system.fmask = masked;
        m.cpu.set_system(system);
        m.set_regs(|r| (r.rip, r.rflags) = (USER, 2 | TF));
        assert_eq!(m.run(100), Exit::Halt);
        let rip = m.cpu.regs().rip;
        assert_eq!(rip, HANDLERS + 1 + 0x100 * traps, "{masked:#x}");
    }
    let mut m = kernel(|a| a.sysretq().unwrap());
    stop_at(&mut m, &[DB]);
    m.set_regs(|r| (r.gpr[1], r.gpr[11]) = (USER, 2 | TF));
    assert_eq!(m.run(100), Exit::Halt);
    assert_eq!(stopped(&mut m, false), (DB, USER, STACK));
}

/// The timer fires at once if the deadline's MSR gets a past time, or if the TSC moves past the
/// deadline.
#[test]
fn a_deadline_in_the_past_fires_before_the_next_instruction() {
    const DEADLINE: u32 = 0x6e0;
    for (msr, value) in [(DEADLINE, 1_u32), (0x10, 1_000_000_000)] {
        let mut m = kernel(|a| {
            let mut top = a.create_label();
            for (msr, value) in [(0x832, 0x4_0040), (DEADLINE, 500_000_000), (msr, value)] {
                a.mov(ecx, msr).unwrap();
                a.mov(eax, value).unwrap();
                a.xor(edx, edx).unwrap();
                a.wrmsr().unwrap();
            }
            a.set_label(&mut top).unwrap();
            a.inc(rbx).unwrap();
            a.jmp(top).unwrap();
        });
        stop_at(&mut m, &[0x40]);
        start_apic(&mut m);
        m.clock.advance(1000);
        m.set_regs(|r| r.rflags |= 1 << 9);
        assert_eq!(m.run(10_000), Exit::Halt, "{msr:#x}");
        assert_eq!(m.reg(3), 0, "{msr:#x}: instructions behind the write");
    }
}

/// FWAIT raises #NM only with both CR0.MP and CR0.TS.
#[test]
fn fwait_is_device_not_available_with_monitor_and_task_switched() {
    const NM: u64 = 7;
    for (bits, faults) in [
        (0, false),
        (2, false),
        (8, false),
        (2 | 8, true),
        (4, false),
    ] {
        let mut m = kernel(|a| {
            a.wait().unwrap();
            a.hlt().unwrap();
        });
        stop_at(&mut m, &[NM, UD]);
        let mut system = m.cpu.system().clone();
        system.cr0 = system.cr0 & !0xe | bits;
        m.cpu.set_system(system);
        assert_eq!(m.run(10), Exit::Halt);
        if faults {
            assert_eq!(stopped(&mut m, false), (NM, CODE, STACK), "{bits:#x}");
        } else {
            assert_eq!(m.cpu.regs().rip, CODE + 2, "{bits:#x}");
        }
    }
}

/// WBNOINVD is privileged, and has no effect.
#[test]
fn wbnoinvd_is_wbinvd() {
    let mut m = kernel(|a| {
        a.db(&[0xf3, 0x0f, 0x09]).unwrap();
        a.hlt().unwrap();
    });
    assert_eq!(m.run(10), Exit::Halt);
    assert_eq!(m.cpu.regs().rip, CODE + 4);
}

/// LSS and LFS take the offset, then the selector. A refused selector changes neither register.
#[test]
fn far_pointers_are_loaded_whole_or_not_at_all() {
    // The prefix, and the bytes of the offset.
    for (prefix, bytes) in [(0x66, 2), (0x40, 4), (0x48, 8)] {
        for (opcode, segment) in [(0xb2, 2), (0xb4, 4)] {
            let mut m = kernel(|a| {
                a.db(&[prefix, 0x0f, opcode, 0x07]).unwrap();
                a.hlt().unwrap();
            });
            stop_at(&mut m, &[GP, UD]);
            m.set_regs(|r| (r.gpr[0], r.gpr[7]) = (0x1111_2222_3333_4444, DATA));
            m.memory.write_u64(DATA, 0xaaaa_bbbb_cccc_dddd);
            m.memory.write(DATA + bytes, &[0x10, 0]);
            assert_eq!(m.run(10), Exit::Halt);
            let offset = match bytes {
                2 => 0x1111_2222_3333_dddd,
                4 => 0xcccc_dddd,
                _ => 0xaaaa_bbbb_cccc_dddd,
            };
            let selector = m.cpu.system().selectors[segment];
            assert_eq!((m.reg(0), selector), (offset, 0x10), "{opcode:#x}");

            m.memory.write(DATA + bytes, &[0x80, 0]);
            let mut system = m.cpu.system().clone();
            system.halted = false;
            m.cpu.set_system(system);
            m.set_regs(|r| (r.gpr[0], r.rip) = (1, CODE));
            assert_eq!(m.run(10), Exit::Halt);
            assert_eq!(stopped(&mut m, true), (GP, CODE, STACK), "{opcode:#x}");
            assert_eq!(m.memory.read_u64(m.reg(4)), 0x80);
            let selector = m.cpu.system().selectors[segment];
            assert_eq!((m.reg(0), selector), (1, 0x10), "{opcode:#x}");
        }
    }
}
