//! Non-maskable interrupts: when they are taken, when they are blocked, and that none is lost.

use crate::support;

use iced_x86::code_asm::*;
use lacuna_cpu::{Event, Processor as _, Stop};
use lacuna_x86::Exit;
use support::Machine;
use support::kernel::{HANDLERS, IDT, handle, kernel};

const NMI: u64 = HANDLERS + 2 * 0x100;

/// A kernel whose NMI handler counts in R9 and halts before its IRET.
fn with_handler(program: impl FnOnce(&mut CodeAssembler)) -> Machine {
    let mut m = kernel(program);
    handle(&mut m, 2, |a| {
        a.inc(r9).unwrap();
        a.hlt().unwrap();
        a.iretq().unwrap();
    });
    m
}

fn nmi(m: &mut Machine) {
    assert_eq!(m.cpu.inject(Event::Nmi), Ok(()));
}

#[test]
fn it_ends_a_halt_without_if_and_blocks_the_next_until_iret() {
    let mut m = with_handler(|a| {
        a.hlt().unwrap();
        a.inc(r8).unwrap();
        a.hlt().unwrap();
    });
    assert_eq!(m.run(100), Exit::Halt);
    assert!(!m.cpu.has_interrupt());
    nmi(&mut m);
    assert!(m.cpu.has_interrupt() && !m.cpu.is_interruptible());
    assert_eq!(m.run(1), Exit::Fuel);
    assert_eq!(m.cpu.regs().rip, NMI);
    for _ in 0..3 {
        nmi(&mut m);
        assert!(!m.cpu.has_interrupt(), "blocked");
        assert_eq!(m.run(100), Exit::Halt);
        assert_eq!((m.reg(8), m.reg(9)), (0, 1));
    }
    m.cpu.unhalt();
    assert_eq!(m.run(100), Exit::Halt);
    assert_eq!((m.reg(8), m.reg(9)), (0, 2), "one after IRET, before R8");
    m.cpu.unhalt();
    assert_eq!(m.run(100), Exit::Halt);
    assert_eq!((m.reg(8), m.reg(9)), (1, 2));
}

#[test]
fn it_waits_behind_sti_and_for_the_pages_of_its_delivery() {
    let mut m = with_handler(|a| {
        a.sti().unwrap();
        a.inc(r8).unwrap();
        a.inc(r8).unwrap();
        a.hlt().unwrap();
    });
    assert_eq!(m.run(1), Exit::Fuel);
    nmi(&mut m);
    assert!(!m.cpu.has_interrupt());
    m.cpu.flush_tlb();
    m.memory.absent[(IDT >> 12) as usize] = true;
    assert_eq!(m.run(100), Exit::Stop(Stop::Wait));
    assert_eq!((m.reg(8), m.reg(9)), (1, 0));
    m.memory.absent[(IDT >> 12) as usize] = false;
    assert_eq!(m.run(100), Exit::Halt);
    assert_eq!((m.reg(8), m.reg(9)), (1, 1));
}

#[test]
fn a_fault_of_its_delivery_ends_it() {
    let mut m = with_handler(|a| {
        a.hlt().unwrap();
        a.hlt().unwrap();
    });
    handle(&mut m, 13, |a| {
        a.inc(r10).unwrap();
        a.add(rsp, 8).unwrap();
        a.iretq().unwrap();
    });
    let gate = m.memory.read_u64(IDT + 2 * 16);
    m.memory.write_u64(IDT + 2 * 16, 0);
    assert_eq!(m.run(100), Exit::Halt);
    nmi(&mut m);
    assert_eq!(m.run(100), Exit::Halt);
    assert_eq!((m.reg(9), m.reg(10)), (0, 1));
    m.memory.write_u64(IDT + 2 * 16, gate);
    m.cpu.flush_tlb();
    nmi(&mut m);
    assert_eq!(m.run(100), Exit::Halt);
    assert_eq!((m.reg(9), m.reg(10)), (1, 1), "the IRET has unblocked it");
}

#[test]
fn a_waiting_one_and_a_running_handler_are_part_of_the_state() {
    let mut m = with_handler(|a| {
        a.hlt().unwrap();
    });
    let fresh = m.cpu.save().unwrap();
    nmi(&mut m);
    let waiting = m.cpu.save().unwrap();
    assert_eq!(m.run(1), Exit::Fuel);
    let blocked = m.cpu.save().unwrap();
    assert_eq!(
        (waiting.events.nmi_pending, blocked.events.nmi_pending),
        (true, false)
    );
    nmi(&mut m);
    m.cpu.restore(&fresh).unwrap();
    assert!(!m.cpu.has_interrupt());
    m.cpu.restore(&waiting).unwrap();
    assert_eq!(m.cpu.save().unwrap(), waiting);
    assert!(m.cpu.has_interrupt());
    m.cpu.restore(&blocked).unwrap();
    nmi(&mut m);
    assert!(!m.cpu.has_interrupt());
    m.cpu.reset();
    assert!(!m.cpu.save().unwrap().events.nmi_pending);
}
