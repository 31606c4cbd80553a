//! System registers: their values, and one table with the access rules of each.
//!
//! ```text
//! MRS/MSR word -> Encoding -> table.rs: Row { EL0 access, Kind }
//!                                         Constant   reads as this
//!                                         Ignored    reads as zero, ignores writes
//!                                         Value      a field of System, its writable bits, and
//!                                                    what a write changes beside it
//!                                         Special    access.rs: PSTATE, timers, GIC
//! ```
//! A register outside of the table is undefined, so the table lists all registers. [`System`] has
//! every saved register that is not part of PSTATE.

mod access;
mod saved;
mod table;

use crate::timer::Timers;
pub(crate) use access::{Written, read, write};
use lacuna_cpu::Space;
pub(crate) use table::find;

/// The five numbers that name a system register or instruction (Arm ARM C5.1.3).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Encoding(pub(crate) u16);

impl Encoding {
    pub(crate) const fn new(op0: u16, op1: u16, crn: u16, crm: u16, op2: u16) -> Self {
        Self(op0 << 14 | op1 << 11 | crn << 7 | crm << 3 | op2)
    }

    /// Of an MSR, MRS, SYS or SYSL instruction: bits 20 to 5.
    pub(crate) const fn of(word: u32) -> Self {
        Self((word >> 5) as u16)
    }

    pub(crate) const fn op1(self) -> u16 {
        self.0 >> 11 & 7
    }

    pub(crate) const fn crn(self) -> u16 {
        self.0 >> 7 & 15
    }

    pub(crate) const fn crm(self) -> u16 {
        self.0 >> 3 & 15
    }

    pub(crate) const fn op2(self) -> u16 {
        self.0 & 7
    }
}

/// The values of the system registers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct System {
    /// SCTLR_EL1.
    pub sctlr: u64,
    /// TCR_EL1.
    pub tcr: u64,
    /// TTBR0_EL1.
    pub ttbr0: u64,
    /// TTBR1_EL1.
    pub ttbr1: u64,
    /// MAIR_EL1. Memory types have no effect here, except in PAR_EL1.
    pub mair: u64,
    /// VBAR_EL1.
    pub vbar: u64,
    /// ESR_EL1.
    pub esr: u64,
    /// FAR_EL1.
    pub far: u64,
    /// ELR_EL1.
    pub elr: u64,
    /// SPSR_EL1.
    pub spsr: u64,
    /// PAR_EL1.
    pub par: u64,
    /// CPACR_EL1. There is no floating point, so its bits have no effect.
    pub cpacr: u64,
    /// CONTEXTIDR_EL1.
    pub contextidr: u64,
    /// TPIDR_EL0.
    pub tpidr_el0: u64,
    /// TPIDRRO_EL0.
    pub tpidrro_el0: u64,
    /// TPIDR_EL1.
    pub tpidr_el1: u64,
    /// CSSELR_EL1.
    pub csselr: u64,
    /// MDSCR_EL1. There is no debug hardware, so its bits have no effect.
    pub mdscr: u64,
    /// OSLSR_EL1.OSLK: bit 0.
    pub os_lock: u64,
    /// CNTKCTL_EL1.
    pub cntkctl: u64,
    /// CNTFRQ_EL0, which only informs the guest.
    pub cntfrq: u64,
    /// The counter and the timers.
    pub timers: Timers,
    /// MPIDR_EL1, derived from the processor's number.
    pub(crate) mpidr: u64,
    /// PSTATE.PAN, where the walk finds it.
    pub(crate) pan: bool,
}

/// Bits of SCTLR_EL1 (Arm ARM D17.2.118).
pub(crate) mod sctlr {
    /// Stage 1 is on.
    pub(crate) const M: u64 = 1 << 0;
    /// Alignment checks of all loads and stores.
    pub(crate) const A: u64 = 1 << 1;
    /// Data caches.
    pub(crate) const C: u64 = 1 << 2;
    /// SP must be aligned when it is a base at EL1.
    pub(crate) const SA: u64 = 1 << 3;
    /// SP must be aligned when it is a base at EL0.
    pub(crate) const SA0: u64 = 1 << 4;
    /// EL0 may access DAIF.
    pub(crate) const UMA: u64 = 1 << 9;
    /// Instruction caches.
    pub(crate) const I: u64 = 1 << 12;
    /// EL0 may execute DC ZVA.
    pub(crate) const DZE: u64 = 1 << 14;
    /// EL0 may read CTR_EL0.
    pub(crate) const UCT: u64 = 1 << 15;
    /// EL0 may execute WFI.
    pub(crate) const NTWI: u64 = 1 << 16;
    /// EL0 may execute WFE.
    pub(crate) const NTWE: u64 = 1 << 18;
    /// Writable pages are not executable.
    pub(crate) const WXN: u64 = 1 << 19;
    /// An exception leaves PSTATE.PAN as it is.
    pub(crate) const SPAN: u64 = 1 << 23;
    /// EL0 may execute cache maintenance by address.
    pub(crate) const UCI: u64 = 1 << 26;
    /// Bits that read as one without AArch32 and later extensions: 7, 8, 11, 20, 22, 28, 29.
    pub(crate) const RES1: u64 = 0x3050_0980;
    /// Bits that software may change.
    pub(crate) const WRITABLE: u64 =
        M | A | C | SA | SA0 | UMA | I | DZE | UCT | NTWI | NTWE | WXN | SPAN | UCI;
}

/// Bits of TCR_EL1 (Arm ARM D17.2.131).
pub(crate) mod tcr {
    /// TTBR0_EL1 translates nothing.
    pub(crate) const EPD0: u64 = 1 << 7;
    /// The ASID is in TTBR1_EL1.
    pub(crate) const A1: u64 = 1 << 22;
    /// TTBR1_EL1 translates nothing.
    pub(crate) const EPD1: u64 = 1 << 23;
    /// ASIDs have 16 bits.
    pub(crate) const AS: u64 = 1 << 36;
    /// The highest byte of a low address is ignored.
    pub(crate) const TBI0: u64 = 1 << 37;
    /// The highest byte of a high address is ignored.
    pub(crate) const TBI1: u64 = 1 << 38;
    /// The walk sets access flags.
    pub(crate) const HA: u64 = 1 << 39;
    /// The walk sets dirty states.
    pub(crate) const HD: u64 = 1 << 40;
    /// Implemented bits: all but 6 and 35, up to HD.
    pub(crate) const WRITABLE: u64 = 0x01f7_ffff_ffbf;
}

impl System {
    /// The registers of vCPU `index` after a reset.
    pub fn reset(index: usize) -> Self {
        Self {
            mpidr: 1 << 31 | u64::from(crate::gic::affinity(index)),
            ..Self::default()
        }
    }

    /// The number of the current address space (D8.13.3).
    pub(crate) const fn space(&self) -> Space {
        let ttbr = if self.tcr & tcr::A1 == 0 {
            self.ttbr0
        } else {
            self.ttbr1
        };
        Space(self.asid(ttbr))
    }

    /// The ASID in bits 63 to 48 of a TTBR or of a TLBI's operand.
    pub(crate) const fn asid(&self, value: u64) -> u16 {
        let asid = (value >> 48) as u16;
        if self.tcr & tcr::AS == 0 {
            asid & 0xff
        } else {
            asid
        }
    }
}

impl Default for System {
    /// The values after a reset of vCPU 0.
    fn default() -> Self {
        Self {
            sctlr: sctlr::RES1 | sctlr::SPAN,
            tcr: 0,
            ttbr0: 0,
            ttbr1: 0,
            mair: 0,
            vbar: 0,
            esr: 0,
            far: 0,
            elr: 0,
            spsr: 0,
            par: 1 << 11,
            cpacr: 0,
            contextidr: 0,
            tpidr_el0: 0,
            tpidrro_el0: 0,
            tpidr_el1: 0,
            csselr: 0,
            mdscr: 0,
            os_lock: 1,
            cntkctl: 0,
            cntfrq: crate::timer::FREQUENCY,
            timers: Timers::default(),
            mpidr: 1 << 31,
            pan: false,
        }
    }
}

#[cfg(test)]
mod tests;
