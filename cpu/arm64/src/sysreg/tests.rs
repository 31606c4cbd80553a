//! The table as a whole, and each access rule of Arm ARM D17 beyond a plain value.

use super::*;
use crate::gic::Group;
use crate::state::pstate;
use crate::testing::{CODE, EL1H, End, Machine, mrs, msr};
use lacuna_cpu::Processor;
use lacuna_sync::Nanos;

const UNDEFINED: End = End::Vector(0x200);
const EL0: u64 = 0;

const SCTLR_EL1: [u16; 5] = [3, 0, 1, 0, 0];
const TTBR0_EL1: [u16; 5] = [3, 0, 2, 0, 0];
const DAIF: [u16; 5] = [3, 3, 4, 2, 1];
const CTR_EL0: [u16; 5] = [3, 3, 0, 0, 1];
const TPIDRRO_EL0: [u16; 5] = [3, 3, 13, 0, 3];
const CNTFRQ_EL0: [u16; 5] = [3, 3, 14, 0, 0];
const CNTPCT_EL0: [u16; 5] = [3, 3, 14, 0, 1];
const CNTVCT_EL0: [u16; 5] = [3, 3, 14, 0, 2];
const CNTV_CTL_EL0: [u16; 5] = [3, 3, 14, 3, 1];
const CNTP_CTL_EL0: [u16; 5] = [3, 3, 14, 2, 1];
const CNTKCTL_EL1: [u16; 5] = [3, 0, 14, 1, 0];

#[test]
fn the_table_is_in_order_and_finds_every_row() {
    for pair in table::ROWS.windows(2) {
        let (one, next) = (pair[0].encoding, pair[1].encoding);
        assert!(one < next, "{one:?} {next:?}");
    }
    for row in table::ROWS {
        assert_eq!(find(row.encoding).unwrap().encoding, row.encoding);
    }
}

/// Every encoding, read and written with several values: nothing panics, and an encoding outside of
/// the table is undefined.
#[test]
fn every_encoding() {
    let mut m = Machine::new(2);
    for number in 1 << 15..=u16::MAX {
        let known = find(Encoding(number));
        let word = 0xd500_0000 | u32::from(number) << 5;
        for (direction, value) in [(1 << 21, 0), (0, 0), (0, u64::MAX), (0, 0x5555 << 20)] {
            let core = &mut m.cpus[0].core;
            core.r[0] = value;
            let undefined = match direction {
                0 => write(core, word, value).is_err(),
                _ => read(core, word | direction).is_err(),
            };
            assert!(
                !undefined
                    || known.is_none_or(|row| !matches!(row.kind, table::Kind::Value { .. }))
            );
            assert!(undefined || known.is_some(), "{number:#x}");
        }
    }
}

/// A register keeps its implemented bits, and no others.
#[test]
fn values_keep_their_writable_bits() {
    let mut m = Machine::new(1);
    for row in table::ROWS {
        let table::Kind::Value { writable, .. } = row.kind else {
            continue;
        };
        let word = 0xd500_0000 | u32::from(row.encoding.0) << 5;
        let core = &mut m.cpus[0].core;
        let fixed = read(core, word | 1 << 21).unwrap() & !writable;
        for value in [0, u64::MAX, 0x0123_4567_89ab_cdef] {
            write(core, word, value).unwrap();
            let read = read(core, word | 1 << 21).unwrap();
            assert_eq!(read, value & writable | fixed, "{:?}", row.encoding);
        }
        let saved = core.sys.saved().collect();
        assert_eq!(
            System::restored(0, &saved),
            Ok(core.sys.clone()),
            "{:?}",
            row.encoding
        );
    }
}

/// D17.3.1: the ID registers, field by field, and the reserved ones.
#[test]
fn features() {
    let mut m = Machine::new(1);
    let mut field = |crm, op2, bit: u32| m.mrs([3, 0, 0, crm, op2]).unwrap() >> bit & 0xf;
    for (crm, op2, bit, value, what) in [
        (4, 0, 0, 1, "EL0 AArch64 only"),
        (4, 0, 4, 1, "EL1 AArch64 only"),
        (4, 0, 8, 0, "no EL2"),
        (4, 0, 12, 0, "no EL3"),
        (4, 0, 16, 0xf, "no FP"),
        (4, 0, 20, 0xf, "no Advanced SIMD"),
        (4, 0, 24, 1, "GICv3 system registers"),
        (4, 0, 56, 1, "CSV2"),
        (4, 0, 60, 1, "CSV3"),
        (5, 0, 8, 0, "no PMU"),
        (6, 0, 16, 1, "CRC32"),
        (6, 0, 20, 2, "LSE"),
        (6, 1, 20, 1, "RCpc"),
        (7, 0, 0, 5, "48 bits of physical address"),
        (7, 0, 4, 2, "16 bits of ASID"),
        (7, 0, 20, 0, "no 16 KiB granule"),
        (7, 0, 24, 0xf, "no 64 KiB granule"),
        (7, 0, 28, 0, "4 KiB granule"),
        (7, 1, 0, 2, "HAFDBS with dirty state"),
        (7, 1, 20, 1, "PAN"),
        (7, 2, 0, 0, "no CnP"),
        (1, 0, 0, 0, "AArch32"),
        (7, 7, 0, 0, "reserved"),
    ] {
        assert_eq!(field(crm, op2, bit), value, "{what}");
    }
    assert_eq!(m.msr([3, 0, 0, 7, 7], 0), UNDEFINED, "read-only");
    assert_eq!(m.mrs([3, 0, 0, 8, 0]), Err(UNDEFINED), "behind the space");
    let mut two = Machine::new(2);
    assert_eq!(
        read(&mut two.cpus[1].core, mrs([3, 0, 0, 0, 5])),
        Ok(1 << 31 | 1),
        "MPIDR_EL1"
    );
}

/// D17: views of PSTATE.
#[test]
fn pstate_registers() {
    let mut m = Machine::new(1);
    assert_eq!(m.mrs([3, 0, 4, 2, 2]), Ok(4), "CurrentEL");
    assert_eq!(m.mrs([3, 0, 4, 2, 0]), Ok(1), "SPSel");
    assert_eq!(m.mrs(DAIF), Ok(pstate::DAIF));
    m.msr(DAIF, u64::MAX);
    assert_eq!(m.cpus[0].core.pstate() & pstate::DAIF, pstate::DAIF);
    m.msr(DAIF, pstate::A);
    assert_eq!(m.cpus[0].core.pstate() & pstate::DAIF, pstate::A);
    m.msr([3, 3, 4, 2, 0], 0xffff_ffff_a000_0000);
    assert_eq!(m.cpus[0].core.flags.bits(), 0xa000_0000, "NZCV");
    assert_eq!(m.mrs([3, 3, 4, 2, 0]), Ok(0), "exec has set PSTATE");
    m.msr([3, 0, 4, 2, 3], pstate::PAN);
    assert!(m.cpus[0].core.sys.pan);
    m.msr([3, 0, 4, 2, 3], 0);
    assert!(!m.cpus[0].core.sys.pan);
    // C5.2.18: SP_EL0 by name, unless it is the stack pointer.
    assert_eq!(m.msr([3, 0, 4, 1, 0], 0x1230), End::Code);
    assert_eq!(m.mrs([3, 0, 4, 1, 0]), Ok(0x1230));
    m.set_x0(0x99);
    assert_eq!(m.exec(pstate::EL1, &[msr([3, 0, 4, 1, 0])]), End::Vector(0));
    // MSR SPSel, #0 and a move of SP: the other stack pointer.
    let code = [0xd500_40bf, 0x9100_03e0];
    assert_eq!(m.exec(EL1H, &code), End::Code);
    assert_eq!(m.x0(), 0x1230);
}

/// D17, the accessibility tables: undefined at EL0 if there is no control, trapped with class 0x18
/// if a control forbids it.
#[test]
fn el0_accesses() {
    let mut m = Machine::new(1);
    for (word, sctlr, cntkctl, class) in [
        (mrs(SCTLR_EL1), !0, !0, Some(0)),
        (mrs([3, 0, 0, 4, 0]), !0, !0, Some(0)),
        (msr(TPIDRRO_EL0), !0, !0, Some(0)),
        (mrs(TPIDRRO_EL0), 0, 0, None),
        (mrs([3, 3, 13, 0, 2]), 0, 0, None),
        (msr([3, 3, 13, 0, 2]), 0, 0, None),
        (mrs([3, 3, 4, 2, 0]), 0, 0, None),
        (mrs(CTR_EL0), 0, 0, Some(0x18)),
        (mrs(CTR_EL0), sctlr::UCT, 0, None),
        (mrs(DAIF), 0, 0, Some(0x18)),
        (msr(DAIF), sctlr::UMA, 0, None),
        (mrs([3, 3, 0, 0, 7]), 0, 0, None),
        (mrs(CNTFRQ_EL0), 0, 0, Some(0x18)),
        (mrs(CNTFRQ_EL0), 0, 1, None),
        (mrs(CNTFRQ_EL0), 0, 2, None),
        (msr(CNTFRQ_EL0), 0, 3, Some(0)),
        (mrs(CNTPCT_EL0), 0, 2, Some(0x18)),
        (mrs(CNTPCT_EL0), 0, 1, None),
        (mrs(CNTVCT_EL0), 0, 1, Some(0x18)),
        (mrs(CNTVCT_EL0), 0, 2, None),
        (mrs(CNTV_CTL_EL0), 0, !(1 << 8), Some(0x18)),
        (msr(CNTV_CTL_EL0), 0, 1 << 8, None),
        (mrs(CNTP_CTL_EL0), 0, !(1 << 9), Some(0x18)),
        (msr(CNTP_CTL_EL0), 0, 1 << 9, None),
        (mrs(CNTKCTL_EL1), !0, !0, Some(0)),
        (mrs([3, 0, 12, 12, 0]), !0, !0, Some(0)),
    ] {
        let sys = &mut m.cpus[0].core.sys;
        sys.sctlr = sctlr::RES1 | sctlr & sctlr::WRITABLE & !sctlr::M;
        sys.cntkctl = cntkctl & 0x3ff;
        m.set_x0(0);
        assert_eq!(m.exec(EL0, &[word]), End::Vector(0x400));
        let sys = m.cpus[0].system();
        match class {
            // The HVC behind it is undefined at EL0.
            None => assert_eq!((m.syndrome(), sys.elr), ((0, 0), CODE + 4), "{word:#x}"),
            Some(class) => {
                assert_eq!((m.syndrome().0, sys.elr), (class, CODE), "{word:#x}");
            }
        }
    }
    // The syndrome names the instruction: CTR_EL0, read into X0.
    m.cpus[0].core.sys.sctlr = sctlr::RES1;
    m.exec(EL0, &[mrs(CTR_EL0) | 5]);
    assert_eq!(
        m.syndrome(),
        (0x18, 3 << 20 | 1 << 17 | 3 << 14 | 5 << 5 | 1)
    );
}

/// D17.2.46: DC ZVA is prohibited at EL0 without DZE.
#[test]
fn block_size_of_zeroing() {
    let mut m = Machine::new(1);
    let dczid = mrs([3, 3, 0, 0, 7]);
    assert_eq!(m.mrs([3, 3, 0, 0, 7]), Ok(4));
    m.exec(EL0, &[dczid]);
    assert_eq!(m.x0(), 1 << 4 | 4);
    m.cpus[0].core.sys.sctlr |= sctlr::DZE;
    m.exec(EL0, &[dczid]);
    assert_eq!(m.x0(), 4);
}

#[test]
fn counters_and_timers_follow_the_clock() {
    let mut m = Machine::new(1);
    m.clock.advance(1_000_000);
    assert_eq!(m.mrs(CNTVCT_EL0), Ok(1_000_000));
    assert_eq!(m.mrs(CNTPCT_EL0), Ok(1_000_000));
    assert_eq!(m.mrs(CNTFRQ_EL0), Ok(1_000_000_000));
    m.msr([3, 3, 14, 3, 0], 500);
    assert_eq!(m.mrs([3, 3, 14, 3, 2]), Ok(1_000_500), "TVAL sets CVAL");
    m.msr(CNTV_CTL_EL0, 1);
    assert_eq!(m.cpus[0].next_deadline(), Some(Nanos(1_000_500)));
    assert_eq!(m.msr(CNTVCT_EL0, 0), UNDEFINED);
    m.clock.advance(500);
    assert_eq!(m.mrs(CNTV_CTL_EL0), Ok(5));
}

/// D17: OSLAR_EL1 locks, OSLSR_EL1 says so.
#[test]
fn the_os_lock() {
    let mut m = Machine::new(1);
    let (oslar, oslsr) = ([2, 0, 1, 0, 4], [2, 0, 1, 1, 4]);
    assert_eq!(m.mrs(oslsr), Ok(0b1010), "locked by a reset");
    assert_eq!(m.msr(oslar, 0), End::Code);
    assert_eq!(m.mrs(oslsr), Ok(0b1000));
    assert_eq!(m.mrs(oslar), Err(UNDEFINED));
    assert_eq!(m.msr(oslsr, 0), UNDEFINED);
}

/// D17.3: two breakpoints and two watchpoints, the fewest to announce, and a channel without a
/// debugger.
#[test]
fn the_debug_registers() {
    let mut m = Machine::new(1);
    let dfr0 = m.mrs([3, 0, 0, 5, 0]).unwrap();
    assert_eq!((dfr0 >> 12 & 0xf, dfr0 >> 20 & 0xf), (1, 1), "BRPs, WRPs");
    for op2 in 4..8 {
        assert_eq!(m.msr([2, 0, 0, 1, op2], !0), End::Code);
        assert_eq!(m.mrs([2, 0, 0, 1, op2]), Ok(0));
        assert_eq!(m.mrs([2, 0, 0, 2, op2]), Err(UNDEFINED), "the third");
    }
    for (crm, op2, name) in [
        (0, 2, "OSDTRRX_EL1"),
        (2, 0, "MDCCINT_EL1"),
        (3, 2, "OSDTRTX_EL1"),
        (6, 2, "OSECCR_EL1"),
    ] {
        assert_eq!(m.msr([2, 0, 0, crm, op2], !0), End::Code, "{name}");
        assert_eq!(m.mrs([2, 0, 0, crm, op2]), Ok(0), "{name}");
    }
    let (mdccsr, dbgdtr, dbgdtrrx) = ([2, 3, 0, 1, 0], [2, 3, 0, 4, 0], [2, 3, 0, 5, 0]);
    for register in [mdccsr, dbgdtr, dbgdtrrx] {
        assert_eq!(m.mrs(register), Ok(0));
    }
    assert_eq!(m.msr(mdccsr, 0), UNDEFINED);
    assert_eq!(m.msr(dbgdtrrx, 0), End::Code);
    for (word, mdscr, class) in [
        (mrs(mdccsr), 0, None),
        (mrs(mdccsr), 1 << 12, Some(0x18)),
        (msr(mdccsr), 1 << 12, Some(0)),
        (msr(dbgdtr), 0, None),
        (msr(dbgdtr), 1 << 12, Some(0x18)),
    ] {
        m.cpus[0].core.sys.mdscr = mdscr;
        assert_eq!(m.exec(EL0, &[word]), End::Vector(0x400));
        let (at, class) = class.map_or((CODE + 4, 0), |class| (CODE, class));
        let elr = m.cpus[0].system().elr;
        assert_eq!((m.syndrome().0, elr), (class, at), "{word:#x}");
    }
}

/// IHI 0069, 12.2: the CPU interface as system registers; the steps of Linux's driver.
#[test]
fn the_interrupt_controller() {
    let mut m = Machine::new(1);
    let icc = |crm, op2| [3, 0, 12, crm, op2];
    assert_eq!(m.mrs(icc(12, 5)), Ok(7), "SRE");
    assert_eq!(m.msr(icc(12, 5), 0), End::Code);
    assert_eq!(m.mrs(icc(12, 5)), Ok(7), "which no write changes");
    let pmr = [3, 0, 4, 6, 0];
    m.msr(pmr, 0xff);
    assert_eq!(m.mrs(pmr), Ok(0xf8), "five bits of priority");
    assert_eq!(m.mrs(icc(12, 4)).unwrap() >> 8 & 7, 4, "CTLR.PRIbits");
    m.msr(icc(12, 4), 2);
    assert_eq!(m.mrs(icc(12, 4)).unwrap() & 3, 2, "EOImode");
    m.msr(icc(12, 7), 1);
    assert_eq!(m.mrs(icc(12, 7)), Ok(1), "IGRPEN1");
    m.msr(icc(9, 0), 0);
    for op2 in 1..4 {
        assert_eq!(m.mrs(icc(9, op2)), Err(UNDEFINED), "AP1R1 to AP1R3");
    }
    assert_eq!(m.mrs(icc(12, 0)), Ok(1023), "IAR1");
    assert_eq!(m.mrs(icc(12, 2)), Ok(1023), "HPPIR1");
    assert_eq!(m.mrs(icc(11, 3)), Ok(0xff), "RPR");
    assert_eq!(m.msr(icc(12, 1), 1023), End::Code, "EOIR1");
    assert_eq!(m.mrs(icc(12, 1)), Err(UNDEFINED));
    assert_eq!(m.msr(icc(12, 0), 0), UNDEFINED);
    assert_eq!(m.mrs([3, 0, 12, 1, 0]), Ok(0), "ISR_EL1");
    assert!(m.cpus[0].core.interface.registers().enabled[Group::One as usize]);
}

/// A write to TTBR that changes the ASID changes the address space; any other keeps it.
#[test]
fn address_spaces() {
    let mut m = Machine::new(1);
    let core = &mut m.cpus[0].core;
    let mut asid = |tcr, ttbr: [u16; 5], value| {
        core.sys.tcr = tcr;
        let written = write(core, msr(ttbr), value).unwrap();
        (written, core.sys.space().0)
    };
    assert_eq!(
        asid(0, TTBR0_EL1, 0x0123 << 48),
        (Written::Space, 0x23),
        "8 bits"
    );
    assert_eq!(
        asid(0, TTBR0_EL1, 0x0123 << 48 | 0x5000),
        (Written::Nothing, 0x23)
    );
    assert_eq!(
        asid(tcr::AS, TTBR0_EL1, 0x0124 << 48),
        (Written::Space, 0x124),
        "16 bits"
    );
    let ttbr1 = [3, 0, 2, 0, 1];
    assert_eq!(
        asid(tcr::AS, ttbr1, 0x0777 << 48),
        (Written::Nothing, 0x124),
        "A1 is clear"
    );
    assert_eq!(
        asid(tcr::AS | tcr::A1, ttbr1, 0x0778 << 48),
        (Written::Space, 0x778)
    );
}
