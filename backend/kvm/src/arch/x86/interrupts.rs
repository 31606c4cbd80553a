//! The interrupt controllers of a VM, and the interrupts of devices.
//!
//! KVM makes an I/O APIC and two PICs, and connects lines 0 to 15 to both. [`connect`] leaves the
//! lines to the I/O APIC alone, because a PIC without a program would interrupt with the vectors of
//! exceptions. There is no PIT, so every line is free.
//!
//! UNSAFETY: the registers of an interrupt controller are in unions of KVM.

use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KvmIrqRouting,
    kvm_ioapic_state, kvm_ioapic_state__bindgen_ty_1 as Entry, kvm_irq_routing_entry,
    kvm_irq_routing_irqchip, kvm_irq_routing_msi, kvm_irqchip, kvm_msi,
};
use kvm_ioctls::{Error, VmFd};
use lacuna_machine::x86::{IoApic, Shared};
use lacuna_machine::{InterruptError, Msi, SharedState, StateError};

/// The number of lines.
pub const PINS: u32 = 24;
/// The address of the I/O APIC.
const BASE: u64 = 0xfec0_0000;

/// Connects each line to the pin of the I/O APIC with its number and to nothing else, and other
/// numbers to messages.
pub fn connect(vm: &VmFd, messages: impl IntoIterator<Item = (u32, Msi)>) -> Result<(), Error> {
    let messages = messages.into_iter().map(|(gsi, msi)| message(gsi, msi));
    let entries: Vec<_> = (0..PINS).map(route).chain(messages).collect();
    let routing = KvmIrqRouting::from_entries(&entries);
    vm.set_gsi_routing(&routing.map_err(|_| Error::new(libc::ENOSPC))?)
}

fn message(gsi: u32, msi: Msi) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry {
        gsi,
        type_: KVM_IRQ_ROUTING_MSI,
        ..Default::default()
    };
    entry.u.msi = kvm_irq_routing_msi {
        address_lo: msi.address as u32,
        data: msi.data,
        ..Default::default()
    };
    entry
}

fn route(pin: u32) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry {
        gsi: pin,
        type_: KVM_IRQ_ROUTING_IRQCHIP,
        ..Default::default()
    };
    entry.u.irqchip = kvm_irq_routing_irqchip {
        irqchip: KVM_IRQCHIP_IOAPIC,
        pin,
    };
    entry
}

/// Sets the level of an existing line.
pub fn set_line(vm: &VmFd, number: u32, level: bool) {
    let set = vm.set_irq_line(number, level);
    debug_assert!(set.is_ok(), "KVM has line {number}: {set:?}");
}

/// Sends a message. KVM fails with EPERM if no APIC takes it, or if the APIC is turned off.
pub fn send_msi(vm: &VmFd, msi: Msi) -> Result<(), InterruptError> {
    let message = kvm_msi {
        address_lo: msi.address as u32,
        data: msi.data,
        ..Default::default()
    };
    match vm.signal_msi(message) {
        Err(error) if error.errno() != libc::EPERM => Err(InterruptError::Host {
            step: "send an interrupt message",
            cause: error.to_string(),
        }),
        _ => Ok(()),
    }
}

fn refused(step: &'static str) -> impl Fn(Error) -> StateError {
    move |error| StateError::Host {
        step,
        cause: error.to_string(),
    }
}

/// The state shared by the vCPUs.
pub fn save_shared(vm: &VmFd) -> Result<SharedState, StateError> {
    let mut chip = kvm_irqchip {
        chip_id: KVM_IRQCHIP_IOAPIC,
        ..Default::default()
    };
    vm.get_irqchip(&mut chip)
        .map_err(refused("read the I/O APIC"))?;
    // SAFETY: 1. KVM has filled this member, as `chip_id` asks; any bits are a value of it.
    let io = unsafe { chip.chip.ioapic };
    // SAFETY: 1. both members have 64 bits, and any bits are a value of `bits`.
    let entries = io.redirtbl.map(|entry| unsafe { entry.bits });
    let io_apic = IoApic::new(io.id as u8, io.ioregsel as u8, entries, io.irr);
    Ok(SharedState::X86Shared(Box::new(Shared { io_apic })))
}

/// Puts the VM into a state shared by vCPUs.
pub fn restore_shared(vm: &VmFd, state: &SharedState) -> Result<(), StateError> {
    let io = state.x86()?.io_apic;
    let mut chip = kvm_irqchip {
        chip_id: KVM_IRQCHIP_IOAPIC,
        ..Default::default()
    };
    chip.chip.ioapic = kvm_ioapic_state {
        base_address: BASE,
        ioregsel: io.select.into(),
        id: io.id.into(),
        irr: io.high,
        pad: 0,
        redirtbl: io.entries.map(|bits| Entry { bits }),
    };
    vm.set_irqchip(&chip).map_err(refused("set the I/O APIC"))
}
