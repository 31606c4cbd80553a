//! A processor's state as a value, for saving and restoring it between two runs.
//!
//! A state may be damaged or hostile. Every value is checked before the first change. An error
//! names the field.

use crate::cpu::Cpu;
use crate::state::{Exception, System, Table, bits, is_canonical};
use crate::tsc::{Tsc, TscRate};
use lacuna_state::StateError;
use lacuna_state::x86::cpuid::Features;
use lacuna_state::x86::{
    self, Apic, COMMON_MSRS, Debug, Events, Regs, RunState, Segment, State, segment,
};
use std::collections::BTreeMap;
use std::num::NonZeroU32;

/// Access rights of flat segments: type, S, P, G.
const CODE: u32 = 11 | 1 << 4 | Segment::PRESENT | Segment::LONG | 1 << 15;
const DATA: u32 = 3 | 1 << 4 | Segment::PRESENT | 1 << 14 | 1 << 15;
const BUSY_TSS: u32 = 11 | Segment::PRESENT;
const LDT: u32 = 2 | Segment::PRESENT;
/// The limit of a task register that no guest has loaded. KVM requires a limit.
const TSS_LIMIT: u32 = 0x67;

/// The model-specific registers without a field of their own in a state.
const MSRS: [(u32, MsrField); 8] = [
    (0x1a0, |sys| &mut sys.misc_enable),
    (0x277, |sys| &mut sys.pat),
    (0xc000_0081, |sys| &mut sys.star),
    (0xc000_0082, |sys| &mut sys.lstar),
    (0xc000_0083, |sys| &mut sys.cstar),
    (0xc000_0084, |sys| &mut sys.fmask),
    (0xc000_0102, |sys| &mut sys.kernel_gs_base),
    (0xc000_0103, |sys| &mut sys.tsc_aux),
];

type MsrField = fn(&mut System) -> &mut u64;

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

fn masked(field: &'static str, value: u64, valid: u64) -> Result<(), StateError> {
    match value & !valid {
        0 => Ok(()),
        bits => StateError::unsupported(field, bits),
    }
}

fn has(field: &'static str, value: u64, needed: u64) -> Result<(), StateError> {
    match value & needed == needed {
        true => Ok(()),
        false => StateError::unsupported(field, value),
    }
}

fn canonical(field: &'static str, value: u64) -> Result<(), StateError> {
    match is_canonical(value) {
        true => Ok(()),
        false => StateError::invalid(field, value),
    }
}

/// Whether a processor can have these general registers.
fn check_regs(regs: &Regs) -> Result<(), StateError> {
    canonical("regs.rip", regs.rip)?;
    masked("regs.rflags", regs.rflags, RFLAGS_VALID)?;
    has("regs.rflags", regs.rflags, 1 << 1)
}

/// Whether this processor can have these system registers: it is always in long mode.
fn check_system(sys: &System) -> Result<(), StateError> {
    masked("system.cr0", sys.cr0, CR0_VALID)?;
    has("system.cr0", sys.cr0, bits::CR0_PE | bits::CR0_PG)?;
    if sys.cr0 & (bits::CR0_NW | bits::CR0_CD) == bits::CR0_NW {
        return StateError::invalid("system.cr0", bits::CR0_NW);
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
        false => StateError::invalid("msrs.pat", sys.pat),
    }
}

fn check_exception(exception: &Exception) -> Result<(), StateError> {
    let Exception { vector, cr2, .. } = *exception;
    match vector > 31 || vector == 2 || cr2.is_some() != (vector == 14) {
        true => StateError::invalid("events.exception", vector),
        false => Ok(()),
    }
}

/// The APIC's registers. An interrupt in service without an entered handler becomes requested
/// again, so that the APIC delivers it.
fn apic(state: &State) -> Result<Apic, StateError> {
    const ISR: usize = 0x10;
    const IRR: usize = 0x20;
    let mut apic = state.apic.clone();
    let page = &mut apic.regs;
    if let Some(vector) = state.events.interrupt {
        let (word, bit) = (usize::from(vector / 32), 1 << (vector % 32));
        if vector < 16 || page[ISR + word] & bit == 0 {
            return StateError::unsupported("events.interrupt", vector);
        }
        page[ISR + word] &= !bit;
        page[IRR + word] |= bit;
    }
    Ok(apic)
}

/// The registers in every state, and those that differ from a fresh processor's.
fn msrs(sys: &mut System) -> BTreeMap<u32, u64> {
    let mut fresh = System::long_mode(0);
    let both = MSRS.into_iter();
    let both = both.map(|(index, place)| (index, *place(sys), *place(&mut fresh)));
    both.filter(|(index, value, fresh)| value != fresh || COMMON_MSRS.contains(index))
        .map(|(index, value, _)| (index, value))
        .collect()
}

fn system(sys: &System) -> x86::System {
    let dpl = |level: u8| u32::from(level) << 5;
    let of = |index: usize| {
        let selector = sys.selectors[index];
        let base = match index {
            segment::FS => sys.fs_base,
            segment::GS => sys.gs_base,
            _ => 0,
        };
        let access = match index {
            segment::CS => CODE | dpl(sys.cpl),
            segment::SS => DATA | dpl(sys.cpl),
            _ if selector & !3 == 0 => Segment::UNUSABLE | dpl(3),
            _ => DATA | dpl(sys.segment_dpl[index]),
        };
        Segment {
            selector,
            base,
            limit: u32::MAX,
            access,
        }
    };
    let table = |table: &Table| x86::Table {
        base: table.base,
        limit: table.limit as u16,
    };
    let special = |table: &Table, access| Segment {
        selector: table.selector,
        base: table.base,
        limit: table.limit,
        access,
    };
    let mut tr = special(&sys.tr, BUSY_TSS);
    if sys.tr == Table::default() {
        tr.limit = TSS_LIMIT;
    }
    let no_ldt = sys.ldtr.selector & !3 == 0;
    x86::System {
        segments: [0, 1, 2, 3, 4, 5].map(of),
        tr,
        ldtr: special(&sys.ldtr, if no_ldt { Segment::UNUSABLE } else { LDT }),
        gdtr: table(&sys.gdtr),
        idtr: table(&sys.idtr),
        cr0: sys.cr0,
        cr2: sys.cr2,
        cr3: sys.cr3,
        cr4: sys.cr4,
        efer: sys.efer,
    }
}

/// The processor's form of the system registers. Bases and limits of CS, SS, DS and ES have no
/// meaning in 64-bit mode.
fn processor_system(state: &State) -> Result<System, StateError> {
    let from = &state.system;
    let (code, stack) = (&from.segments[segment::CS], &from.segments[segment::SS]);
    let needed = Segment::PRESENT | Segment::LONG;
    if code.access & needed != needed {
        return StateError::unsupported("system.segments.cs.access", code.access);
    }
    let cpl = stack.dpl();
    if cpl != (code.selector & 3) as u8 {
        return StateError::invalid("system.segments.ss.access", stack.access);
    }
    let mut sys = System::long_mode(from.cr3);
    (sys.cr0, sys.cr2, sys.cr4, sys.efer) = (from.cr0 | 1 << 4, from.cr2, from.cr4, from.efer);
    sys.cpl = cpl;
    for (index, segment) in from.segments.iter().enumerate() {
        sys.selectors[index] = segment.selector;
        let data = segment.access & Segment::UNUSABLE == 0 && segment.selector & !3 != 0;
        sys.segment_dpl[index] = match index {
            segment::CS | segment::SS => 3,
            _ if data => segment.dpl(),
            _ => 3,
        };
    }
    sys.fs_base = from.segments[segment::FS].base;
    sys.gs_base = from.segments[segment::GS].base;
    let table = |table: &x86::Table| Table {
        base: table.base,
        limit: table.limit.into(),
        selector: 0,
    };
    let special = |segment: &Segment| Table {
        base: segment.base,
        limit: segment.limit,
        selector: segment.selector,
    };
    (sys.gdtr, sys.idtr) = (table(&from.gdtr), table(&from.idtr));
    let loaded = (from.tr.selector, from.tr.base, from.tr.limit) != (0, 0, TSS_LIMIT);
    if loaded {
        sys.tr = special(&from.tr);
    }
    if from.ldtr.access & Segment::UNUSABLE == 0 {
        sys.ldtr = special(&from.ldtr);
    } else {
        sys.ldtr.selector = from.ldtr.selector;
    }
    let Some(khz) = NonZeroU32::new(state.tsc.khz) else {
        return StateError::unsupported("tsc.khz", 0_u64);
    };
    sys.tsc = Tsc::new(TscRate::new(khz), state.tsc.value);
    (sys.dr, sys.dr6, sys.dr7) = (state.debug.dr, state.debug.dr6, state.debug.dr7);
    sys.interrupt_shadow = state.events.interrupt_shadow;
    sys.nmi_blocked = state.events.nmi_masked;
    sys.halted = state.run == RunState::Halted;
    for (index, value) in &state.msrs {
        let (index, value) = (*index, *value);
        let known = MSRS.into_iter().find(|(known, _)| *known == index);
        match known {
            Some((_, place)) => *place(&mut sys) = value,
            None => return Err(StateError::Msr { index, value }),
        }
    }
    Ok(sys)
}

impl Cpu {
    /// The features that CPUID announces.
    fn features(&self) -> Features {
        Features::of(|function, index| self.cpuid(function, index))
    }

    /// The state between two instructions. Asynchronous page faults belong to the machine.
    pub(crate) fn state(&mut self) -> State {
        let now = self.core.clock.now();
        let apic = self.core.apic.registers(now);
        let sys = &mut self.core.sys;
        State {
            system: system(sys),
            debug: Debug {
                dr: sys.dr,
                dr6: sys.dr6,
                dr7: sys.dr7,
            },
            msrs: msrs(sys),
            tsc: x86::Tsc {
                value: sys.tsc.at(now),
                khz: sys.tsc.rate().khz(),
            },
            apic,
            events: Events {
                exception: self.pending.exception(),
                interrupt: None,
                nmi_pending: self.core.apic.has_nmi(),
                nmi_masked: sys.nmi_blocked,
                interrupt_shadow: sys.interrupt_shadow,
            },
            run: match sys.halted {
                true => RunState::Halted,
                false => RunState::Runnable,
            },
            regs: self.regs(),
            features: self.features(),
            xcr0: 1,
            ..State::default()
        }
    }

    /// Whether this processor can be in `state`.
    ///
    /// # Errors
    /// The first impossible field.
    pub fn check(&self, state: &State) -> Result<(), StateError> {
        self.accept(state).map(drop)
    }

    /// The system registers, as if the clock read 0, and the APIC's registers of `state`. A failure
    /// names the first field that this processor cannot have.
    pub(crate) fn accept(&self, state: &State) -> Result<(System, Apic), StateError> {
        state.features.check_in(&self.features())?;
        if let Some(area) = &state.xsave {
            return StateError::unsupported("xsave", area.len() as u64);
        }
        if state.xcr0 > 1 {
            return StateError::unsupported("xcr0", state.xcr0);
        }
        if state.run == RunState::WaitingForStartup {
            return StateError::unsupported("run", 0_u64);
        }
        let (system, apic) = (processor_system(state)?, apic(state)?);
        check_regs(&state.regs)?;
        check_system(&system)?;
        if system.tsc.rate() != self.core.sys.tsc.rate() {
            return StateError::unsupported("tsc.khz", state.tsc.khz);
        }
        crate::apic::check(&apic, self.core.apic.index())?;
        let exception = state.events.exception.as_ref();
        exception.map_or(Ok(()), check_exception)?;
        Ok((system, apic))
    }
}
