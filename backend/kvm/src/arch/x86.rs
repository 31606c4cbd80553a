//! The parts of the backend for x86-64.

pub mod apf;
pub mod interrupts;
mod msrs;
mod setup;
mod state;

pub use msrs::Fresh;
pub use setup::Features;
pub use state::{accept, restore, save};

use crate::error::{KvmError, Unavailable};
use kvm_bindings::{KVM_CAP_X2APIC_API, KVM_X2APIC_API_DISABLE_BROADCAST_QUIRK, kvm_enable_cap};
use kvm_ioctls::{Error, VcpuFd, VmFd};

/// The address of three guest pages that KVM uses on Intel processors without *unrestricted guest*
/// (`KVM_SET_TSS_ADDR`). It is in the hole below 4 GiB, where other machines have firmware, so no
/// memory slot overlaps it.
const TSS_ADDRESS: usize = 0xfffb_d000;

/// Whether the backend runs on this architecture.
pub fn check() -> Result<(), Unavailable> {
    Ok(())
}

/// Makes the interrupt controllers of a new VM for `vcpus` vCPUs.
pub fn make_controllers(vm: &VmFd, vcpus: usize) -> Result<(), KvmError> {
    vm.set_tss_address(TSS_ADDRESS)
        .map_err(KvmError::step("place the TSS"))?;
    if vcpus > usize::from(u8::MAX) {
        address_the_last(vm).map_err(KvmError::step("address vCPU 255"))?;
    }
    vm.create_irq_chip()
        .map_err(KvmError::step("make interrupt controllers"))?;
    interrupts::connect(vm, []).map_err(|cause| KvmError::Kvm {
        step: "connect the I/O APIC",
        errno: lacuna_sys::Errno::from_raw_os_error(cause.errno()),
    })
}

/// Makes destination 255 of a device's message name the APIC with that ID, if the APICs are in
/// x2APIC mode. By default KVM sends such a message to every APIC.
fn address_the_last(vm: &VmFd) -> Result<(), Error> {
    vm.enable_cap(&kvm_enable_cap {
        cap: KVM_CAP_X2APIC_API,
        args: [KVM_X2APIC_API_DISABLE_BROADCAST_QUIRK.into(), 0, 0, 0],
        ..Default::default()
    })
}

/// A vCPU's program counter, for messages.
pub fn program_counter(vcpu: &VcpuFd) -> Result<String, Error> {
    let regs = vcpu.get_regs()?;
    Ok(format!("rip {:#x}", regs.rip))
}

/// The frequency of a vCPU's TSC, in kHz.
pub fn tsc_khz(vcpu: &VcpuFd) -> Option<u32> {
    vcpu.get_tsc_khz().ok()
}
