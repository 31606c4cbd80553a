//! The machine's answers and calls: KVM's MSRs and features, interrupts of the APIC, reset.

use crate::support;

use iced_x86::code_asm::*;
use lacuna_cpu::{Processor, Stop};
use lacuna_x86::{Exit, Own, Regs, System, Tsc, TscRate};
use support::kernel::{HANDLERS, IDT, USER, enter_user, handle, kernel, start_apic, start_timer};
use support::{CODE, DATA, Machine, STACK, assemble};

const EN: u32 = 0x4b56_4d02;
const GP: u64 = HANDLERS + 13 * 0x100;

/// WRMSR of 0x11111111_22222222 to the MSR in ECX, at [`CODE`] + 10, then HLT.
fn writer(a: &mut CodeAssembler) {
    a.mov(edx, 0x1111_1111).unwrap();
    a.mov(eax, 0x2222_2222).unwrap();
    a.wrmsr().unwrap();
    a.hlt().unwrap();
}

fn reader(a: &mut CodeAssembler) {
    a.rdmsr().unwrap();
    a.hlt().unwrap();
}

#[test]
fn a_read_of_a_kvm_msr_exits() {
    let mut m = kernel(reader);
    m.set_regs(|r| (r.gpr[0], r.gpr[1], r.gpr[2]) = (u64::MAX, EN.into(), u64::MAX));
    assert_eq!(m.run(100), Exit::Own(Own::MsrRead { index: EN }));
    assert_eq!((m.cpu.regs().rip, m.cpu.retired()), (CODE, 0));
    m.cpu.complete_msr(Some(0x1122_3344_5566_7788));
    assert_eq!(m.run(100), Exit::Halt);
    assert_eq!((m.reg(0), m.reg(2)), (0x5566_7788, 0x1122_3344));
    assert_eq!(m.cpu.retired(), 2);
}

#[test]
fn a_write_of_a_kvm_msr_exits() {
    for index in [0x4b56_4d00, EN, 0x4b56_4dff] {
        let mut m = kernel(writer);
        // The upper half of RCX is ignored.
        m.set_regs(|r| r.gpr[1] = 7 << 32 | u64::from(index));
        let value = 0x1111_1111_2222_2222;
        assert_eq!(m.run(100), Exit::Own(Own::MsrWrite { index, value }));
        m.cpu.complete_msr(Some(0));
        assert_eq!(m.run(100), Exit::Halt);
        assert_eq!((m.reg(0), m.reg(2)), (0x2222_2222, 0x1111_1111));
        assert_eq!(m.cpu.retired(), 4);
    }
}

/// A machine with a #GP handler that halts with the error code in RBX and the faulting RIP in RSI.
fn with_gp_handler(program: impl FnOnce(&mut CodeAssembler), index: u32) -> Machine {
    let mut m = kernel(program);
    handle(&mut m, 13, |a| {
        a.pop(rbx).unwrap();
        a.mov(rsi, qword_ptr(rsp)).unwrap();
        a.hlt().unwrap();
    });
    m.set_regs(|r| (r.gpr[1], r.gpr[3]) = (index.into(), 99));
    m
}

#[test]
fn a_refused_msr_is_a_general_protection_fault_there() {
    type Program = fn(&mut CodeAssembler);
    for (program, rip) in [(reader as Program, CODE), (writer, CODE + 10)] {
        for missing in [None, Some(IDT + 13 * 16), Some(STACK - 8)] {
            let mut m = with_gp_handler(program, EN);
            let asked = m.run(100);
            assert!(matches!(
                asked,
                Exit::Own(Own::MsrRead { .. }) | Exit::Own(Own::MsrWrite { .. })
            ));
            m.cpu.complete_msr(None);
            assert!(!m.cpu.is_interruptible());
            if let Some(address) = missing {
                m.cpu.flush_tlb();
                m.memory.absent[(address >> 12) as usize] = true;
                assert_eq!(m.run(100), Exit::Stop(Stop::Wait));
                assert_eq!(m.cpu.regs().rip, rip);
            }
            assert_eq!(m.run(1), Exit::Fuel);
            assert_eq!(m.cpu.regs().rip, GP);
            assert_eq!(m.run(100), Exit::Halt);
            assert_eq!((m.reg(3), m.reg(6)), (0, rip));
            m.set_regs(|r| r.rflags |= 0x200);
            assert!(m.cpu.is_interruptible(), "it is over");
        }
    }
}

#[test]
fn outside_the_range_and_above_cpl_0_there_is_no_exit() {
    for index in [0x4b56_4cff, 0x4b56_4e00, 0x11] {
        for program in [reader, writer] {
            let mut m = with_gp_handler(program, index);
            assert_eq!(m.run(100), Exit::Halt, "{index:#x}");
            assert_eq!(m.reg(3), 0);
        }
    }
    for program in [reader, writer] {
        let mut m = with_gp_handler(enter_user, EN);
        m.memory.write(USER, &assemble(USER, program));
        assert_eq!(m.run(100), Exit::Halt);
        assert_eq!(m.reg(3), 0);
    }
}

/// An access to an MSR that the machine answers is an instruction like any other for the interrupt
/// shadow, a pending interrupt and the trap flag.
#[test]
fn nothing_comes_between_an_msr_and_its_answer() {
    let mut m = kernel(|a| {
        a.sti().unwrap();
        a.wrmsr().unwrap();
        a.mov(ebx, 1).unwrap();
        a.hlt().unwrap();
    });
    handle(&mut m, 0x51, |a| a.hlt().unwrap());
    start_apic(&mut m);
    m.set_regs(|r| r.gpr[1] = EN.into());
    m.cpu.raise_interrupt(0x51);
    assert!(matches!(m.run(100), Exit::Own(Own::MsrWrite { .. })));
    assert!(!m.cpu.is_interruptible() && !m.cpu.has_interrupt());
    m.cpu.complete_msr(Some(0));
    assert!(!m.cpu.is_interruptible() && !m.cpu.has_interrupt());
    assert_eq!(m.run(1), Exit::Fuel);
    assert_eq!(m.cpu.regs().rip, CODE + 3);
    assert!(m.cpu.has_interrupt());
    assert_eq!(m.run(100), Exit::Halt);
    assert_eq!(m.reg(3), 0, "before the next instruction");

    let mut m = kernel(reader);
    handle(&mut m, 1, |a| {
        a.inc(rbx).unwrap();
        a.and(qword_ptr(rsp + 16), !0x100).unwrap();
        a.iretq().unwrap();
    });
    m.set_regs(|r| (r.gpr[1], r.rflags) = (EN.into(), 0x102));
    assert!(matches!(m.run(100), Exit::Own(Own::MsrRead { .. })));
    assert_eq!(m.reg(3), 0);
    m.cpu.complete_msr(Some(0));
    assert_eq!(m.run(100), Exit::Halt);
    assert_eq!(m.reg(3), 1);
}

#[test]
fn the_code_page_may_go_between_an_msr_and_its_answer() {
    let mut m = kernel(reader);
    m.set_regs(|r| r.gpr[1] = EN.into());
    assert!(matches!(m.run(100), Exit::Own(Own::MsrRead { .. })));
    m.cpu.complete_msr(Some(5));
    m.cpu.flush_tlb();
    m.memory.absent[(CODE >> 12) as usize] = true;
    assert_eq!(m.run(100), Exit::Stop(Stop::Wait));
    assert_eq!(m.run(100), Exit::Halt);
    assert_eq!(m.reg(0), 5);
}

#[test]
fn features_of_the_machine_are_in_cpuid() {
    let features = |bits| {
        let mut m = kernel(|a| {
            a.mov(eax, 0x4000_0001).unwrap();
            a.cpuid().unwrap();
            a.hlt().unwrap();
        });
        m.cpu.set_kvm_features(bits);
        assert_eq!(m.run(100), Exit::Halt);
        m.reg(0)
    };
    let async_pf = 1 << 4 | 1 << 14;
    assert_eq!(features(0) & async_pf, 0);
    assert_eq!(features(async_pf as u32), features(0) | async_pf);
}

/// The APIC's ESR.
fn error_status(m: &mut Machine) -> u64 {
    let code = assemble(USER, |a| {
        a.mov(ecx, 0x828).unwrap();
        a.xor(eax, eax).unwrap();
        a.xor(edx, edx).unwrap();
        a.wrmsr().unwrap();
        a.rdmsr().unwrap();
        a.hlt().unwrap();
    });
    m.memory.write(USER, &code);
    m.set_regs(|r| (r.rip, r.rflags) = (USER, 2));
    assert_eq!(m.run(100), Exit::Halt);
    m.reg(0)
}

#[test]
fn interrupts_to_itself_are_seen_when_they_could_be_taken() {
    let mut m = kernel(|a| a.hlt().unwrap());
    assert!(!m.cpu.apic_enabled());
    m.cpu.raise_interrupt(0x51);
    start_apic(&mut m);
    let with = |m: &mut Machine, flags| {
        m.set_regs(|r| r.rflags = flags);
        m.cpu.has_interrupt()
    };
    assert!(m.cpu.apic_enabled());
    assert!(!with(&mut m, 0x202), "it was off then");
    m.cpu.raise_interrupt(3);
    assert!(!with(&mut m, 0x202), "illegal");
    assert_eq!(error_status(&mut m), 1 << 6, "received an illegal vector");
    m.cpu.raise_interrupt(0x51);
    assert!(with(&mut m, 0x202));
    assert!(!with(&mut m, 2));
}

#[test]
fn the_timer_is_looked_at_before_the_answer() {
    let mut m = kernel(|a| a.hlt().unwrap());
    start_timer(&mut m, 100_000);
    m.set_regs(|r| r.rflags = 0x202);
    let due = m.cpu.next_deadline().expect("the timer runs");
    assert!(!m.cpu.has_interrupt());
    m.clock.advance_to(due);
    assert!(m.cpu.has_interrupt());
}

/// A reset while every kind of state is pending. The processor then runs like a new one.
#[test]
fn reset_leaves_nothing() {
    let mut m = kernel(|a| {
        a.sti().unwrap();
        a.mov(rdi, DATA).unwrap();
        a.mov(rax, qword_ptr(rdi)).unwrap();
        a.mov(ecx, EN).unwrap();
        a.rdmsr().unwrap();
        a.hlt().unwrap();
    });
    m.memory.write_u64(DATA, 1);
    let system = m.cpu.system().clone();
    start_timer(&mut m, 100_000);
    assert_eq!(m.run(100), Exit::Own(Own::MsrRead { index: EN }));
    m.cpu.raise_interrupt(0x61);
    let mut dirty = system.clone();
    (dirty.cr2, dirty.cpl, dirty.halted, dirty.interrupt_shadow) = (5, 3, true, true);
    (dirty.dr6, dirty.kernel_gs_base) = (1, 7);
    dirty.tsc = Tsc::new(TscRate::GIGAHERTZ, 99);
    m.cpu.set_system(dirty);
    m.cpu.complete_msr(Some(1));
    m.cpu.inject_page_fault(0x1000);
    let retired = m.cpu.retired();

    m.cpu.reset();
    let clean = format!("{:?}", System::long_mode(0));
    assert_eq!(format!("{:?}", m.cpu.system()), clean);
    let zero = Regs {
        rflags: 2,
        ..Regs::default()
    };
    assert_eq!((m.cpu.regs(), m.cpu.retired()), (zero, retired));
    assert_eq!((m.cpu.next_deadline(), m.cpu.cpl()), (None, 0));
    assert!(!m.cpu.apic_enabled() && !m.cpu.is_halted() && !m.cpu.is_interruptible());

    // The data's page was removed meanwhile: the processor uses no old translation or answer.
    m.cpu.set_system(system);
    m.set_regs(|r| (r.rip, r.gpr[4]) = (CODE, STACK));
    m.memory.absent[(DATA >> 12) as usize] = true;
    assert_eq!(m.run(100), Exit::Stop(Stop::Wait));
    assert!(m.cpu.is_interruptible());
    assert_eq!(m.run(100), Exit::Own(Own::MsrRead { index: EN }));
    assert_eq!(m.reg(0), 1);
    m.cpu.complete_msr(Some(2));
    assert_eq!(m.run(100), Exit::Halt);
    assert_eq!(m.reg(0), 2);
    start_apic(&mut m);
    m.clock.advance(1_000_000);
    assert!(m.cpu.is_interruptible());
    assert!(!m.cpu.has_interrupt(), "what was posted is gone");
}

#[test]
fn features_outlive_a_reset() {
    let mut m = kernel(|a| a.hlt().unwrap());
    m.cpu.set_kvm_features(1 << 4);
    let system = m.cpu.system().clone();
    m.cpu.reset();
    m.cpu.set_system(system);
    let code = assemble(USER, |a| {
        a.cpuid().unwrap();
        a.hlt().unwrap();
    });
    m.memory.write(USER, &code);
    m.set_regs(|r| (r.rip, r.gpr[0]) = (USER, 0x4000_0001));
    assert_eq!(m.run(100), Exit::Halt);
    assert_eq!(m.reg(0) & 1 << 4, 1 << 4);
}
