//! A vCPU's whole state, saved and restored: the processor's own form (`lacuna_x86::State`) from
//! and to the neutral form of `lacuna_machine`, and the async-fault MSRs; and the I/O APIC of a VM.
//! `arm64` does this for AArch64.

mod arm64;

use crate::platform::Platform;
use crate::vcpu::VcpuOf;
use crate::vm::Vm;
use lacuna_apf::x86::Msr;
use lacuna_cpu::Processor as _;
use lacuna_machine::x86::cpuid::Features;
use lacuna_machine::x86::{
    Apic, AsyncFaults, COMMON_MSRS, Debug, Events, Exception, IoApic, Regs, RunState, Segment,
    Shared, State, System, Table, Tsc, segment,
};
use lacuna_machine::{SaveRestore, SharedState, StateError, VcpuState};
use lacuna_sync::Nanos;
use lacuna_x86::{ApicRegisters, Cpu, IoApicRegisters, Refused, TscRate};
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

type MsrField = fn(&mut lacuna_x86::System) -> &mut u64;

fn refused(refused: Refused) -> StateError {
    match refused {
        Refused::Invalid(field, value) => StateError::Invalid { field, value },
        Refused::Unsupported(field, value) => StateError::Unsupported { field, value },
    }
}

fn unsupported<T>(field: &'static str, value: u64) -> Result<T, StateError> {
    Err(StateError::Unsupported { field, value })
}

impl<P: Platform> VcpuOf<P> {
    /// The processor's own form of its state.
    fn processor_state(&mut self) -> Result<P::State, StateError> {
        if let Some(lost) = self.entry.lost() {
            return Err(StateError::Host {
                step: "save a vCPU that has lost a page",
                cause: lost.to_string(),
            });
        }
        let vcpu = self.index;
        let state = self.entry.cpu.save();
        state.ok_or(StateError::MidInstruction { vcpu })
    }
}

impl SaveRestore for VcpuOf<Cpu> {
    fn save(&mut self) -> Result<VcpuState, StateError> {
        let state = self.processor_state()?;
        let msr = |msr| self.apf.read_msr(msr).unwrap_or(0);
        let apf = AsyncFaults {
            enable: msr(Msr::Enable),
            vector: msr(Msr::Vector),
        };
        let features = self.features();
        Ok(VcpuState::X86(Box::new(State {
            features,
            apf,
            ..neutral(state)
        })))
    }

    fn restore(&mut self, state: &VcpuState) -> Result<(), StateError> {
        let VcpuState::X86(state) = state else {
            return Err(StateError::Architecture);
        };
        state.features.check_in(&self.features())?;
        let processor = processor(state)?;
        self.entry.cpu.check(&processor).map_err(refused)?;
        self.check_apf(&state.apf)?;
        self.forget_stop();
        self.entry.cpu.restore(&processor);
        self.restore_apf(&state.apf)
    }
}

/// The vector is first: the wake-all that EN causes uses it.
fn apf_msrs(apf: &AsyncFaults) -> impl Iterator<Item = (&'static str, Msr, u64)> {
    let fields = [
        ("apf.vector", Msr::Vector, apf.vector),
        ("apf.enable", Msr::Enable, apf.enable),
    ];
    fields.into_iter().filter(|(_, _, value)| *value != 0)
}

impl VcpuOf<Cpu> {
    /// Its registers, for tests and debuggers.
    pub fn regs(&self) -> lacuna_x86::Regs {
        self.entry.cpu.regs()
    }

    fn features(&self) -> Features {
        Features::of(|function, index| self.entry.cpu.cpuid(function, index))
    }

    fn check_apf(&mut self, apf: &AsyncFaults) -> Result<(), StateError> {
        for (field, msr, value) in apf_msrs(apf) {
            if self.apf.check_msr(msr, value, &mut self.entry).is_err() {
                return unsupported(field, value);
            }
        }
        Ok(())
    }

    fn restore_apf(&mut self, apf: &AsyncFaults) -> Result<(), StateError> {
        for (field, msr, value) in apf_msrs(apf) {
            let now = self.vm.clock.now();
            let written = self.apf.write_msr(msr, value, now, &mut self.entry);
            if written.is_err() {
                return unsupported(field, value);
            }
        }
        Ok(())
    }
}

/// The neutral form of the processor's state, without features and async faults.
fn neutral(state: lacuna_x86::State) -> State {
    let lacuna_x86::State {
        regs,
        system: mut sys,
        apic,
        exception,
        nmi,
    } = state;
    State {
        regs: Regs {
            gpr: regs.gpr,
            rip: regs.rip,
            rflags: regs.rflags,
        },
        system: system(&sys),
        debug: Debug {
            dr: sys.dr,
            dr6: sys.dr6,
            dr7: sys.dr7,
        },
        tsc: Tsc {
            value: sys.tsc.at(Nanos(0)),
            khz: sys.tsc.rate().khz(),
        },
        apic: Apic {
            base: apic.base,
            regs: apic.page,
            tsc_deadline: apic.tsc_deadline,
        },
        events: Events {
            exception: exception.map(|e| Exception {
                vector: e.vector,
                error: e.error,
                cr2: e.cr2,
            }),
            interrupt: None,
            nmi_pending: nmi,
            nmi_masked: sys.nmi_blocked,
            interrupt_shadow: sys.interrupt_shadow,
        },
        xsave: None,
        xcr0: 1,
        run: match sys.halted {
            true => RunState::Halted,
            false => RunState::Runnable,
        },
        msrs: msrs(&mut sys),
        ..State::default()
    }
}

/// The processor's form of a neutral state, for [`Cpu::check`](lacuna_x86::Cpu::check).
///
/// # Errors
/// The processor's form lacks a part of the state.
fn processor(state: &State) -> Result<lacuna_x86::State, StateError> {
    if let Some(area) = &state.xsave {
        return unsupported("xsave", area.len() as u64);
    }
    if state.xcr0 > 1 {
        return unsupported("xcr0", state.xcr0);
    }
    if state.run == RunState::WaitingForStartup {
        return unsupported("run", 0);
    }
    let events = &state.events;
    Ok(lacuna_x86::State {
        regs: lacuna_x86::Regs {
            gpr: state.regs.gpr,
            rip: state.regs.rip,
            rflags: state.regs.rflags,
        },
        system: processor_system(state)?,
        apic: apic_registers(state)?,
        exception: events.exception.map(|e| lacuna_x86::Exception {
            vector: e.vector,
            error: e.error,
            cr2: e.cr2,
        }),
        nmi: events.nmi_pending,
    })
}

/// The APIC's registers. An interrupt in service without an entered handler becomes requested
/// again, so that the APIC delivers it.
fn apic_registers(state: &State) -> Result<ApicRegisters, StateError> {
    const ISR: usize = 0x10;
    const IRR: usize = 0x20;
    let mut page = state.apic.regs;
    if let Some(vector) = state.events.interrupt {
        let (word, bit) = (usize::from(vector / 32), 1 << (vector % 32));
        if vector < 16 || page[ISR + word] & bit == 0 {
            return unsupported("events.interrupt", vector.into());
        }
        page[ISR + word] &= !bit;
        page[IRR + word] |= bit;
    }
    Ok(ApicRegisters {
        base: state.apic.base,
        page,
        tsc_deadline: state.apic.tsc_deadline,
    })
}

/// The registers in every state, and those that differ from a fresh processor's.
fn msrs(sys: &mut lacuna_x86::System) -> BTreeMap<u32, u64> {
    let mut fresh = lacuna_x86::System::long_mode(0);
    let both = MSRS.into_iter();
    let both = both.map(|(index, place)| (index, *place(sys), *place(&mut fresh)));
    both.filter(|(index, value, fresh)| value != fresh || COMMON_MSRS.contains(index))
        .map(|(index, value, _)| (index, value))
        .collect()
}

fn system(sys: &lacuna_x86::System) -> System {
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
    let table = |table: &lacuna_x86::Table| Table {
        base: table.base,
        limit: table.limit as u16,
    };
    let special = |table: &lacuna_x86::Table, access| Segment {
        selector: table.selector,
        base: table.base,
        limit: table.limit,
        access,
    };
    let mut tr = special(&sys.tr, BUSY_TSS);
    if sys.tr == lacuna_x86::Table::default() {
        tr.limit = TSS_LIMIT;
    }
    let no_ldt = sys.ldtr.selector & !3 == 0;
    System {
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
fn processor_system(state: &State) -> Result<lacuna_x86::System, StateError> {
    let from = &state.system;
    let (code, stack) = (&from.segments[segment::CS], &from.segments[segment::SS]);
    let needed = Segment::PRESENT | Segment::LONG;
    if code.access & needed != needed {
        return unsupported("system.segments.cs.access", code.access.into());
    }
    let cpl = stack.dpl();
    if cpl != (code.selector & 3) as u8 {
        let field = "system.segments.ss.access";
        let value = stack.access.into();
        return Err(StateError::Invalid { field, value });
    }
    let mut sys = lacuna_x86::System::long_mode(from.cr3);
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
    let table = |table: &Table| lacuna_x86::Table {
        base: table.base,
        limit: table.limit.into(),
        selector: 0,
    };
    let special = |segment: &Segment| lacuna_x86::Table {
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
        return unsupported("tsc.khz", 0);
    };
    sys.tsc = lacuna_x86::Tsc::new(TscRate::new(khz), state.tsc.value);
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

impl Vm {
    /// [`lacuna_machine::Vm::save_shared`] of an x86-64 VM.
    pub(crate) fn save_x86(&self) -> SharedState {
        let IoApicRegisters {
            id,
            select,
            entries,
            high,
        } = self.apic_bus().io_apic();
        let io_apic = IoApic::new(id, select, entries, high);
        SharedState::X86Shared(Box::new(Shared { io_apic }))
    }

    /// [`lacuna_machine::Vm::restore_shared`] of an x86-64 VM.
    pub(crate) fn restore_x86(&self, state: &SharedState) -> Result<(), StateError> {
        let IoApic {
            id,
            select,
            entries,
            high,
        } = state.x86()?.io_apic;
        self.apic_bus().set_io_apic(&IoApicRegisters {
            id,
            select,
            entries,
            high,
        });
        Ok(())
    }
}
