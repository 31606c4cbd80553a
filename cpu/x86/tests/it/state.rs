//! The whole state of a processor, through the trait of all processors. The test saves it at many
//! points of a run and puts it into another processor. The guest then continues as without this.

use crate::support;

use iced_x86::code_asm::*;
use lacuna_cpu::{Event, Exit, Privilege, Processor, Refused};
use lacuna_x86::{ApicBus, Cpu, Own};
use std::sync::Arc;
use support::kernel::{enter_user, handle, kernel, start_apic, start_timer};
use support::{Machine, NoWake};

/// Programs at CPL 3 count in RCX, the timer's handler counts in R12.
fn counting() -> Machine {
    let mut m = kernel(enter_user);
    handle(&mut m, 0x40, |a| {
        a.inc(r12).unwrap();
        // x2APIC mode: EOI is an MSR.
        a.mov(rbx, rcx).unwrap();
        a.mov(ecx, 0x80b).unwrap();
        a.xor(eax, eax).unwrap();
        a.xor(edx, edx).unwrap();
        a.wrmsr().unwrap();
        a.mov(rcx, rbx).unwrap();
        a.iretq().unwrap();
    });
    handle(&mut m, 14, |a| {
        a.add(rsp, 8).unwrap();
        a.iretq().unwrap();
    });
    let code = support::assemble(support::kernel::USER, |a| {
        let mut top = a.create_label();
        a.set_label(&mut top).unwrap();
        a.add(rcx, 3).unwrap();
        a.xor(rdx, rcx).unwrap();
        a.jmp(top).unwrap();
    });
    m.memory.write(support::kernel::USER, &code);
    start_apic(&mut m);
    start_timer(&mut m, 1000);
    m
}

/// Replaces the processor by a fresh one. The clock of the fresh one reads another time.
fn moved(m: &mut Machine, state: &<Cpu as Processor>::State) {
    m.clock = Arc::new(lacuna_sync::VirtualClock::default());
    m.clock.advance(77_777);
    let fabric = Arc::new(ApicBus::new(1, Arc::new(NoWake)));
    m.cpu = <Cpu as Processor>::new(0, fabric, m.clock.clone());
    m.cpu.restore(state).unwrap();
}

/// Runs in steps of 7 instructions and 50 ns, and saves the state after each step.
fn states(m: &mut Machine, steps: usize) -> Vec<<Cpu as Processor>::State> {
    let mut all = Vec::new();
    for _ in 0..steps {
        let exit = Processor::run(&mut m.cpu, &mut m.memory, m.slots.vcpu(0), 7);
        assert_eq!(exit, Exit::Fuel);
        m.clock.advance(50);
        all.push(m.cpu.save().expect("no instruction waits for an answer"));
    }
    all
}

#[test]
fn a_guest_goes_on_on_another_processor_as_it_would_have_on_the_first() {
    let mut undisturbed = counting();
    let expected = states(&mut undisturbed, 300);
    assert_eq!(expected[299].regs.gpr[12], 1, "the timer has fired");
    assert_eq!(undisturbed.cpu.privilege(), Privilege::User);
    for at in [0, 1, 17, 40, 41, 42, 150] {
        let mut m = counting();
        states(&mut m, at + 1);
        let state = m.cpu.save().unwrap();
        moved(&mut m, &state);
        assert_eq!(
            m.cpu.save().unwrap(),
            state,
            "{at}: restoring loses nothing"
        );
        assert_eq!(states(&mut m, 299 - at), expected[at + 1..], "{at}");
    }
}

#[test]
fn an_exception_and_an_interrupt_that_wait_are_part_of_the_state() {
    let mut m = counting();
    states(&mut m, 3);
    m.cpu.inject(Event::Interrupt(0x40)).unwrap();
    m.cpu.inject(Event::AsyncFault { address: 0x5000 }).unwrap();
    assert!(!m.cpu.is_interruptible());
    let state = m.cpu.save().unwrap();
    moved(&mut m, &state);
    assert!(!m.cpu.is_interruptible(), "the exception still waits");
    let exit = Processor::run(&mut m.cpu, &mut m.memory, m.slots.vcpu(0), 1);
    assert_eq!(exit, Exit::Fuel);
    assert_eq!(m.cpu.system().cr2, 0x5000);
    assert_eq!(m.cpu.inject(Event::Interrupt(0x100)), Err(Refused));
}

#[test]
fn there_is_no_state_while_a_device_owes_an_answer() {
    let mut m = kernel(|a| {
        a.in_(al, 0x60).unwrap();
        a.hlt().unwrap();
    });
    let exit = Processor::run(&mut m.cpu, &mut m.memory, m.slots.vcpu(0), 9);
    assert!(matches!(
        exit,
        Exit::Own(Own::IoIn {
            port: 0x60,
            size: 1
        })
    ));
    assert_eq!(m.cpu.save(), None);
    Processor::complete_read(&mut m.cpu, 0x12);
    assert_eq!(
        m.cpu.save(),
        None,
        "the instruction has its answer and is not complete"
    );
    assert_eq!(m.run(9), lacuna_x86::Exit::Halt);
    assert_eq!(m.cpu.save().unwrap().regs.gpr[0] & 0xff, 0x12);
}
