//! A processor's state as values, for saving and restoring it between two runs.
//!
//! A state may be damaged or hostile. Every value is checked before the first change. An error
//! names the field.

use crate::apic::ApicRegisters;
use crate::cpu::{Cpu, Regs};
use crate::state::{Exception, System, bits, is_canonical};

/// The whole state of an x86 processor, between two instructions. The features of
/// [`Cpu::set_kvm_features`] belong to the machine and are not included.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct State {
    /// General registers, RIP and RFLAGS.
    pub regs: Regs,
    /// System registers. The TSC's offset is the value of the TSC at the save, as if the clock read
    /// 0 then.
    pub system: System,
    /// The local APIC.
    pub apic: ApicRegisters,
    /// The exception at the begin of the next run.
    pub exception: Option<Exception>,
    /// Whether an NMI waits.
    pub nmi: bool,
}

/// Why a value is refused: the name of its field, and the value or its wrong bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refused {
    /// No processor can have it.
    Invalid(&'static str, u64),
    /// This processor does not have it.
    Unsupported(&'static str, u64),
}

/// RFLAGS without the reserved bits and VM.
const RFLAGS_VALID: u64 = 0x0035_7fd7 | 1 << 1;
const CR0_VALID: u64 = bits::CR0_PE
    | bits::CR0_MP
    | bits::CR0_EM
    | bits::CR0_TS
    | bits::CR0_ET
    | bits::CR0_NE
    | bits::CR0_WP
    | bits::CR0_AM
    | bits::CR0_NW
    | bits::CR0_CD
    | bits::CR0_PG;
const CR4_VALID: u64 = bits::CR4_TSD
    | bits::CR4_DE
    | bits::CR4_PSE
    | bits::CR4_PAE
    | bits::CR4_PGE
    | bits::CR4_PCIDE
    | bits::CR4_SMEP;
const EFER_VALID: u64 = bits::EFER_SCE | bits::EFER_LME | bits::EFER_LMA | bits::EFER_NXE;
/// Page tables lie below 2^48.
const ADDRESS: u64 = (1 << 48) - 1;

fn masked(field: &'static str, value: u64, valid: u64) -> Result<(), Refused> {
    match value & !valid {
        0 => Ok(()),
        bits => Err(Refused::Unsupported(field, bits)),
    }
}

fn has(field: &'static str, value: u64, needed: u64) -> Result<(), Refused> {
    match value & needed == needed {
        true => Ok(()),
        false => Err(Refused::Unsupported(field, value)),
    }
}

fn canonical(field: &'static str, value: u64) -> Result<(), Refused> {
    match is_canonical(value) {
        true => Ok(()),
        false => Err(Refused::Invalid(field, value)),
    }
}

/// Whether a processor can have these general registers.
fn check_regs(regs: &Regs) -> Result<(), Refused> {
    canonical("regs.rip", regs.rip)?;
    masked("regs.rflags", regs.rflags, RFLAGS_VALID)?;
    has("regs.rflags", regs.rflags, 1 << 1)
}

/// Whether this processor can have these system registers: it is always in long mode.
fn check_system(sys: &System) -> Result<(), Refused> {
    masked("system.cr0", sys.cr0, CR0_VALID)?;
    has("system.cr0", sys.cr0, bits::CR0_PE | bits::CR0_PG)?;
    if sys.cr0 & (bits::CR0_NW | bits::CR0_CD) == bits::CR0_NW {
        return Err(Refused::Invalid("system.cr0", bits::CR0_NW));
    }
    masked("system.cr4", sys.cr4, CR4_VALID)?;
    has("system.cr4", sys.cr4, bits::CR4_PAE)?;
    masked("system.efer", sys.efer, EFER_VALID)?;
    has("system.efer", sys.efer, bits::EFER_LME | bits::EFER_LMA)?;
    masked("system.cr3", sys.cr3, ADDRESS)?;
    for (field, base) in [
        ("system.segments.fs.base", sys.fs_base),
        ("system.segments.gs.base", sys.gs_base),
        ("system.gdtr.base", sys.gdtr.base),
        ("system.idtr.base", sys.idtr.base),
        ("system.tr.base", sys.tr.base),
        ("system.ldtr.base", sys.ldtr.base),
        ("msrs.kernel_gs_base", sys.kernel_gs_base),
        ("msrs.lstar", sys.lstar),
        ("msrs.cstar", sys.cstar),
    ] {
        canonical(field, base)?;
    }
    for (field, value) in [
        ("debug.dr6", sys.dr6),
        ("debug.dr7", sys.dr7),
        ("msrs.fmask", sys.fmask),
        ("msrs.tsc_aux", sys.tsc_aux),
    ] {
        masked(field, value, u64::from(u32::MAX))?;
    }
    let is_memory_type = |t: &u8| matches!(t, 0 | 1 | 4..=7);
    match sys.pat.to_le_bytes().iter().all(is_memory_type) {
        true => Ok(()),
        false => Err(Refused::Invalid("msrs.pat", sys.pat)),
    }
}

fn check_exception(exception: &Exception) -> Result<(), Refused> {
    let Exception { vector, cr2, .. } = *exception;
    match vector > 31 || vector == 2 || cr2.is_some() != (vector == 14) {
        true => Err(Refused::Invalid("events.exception", vector.into())),
        false => Ok(()),
    }
}

impl Cpu {
    /// Whether this processor can be in `state`.
    ///
    /// # Errors
    /// [`Refused`], with the first impossible field.
    pub fn check(&self, state: &State) -> Result<(), Refused> {
        check_regs(&state.regs)?;
        check_system(&state.system)?;
        let rate = state.system.tsc.rate();
        if rate != self.core.sys.tsc.rate() {
            return Err(Refused::Unsupported("tsc.khz", rate.khz().into()));
        }
        state.apic.check(self.core.apic.index())?;
        state.exception.as_ref().map_or(Ok(()), check_exception)
    }
}
