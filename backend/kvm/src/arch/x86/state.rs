//! A vCPU's whole state, saved and restored by KVM's ioctls.
//!
//! UNSAFETY: KVM reads an XSAVE area of a size that the caller has to know.

use super::msrs::{self, APF_ENABLE, APF_VECTOR, Fresh, TSC, TSC_DEADLINE};
use super::setup::Features;
use kvm_bindings::{
    KVM_MP_STATE_HALTED, KVM_MP_STATE_RUNNABLE, KVM_MP_STATE_UNINITIALIZED,
    KVM_VCPUEVENT_VALID_NMI_PENDING, KVM_VCPUEVENT_VALID_SHADOW, kvm_debugregs, kvm_dtable,
    kvm_lapic_state, kvm_mp_state, kvm_regs, kvm_segment, kvm_vcpu_events, kvm_xcrs,
};
use kvm_ioctls::VcpuFd;
use lacuna_machine::x86::{
    Apic, AsyncFaults, COMMON_MSRS, Debug, Events, Exception, Regs, RunState, Segment, State,
    System, Table, Tsc,
};
use lacuna_machine::{CpuModel, StateError, VcpuState};

const PAGE_FAULT: u8 = 14;

/// For `map_err`: KVM refused to `step`.
fn refused(step: &'static str) -> impl Fn(kvm_ioctls::Error) -> StateError {
    move |error| StateError::Host {
        step,
        cause: error.to_string(),
    }
}

/// Reads the state of a vCPU between two instructions. `fresh` are the first values of its
/// model-specific registers.
pub fn save(fd: &VcpuFd, features: &Features, fresh: &Fresh) -> Result<VcpuState, StateError> {
    let msr = |index| msrs::read(fd, index).unwrap_or(0);
    let sregs = fd.get_sregs().map_err(refused("read system registers"))?;
    let debug = fd
        .get_debug_regs()
        .map_err(refused("read debug registers"))?;
    let lapic = fd.get_lapic().map_err(refused("read the local APIC"))?;
    let both = |(index, old): (&u32, &u64)| Some((*index, *old, msrs::read(fd, *index)?));
    let changed = fresh.iter().filter_map(both);
    let changed = changed.filter(|(index, old, now)| old != now || COMMON_MSRS.contains(index));
    let (xsave, xcr0) = match features.model() {
        CpuModel::Common { .. } => (None, 1),
        CpuModel::Host => (Some(xsave(fd)?), xcr0(fd)?),
    };
    let state = State {
        regs: regs(fd)?,
        system: system(&sregs),
        debug: Debug {
            dr: debug.db,
            dr6: debug.dr6,
            dr7: debug.dr7,
        },
        msrs: changed.map(|(index, _, now)| (index, now)).collect(),
        features: features.announced(),
        tsc: Tsc {
            value: msr(TSC),
            khz: fd
                .get_tsc_khz()
                .map_err(refused("read the TSC's frequency"))?,
        },
        apic: Apic {
            base: sregs.apic_base,
            regs: page(&lapic),
            tsc_deadline: msr(TSC_DEADLINE),
        },
        events: events(fd, sregs.cr2)?,
        apf: AsyncFaults {
            enable: msr(APF_ENABLE),
            vector: msr(APF_VECTOR),
        },
        xsave,
        xcr0,
        run: run_state(fd)?,
    };
    Ok(VcpuState::X86(Box::new(state)))
}

/// An accepted state.
pub struct Accepted<'a>(&'a State);

/// Checks `state`, and sets the TSC of vCPU `index`. KVM may refuse a TSC after the check,
/// so this sets the TSC before [`restore`] changes anything else.
pub fn accept<'a>(
    fd: &VcpuFd,
    index: usize,
    features: &Features,
    fresh: &Fresh,
    state: &'a VcpuState,
) -> Result<Accepted<'a>, StateError> {
    let VcpuState::X86(state) = state else {
        return Err(StateError::Architecture);
    };
    check(state, features, fresh)?;
    let khz = state.tsc.khz;
    let set = features.set_tsc(fd, index, khz);
    if !set.map_err(refused("set the TSC's frequency"))? {
        return StateError::unsupported("tsc.khz", khz);
    }
    set_tsc(fd, &state.tsc)?;
    Ok(Accepted(state))
}

/// Gives a vCPU its accepted state.
pub fn restore(fd: &VcpuFd, fresh: &Fresh, state: Accepted<'_>) -> Result<(), StateError> {
    let Accepted(state) = state;
    let mut sregs = fd.get_sregs().map_err(refused("read system registers"))?;
    put_system(&mut sregs, state);
    fd.set_sregs(&sregs)
        .map_err(refused("set system registers"))?;
    set_regs(fd, &state.regs)?;
    set_vectors(fd, state)?;
    for (index, fresh) in fresh {
        let value = state.msrs.get(index).copied().unwrap_or(*fresh);
        if msrs::read(fd, *index) != Some(value) {
            msrs::write(fd, *index, value)?;
        }
    }
    let lapic = lapic(&state.apic);
    fd.set_lapic(&lapic)
        .map_err(refused("set the local APIC"))?;
    msrs::write(fd, TSC_DEADLINE, state.apic.tsc_deadline)?;
    let debug = kvm_debugregs {
        db: state.debug.dr,
        dr6: state.debug.dr6,
        dr7: state.debug.dr7,
        ..Default::default()
    };
    fd.set_debug_regs(&debug)
        .map_err(refused("set debug registers"))?;
    set_events(fd, &state.events)?;
    set_run_state(fd, state.run)?;
    // These are last: a write of the enable bit makes KVM read the guest's memory and queue the
    // wake-all event.
    for (index, value) in [
        (APF_VECTOR, state.apf.vector),
        (APF_ENABLE, state.apf.enable),
    ] {
        if value != 0 || msrs::read(fd, index).is_some_and(|now| now != 0) {
            msrs::write(fd, index, value)?;
        }
    }
    Ok(())
}

/// Refuses values that KVM would take silently, or refuse after it has set a part of the state.
fn check(state: &State, features: &Features, fresh: &Fresh) -> Result<(), StateError> {
    state.features.check_in(&features.announced())?;
    let unknown = |index: &&u32| !fresh.contains_key(index);
    if let Some(index) = state.msrs.keys().find(unknown) {
        let (index, value) = (*index, state.msrs[index]);
        return Err(StateError::Msr { index, value });
    }
    if let Some(exception) = state.events.exception
        && (exception.vector > 31 || exception.cr2.is_some() != (exception.vector == PAGE_FAULT))
    {
        return StateError::invalid("events.exception", exception.vector);
    }
    match features.model() {
        CpuModel::Host => Ok(()),
        CpuModel::Common { .. } => check_common(state),
    }
}

/// Allows only the control bits of the common model, and no FPU.
fn check_common(state: &State) -> Result<(), StateError> {
    /// PE MP EM TS ET NE WP AM NW CD PG.
    const CR0: u64 = 0xe005_003f;
    /// TSD DE PSE PAE MCE PGE SMEP.
    const CR4: u64 = 0x10_00fc;
    /// SCE LME LMA NXE.
    const EFER: u64 = 0xd01;
    if let Some(area) = &state.xsave {
        return StateError::unsupported("xsave", area.len() as u64);
    }
    if state.xcr0 > 1 {
        return StateError::unsupported("xcr0", state.xcr0);
    }
    let system = &state.system;
    for (field, value, valid) in [
        ("system.cr0", system.cr0, CR0),
        ("system.cr4", system.cr4, CR4),
        ("system.efer", system.efer, EFER),
    ] {
        if value & !valid != 0 {
            return StateError::unsupported(field, value & !valid);
        }
    }
    Ok(())
}

/// Sets the TSC, before anything else is changed.
///
/// Some KVMs ignore the write, and the guest reads the host's TSC. This function refuses a state
/// whose TSC would go back. A TSC that is ahead looks like a long stop to the guest. KVM makes the
/// TSCs of a VM's vCPUs equal if their values are nearly equal, so the TSC may be up to a second
/// behind.
fn set_tsc(fd: &VcpuFd, tsc: &Tsc) -> Result<(), StateError> {
    msrs::write(fd, TSC, tsc.value)?;
    let second = u64::from(tsc.khz) * 1000;
    match msrs::read(fd, TSC) {
        Some(now) if now.saturating_add(second) >= tsc.value => Ok(()),
        _ => StateError::unsupported("tsc.value", tsc.value),
    }
}

fn regs(fd: &VcpuFd) -> Result<Regs, StateError> {
    let r = fd.get_regs().map_err(refused("read registers"))?;
    Ok(Regs {
        gpr: [
            r.rax, r.rcx, r.rdx, r.rbx, r.rsp, r.rbp, r.rsi, r.rdi, r.r8, r.r9, r.r10, r.r11,
            r.r12, r.r13, r.r14, r.r15,
        ],
        rip: r.rip,
        rflags: r.rflags,
    })
}

fn set_regs(fd: &VcpuFd, from: &Regs) -> Result<(), StateError> {
    let [
        rax,
        rcx,
        rdx,
        rbx,
        rsp,
        rbp,
        rsi,
        rdi,
        r8,
        r9,
        r10,
        r11,
        r12,
        r13,
        r14,
        r15,
    ] = from.gpr;
    let (rip, rflags) = (from.rip, from.rflags);
    let regs = kvm_regs {
        rax,
        rbx,
        rcx,
        rdx,
        rsi,
        rdi,
        rsp,
        rbp,
        r8,
        r9,
        r10,
        r11,
        r12,
        r13,
        r14,
        r15,
        rip,
        rflags,
    };
    fd.set_regs(&regs).map_err(refused("set registers"))
}

fn segment_of(s: &kvm_segment) -> Segment {
    let access = u32::from(s.type_ & 15)
        | u32::from(s.s & 1) << 4
        | u32::from(s.dpl & 3) << 5
        | u32::from(s.present & 1) << 7
        | u32::from(s.avl & 1) << 12
        | u32::from(s.l & 1) << 13
        | u32::from(s.db & 1) << 14
        | u32::from(s.g & 1) << 15
        | u32::from(s.unusable & 1) << 16;
    Segment {
        selector: s.selector,
        base: s.base,
        limit: s.limit,
        access,
    }
}

fn kvm_segment_of(s: &Segment) -> kvm_segment {
    let bit = |n: u32| (s.access >> n & 1) as u8;
    kvm_segment {
        base: s.base,
        limit: s.limit,
        selector: s.selector,
        type_: (s.access & 15) as u8,
        s: bit(4),
        dpl: s.dpl(),
        present: bit(7),
        avl: bit(12),
        l: bit(13),
        db: bit(14),
        g: bit(15),
        unusable: bit(16),
        ..Default::default()
    }
}

fn system(s: &kvm_bindings::kvm_sregs) -> System {
    let table = |t: &kvm_dtable| Table {
        base: t.base,
        limit: t.limit,
    };
    System {
        segments: [&s.es, &s.cs, &s.ss, &s.ds, &s.fs, &s.gs].map(segment_of),
        tr: segment_of(&s.tr),
        ldtr: segment_of(&s.ldt),
        gdtr: table(&s.gdt),
        idtr: table(&s.idt),
        cr0: s.cr0,
        cr2: s.cr2,
        cr3: s.cr3,
        cr4: s.cr4,
        efer: s.efer,
    }
}

fn put_system(sregs: &mut kvm_bindings::kvm_sregs, state: &State) {
    let from = &state.system;
    let table = |t: &Table| kvm_dtable {
        base: t.base,
        limit: t.limit,
        ..Default::default()
    };
    let [es, cs, ss, ds, fs, gs] = from.segments.each_ref().map(kvm_segment_of);
    (sregs.es, sregs.cs, sregs.ss) = (es, cs, ss);
    (sregs.ds, sregs.fs, sregs.gs) = (ds, fs, gs);
    (sregs.tr, sregs.ldt) = (kvm_segment_of(&from.tr), kvm_segment_of(&from.ldtr));
    (sregs.gdt, sregs.idt) = (table(&from.gdtr), table(&from.idtr));
    (sregs.cr0, sregs.cr3, sregs.cr4) = (from.cr0, from.cr3, from.cr4);
    sregs.efer = from.efer;
    // The CR2 of an undelivered page fault takes precedence.
    let faulted = state.events.exception.and_then(|exception| exception.cr2);
    sregs.cr2 = faulted.unwrap_or(from.cr2);
    sregs.cr8 = u64::from(state.apic.regs[8] >> 4 & 15);
    sregs.apic_base = state.apic.base;
    sregs.interrupt_bitmap = [0; 4];
}

fn xcr0(fd: &VcpuFd) -> Result<u64, StateError> {
    let xcrs = fd.get_xcrs().map_err(refused("read XCR0"))?;
    let count = (xcrs.nr_xcrs as usize).min(xcrs.xcrs.len());
    let xcr0 = xcrs.xcrs[..count].iter().find(|xcr| xcr.xcr == 0);
    Ok(xcr0.map_or(1, |xcr| xcr.value))
}

fn xsave(fd: &VcpuFd) -> Result<Vec<u32>, StateError> {
    let area = fd.get_xsave().map_err(refused("read the FPU"))?;
    Ok(area.region.to_vec())
}

fn set_vectors(fd: &VcpuFd, state: &State) -> Result<(), StateError> {
    let Some(saved) = &state.xsave else {
        return Ok(());
    };
    let mut xcrs = kvm_xcrs {
        nr_xcrs: 1,
        ..Default::default()
    };
    xcrs.xcrs[0].value = state.xcr0;
    fd.set_xcrs(&xcrs).map_err(refused("set XCR0"))?;
    let mut area = fd.get_xsave().map_err(refused("read the FPU"))?;
    if saved.len() != area.region.len() {
        return StateError::invalid("xsave", saved.len() as u64);
    }
    area.region.copy_from_slice(saved);
    // SAFETY: 1. the area has the size that KVM reads for a vCPU without dynamic features.
    unsafe { fd.set_xsave(&area) }.map_err(refused("set the FPU"))
}

fn page(lapic: &kvm_lapic_state) -> [u32; 64] {
    let byte = |at: usize| lapic.regs[at] as u8;
    std::array::from_fn(|n| {
        let at = n * 16;
        u32::from_le_bytes([byte(at), byte(at + 1), byte(at + 2), byte(at + 3)])
    })
}

fn lapic(apic: &Apic) -> kvm_lapic_state {
    let mut lapic = kvm_lapic_state { regs: [0; 1024] };
    for (n, register) in apic.regs.iter().enumerate() {
        for (at, byte) in register.to_le_bytes().into_iter().enumerate() {
            lapic.regs[n * 16 + at] = byte as _;
        }
    }
    lapic
}

fn events(fd: &VcpuFd, cr2: u64) -> Result<Events, StateError> {
    let events = fd
        .get_vcpu_events()
        .map_err(refused("read pending events"))?;
    if events.interrupt.injected != 0 && events.interrupt.soft != 0 {
        return StateError::unsupported("events.software_interrupt", events.interrupt.nr);
    }
    if events.smi.smm != 0 || events.smi.pending != 0 {
        return StateError::unsupported("events.smi", 1u32);
    }
    let e = &events.exception;
    let exception = (e.injected != 0 || e.pending != 0).then(|| Exception {
        vector: e.nr,
        error: (e.has_error_code != 0).then_some(e.error_code),
        cr2: (e.nr == PAGE_FAULT).then_some(match events.exception_has_payload {
            0 => cr2,
            _ => events.exception_payload,
        }),
    });
    Ok(Events {
        exception,
        interrupt: (events.interrupt.injected != 0).then_some(events.interrupt.nr),
        nmi_pending: events.nmi.pending != 0 || events.nmi.injected != 0,
        // On AMD, KVM masks NMIs when it begins to inject one.
        nmi_masked: events.nmi.masked != 0 && events.nmi.injected == 0,
        interrupt_shadow: events.interrupt.shadow != 0,
    })
}

fn set_events(fd: &VcpuFd, from: &Events) -> Result<(), StateError> {
    let mut events = kvm_vcpu_events {
        flags: KVM_VCPUEVENT_VALID_NMI_PENDING | KVM_VCPUEVENT_VALID_SHADOW,
        ..Default::default()
    };
    if let Some(exception) = from.exception {
        events.exception.injected = 1;
        events.exception.nr = exception.vector;
        events.exception.has_error_code = u8::from(exception.error.is_some());
        events.exception.error_code = exception.error.unwrap_or(0);
    }
    if let Some(vector) = from.interrupt {
        events.interrupt.injected = 1;
        events.interrupt.nr = vector;
    }
    events.interrupt.shadow = u8::from(from.interrupt_shadow);
    events.nmi.pending = u8::from(from.nmi_pending);
    events.nmi.masked = u8::from(from.nmi_masked);
    fd.set_vcpu_events(&events)
        .map_err(refused("set pending events"))
}

fn run_state(fd: &VcpuFd) -> Result<RunState, StateError> {
    let state = fd.get_mp_state().map_err(refused("read the run state"))?;
    match state.mp_state {
        KVM_MP_STATE_RUNNABLE => Ok(RunState::Runnable),
        KVM_MP_STATE_HALTED => Ok(RunState::Halted),
        KVM_MP_STATE_UNINITIALIZED => Ok(RunState::WaitingForStartup),
        other => StateError::unsupported("run", other),
    }
}

fn set_run_state(fd: &VcpuFd, run: RunState) -> Result<(), StateError> {
    let mp_state = match run {
        RunState::Runnable => KVM_MP_STATE_RUNNABLE,
        RunState::Halted => KVM_MP_STATE_HALTED,
        RunState::WaitingForStartup => KVM_MP_STATE_UNINITIALIZED,
    };
    let state = kvm_mp_state { mp_state };
    fd.set_mp_state(state).map_err(refused("set the run state"))
}
