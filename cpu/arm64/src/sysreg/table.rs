//! The table of system registers (Arm ARM D17.1, D22).
//!
//! The features that the ID registers announce: Armv8.0 with LSE, CRC32, RCpc, HAFDBS and PAN; the
//! 4 KiB granule, 48 bits of address, 16 bits of ASID, GICv3 system registers. No EL2 and EL3, no
//! AArch32, no floating point, no PMU. The smallest debug architecture is announced, with two
//! breakpoints and two watchpoints: no encoding exists for fewer. They never match. Their
//! registers, and the registers of the debugger's channel, read as zero.

use super::{Encoding, System, sctlr, tcr};
use crate::gic::Group;
use crate::timer::{Register, Which};

/// How EL0 may access a register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum El0 {
    /// It may not: the instruction is undefined.
    No,
    /// It may read it; a write is undefined.
    Reads,
    /// It may read and write it.
    Accesses,
    /// As `Reads`, if one of these bits of SCTLR_EL1 is set. Otherwise the access traps to EL1.
    ReadsIf(u64),
    /// As `Accesses`, under the same condition.
    AccessesIf(u64),
    /// As `Reads`, if one of these bits of CNTKCTL_EL1 is set. Otherwise it traps.
    ReadsIfTimer(u64),
    /// As `Accesses`, under the same condition.
    AccessesIfTimer(u64),
    /// As `Accesses`, or as `Reads` if it is constant, unless MDSCR_EL1.TDCC is set. Then it traps.
    AccessesDebugger,
}

/// The change by a write, beside the register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Changes {
    /// Nothing.
    Nothing,
    /// Perhaps the number of the address space.
    Space,
    /// Perhaps every translation.
    Translations,
}

/// The effect of an access of EL1.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    /// Reads as this; a write is undefined.
    Constant(u64),
    /// Reads as zero, and ignores writes.
    Ignored,
    /// A field with these writable bits.
    Value {
        place: fn(&mut System) -> &mut u64,
        writable: u64,
        changes: Changes,
    },
    /// See `access.rs`.
    Special(Special),
}

/// Registers with more than a value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Special {
    Mpidr,
    CurrentEl,
    SpSel,
    SpEl0,
    Daif,
    Nzcv,
    Pan,
    Isr,
    Dczid,
    OsLar,
    OsLsr,
    Counter,
    Timer(Which, Register),
    Icc(Icc),
}

/// Registers of the GIC's CPU interface.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Icc {
    Iar(Group),
    Eoir(Group),
    Hppir(Group),
    Bpr(Group),
    ActivePriorities(Group),
    GroupEnable(Group),
    Pmr,
    Ctlr,
    Sre,
    Dir,
    Rpr,
    /// ICC_SGI1R_EL1.
    Sgi,
    /// ICC_SGI0R_EL1 and ICC_ASGI1R_EL1.
    SgiGroup0,
}

/// A register.
pub(crate) struct Row {
    pub(crate) encoding: Encoding,
    pub(crate) el0: El0,
    pub(crate) kind: Kind,
}

/// The row of `encoding`; `None` if there is no such register.
pub(crate) fn find(encoding: Encoding) -> Option<&'static Row> {
    let found = ROWS.binary_search_by_key(&encoding, |row| row.encoding);
    match found {
        Ok(at) => Some(&ROWS[at]),
        Err(_) if is_reserved_id(encoding) => Some(&RESERVED_ID),
        Err(_) if is_breakpoint(encoding) => Some(&BREAKPOINT),
        Err(_) => None,
    }
}

/// The space of the ID registers: reserved ones, and AArch32's, read as zero (D17.3.1).
const fn is_reserved_id(encoding: Encoding) -> bool {
    let Encoding(number) = encoding;
    number >= Encoding::new(3, 0, 0, 1, 0).0 && number <= Encoding::new(3, 0, 0, 7, 7).0
}

/// DBGBVR<n>_EL1, DBGBCR<n>_EL1, DBGWVR<n>_EL1, DBGWCR<n>_EL1 of the existing two.
const fn is_breakpoint(encoding: Encoding) -> bool {
    let number = encoding.0 & !Encoding::new(0, 0, 0, 1, 3).0;
    number == Encoding::new(2, 0, 0, 0, 4).0
}

static RESERVED_ID: Row = Row {
    encoding: Encoding(0),
    el0: El0::No,
    kind: Kind::Constant(0),
};

static BREAKPOINT: Row = Row {
    encoding: Encoding(0),
    el0: El0::No,
    kind: Kind::Ignored,
};

const fn constant(value: u64) -> Kind {
    Kind::Constant(value)
}

const fn value(place: fn(&mut System) -> &mut u64, writable: u64) -> Kind {
    Kind::Value {
        place,
        writable,
        changes: Changes::Nothing,
    }
}

const fn changes(place: fn(&mut System) -> &mut u64, writable: u64, changes: Changes) -> Kind {
    Kind::Value {
        place,
        writable,
        changes,
    }
}

const fn special(special: Special) -> Kind {
    Kind::Special(special)
}

const fn icc(register: Icc) -> Kind {
    Kind::Special(Special::Icc(register))
}

const fn timer(which: Which, register: Register) -> Kind {
    Kind::Special(Special::Timer(which, register))
}

const ALL: u64 = u64::MAX;
const LOW: u64 = 0xffff_ffff;
const CNTKCTL: u64 = 0x3ff;
const EL0PCTEN: u64 = 1 << 0;
const EL0VCTEN: u64 = 1 << 1;
const EL0VTEN: u64 = 1 << 8;
const EL0PTEN: u64 = 1 << 9;

/// Architecture 0xf: see the ID registers. The implementer is 0, "reserved for software use".
const MIDR: u64 = 0x000f_4c00;
/// EL0 and EL1 in AArch64 only; no floating point; GICv3 system registers. CSV2 and CSV3: there is
/// no speculative execution, so a kernel needs no defence against it.
const PFR0: u64 = 0x1100_0000_01ff_0011;
/// Debug of Armv8.0 with 2 breakpoints and 2 watchpoints; no PMU, no trace.
const DFR0: u64 = 0x0010_1006;
/// CRC32, LSE.
const ISAR0: u64 = 0x0021_0000;
/// LDAPR.
const ISAR1: u64 = 0x0010_0000;
/// 48 bits of physical address, 16 bits of ASID, only the 4 KiB granule.
const MMFR0: u64 = 0x0f00_0025;
/// HAFDBS with dirty state, PAN.
const MMFR1: u64 = 0x0010_0002;
/// Lines of 64 bytes. Caches are coherent: no maintenance is needed (IDC, DIC).
const CTR: u64 = 0xb444_c004;

/// Rows by the numbers of a register. Its name is for the reader.
macro_rules! rows {
    ($(($op0:literal $op1:literal $crn:literal $crm:literal $op2:literal) $name:ident $el0:expr,
        $kind:expr;)+) => {
        &[$(Row {
            encoding: Encoding::new($op0, $op1, $crn, $crm, $op2),
            el0: $el0,
            kind: $kind,
        }),+]
    };
}

use Changes::{Space, Translations};
use El0::{Accesses, AccessesDebugger, AccessesIf, AccessesIfTimer};
use El0::{No, Reads, ReadsIf, ReadsIfTimer};
use Group::{One, Zero};
use Kind::Ignored;
use Register::{Ctl, Cval, Tval};
use Which::{Physical, Virtual};

/// All registers, in ascending order of their encodings.
#[rustfmt::skip]
pub(super) static ROWS: &[Row] = rows! {
    (2 0 0 0 2) OSDTRRX_EL1 No, Ignored;
    (2 0 0 2 0) MDCCINT_EL1 No, Ignored;
    (2 0 0 2 2) MDSCR_EL1 No, value(|s| &mut s.mdscr, LOW);
    (2 0 0 3 2) OSDTRTX_EL1 No, Ignored;
    (2 0 0 6 2) OSECCR_EL1 No, Ignored;
    (2 0 1 0 0) MDRAR_EL1 No, constant(0);
    (2 0 1 0 4) OSLAR_EL1 No, special(Special::OsLar);
    (2 0 1 1 4) OSLSR_EL1 No, special(Special::OsLsr);
    (2 0 1 3 4) OSDLR_EL1 No, Ignored;
    (2 0 1 4 4) DBGPRCR_EL1 No, Ignored;
    (2 0 7 8 6) DBGCLAIMSET_EL1 No, Ignored;
    (2 0 7 9 6) DBGCLAIMCLR_EL1 No, Ignored;
    (2 0 7 14 6) DBGAUTHSTATUS_EL1 No, constant(0);
    (2 3 0 1 0) MDCCSR_EL0 AccessesDebugger, constant(0);
    (2 3 0 4 0) DBGDTR_EL0 AccessesDebugger, Ignored;
    (2 3 0 5 0) DBGDTRRX_EL0 AccessesDebugger, Ignored;
    (3 0 0 0 0) MIDR_EL1 No, constant(MIDR);
    (3 0 0 0 5) MPIDR_EL1 No, special(Special::Mpidr);
    (3 0 0 0 6) REVIDR_EL1 No, constant(0);
    (3 0 0 4 0) ID_AA64PFR0_EL1 No, constant(PFR0);
    (3 0 0 5 0) ID_AA64DFR0_EL1 No, constant(DFR0);
    (3 0 0 6 0) ID_AA64ISAR0_EL1 No, constant(ISAR0);
    (3 0 0 6 1) ID_AA64ISAR1_EL1 No, constant(ISAR1);
    (3 0 0 7 0) ID_AA64MMFR0_EL1 No, constant(MMFR0);
    (3 0 0 7 1) ID_AA64MMFR1_EL1 No, constant(MMFR1);
    (3 0 1 0 0) SCTLR_EL1 No, changes(|s| &mut s.sctlr, sctlr::WRITABLE, Translations);
    (3 0 1 0 1) ACTLR_EL1 No, Ignored;
    (3 0 1 0 2) CPACR_EL1 No, value(|s| &mut s.cpacr, 3 << 20);
    (3 0 2 0 0) TTBR0_EL1 No, changes(|s| &mut s.ttbr0, ALL & !1, Space);
    (3 0 2 0 1) TTBR1_EL1 No, changes(|s| &mut s.ttbr1, ALL & !1, Space);
    (3 0 2 0 2) TCR_EL1 No, changes(|s| &mut s.tcr, tcr::WRITABLE, Translations);
    (3 0 4 0 0) SPSR_EL1 No, value(|s| &mut s.spsr, LOW);
    (3 0 4 0 1) ELR_EL1 No, value(|s| &mut s.elr, ALL);
    (3 0 4 1 0) SP_EL0 No, special(Special::SpEl0);
    (3 0 4 2 0) SPSel No, special(Special::SpSel);
    (3 0 4 2 2) CurrentEL No, special(Special::CurrentEl);
    (3 0 4 2 3) PAN No, special(Special::Pan);
    (3 0 4 6 0) ICC_PMR_EL1 No, icc(Icc::Pmr);
    (3 0 5 1 0) AFSR0_EL1 No, Ignored;
    (3 0 5 1 1) AFSR1_EL1 No, Ignored;
    (3 0 5 2 0) ESR_EL1 No, value(|s| &mut s.esr, LOW);
    (3 0 6 0 0) FAR_EL1 No, value(|s| &mut s.far, ALL);
    (3 0 7 4 0) PAR_EL1 No, value(|s| &mut s.par, ALL);
    (3 0 10 2 0) MAIR_EL1 No, value(|s| &mut s.mair, ALL);
    (3 0 10 3 0) AMAIR_EL1 No, Ignored;
    (3 0 12 0 0) VBAR_EL1 No, value(|s| &mut s.vbar, !0x7ff);
    (3 0 12 0 1) RVBAR_EL1 No, constant(0);
    (3 0 12 1 0) ISR_EL1 No, special(Special::Isr);
    (3 0 12 8 0) ICC_IAR0_EL1 No, icc(Icc::Iar(Zero));
    (3 0 12 8 1) ICC_EOIR0_EL1 No, icc(Icc::Eoir(Zero));
    (3 0 12 8 2) ICC_HPPIR0_EL1 No, icc(Icc::Hppir(Zero));
    (3 0 12 8 3) ICC_BPR0_EL1 No, icc(Icc::Bpr(Zero));
    (3 0 12 8 4) ICC_AP0R0_EL1 No, icc(Icc::ActivePriorities(Zero));
    (3 0 12 9 0) ICC_AP1R0_EL1 No, icc(Icc::ActivePriorities(One));
    (3 0 12 11 1) ICC_DIR_EL1 No, icc(Icc::Dir);
    (3 0 12 11 3) ICC_RPR_EL1 No, icc(Icc::Rpr);
    (3 0 12 11 5) ICC_SGI1R_EL1 No, icc(Icc::Sgi);
    (3 0 12 11 6) ICC_ASGI1R_EL1 No, icc(Icc::SgiGroup0);
    (3 0 12 11 7) ICC_SGI0R_EL1 No, icc(Icc::SgiGroup0);
    (3 0 12 12 0) ICC_IAR1_EL1 No, icc(Icc::Iar(One));
    (3 0 12 12 1) ICC_EOIR1_EL1 No, icc(Icc::Eoir(One));
    (3 0 12 12 2) ICC_HPPIR1_EL1 No, icc(Icc::Hppir(One));
    (3 0 12 12 3) ICC_BPR1_EL1 No, icc(Icc::Bpr(One));
    (3 0 12 12 4) ICC_CTLR_EL1 No, icc(Icc::Ctlr);
    (3 0 12 12 5) ICC_SRE_EL1 No, icc(Icc::Sre);
    (3 0 12 12 6) ICC_IGRPEN0_EL1 No, icc(Icc::GroupEnable(Zero));
    (3 0 12 12 7) ICC_IGRPEN1_EL1 No, icc(Icc::GroupEnable(One));
    (3 0 13 0 1) CONTEXTIDR_EL1 No, value(|s| &mut s.contextidr, LOW);
    (3 0 13 0 4) TPIDR_EL1 No, value(|s| &mut s.tpidr_el1, ALL);
    (3 0 14 1 0) CNTKCTL_EL1 No, value(|s| &mut s.cntkctl, CNTKCTL);
    (3 1 0 0 0) CCSIDR_EL1 No, constant(0);
    (3 1 0 0 1) CLIDR_EL1 No, constant(0);
    (3 1 0 0 7) AIDR_EL1 No, constant(0);
    (3 2 0 0 0) CSSELR_EL1 No, value(|s| &mut s.csselr, 0xf);
    (3 3 0 0 1) CTR_EL0 ReadsIf(sctlr::UCT), constant(CTR);
    (3 3 0 0 7) DCZID_EL0 Reads, special(Special::Dczid);
    (3 3 4 2 0) NZCV Accesses, special(Special::Nzcv);
    (3 3 4 2 1) DAIF AccessesIf(sctlr::UMA), special(Special::Daif);
    (3 3 13 0 2) TPIDR_EL0 Accesses, value(|s| &mut s.tpidr_el0, ALL);
    (3 3 13 0 3) TPIDRRO_EL0 Reads, value(|s| &mut s.tpidrro_el0, ALL);
    (3 3 14 0 0) CNTFRQ_EL0 ReadsIfTimer(EL0PCTEN | EL0VCTEN), value(|s| &mut s.cntfrq, LOW);
    (3 3 14 0 1) CNTPCT_EL0 ReadsIfTimer(EL0PCTEN), special(Special::Counter);
    (3 3 14 0 2) CNTVCT_EL0 ReadsIfTimer(EL0VCTEN), special(Special::Counter);
    (3 3 14 2 0) CNTP_TVAL_EL0 AccessesIfTimer(EL0PTEN), timer(Physical, Tval);
    (3 3 14 2 1) CNTP_CTL_EL0 AccessesIfTimer(EL0PTEN), timer(Physical, Ctl);
    (3 3 14 2 2) CNTP_CVAL_EL0 AccessesIfTimer(EL0PTEN), timer(Physical, Cval);
    (3 3 14 3 0) CNTV_TVAL_EL0 AccessesIfTimer(EL0VTEN), timer(Virtual, Tval);
    (3 3 14 3 1) CNTV_CTL_EL0 AccessesIfTimer(EL0VTEN), timer(Virtual, Ctl);
    (3 3 14 3 2) CNTV_CVAL_EL0 AccessesIfTimer(EL0VTEN), timer(Virtual, Cval);
};
