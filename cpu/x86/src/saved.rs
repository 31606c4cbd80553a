//! A processor's state as values, for saving and restoring it between two runs.
//!
//! A state may be damaged or hostile. Each value is checked before anything changes. An error names
//! the field.

use crate::apic::ApicRegisters;
use crate::cpu::{Cpu, Regs};
use crate::state::{Exception, System, bits, is_canonical};
use lacuna_sync::Nanos;

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
pub fn check_regs(regs: &Regs) -> Result<(), Refused> {
    canonical("regs.rip", regs.rip)?;
    masked("regs.rflags", regs.rflags, RFLAGS_VALID)?;
    has("regs.rflags", regs.rflags, 1 << 1)
}

/// Whether this processor can have these system registers: it is always in long mode.
pub fn check_system(sys: &System) -> Result<(), Refused> {
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

impl Cpu {
    /// Whether no instruction waits for an answer of a device or an MSR, or holds one. Only then
    /// is the state complete.
    pub fn is_between_instructions(&self) -> bool {
        self.core.replay.is_idle()
    }

    /// The exception that the next run begins with.
    pub fn pending_exception(&self) -> Option<Exception> {
        self.pending.exception()
    }

    /// Sets the exception with which the next run begins; `None` for no exception.
    pub fn set_pending_exception(&mut self, exception: Option<Exception>) {
        self.pending = exception.into();
    }

    /// The local APIC's registers.
    pub fn apic_registers(&mut self) -> ApicRegisters {
        self.core.apic.registers(self.core.clock.now())
    }

    /// Whether the local APIC can have these registers.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn check_apic(&self, registers: &ApicRegisters) -> Result<(), Refused> {
        registers.check(self.core.apic.index())
    }

    /// Sets the local APIC's registers. [`Cpu::check_apic`] has accepted them, and the TSC has been
    /// set.
    pub fn set_apic_registers(&mut self, registers: &ApicRegisters) {
        let (offset, now) = (self.core.sys.tsc_offset, self.core.clock.now());
        self.core.apic.set_registers(registers, offset, now);
    }

    /// Requests an interrupt again that the APIC has in service, because its handler was not
    /// entered. Returns whether it was in service.
    pub fn request_again(&mut self, vector: u8) -> bool {
        self.core.apic.unaccept(vector)
    }

    /// The time of the processor's clock.
    pub fn now(&self) -> Nanos {
        self.core.clock.now()
    }
}
