//! A small kernel: handlers through an IDT, user level and back, interrupts, single steps.

use crate::support;

use iced_x86::code_asm::*;
use lacuna_cpu::{Processor, Wake};
use lacuna_x86::{ApicBus, Cpu, Exit, Regs};
use std::sync::Arc;
use support::kernel::{HANDLERS, IDT, TSS, USER, enter_user, handle, kernel};
use support::{CODE, DATA, STACK, assemble};

#[test]
fn a_page_fault_is_repaired_and_the_access_done_again() {
    let mut m = kernel(|a| {
        a.mov(rdi, 1_u64 << 40).unwrap();
        a.mov(rax, qword_ptr(rdi)).unwrap();
        a.hlt().unwrap();
    });
    m.memory.write_u64(DATA, 4711);
    handle(&mut m, 14, |a| {
        a.mov(rbx, cr2).unwrap();
        a.pop(rcx).unwrap();
        a.mov(rdi, DATA).unwrap();
        a.iretq().unwrap();
    });
    assert_eq!(m.run(100), Exit::Halt);
    assert_eq!((m.reg(0), m.reg(3), m.reg(1)), (4711, 1 << 40, 0));
    assert_eq!(m.reg(4), STACK);
}

#[test]
fn user_level_calls_the_kernel_and_comes_back() {
    let mut m = kernel(enter_user);
    let code = assemble(USER, |a| {
        a.mov(eax, 1).unwrap();
        a.syscall().unwrap();
        a.add(eax, 1).unwrap();
        a.int(0x80).unwrap();
        a.cli().unwrap();
    });
    m.memory.write(USER, &code);
    let cli = USER + code.len() as u64 - 1;
    let code = assemble(HANDLERS, |a| {
        a.add(eax, 0x10).unwrap();
        a.sysretq().unwrap();
    });
    m.memory.write(HANDLERS, &code);
    handle(&mut m, 0x80, |a| {
        a.add(eax, 0x100).unwrap();
        a.iretq().unwrap();
    });
    handle(&mut m, 13, |a| a.hlt().unwrap());
    assert_eq!(m.run(100), Exit::Halt, "CLI at user level");
    assert_eq!(m.reg(0), 0x112);
    assert_eq!(m.memory.read_u64(STACK + 0x4000 - 40), cli);
}

#[test]
fn the_timer_breaks_a_halt_and_a_loop() {
    let mut m = kernel(|a| {
        let mut top = a.create_label();
        a.sti().unwrap();
        a.hlt().unwrap();
        a.set_label(&mut top).unwrap();
        a.inc(r8).unwrap();
        a.cmp(rbx, 2).unwrap();
        a.jne(top).unwrap();
        a.cli().unwrap();
        a.hlt().unwrap();
    });
    handle(&mut m, 0x40, |a| {
        a.inc(rbx).unwrap();
        a.mov(ecx, 0x80b).unwrap();
        a.xor(eax, eax).unwrap();
        a.xor(edx, edx).unwrap();
        a.wrmsr().unwrap();
        a.iretq().unwrap();
    });
    let setup = assemble(USER, |a| {
        for (msr, value) in [
            (0x1b, 0xfee0_0c00_u32),
            (0x80f, 0x1ff),
            (0x832, 0x2_0040),
            (0x83e, 0xb),
            (0x838, 100_000),
        ] {
            a.mov(ecx, msr).unwrap();
            a.mov(eax, value).unwrap();
            a.xor(edx, edx).unwrap();
            a.wrmsr().unwrap();
        }
        a.mov(rax, CODE).unwrap();
        a.jmp(rax).unwrap();
    });
    m.memory.write(USER, &setup);
    m.set_regs(|r| r.rip = USER);
    assert_eq!(m.run(1000), Exit::Halt);
    let due = m.cpu.next_deadline().expect("the timer runs");
    m.clock.advance_to(due);
    assert_eq!(m.run(100_000), Exit::Fuel);
    assert_eq!(m.reg(3), 1);
    m.clock.advance(200_000);
    assert_eq!(m.run(100_000), Exit::Halt);
    assert_eq!(m.reg(3), 2);
}

#[test]
fn the_trap_flag_stops_after_every_instruction() {
    let mut m = kernel(|a| {
        a.pushfq().unwrap();
        a.or(qword_ptr(rsp), 0x100).unwrap();
        a.popfq().unwrap();
        a.mov(eax, 1).unwrap();
        a.add(eax, 2).unwrap();
        a.ud2().unwrap();
    });
    handle(&mut m, 1, |a| {
        a.inc(rbx).unwrap();
        a.iretq().unwrap();
    });
    handle(&mut m, 6, |a| a.hlt().unwrap());
    assert_eq!(m.run(100), Exit::Halt);
    assert_eq!((m.reg(0), m.reg(3)), (3, 2));
}

struct NoWake;

impl Wake for NoWake {
    fn wake(&self, _index: usize) {}
}

#[test]
fn an_interrupt_posted_from_outside_is_delivered_once() {
    let mut m = kernel(|a| a.nop().unwrap());
    let apics = Arc::new(ApicBus::new(1, Arc::new(NoWake)));
    let system = m.cpu.system().clone();
    m.cpu = Cpu::new(0, apics.clone(), m.clock.clone());
    m.cpu.set_system(system);
    let code = assemble(CODE, |a| {
        let mut top = a.create_label();
        a.mov(ecx, 0x1b).unwrap();
        a.mov(eax, 0xfee0_0c00_u32).unwrap();
        a.wrmsr().unwrap();
        a.mov(ecx, 0x80f).unwrap();
        a.mov(eax, 0x1ff).unwrap();
        a.wrmsr().unwrap();
        a.sti().unwrap();
        a.set_label(&mut top).unwrap();
        a.jmp(top).unwrap();
    });
    m.memory.write(CODE, &code);
    handle(&mut m, 0x51, |a| {
        a.inc(rbx).unwrap();
        a.iretq().unwrap();
    });
    let mut regs = Regs {
        rip: CODE,
        rflags: 2,
        ..Regs::default()
    };
    regs.gpr[4] = STACK;
    m.cpu.set_regs(&regs);
    assert_eq!(m.run(100), Exit::Fuel);
    assert_eq!(m.reg(3), 0);
    apics.post(0, 0x51);
    assert_eq!(m.run(100), Exit::Fuel);
    assert_eq!(m.reg(3), 1);
    assert_eq!(m.run(100), Exit::Fuel);
    assert_eq!(m.reg(3), 1);
}

/// The gate resets the stack at each event (IST 1), so the guest would run for ever: fuel must end
/// it.
#[test]
fn a_handler_that_faults_at_once_uses_up_its_fuel() {
    let mut m = kernel(|a| {
        a.ud2().unwrap();
    });
    handle(&mut m, 6, |a| {
        a.ud2().unwrap();
    });
    let gate = m.memory.read_u64(IDT + 6 * 16);
    m.memory.write_u64(IDT + 6 * 16, gate | 1 << 32);
    m.memory.write_u64(TSS + 36, STACK + 0x4000);
    let before = m.cpu.retired();
    assert_eq!(m.run(10_000), Exit::Fuel);
    assert!(m.cpu.retired() >= before + 10_000);
}
