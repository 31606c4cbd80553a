//! KVM's part in async page faults whose host side is this process: the guest's accesses to three
//! registers exit, and events are injected.
//!
//! A page fault is injected as a *pending* exception with its address
//! (`KVM_CAP_EXCEPTION_PAYLOAD`). An injected exception would not suffice: KVM halts a vCPU while
//! one of its workers brings a page in, and only a pending exception ends that halt.
//!
//! KVM itself handles an INIT from one vCPU to another, which resets async page faults. So
//! [`remember`] writes the vector's register in KVM, which the guest cannot reach. KVM sets this
//! register to 0 at an INIT, and [`has_forgotten`] sees that.

use super::msrs::{self, APF_ENABLE, APF_VECTOR};
use crate::error::KvmError;
use kvm_bindings::{
    KVM_CAP_EXCEPTION_PAYLOAD, KVM_CAP_X86_USER_SPACE_MSR, KVM_MP_STATE_HALTED,
    KVM_MP_STATE_RUNNABLE, KVM_MSR_EXIT_REASON_FILTER, KVM_VCPUEVENT_VALID_PAYLOAD, kvm_enable_cap,
    kvm_mp_state, kvm_msi,
};
use kvm_ioctls::{
    Error, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, VcpuFd, VmFd,
};
use lacuna_apf::x86::CpuState;
use lacuna_machine::StateError;

const INTERRUPT_FLAG: u64 = 1 << 9;
const PAGING: u64 = 1 << 31;
const PAGE_FAULT: u8 = 14;
/// The register SVR of a local APIC, and its bit that enables the APIC.
const SVR: usize = 0xf0;
const APIC_ENABLED: u32 = 1 << 8;
/// The address of interrupt messages; bits 19:12 are the number of the APIC.
const APIC_MESSAGES: u32 = 0xfee0_0000;

/// The registers from EN to ACK. The three of async page faults exit: their bits are 0.
const FILTERED: u32 = 6;
const ALLOWED: [u8; 1] = [0b00_1110];

/// The value of KVM's own vector register, while it is unused. Any nonzero value works.
const MARK: u64 = 0xff;

/// Makes accesses to the registers of async page faults exit to this process.
pub fn take(vm: &VmFd) -> Result<(), KvmError> {
    let enable = |cap, value| {
        let mut enable = kvm_enable_cap {
            cap,
            ..Default::default()
        };
        enable.args[0] = value;
        vm.enable_cap(&enable)
    };
    enable(KVM_CAP_EXCEPTION_PAYLOAD, 1).map_err(KvmError::step("inject page faults"))?;
    enable(
        KVM_CAP_X86_USER_SPACE_MSR,
        KVM_MSR_EXIT_REASON_FILTER.into(),
    )
    .map_err(KvmError::step("exit for registers"))?;
    let registers = MsrFilterRange {
        flags: MsrFilterRangeFlags::READ | MsrFilterRangeFlags::WRITE,
        base: APF_ENABLE,
        msr_count: FILTERED,
        bitmap: &ALLOWED,
    };
    vm.set_msr_filter(MsrFilterDefaultAction::ALLOW, &[registers])
        .map_err(KvmError::step("filter registers"))
}

/// Whether a vCPU outside the guest could take an interrupt: interrupts are enabled, and no event
/// is pending or being delivered.
pub fn is_interruptible(fd: &VcpuFd) -> Result<bool, Error> {
    let events = fd.get_vcpu_events()?;
    let quiet = [
        events.exception.injected,
        events.exception.pending,
        events.interrupt.injected,
        events.interrupt.shadow,
        events.nmi.injected,
        events.nmi.pending,
        events.smi.smm,
        events.smi.pending,
    ];
    Ok(quiet == [0; 8] && fd.get_regs()?.rflags & INTERRUPT_FLAG != 0)
}

/// The state of a vCPU outside the guest.
pub fn state(fd: &VcpuFd) -> Result<CpuState, Error> {
    let sregs = fd.get_sregs()?;
    let lapic = fd.get_lapic()?;
    let byte = |at: usize| lapic.regs[SVR + at] as u8;
    let svr = u32::from_le_bytes([byte(0), byte(1), byte(2), byte(3)]);
    Ok(CpuState {
        user: sregs.cs.selector & 3 != 0,
        paging: sregs.cr0 & PAGING != 0,
        lapic: svr & APIC_ENABLED != 0,
    })
}

/// Makes a #PF at `address` pending, with error code 0.
pub fn inject_page_fault(fd: &VcpuFd, address: u64) -> Result<(), Error> {
    let mut events = fd.get_vcpu_events()?;
    events.flags |= KVM_VCPUEVENT_VALID_PAYLOAD;
    events.exception.nr = PAGE_FAULT;
    events.exception.pending = 1;
    events.exception.injected = 0;
    events.exception.has_error_code = 1;
    events.exception.error_code = 0;
    events.exception_has_payload = 1;
    events.exception_payload = address;
    fd.set_vcpu_events(&events)
}

/// Raises an interrupt in the local APIC of vCPU `index`.
pub fn interrupt(vm: &VmFd, index: usize, vector: u8) -> Result<(), Error> {
    let message = kvm_msi {
        address_lo: APIC_MESSAGES | (index as u32) << 12,
        data: vector.into(),
        ..Default::default()
    };
    // The guest may have turned its APIC off meanwhile. Then the interrupt is lost, as on hardware.
    vm.signal_msi(message).map(drop)
}

/// Whether the guest has halted the vCPU. KVM's own halt does not count.
pub fn is_halted(fd: &VcpuFd) -> Result<bool, Error> {
    Ok(fd.get_mp_state()?.mp_state == KVM_MP_STATE_HALTED)
}

/// Ends a halt by the guest.
pub fn unhalt(fd: &VcpuFd) -> Result<(), Error> {
    if !is_halted(fd)? {
        return Ok(());
    }
    fd.set_mp_state(kvm_mp_state {
        mp_state: KVM_MP_STATE_RUNNABLE,
    })
}

/// Lets [`has_forgotten`] see a later reset of the vCPU.
pub fn remember(fd: &VcpuFd) -> Result<(), StateError> {
    msrs::write(fd, APF_VECTOR, MARK)
}

/// Whether the vCPU was reset since [`remember`].
pub fn has_forgotten(fd: &VcpuFd) -> bool {
    msrs::read(fd, APF_VECTOR) == Some(0)
}

/// Makes an INIT pending, as if another vCPU had sent it.
#[cfg(test)]
pub fn latch_init(fd: &VcpuFd) -> Result<(), Error> {
    let mut events = fd.get_vcpu_events()?;
    events.flags |= kvm_bindings::KVM_VCPUEVENT_VALID_SMM;
    events.smi.latched_init = 1;
    fd.set_vcpu_events(&events)
}
