//! Page faults that the machine injects: their handler, and their order among other events. A
//! missing page during delivery neither loses nor repeats them.

use crate::support;

use iced_x86::code_asm::*;
use lacuna_cpu::{Processor, Stop};
use lacuna_x86::{Exit, Own};
use support::kernel::{GDT, HANDLERS, IDT, TSS, USER, enter_user, handle, kernel, start_apic};
use support::{CODE, DATA, Machine, STACK, assemble};

const TOKEN: u64 = 0x1234_5000;
const PF: u64 = HANDLERS + 14 * 0x100;
/// The TSS's stack for handlers entered from user level.
const KERNEL_STACK: u64 = STACK + 0x4000;
const RF: u64 = 1 << 16;

/// A machine in an endless loop at user level, interrupts on, with a #PF handler.
fn user_loop() -> Machine {
    let mut m = kernel(enter_user);
    let code = assemble(USER, |a| {
        let mut top = a.create_label();
        a.set_label(&mut top).unwrap();
        a.inc(r8).unwrap();
        a.jmp(top).unwrap();
    });
    m.memory.write(USER, &code);
    handle(&mut m, 14, |a| {
        a.inc(r9).unwrap();
        a.add(rsp, 8).unwrap();
        a.iretq().unwrap();
    });
    assert_eq!(m.run(100), Exit::Fuel);
    m
}

/// Makes the page of `address` missing for the next access.
fn take_away(m: &mut Machine, address: u64) {
    m.cpu.flush_tlb();
    m.memory.absent[(address >> 12) as usize] = true;
}

#[test]
fn it_enters_the_handler_from_user_level_with_the_whole_frame() {
    let mut m = user_loop();
    let before = m.cpu.regs();
    let retired = m.cpu.retired();
    assert!(m.cpu.is_interruptible() && m.cpu.paging());
    assert_eq!((m.cpu.cpl(), m.cpu.system().cr2), (3, 0));
    m.cpu.inject_page_fault(TOKEN);
    assert!(!m.cpu.is_interruptible());
    assert_eq!((m.cpu.cpl(), m.cpu.system().cr2), (3, 0));
    assert_eq!(m.run(1), Exit::Fuel);
    assert_eq!(m.cpu.retired(), retired + 1);
    let after = m.cpu.regs();
    assert_eq!((after.rip, after.gpr[4]), (PF, KERNEL_STACK - 48));
    assert_eq!((m.cpu.cpl(), m.cpu.system().cr2), (0, TOKEN));
    let frame = (1..=6).rev().map(|n| KERNEL_STACK - 8 * n);
    let frame: Vec<u64> = frame.map(|at| m.memory.read_u64(at)).collect();
    let flags = before.rflags | RF;
    assert_eq!(frame, [0, before.rip, 0x23, flags, before.gpr[4], 0x1b]);
    assert!(!m.cpu.is_interruptible(), "an interrupt gate");
    assert_eq!(m.run(50), Exit::Fuel);
    assert_eq!((m.cpu.cpl(), m.reg(9)), (3, 1), "back, and only once");
    assert!(m.cpu.is_interruptible());
}

#[test]
fn it_waits_for_every_page_that_delivery_needs() {
    for missing in [IDT + 14 * 16, GDT, TSS, KERNEL_STACK - 48] {
        let mut m = user_loop();
        let before = m.cpu.regs();
        m.cpu.inject_page_fault(TOKEN);
        take_away(&mut m, missing);
        assert_eq!(m.run(100), Exit::Stop(Stop::Wait), "{missing:#x}");
        assert!(!m.cpu.is_interruptible());
        m.slots.vcpu(0).request(2);
        assert_eq!(m.run(100), Exit::Requested);
        assert!(!m.cpu.is_interruptible());
        assert_eq!((m.cpu.regs(), m.cpu.system().cr2), (before, 0));
        assert_eq!(m.slots.vcpu(0).take(), 2);
        assert_eq!(m.run(1), Exit::Fuel);
        assert_eq!((m.cpu.regs().rip, m.cpu.system().cr2), (PF, TOKEN));
        assert_eq!(m.run(100), Exit::Fuel);
        assert_eq!(m.reg(9), 1);
    }
}

#[test]
fn it_goes_before_an_interrupt_that_is_pending_too() {
    let mut m = user_loop();
    for (vector, digit) in [(14, 1), (0x51, 2)] {
        handle(&mut m, vector, |a| {
            a.imul_3(rbx, rbx, 10).unwrap();
            a.add(rbx, digit).unwrap();
            if vector == 14 {
                a.add(rsp, 8).unwrap();
            }
            a.iretq().unwrap();
        });
    }
    start_apic(&mut m);
    assert!(m.cpu.apic_enabled() && !m.cpu.has_interrupt());
    m.cpu.raise_interrupt(0x51);
    assert!(m.cpu.has_interrupt());
    m.cpu.inject_page_fault(TOKEN);
    assert!(!m.cpu.has_interrupt(), "not before the fault");
    assert_eq!(m.run(100), Exit::Fuel);
    assert_eq!(m.reg(3), 12);
    assert!(!m.cpu.has_interrupt(), "in service");
}

#[test]
fn a_repeated_string_is_interrupted_and_completed() {
    let (from, to, len) = (DATA + 0x2_0100, DATA + 0x4_0f00, 0x3000);
    let mut m = kernel(|a| {
        a.sti().unwrap();
        a.nop().unwrap();
        a.rep().movsb().unwrap();
        a.hlt().unwrap();
    });
    let movs = CODE + 2;
    handle(&mut m, 14, |a| {
        a.mov(r9, rcx).unwrap();
        a.mov(r10, qword_ptr(rsp + 8)).unwrap();
        a.mov(r11, cr2).unwrap();
        a.add(rsp, 8).unwrap();
        a.iretq().unwrap();
    });
    let bytes: Vec<u8> = (0..len).map(|n| (n * 7 % 251) as u8).collect();
    m.memory.write(from, &bytes);
    m.set_regs(|r| (r.gpr[1], r.gpr[6], r.gpr[7]) = (len, from, to));
    m.memory.absent[(from >> 12) as usize + 2] = true;
    assert_eq!(m.run(1000), Exit::Stop(Stop::Wait));
    let done = m.reg(7) - to;
    assert!(done > 0 && done < len, "in the middle");
    assert!(m.cpu.is_interruptible());
    m.cpu.inject_page_fault(TOKEN);
    assert_eq!(m.run(1000), Exit::Halt);
    assert_eq!((m.reg(9), m.reg(10), m.reg(11)), (len - done, movs, TOKEN));
    assert_eq!((m.reg(1), m.reg(7)), (0, to + len));
    assert_eq!(m.memory.read(to, len as usize), bytes);
}

/// A machine halted with interrupts on; the instruction behind HLT increments RBX.
fn halted() -> Machine {
    let mut m = kernel(|a| {
        a.sti().unwrap();
        a.hlt().unwrap();
        a.inc(rbx).unwrap();
        a.cli().unwrap();
        a.hlt().unwrap();
    });
    handle(&mut m, 14, |a| {
        a.inc(r9).unwrap();
        a.add(rsp, 8).unwrap();
        a.iretq().unwrap();
    });
    assert_eq!(m.run(100), Exit::Halt);
    assert!(m.cpu.is_halted() && m.cpu.is_interruptible());
    m
}

#[test]
fn it_ends_a_halt() {
    let mut m = halted();
    m.cpu.inject_page_fault(TOKEN);
    assert_eq!(m.run(1), Exit::Fuel);
    assert!(!m.cpu.is_halted());
    assert_eq!(m.run(100), Exit::Halt);
    assert_eq!((m.reg(9), m.reg(3)), (1, 1));
}

#[test]
fn a_halt_ends_without_an_event_too() {
    let mut m = halted();
    assert_eq!(m.run(100), Exit::Halt);
    assert_eq!(m.reg(3), 0);
    m.cpu.unhalt();
    assert!(!m.cpu.is_halted());
    assert_eq!(m.run(100), Exit::Halt);
    assert_eq!((m.reg(9), m.reg(3)), (0, 1));
    assert!(!m.cpu.is_interruptible(), "CLI");
}

#[test]
fn a_stop_says_whether_an_event_was_being_delivered() {
    let mut m = user_loop();
    let ud2 = assemble(USER + 0x100, |a| a.ud2().unwrap());
    m.memory.write(USER + 0x100, &ud2);
    handle(&mut m, 6, |a| {
        a.add(qword_ptr(rsp), 2).unwrap();
        a.iretq().unwrap();
    });
    // A plain case: the code itself is missing.
    m.set_regs(|r| r.rip = USER + 0x100);
    take_away(&mut m, USER);
    assert_eq!(m.run(100), Exit::Stop(Stop::Wait));
    assert!(m.cpu.is_interruptible());
    // With the handler's stack missing, the exception is still pending.
    take_away(&mut m, KERNEL_STACK - 8);
    assert_eq!(m.run(100), Exit::Stop(Stop::Wait));
    assert!(!m.cpu.is_interruptible());
    m.slots.vcpu(0).request(2);
    assert_eq!(m.run(100), Exit::Requested);
    assert!(!m.cpu.is_interruptible());
    m.slots.vcpu(0).take();
    // The fault repeats by itself, or ends with its cause.
    let jump = assemble(USER + 0x100, |a| {
        let mut top = a.create_label();
        a.set_label(&mut top).unwrap();
        a.jmp(top).unwrap();
    });
    m.memory.write(USER + 0x100, &jump);
    m.cpu.drop_all_code();
    assert_eq!(m.run(100), Exit::Fuel);
    assert_eq!((m.cpu.cpl(), m.cpu.regs().rip), (3, USER + 0x100));
    assert!(m.cpu.is_interruptible());
    // The same for an interrupt.
    handle(&mut m, 0x51, |a| a.iretq().unwrap());
    start_apic(&mut m);
    m.cpu.raise_interrupt(0x51);
    take_away(&mut m, KERNEL_STACK - 8);
    assert_eq!(m.run(100), Exit::Stop(Stop::Wait));
    assert!(!m.cpu.is_interruptible() && !m.cpu.has_interrupt());
    assert_eq!(m.run(100), Exit::Fuel);
    assert!(m.cpu.is_interruptible());
}

#[test]
fn a_single_step_trap_waits_for_the_handlers_stack() {
    let mut m = user_loop();
    handle(&mut m, 1, |a| {
        a.inc(rbx).unwrap();
        a.and(qword_ptr(rsp + 16), !0x100).unwrap();
        a.iretq().unwrap();
    });
    m.set_regs(|r| r.rflags |= 0x100);
    take_away(&mut m, KERNEL_STACK - 8);
    assert_eq!(m.run(100), Exit::Stop(Stop::Wait));
    let behind = m.cpu.regs().rip;
    assert_eq!(m.run(1), Exit::Fuel);
    assert_eq!(m.cpu.regs().rip, HANDLERS + 0x100);
    let saved = m.memory.read_u64(KERNEL_STACK - 40);
    assert_eq!(saved, behind, "nothing ran in between");
    assert_eq!(m.run(100), Exit::Fuel);
    assert_eq!(m.reg(3), 1);
}

/// The trap flag traps after an instruction. No instruction runs here, so no trap comes before the
/// handler or in it.
#[test]
fn it_does_not_count_as_a_single_step() {
    let mut m = user_loop();
    handle(&mut m, 1, |a| {
        a.inc(rbx).unwrap();
        a.and(qword_ptr(rsp + 16), !0x100).unwrap();
        a.iretq().unwrap();
    });
    m.set_regs(|r| r.rflags |= 0x100);
    let rip = m.cpu.regs().rip;
    m.cpu.inject_page_fault(TOKEN);
    assert_eq!(m.run(1), Exit::Fuel);
    assert_eq!(m.memory.read_u64(KERNEL_STACK - 40), rip);
    assert_eq!(m.run(3), Exit::Fuel);
    assert_eq!((m.reg(9), m.reg(3), m.cpu.cpl()), (1, 0, 3));
    assert_eq!(m.run(100), Exit::Fuel);
    assert_eq!((m.reg(9), m.reg(3)), (1, 1), "one trap, after the return");
}

#[test]
fn no_injection_in_an_instruction_that_waits_for_a_device() {
    let mut m = kernel(|a| {
        a.sti().unwrap();
        a.nop().unwrap();
        a.mov(eax, dword_ptr(rdi)).unwrap();
        a.add(dword_ptr(rdi), eax).unwrap();
        a.hlt().unwrap();
    });
    let device = m.device().get();
    m.set_regs(|r| r.gpr[7] = device);
    assert!(matches!(m.run(100), Exit::MmioRead { .. }));
    assert!(!m.cpu.is_interruptible(), "unanswered");
    m.cpu.complete_read(7);
    assert!(!m.cpu.is_interruptible(), "answered");
    assert!(matches!(m.run(100), Exit::MmioRead { .. }));
    m.cpu.complete_read(8);
    assert!(matches!(m.run(100), Exit::MmioWrite { value: 15, .. }));
    assert!(!m.cpu.is_interruptible());
    assert_eq!(m.run(100), Exit::Halt);
    assert!(m.cpu.is_interruptible());
}

#[test]
fn the_shadow_of_sti_closes_it() {
    let mut m = kernel(|a| {
        a.sti().unwrap();
        a.hlt().unwrap();
    });
    assert!(!m.cpu.is_interruptible());
    assert_eq!(m.run(1), Exit::Fuel);
    assert_eq!(m.cpu.regs().rflags & 0x200, 0x200);
    assert!(!m.cpu.is_interruptible());
    assert_eq!(m.run(1), Exit::Fuel);
    assert!(m.cpu.is_interruptible() && m.cpu.is_halted());
}

#[test]
fn without_a_handler_it_is_a_shutdown_and_nothing_stays() {
    let mut m = user_loop();
    m.memory.write(IDT, &[0; 16 * 15]);
    let rip = m.cpu.regs().rip;
    m.cpu.inject_page_fault(TOKEN);
    let Exit::Own(Own::Shutdown(shutdown)) = m.run(100) else {
        panic!("no shutdown")
    };
    assert_eq!((shutdown.rip, shutdown.first.vector), (rip, 14));
    assert!(m.cpu.is_interruptible());
}
