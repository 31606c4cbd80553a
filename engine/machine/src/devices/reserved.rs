//! Addresses that a guest's machine uses before the VMM adds a device or memory.

use super::mmio;
use crate::{Arch, VCPUS_MAX};
use lacuna_addr::{GfnRange, Gpa, PAGE_SIZE};
use lacuna_slots::{SlotError, SlotId};
use std::ops::RangeInclusive;

type Addresses = RangeInclusive<u64>;

/// The I/O APIC and the local APIC.
const APICS: [Addresses; 2] = [0xfec0_0000..=0xfec0_00ff, 0xfee0_0000..=0xfee0_0fff];

/// The GIC, with redistributors for as many vCPUs as a VM may have.
const GIC: [Addresses; 3] = {
    let [first, second] = mmio::redistributors(VCPUS_MAX);
    [
        device(mmio::DISTRIBUTOR, mmio::DISTRIBUTOR_BYTES),
        device(first.0, first.1),
        device(second.0, second.1),
    ]
};

/// The devices of every AArch64 guest.
pub(super) const OWN: [Addresses; 2] = [
    device(mmio::UART, mmio::DEVICE_BYTES),
    device(mmio::HOST, mmio::DEVICE_BYTES),
];

const fn device(start: Gpa, bytes: u64) -> Addresses {
    start.get()..=start.get() + (bytes - 1)
}

/// The guest-physical addresses of interrupt controllers.
pub(super) const fn controllers(arch: Arch) -> &'static [Addresses] {
    match arch {
        Arch::X86_64 => &APICS,
        Arch::Arm64 => &GIC,
    }
}

/// The guest-physical addresses of the devices of every guest.
pub(super) const fn own(arch: Arch) -> &'static [Addresses] {
    match arch {
        Arch::X86_64 => &[],
        Arch::Arm64 => &OWN,
    }
}

/// Whether an interrupt controller has this guest-physical address.
pub(crate) fn is_of_controller(arch: Arch, gpa: Gpa) -> bool {
    let mut controllers = controllers(arch).iter();
    controllers.any(|addresses| addresses.contains(&gpa.get()))
}

pub(super) fn overlap<T: PartialOrd>(a: &RangeInclusive<T>, b: &RangeInclusive<T>) -> bool {
    a.start() <= b.end() && b.start() <= a.end()
}

/// Refuses memory over an interrupt controller or a device of every guest, for backends. The
/// backend would decide whether the guest accesses the memory or the controller.
///
/// # Errors
/// [`SlotError::Reserved`], with the first such range.
pub fn check_reserved(arch: Arch, id: SlotId, gfns: GfnRange) -> Result<(), SlotError> {
    let start = gfns.start().gpa().get();
    let wanted = start..=start + (gfns.pages() * PAGE_SIZE as u64 - 1);
    let mut taken = controllers(arch).iter().chain(own(arch));
    match taken.find(|taken| overlap(taken, &wanted)) {
        None => Ok(()),
        Some(taken) => Err(SlotError::Reserved {
            id,
            first: *taken.start(),
            last: *taken.end(),
        }),
    }
}
