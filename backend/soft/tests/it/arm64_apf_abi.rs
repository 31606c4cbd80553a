//! The ABI of asynchronous page faults for an AArch64 guest of a few instructions: each bad input,
//! and each delayed event.

use crate::common;

use common::arm64::*;
use lacuna_machine::{
    Exit, GuestMemory as _, Kick as _, MemoryFaultFlags, MemorySlots as _, MissingMemory as _,
    ReadyOutcome, SlotFlags, SourcePage, Vcpu as _,
};
use lacuna_skip::test;
use lacuna_soft::Apf;
use std::sync::Arc;

#[test]
fn a_guest_finds_the_services_or_none() {
    for (apf, bitmap, event) in [(Apf::On, 0b111, 1 << 48), (Apf::Off, 0b001, NOT_SUPPORTED)] {
        let mut machine = Machine::offered(apf);
        let uid = machine.values(UID, &[]);
        assert_eq!(uid, [0xb66f_b428, 0xe911_c52e, 0x564b_caa9, 0x743a_004d]);
        assert_eq!(machine.values(SERVICES, &[]), [bitmap, 0, 0, 0]);
        assert_eq!(machine.event(0, &[]), event, "SDEI_VERSION");
        if apf == Apf::Off {
            let refused = FORMS.map(|form| machine.switch(form, BLOCK | ENABLED));
            assert_eq!(refused, [NOT_SUPPORTED; 2]);
        }
    }
    let mut machine = Machine::new();
    for (function, value) in [(0, 0x01_0000), (1, 64), (2, EVENT), (3, PPI.into())] {
        assert_eq!(machine.values(SDEI_FORM, &[function]), [0, value, 0, 0]);
    }
}

/// The architecture's calls, PSCI, vendor services and SDEI, and unassigned numbers.
#[test]
fn unknown_function_ids() {
    let mut machine = Machine::new();
    for function in [
        0x8600_0003,
        0x8600_007f,
        0x8600_ff03,
        0xc600_0001,
        0x8000_7fff,
        0x8400_0013,
        0xc400_001f,
        0xc400_002d,
        0xc400_0033,
        0xc400_0040,
        0x8100_0000,
        0xbf00_0000,
        0x0600_0001,
        0,
        1,
    ] {
        assert_eq!(machine.call(function, &[]), NOT_SUPPORTED, "{function:#x}");
    }
    for function in [6, 7, 1 << 31, 0xffff_ffff] {
        assert_eq!(machine.call(SDEI_FORM, &[function]), NOT_SUPPORTED);
    }
    for function in [0, 1, 0xff] {
        let argument = [(BLOCK | ENABLED) & 0xffff_ffff, function << 24];
        assert_eq!(machine.call(ABORT, &argument), NOT_SUPPORTED);
    }
    assert_eq!(machine.call(0x8000_0000, &[]), 0x1_0001, "SMCCC_VERSION");
    assert_eq!(machine.call(0x8400_0000, &[]), 0x1_0001, "PSCI_VERSION");
}

#[test]
fn a_block_that_is_no_memory() {
    for form in FORMS {
        let mut machine = Machine::new();
        for block in [
            0x0900_0000,
            0x3000_0000,
            BASE + (1 << 30),
            1 << 47,
            1 << 48,
            1 << 55,
        ] {
            let refused = machine.switch(form, block | ENABLED);
            assert_eq!(refused, NOT_SUPPORTED, "{form:?} {block:#x}");
            assert_eq!(machine.switch(form, 0), NOT_REQUIRED, "still off");
        }
        // Bits 5:2 have no meaning: the block's address is aligned.
        assert_eq!(machine.switch(form, BLOCK | 0x3c | ENABLED), 0);
        assert_eq!(machine.ready(form), Some(WAKE_ALL));
    }
}

#[test]
fn enabling_and_disabling_twice() {
    for (form, other) in [(Form::Abort, Form::Sdei), (Form::Sdei, Form::Abort)] {
        let mut machine = Machine::new();
        assert_eq!(machine.switch(form, BLOCK), NOT_REQUIRED);
        assert_eq!(machine.switch(form, BLOCK | ENABLED), 0);
        assert_eq!(machine.ready(form), Some(WAKE_ALL));
        machine.consume(form);
        assert_eq!(machine.switch(form, BLOCK | ENABLED), NOT_REQUIRED);
        assert_eq!(machine.switch(other, BLOCK | ENABLED), NOT_SUPPORTED);
        assert_eq!(machine.switch(other, 0), NOT_REQUIRED);
        assert_eq!(machine.ready(form), None, "nothing has changed");
        assert_eq!(machine.switch(form, 0), 0);
        assert_eq!(machine.switch(form, 0), NOT_REQUIRED);
        assert_eq!(machine.switch(other, BLOCK | ENABLED), 0);
    }
}

#[test]
fn a_fault_and_its_ready_page_are_delivered() {
    for form in FORMS {
        let mut machine = Machine::enabled(form, 0);
        let token = machine.notified(form, 1);
        assert_eq!(machine.ready(form), None);
        machine.provide(1);
        assert_eq!(machine.ready(form), None, "the first event is unread");
        machine.consume(form);
        assert_eq!(machine.ready(form), Some(token));
        machine.consume(form);
        assert_eq!((machine.load(1, EL0), machine.pc()), (End::Ran, LOAD + 4));
        assert_eq!(machine.cpu().regs().x[9], 0x0707_0707_0707_0707);
        let stats = machine.stats();
        assert_eq!((stats.taken, stats.ready, stats.halted), (1, 1, 0));
    }
}

#[test]
fn disabling_with_faults_pending() {
    for form in FORMS {
        let mut machine = Machine::enabled(form, 0);
        for page in [1, 2] {
            machine.notified(form, page);
            machine.read_words();
        }
        // Page 1 arrives before the call, and page 2 after it.
        if form == Form::Abort {
            // The guest's own mark means that it wants no events now.
            machine.vm.write(gpa(BLOCK), &[3, 0, 0, 0]).unwrap();
        }
        machine.provide(1);
        if form == Form::Sdei {
            assert!(machine.ready(form).is_some() && machine.line());
        }
        assert_eq!(machine.switch(form, 0), 0);
        assert!(!machine.line(), "{form:?}");
        machine.read_words();
        machine.provide(2);
        machine.put_at(LOAD + 4, EL1);
        assert_eq!(machine.ready(form), None);
        assert_eq!((machine.pc(), machine.words()), (LOAD + 4, (0, 0)));
        let kept = u64::from(form == Form::Sdei);
        assert_eq!(machine.stats().cancelled, 2 - kept);
        assert_eq!(machine.switch(form, BLOCK | ENABLED), 0);
        assert_eq!(machine.ready(form), Some(WAKE_ALL));
    }
}

/// The guest waits for a page whose event cannot be delivered, and gets no later event for the
/// page.
#[test]
fn a_guest_that_never_acknowledges() {
    for form in FORMS {
        let mut machine = Machine::enabled(form, 0);
        let token = machine.notified(form, 1);
        for page in 2..5 {
            assert_eq!(machine.load(page, EL0), End::Ran);
            assert_eq!(machine.settle(), End::Halt, "{form:?}");
            machine.provide(page);
            assert_eq!(machine.step(), End::Ran);
            assert_eq!(machine.pc(), LOAD + 4);
        }
        machine.provide(1);
        assert_eq!(machine.settle(), End::Ran);
        assert_eq!((machine.pc(), machine.words().0), (LOAD + 4, 1));
        machine.read_words();
        assert_eq!(machine.ready(form), Some(token), "{form:?}");
        let stats = machine.stats();
        assert_eq!((stats.taken, stats.halted, stats.ready), (1, 3, 1));
    }
    // The guest has read the words, but not acknowledged the interrupt.
    let mut machine = Machine::enabled(Form::Sdei, 0);
    let tokens = [1, 2].map(|page| {
        let token = machine.notified(Form::Sdei, page);
        machine.read_words();
        token
    });
    machine.put_at(LOAD + 4, EL0);
    (1..3).for_each(|page| machine.provide(page));
    assert_eq!(machine.ready(Form::Sdei), Some(tokens[0]));
    machine.read_words();
    assert_eq!(machine.ready(Form::Sdei), None);
    assert_eq!(machine.acknowledge(), 0);
    assert_eq!(machine.ready(Form::Sdei), Some(tokens[1]));
}

/// RFCv2: the vector table and the range behind it; PSTATE masks nothing.
#[test]
fn aborts_while_masked() {
    let mut machine = Machine::new();
    assert_eq!(machine.call(ABORT, &[0x800, 1 << 30]), 0);
    let always = BLOCK | ENABLED | SEND_ALWAYS;
    assert_eq!(machine.switch(Form::Abort, always), 0);
    assert_eq!(machine.ready(Form::Abort), Some(WAKE_ALL));
    machine.consume(Form::Abort);
    assert_eq!(machine.load(1, EL1), End::Ran);
    let token = machine.not_present(Form::Abort, FROM_EL1);
    assert!(token.is_some(), "DAIF is set");
    machine.consume(Form::Abort);
    machine.provide(1);
    assert_eq!(machine.settle(), End::Ran);
    assert_eq!(machine.words().0, 0, "PC is in the vector table");
    machine.put_at(LOAD + 4, EL1);
    assert_eq!(machine.ready(Form::Abort), token);
    machine.consume(Form::Abort);
    // While events are enabled, the range cannot be set.
    assert_eq!(machine.call(ABORT, &[0x1000, 1 << 30]), NOT_SUPPORTED);
    assert_eq!(machine.switch(Form::Abort, 0), 0);
    assert_eq!(machine.call(ABORT, &[0x1000, 1 << 30]), 0);
    assert_eq!(machine.switch(Form::Abort, always), 0);
    assert_eq!(machine.load_at(NEAR, 2, EL1), End::Ran);
    assert_eq!(machine.settle(), End::Halt);
    machine.provide(2);
    assert_eq!((machine.step(), machine.pc()), (End::Ran, NEAR + 4));
}

/// v1 to v4: PE_MASK, a disabled or unregistered event, and a handler at work.
#[test]
fn events_while_masked() {
    type Call = fn(&mut Machine) -> i64;
    let masks: [(Call, Call); 3] = [
        (|m| m.event(11, &[]) - 1, |m| m.event(12, &[])),
        (|m| m.event(3, &[EVENT]), |m| m.event(2, &[EVENT])),
        (
            |m| m.event(7, &[EVENT]),
            |m| m.event(1, &[EVENT, HANDLER, 77, 0]) + m.event(2, &[EVENT]),
        ),
    ];
    for (mask, unmask) in masks {
        let mut machine = Machine::enabled(Form::Sdei, 0);
        assert_eq!(mask(&mut machine), 0);
        assert_eq!(machine.load(1, EL0), End::Ran);
        assert_eq!((machine.settle(), machine.words().0), (End::Halt, 0));
        machine.provide(1);
        assert_eq!((machine.step(), machine.pc()), (End::Ran, LOAD + 4));
        assert_eq!(unmask(&mut machine), 0);
        machine.notified(Form::Sdei, 2);
    }
    let mut machine = Machine::enabled(Form::Sdei, SEND_ALWAYS);
    assert_eq!(machine.load(1, EL0), End::Ran);
    assert!(machine.not_present(Form::Sdei, 0).is_some());
    machine.read_words();
    assert_eq!(machine.load(2, EL1), End::Ran);
    assert_eq!(machine.settle(), End::Halt, "the handler is at work");
}

/// PSTATE.I masks the page-ready interrupt, which stays pending, and ends a WFI.
#[test]
fn a_page_ready_interrupt_while_masked() {
    let mut machine = Machine::enabled(Form::Sdei, 0);
    machine.read_words();
    enable_interrupts(&mut machine);
    let token = machine.notified(Form::Sdei, 1);
    machine.read_words();
    machine.put_at(WAIT, EL1);
    assert_eq!(machine.settle(), End::Halt);
    machine.provide(1);
    assert_eq!(machine.ready(Form::Sdei), Some(token));
    assert_eq!(machine.pc(), WAIT + 4, "masked");
    machine.put_at(WAIT + 4, EL1_UNMASKED);
    machine.settle();
    assert_eq!(machine.pc(), IRQ_FROM_EL1);
    assert_eq!(machine.acknowledge(), 0);
    machine.put_at(WAIT + 4, EL1_UNMASKED);
    machine.settle();
    assert_eq!(machine.pc(), WAIT + 4, "the line is low");
}

/// Enables group 1 and the page-ready interrupt, as a kernel does at boot.
fn enable_interrupts(machine: &mut Machine) {
    use lacuna_cpu::Processor as _;
    let gic = Arc::clone(&machine.cpu().fabric().gic);
    let mut distributor = gic.distributor();
    distributor.enabled = [false, true];
    gic.set_distributor(&distributor).unwrap();
    let mut state = machine.cpu().save().unwrap();
    state.gic.asleep = false;
    state.gic.cpu.pmr = 0xf8;
    state.gic.cpu.enabled = [false, true];
    state.gic.private.group = u32::MAX;
    state.gic.private.enabled = 1 << PPI;
    machine.cpu().restore(&state).unwrap();
}

/// A kernel that cannot switch to another thread waits in WFI. Its own page-ready ends the wait.
#[test]
fn a_guest_that_cannot_schedule_halts_until_its_page_is_ready() {
    let mut machine = Machine::enabled(Form::Abort, SEND_ALWAYS);
    assert_eq!(machine.load(1, EL1), End::Ran);
    let token = machine.not_present(Form::Abort, FROM_EL1).unwrap();
    machine.consume(Form::Abort);
    // The PC is outside the range, as in a handler that has saved its registers.
    machine.put_at(WAIT, EL1);
    assert_eq!(machine.settle(), End::Halt);
    assert!(machine.cpu().is_halted());
    assert_eq!(machine.stats().halted, 0, "the guest's own halt");
    machine.provide(1);
    assert_eq!(machine.ready(Form::Abort), Some(token));
    assert_eq!(machine.cpu().system().elr, WAIT + 4);
}

/// The block's page is not resident: the vCPU waits with PC at the HVC, a kick ends the wait, and
/// the call happens once.
#[test]
fn enabling_waits_for_the_block() {
    for form in FORMS {
        let mut machine = Machine::new();
        let value = (FAR + 5 * PAGE) | ENABLED;
        let (low, high) = (value & 0xffff_ffff, value >> 32);
        let regs = match form {
            Form::Abort => machine.put_at_call(ABORT, &[low, high | 1 << 31]),
            Form::Sdei => machine.put_at_call(SDEI_FORM, &[ENABLE, low, high]),
        };
        for _ in 0..3 {
            assert_eq!(machine.step(), End::Page);
            assert_eq!(machine.cpu().regs(), regs);
        }
        machine.vm.kick(0);
        assert_eq!(machine.vcpu.run().unwrap(), Exit::Interrupted);
        assert_eq!(machine.cpu().regs(), regs);
        machine.provide(5);
        assert_eq!((machine.step(), machine.pc()), (End::Ran, CALL + 4));
        assert_eq!(machine.cpu().regs().x[..4], [0; 4], "and not NOT_REQUIRED");
    }
}

/// The host may write the block when the guest acknowledges or disables. If its page is missing,
/// the vCPU waits with PC at the HVC, and a kick ends the wait.
#[test]
fn acknowledging_and_disabling_wait_for_the_block() {
    let other = BASE + (64 << 20);
    for args in [&[ACK] as &[u64], &[ENABLE, other]] {
        let mut machine = Machine::new();
        machine.add_page(other, SourcePage(0));
        machine.vm.read(gpa(other), &mut [0; 8]).unwrap();
        assert_eq!(machine.switch(Form::Sdei, other | ENABLED), 0);
        machine.put_at(LOAD + 4, EL1);
        machine.settle();
        assert!(machine.line(), "the wake-all");
        machine.vm.remove_slot(ADDED).unwrap();
        machine.add_page(other, SourcePage((FAR - BASE) / PAGE + 5));
        let regs = machine.put_at_call(SDEI_FORM, args);
        for _ in 0..3 {
            assert_eq!(machine.step(), End::Page, "{args:x?}");
            assert_eq!(machine.cpu().regs(), regs);
        }
        let vm = Arc::clone(&machine.vm);
        let kicker = std::thread::spawn(move || vm.kick(0));
        assert_eq!(machine.vcpu.run().unwrap(), Exit::Interrupted);
        kicker.join().unwrap();
        assert_eq!(machine.cpu().regs(), regs);
        machine.provide(5);
        assert_eq!((machine.step(), machine.pc()), (End::Ran, CALL + 4));
        assert_eq!(machine.cpu().regs().x[..4], [0; 4], "and not NOT_REQUIRED");
        assert!(!machine.line());
        machine.vm.mmu().verify();
    }
}

/// A program needs a page, and the block's page is swapped out. The vCPU waits for the block, and
/// the program's page is on its way too. Otherwise that page would keep its frame until a program
/// needs it again, perhaps for ever.
#[test]
fn a_page_is_on_its_way_while_the_vcpu_waits_for_the_block() {
    for form in FORMS {
        let mut machine = Machine::with_budget(Apf::On, 4).enable(form, 0);
        machine.vm.write(gpa(BLOCK + 512), &[1; 512]).unwrap();
        let mut pages = 1..20;
        let waits_for = loop {
            for other in 100..1600 {
                let at = gpa(FAR + other * PAGE);
                machine.vm.provide(at, &[7; 4096]).unwrap();
                machine.vm.write(at, &[other as u8; 64]).unwrap();
            }
            // The code is resident after this.
            machine.vm.read(gpa(LOAD), &mut [0; 8]).unwrap();
            let page = pages.next().expect("the block is swapped out");
            if machine.load(page, EL0) == End::Page {
                break page;
            }
            machine.not_present(form, FROM_EL0).expect("a notification");
            if form == Form::Sdei {
                machine.complete();
            }
            machine.consume(form);
        };
        assert!(machine.is_asked_for(waits_for), "{form:?}");
        // An interrupt changes the PC.
        machine.put_at(LOAD + 4, EL0);
        machine.settle();
        machine.provide(waits_for);
        assert_eq!(machine.load(waits_for, EL0), End::Ran);
        assert_eq!(machine.pc(), LOAD + 4);
    }
}

#[test]
fn a_reset_forgets_everything() {
    for form in FORMS {
        let mut machine = Machine::enabled(form, 0);
        for page in [1, 2] {
            machine.notified(form, page);
            machine.read_words();
        }
        machine.provide(1);
        machine.put_at(LOAD + 4, EL0);
        assert!(machine.ready(form).is_some());
        machine.vcpu.reset();
        assert!(!machine.line());
        machine.read_words();
        machine.provide(2);
        machine.put_at(LOAD + 4, EL1);
        machine.settle();
        assert_eq!((machine.pc(), machine.words()), (LOAD + 4, (0, 0)));
        assert_eq!(machine.switch(form, 0), NOT_REQUIRED);
        assert_eq!(machine.event(11, &[]), 0, "masked, as after a reset");
    }
}

/// A vCPU switched off has nothing in flight, and starts later without its old state.
#[test]
fn cpu_off_forgets_everything() {
    for form in FORMS {
        let mut machine = Machine::enabled(form, 0);
        machine.notified(form, 1);
        machine.read_words();
        machine.values(CPU_OFF, &[]);
        assert_eq!(machine.settle(), End::Halt);
        machine.provide(1);
        assert_eq!((machine.settle(), machine.words()), (End::Halt, (0, 0)));
        assert_eq!(machine.stats().cancelled, 1);
        // Another vCPU calls CPU_ON, through the power states.
        let call = lacuna_arm64::smccc::Call {
            function: 0xc400_0003,
            args: [0, LOAD + 4, 5, 0, 0, 0, 0],
            immediate: 0,
        };
        let fabric = Arc::clone(machine.cpu().fabric());
        let outcome = fabric.power.call(1, &call);
        assert_eq!(outcome, Some(lacuna_arm64::psci::Outcome::Return(0)));
        assert_eq!((machine.settle(), machine.pc()), (End::Ran, LOAD + 4));
        assert_eq!(machine.cpu().regs().x[0], 5);
        assert_eq!(machine.switch(form, 0), NOT_REQUIRED);
    }
}

/// Exits on missing memory. The VMM accepts their tokens for the guest.
#[test]
fn an_accepted_token_becomes_page_not_present() {
    for form in FORMS {
        let mut machine = Machine::enabled(form, 0);
        for slot in machine.vm.memory_slots() {
            let set = machine
                .vm
                .set_slot_flags(slot.id, SlotFlags::EXIT_ON_MISSING);
            set.unwrap();
        }
        for (pstate, can_notify) in [(EL1, false), (EL0, true)] {
            let mut regs = machine.cpu().regs();
            let page = 1 + pstate;
            regs.x[10] = FAR + page * PAGE;
            (regs.pc, regs.pstate) = (LOAD, pstate);
            machine.cpu().set_regs(&regs);
            let exit = machine.vcpu.run().unwrap();
            let Exit::MemoryFault {
                gpa: at,
                flags,
                token,
                ..
            } = exit
            else {
                panic!("{exit:?}");
            };
            assert_eq!(at, gpa(FAR + page * PAGE));
            assert_eq!(flags.contains(MemoryFaultFlags::CAN_NOTIFY), can_notify);
            if !can_notify {
                machine.vm.provide(at, &[7; 4096]).unwrap();
                assert_eq!((machine.step(), machine.pc()), (End::Ran, LOAD + 4));
                continue;
            }
            assert_eq!(machine.vcpu.accept(token), Ok(()));
            let shown = machine.not_present(form, FROM_EL0).expect("a notification");
            machine.read_words();
            machine.put_at(LOAD + 4, EL0);
            assert_eq!(machine.ready(form), None);
            machine.vm.provide(at, &[7; 4096]).unwrap();
            assert_eq!(machine.vm.ready(token), Ok(ReadyOutcome::Notified));
            assert_eq!(machine.ready(form), Some(shown));
        }
    }
}
