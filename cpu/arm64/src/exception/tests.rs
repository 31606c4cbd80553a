//! Entry, interrupts and return (Arm ARM D1.10, D1.11, D1.13).

use super::*;
use crate::gic::{DISTRIBUTOR, Line, REDISTRIBUTORS, REGISTER_PAGE};
use crate::state::status;
use crate::testing::{CODE, DATA, EL1H, End, Machine, VECTORS};
use lacuna_a64::{BR, ERET, HVC, NOP, WFI};
use lacuna_addr::Gpa;
use lacuna_cpu::{Event, Processor};
use lacuna_state::StateError;
use lacuna_state::arm64::{Abort, State, SysReg};
use lacuna_sync::Nanos;

const SVC: u32 = lacuna_a64::SVC | 0x1234 << 5;
const BRK: u32 = 0xd420_0000 | 0xabcd << 5;
const EL1T: u64 = pstate::EL1;
const EL0: u64 = 0;

/// D1.10.2, table D1-7: the vector for each origin; D1.10.1: the saved state.
#[test]
fn entry_saves_and_selects_the_vector() {
    for (from, group) in [(EL1T, 0x000), (EL1H, 0x200), (EL0, 0x400)] {
        for masks in [0, pstate::DAIF, pstate::I] {
            let old = from | masks | 0xa << 28;
            let mut m = Machine::new(1);
            assert_eq!(m.exec(old, &[SVC]), End::Vector(group));
            let core = &m.cpus[0].core;
            assert_eq!(core.sys.spsr, old);
            assert_eq!(core.sys.elr, CODE + 4, "SVC returns behind itself");
            assert_eq!(core.pstate(), pstate::RESET | 0xa << 28);
            assert_eq!(m.syndrome(), (0x15, 0x1234));
        }
    }
}

/// D17.2.118, SPAN: an exception sets PAN unless SPAN is set.
#[test]
fn pan_on_entry() {
    for (span, old, new) in [
        (0, 0, pstate::PAN),
        (0, pstate::PAN, pstate::PAN),
        (sctlr::SPAN, 0, 0),
        (sctlr::SPAN, pstate::PAN, pstate::PAN),
    ] {
        let mut m = Machine::new(1);
        let sys = &mut m.cpus[0].core.sys;
        sys.sctlr = sys.sctlr & !sctlr::SPAN | span;
        m.exec(EL1H | old, &[SVC]);
        assert_eq!(m.cpus[0].core.pstate() & pstate::PAN, new);
        assert_eq!(m.cpus[0].core.sys.pan, new != 0);
        assert_eq!(m.cpus[0].core.sys.spsr, EL1H | old);
    }
}

/// D17.2.37: the class and the syndrome of each exception of an instruction, and whether the
/// handler returns to the instruction.
#[test]
fn classes_and_syndromes() {
    let load_x1 = 0xf940_0001;
    for (from, code, x0, class, iss, far) in [
        (EL0, BRK, 0, 0x3c, 0xabcd, None),
        (EL1H, BRK, 0, 0x3c, 0xabcd, None),
        (EL1H, 0, 0, 0x00, 0, None),
        (EL1H, 0xd400_0003, 0, 0x00, 0, None),
        (EL1H, 0xd440_0000, 0, 0x00, 0, None),
        (EL0, HVC, 0, 0x00, 0, None),
        (EL0, ERET, 0, 0x00, 0, None),
        (EL0, 0x1e60_4000, 0, 0x00, 0, None),
        (EL0, load_x1, 1 << 50, 0x24, 0x00, Some(1 << 50)),
        (EL1H, load_x1, 1 << 50, 0x25, 0x00, Some(1 << 50)),
        (
            EL0,
            load_x1 & !(1 << 22),
            1 << 50,
            0x24,
            0x40,
            Some(1 << 50),
        ),
        // ldadd x1, x1, [x0]: a load would have failed too.
        (EL0, 0xf821_0001, 1 << 50, 0x24, 0x00, Some(1 << 50)),
        (EL0, 0xf821_0001, DATA + 4, 0x24, 0x21, Some(DATA + 4)),
        (EL0, BR, 0x9002, 0x22, 0, Some(0x9002)),
        (EL1H, BR, 0x9002, 0x22, 0, Some(0x9002)),
        (EL0, BR, 1 << 50, 0x20, 0x00, Some(1 << 50)),
        (EL1H, BR, 1 << 50, 0x21, 0x00, Some(1 << 50)),
        (EL1H, BR, 0x7777_0000, 0x21, 0x10, Some(0x7777_0000)),
    ] {
        let mut m = Machine::new(1);
        m.set_x0(x0);
        let vector = if from == EL0 { 0x400 } else { 0x200 };
        assert_eq!(m.exec(from, &[code]), End::Vector(vector), "{code:#x}");
        assert_eq!(m.syndrome(), (class, iss), "{code:#x}");
        let sys = m.cpus[0].system();
        assert_eq!(sys.elr, if code == BR { x0 } else { CODE }, "{code:#x}");
        assert_eq!(sys.far, far.unwrap_or(0));
    }
}

/// D1.8.2: a misaligned SP as a base raises its own exception, at the level whose check is on.
#[test]
fn a_misaligned_stack_pointer() {
    const STR_X1_SP: u32 = 0xf900_03e1;
    for (from, bit, vector) in [
        (EL1H, sctlr::SA, 0x200),
        (EL0, sctlr::SA0, 0x400),
        (EL1T, sctlr::SA, 0x000),
    ] {
        let mut m = Machine::new(1);
        m.cpus[0].core.set_stack_pointers([DATA + 8, DATA + 8]);
        m.cpus[0].core.sys.sctlr |= (sctlr::SA | sctlr::SA0) & !bit;
        m.exec(from, &[STR_X1_SP]);
        assert_ne!(
            m.cpus[0].system().esr >> 26,
            0x26,
            "the other level's check"
        );
        m.cpus[0].core.set_stack_pointers([DATA + 8, DATA + 8]);
        m.cpus[0].core.sys.sctlr |= bit;
        assert_eq!(m.exec(from, &[STR_X1_SP]), End::Vector(vector));
        assert_eq!(m.syndrome(), (0x26, 0));
        assert_eq!(m.cpus[0].system().elr, CODE);
    }
}

/// D1.11: a return restores what SPSR_EL1 has, at EL0 and with both stack pointers of EL1.
#[test]
fn a_legal_return() {
    for to in [EL0, EL1T, EL1H] {
        let mut m = Machine::new(1);
        let spsr = to | 0x5 << 28 | pstate::A;
        m.cpus[0].core.sys.spsr = spsr | 1 << 21 | 1 << 40;
        m.cpus[0].core.sys.elr = CODE + 8;
        m.cpus[0].core.set_stack_pointers([0x1111, 0x2222]);
        let end = m.exec(EL1H | pstate::DAIF, &[ERET, 0, SVC]);
        assert!(matches!(end, End::Vector(_)));
        let sys = m.cpus[0].system();
        assert_eq!((sys.spsr, sys.elr), (spsr, CODE + 12), "the SVC saw it");
        assert_eq!(m.cpus[0].core.stack_pointers(), [0x1111, 0x2222]);
    }
}

/// D1.11.4: an illegal return keeps level and stack pointer, sets IL, and the next instruction
/// raises class 0x0e.
#[test]
fn an_illegal_return() {
    for mode in 0..32 {
        if matches!(mode, 0b00000 | 0b00100 | 0b00101) {
            continue;
        }
        let mut m = Machine::new(1);
        m.cpus[0].core.sys.spsr = mode | 0x9 << 28 | pstate::PAN;
        m.cpus[0].core.sys.elr = CODE;
        // The instruction at CODE was executed before, in a legal state.
        let end = m.exec(EL1H | pstate::DAIF, &[NOP, ERET, SVC]);
        assert_eq!(end, End::Vector(0x200), "mode {mode:#x}");
        assert_eq!(m.syndrome(), (0x0e, 0), "mode {mode:#x}");
        let sys = m.cpus[0].system();
        assert_eq!(sys.elr, CODE);
        assert_eq!(sys.spsr, EL1H | 0x9 << 28 | pstate::PAN | pstate::IL);
        assert_eq!(m.cpus[0].core.pstate() & pstate::IL, 0, "entry clears it");
    }
}

/// A machine with interrupts enabled, as by a kernel.
fn with_interrupts() -> Machine {
    let mut m = Machine::new(1);
    let redistributor = |offset| Gpa::truncate(REDISTRIBUTORS.get() + offset);
    let gic = &m.fabric.gic;
    gic.mmio_write(0, DISTRIBUTOR, 4, 3);
    gic.mmio_write(0, redistributor(0x14), 4, 0);
    gic.mmio_write(0, redistributor(REGISTER_PAGE + 0x100), 4, 0xffff_ffff);
    let interface = &mut m.cpus[0].core.interface;
    interface.set_pmr(0xf8);
    interface.set_enabled(Group::Zero, 1);
    interface.set_enabled(Group::One, 1);
    m
}

fn group_1(m: &Machine) {
    let page = Gpa::truncate(REDISTRIBUTORS.get() + REGISTER_PAGE + 0x80);
    m.fabric.gic.mmio_write(0, page, 4, 0xffff_ffff);
}

/// D1.13: group 1 is an IRQ, group 0 an FIQ; each has its mask.
#[test]
fn interrupts_and_their_masks() {
    for (group, mask, offset) in [(1, pstate::I, 0x80), (0, pstate::F, 0x100)] {
        for (from, base) in [(EL0, 0x400), (EL1T, 0x000), (EL1H, 0x200)] {
            let mut m = with_interrupts();
            if group == 1 {
                group_1(&m);
            }
            m.fabric.gic.set_ppi(0, 20, Line::High);
            let others = pstate::DAIF & !mask;
            assert_eq!(m.exec(from | others, &[NOP]), End::Vector(base + offset));
            let sys = m.cpus[0].system();
            assert_eq!((sys.elr, sys.spsr), (CODE, from | others));
            assert_eq!(sys.esr, 0, "an interrupt has no syndrome");
            if from != EL0 {
                assert_eq!(m.exec(from | mask, &[NOP]), End::Code, "masked");
            }
        }
    }
}

/// The guest's own loads and stores reach the distributor and the redistributors.
#[test]
fn the_interrupt_controller_s_pages() {
    const STR_W1_X0: u32 = 0xb900_0001;
    const LDR_W0_X0: u32 = 0xb940_0000;
    const LDR_X0_X0: u32 = 0xf940_0000;
    const LDRB_W0_X0: u32 = 0x3940_0000;
    let mut m = Machine::new(2);
    m.cpus[0].core.r[1] = 0x1_0000_0003;
    m.set_x0(DISTRIBUTOR.get());
    assert_eq!(m.exec(EL1H, &[STR_W1_X0, LDR_W0_X0]), End::Code);
    assert_eq!(m.x0(), 0x53, "GICD_CTLR");
    m.set_x0(REDISTRIBUTORS.get() + 0x2_0008);
    assert_eq!(m.exec(EL1H, &[LDR_X0_X0]), End::Code);
    assert_eq!(m.x0(), 1 << 32 | 1 << 8 | 1 << 4, "GICR_TYPER of vCPU 1");
    m.cpus[0].core.r[1] = 0xa0a0_c8a0;
    m.set_x0(REDISTRIBUTORS.get() + REGISTER_PAGE + 0x400);
    assert_eq!(
        m.exec(EL1H, &[STR_W1_X0, 0x9100_0400, LDRB_W0_X0]),
        End::Code
    );
    assert_eq!(m.x0(), 0xc8, "a priority by its byte");
    m.set_x0(REDISTRIBUTORS.get() + 2 * 0x2_0000);
    let end = m.exec(EL1H, &[LDR_W0_X0]);
    assert!(
        matches!(end, End::Other(crate::Exit::MmioRead { size: 4, .. })),
        "of no vCPU"
    );
}

/// D1.16.2: WFI ends with an interrupt, which is taken if unmasked; a due timer counts.
#[test]
fn wfi_ends_with_an_interrupt() {
    let mut m = with_interrupts();
    group_1(&m);
    let halt = End::Other(crate::Exit::Halt);
    assert_eq!(m.exec(EL1H | pstate::I, &[WFI, NOP]), halt);
    assert!(m.cpus[0].is_halted() && !m.cpus[0].has_interrupt());
    assert_eq!(m.go(0), halt, "still waiting");
    let timers = &mut m.cpus[0].core.sys.timers;
    (timers.virt.ctl, timers.virt.cval) = (1, 5000);
    assert_eq!(m.cpus[0].next_deadline(), Some(Nanos(5000)));
    m.clock.advance(5000);
    // The vCPU's thread reads the deadline after the processor has reported its wait. The timer may
    // have become due in between.
    assert_eq!(m.cpus[0].next_deadline(), Some(Nanos(5000)));
    assert!(m.cpus[0].has_interrupt());
    assert_eq!(m.cpus[0].next_deadline(), None);
    assert_eq!(m.go(0), End::Code, "masked: the code continues");
    assert_eq!(
        m.exec(EL1H | pstate::I, &[WFI]),
        End::Code,
        "it does not wait at all"
    );
    let timers = &mut m.cpus[0].core.sys.timers;
    timers.virt.cval = 9000;
    assert_eq!(m.exec(EL1H, &[WFI]), halt);
    m.clock.advance(5000);
    assert_eq!(m.go(0), End::Vector(0x280));
    assert_eq!(m.cpus[0].system().elr, CODE + 4, "behind the WFI");
    m.cpus[0].core.sys.timers.virt.ctl = 0;
    assert_eq!(m.exec(EL1H, &[WFI]), halt);
    m.cpus[0].unhalt();
    assert_eq!(m.go(0), End::Code);
}

/// An injected abort comes first, whatever PSTATE masks, and ends a wait.
#[test]
fn an_injected_abort() {
    for (from, class, vector) in [(EL0, 0x24, 0x400), (EL1H | pstate::DAIF, 0x25, 0x200)] {
        let mut m = with_interrupts();
        group_1(&m);
        m.fabric.gic.set_ppi(0, 20, Line::High);
        assert!(m.cpus[0].is_interruptible());
        m.cpus[0]
            .inject(Event::AsyncFault { address: 0x7_0003 })
            .unwrap();
        assert!(!m.cpus[0].is_interruptible(), "one at a time");
        assert_eq!(m.exec(from, &[NOP]), End::Vector(vector));
        assert_eq!(m.syndrome(), (class, u64::from(status::EXTERNAL)));
        let sys = m.cpus[0].system();
        assert_eq!((sys.far, sys.elr), (0x7_0003, CODE));
        assert!(m.cpus[0].is_interruptible());
    }
    let mut m = Machine::new(1);
    assert_eq!(m.exec(EL1H, &[WFI]), End::Other(crate::Exit::Halt));
    m.cpus[0].inject_abort(0x10, 1);
    assert!(m.cpus[0].has_interrupt());
    let saved = m.cpus[0].save().unwrap();
    assert_eq!(m.go(0), End::Vector(0x200));
    m.cpus[0].restore(&saved).unwrap();
    assert_eq!(
        m.go(0),
        End::Vector(0x200),
        "a saved abort is delivered where it is restored"
    );
    assert_eq!(m.cpus[0].inject(Event::Nmi), Err(lacuna_cpu::Refused));
}

/// As ERET of a higher exception level: registers, level, the end of a wait, and D1.11.4 for an
/// illegal PSTATE, after the instruction at CODE was executed in a legal state.
#[test]
fn a_return_from_firmware() {
    let mut m = Machine::new(1);
    assert_eq!(m.exec(EL1H, &[WFI]), End::Other(crate::Exit::Halt));
    m.put(CODE, &[SVC]);
    m.cpus[0].drop_all_code();
    m.cpus[0].core.r[2] = 9;
    m.cpus[0].return_from_firmware(&[7, 8], CODE, EL0 | 0x9 << 28);
    m.cpus[0].set_exception_return(0x1230, EL1H);
    let sys = m.cpus[0].system();
    assert_eq!((sys.elr, sys.spsr), (0x1230, EL1H));
    assert_eq!(m.go(0), End::Vector(0x400));
    assert_eq!(m.cpus[0].core.r[..3], [7, 8, 9]);
    assert_eq!(m.cpus[0].system().spsr, EL0 | 0x9 << 28);
    for illegal in [0b1001, 0b1_0000, EL1H | pstate::IL] {
        m.cpus[0].return_from_firmware(&[], CODE, illegal);
        assert_eq!(m.go(0), End::Vector(0x200), "{illegal:#x}");
        assert_eq!(m.syndrome(), (0x0e, 0), "{illegal:#x}");
    }
}

/// A processor that cannot fetch its own vector would loop for ever.
#[test]
fn a_missing_vector_ends_the_run() {
    let mut m = Machine::new(1);
    m.cpus[0].core.sys.vbar = 1 << 40;
    let End::Other(crate::Exit::Own(Own::Exception(exception))) = m.exec(EL1H, &[SVC]) else {
        panic!("it continues");
    };
    assert_eq!(
        (exception.class, exception.far),
        (0x20, Some((1 << 40) + 0x200))
    );
    let mut m = Machine::new(1);
    m.cpus[0].core.sys.vbar = VECTORS;
    assert_eq!(m.exec(EL1H, &[SVC]), End::Vector(0x200));
}

#[test]
fn a_state_goes_on_under_another_clock() {
    let mut m = with_interrupts();
    group_1(&m);
    m.clock.advance(1_000);
    m.cpus[0].core.sys.timers.virt.cval = 3_000;
    m.cpus[0].core.sys.timers.virt.ctl = 1;
    assert_eq!(m.exec(EL1H, &[WFI]), End::Other(crate::Exit::Halt));
    let saved = m.cpus[0].save().unwrap();
    let mut n = Machine::new(2);
    n.clock.advance(70_000);
    n.fabric
        .gic
        .set_distributor(&m.fabric.gic.distributor())
        .unwrap();
    let value = m.fabric.counter.value(Nanos(1_000));
    n.fabric.counter.set(value, Nanos(70_000));
    n.put(CODE, &[WFI, HVC]);
    let before = n.cpus[1].save();
    let (register, value) = (SysReg::MPIDR, 1 << 31);
    let refused = Err(StateError::SystemRegister { register, value });
    assert_eq!(n.cpus[1].restore(&saved), refused, "another vCPU's");
    assert_eq!(n.cpus[1].save(), before);
    n.cpus[0].restore(&saved).unwrap();
    assert_eq!(n.cpus[0].save().unwrap(), saved);
    assert_eq!(n.cpus[0].next_deadline(), Some(Nanos(72_000)));
    n.clock.advance(2_000);
    assert_eq!(n.go(0), End::Vector(0x280));
}

/// A damaged state is refused by the field's name, and no field can crash the processor.
#[test]
fn states_that_no_processor_has() {
    let mut m = Machine::new(1);
    let good = m.cpus[0].save().unwrap();
    for (field, spoil) in [
        (
            "regs.pstate",
            (|s| s.regs.pstate = 0b1001) as fn(&mut State),
        ),
        ("regs.pstate", |s| s.regs.pstate |= 1 << 63),
        ("abort.iss", |s| {
            s.abort = Some(Abort {
                iss: 1 << 25,
                address: 0,
            })
        }),
        ("timers.phys.ctl", |s| s.timers.phys.ctl = 4),
        ("gic.cpu.pmr", |s| s.gic.cpu.pmr = 1),
        ("gic.cpu.active", |s| s.gic.cpu.active[1][3] = 1),
    ] {
        let mut bad = good.clone();
        spoil(&mut bad);
        let refused = m.cpus[0].restore(&bad).expect_err(field);
        assert!(refused.to_string().starts_with(field), "{refused}");
    }
    for (numbers, value) in [
        ([3, 0, 1, 0, 0], 0),          // SCTLR_EL1
        ([3, 0, 1, 0, 0], !0),         // SCTLR_EL1
        ([3, 0, 12, 0, 0], 1),         // VBAR_EL1
        ([3, 0, 2, 0, 2], 1 << 6),     // TCR_EL1
        ([2, 0, 1, 1, 4], 1 << 3 | 4), // OSLSR_EL1
        ([3, 7, 15, 15, 7], 0),        // no register
    ] {
        let (mut bad, register) = (good.clone(), SysReg::new(numbers));
        bad.system.insert(register, value);
        let refused = Err(StateError::SystemRegister { register, value });
        assert_eq!(m.cpus[0].restore(&bad), refused);
    }
    assert_eq!(
        m.cpus[0].save().as_ref(),
        Some(&good),
        "nothing has changed"
    );
    m.cpus[0].restore(&good).unwrap();
}
