//! `KVM_IRQFD` for any descriptor of an eventfd: `kvm-ioctls` takes only a type of its own.
//!
//! UNSAFETY: the ioctl changes no memory of this process.

use rustix::fd::{AsRawFd, BorrowedFd};
use rustix::io;
use rustix::ioctl::{Opcode, Setter, ioctl, opcode};

const IRQFD: Opcode = opcode::write::<Irqfd>(0xae, 0x76);
const DEASSIGN: u32 = 1 << 0;

/// `struct kvm_irqfd`.
#[repr(C)]
struct Irqfd {
    fd: u32,
    gsi: u32,
    flags: u32,
    resamplefd: u32,
    pad: [u8; 16],
}

// The size is part of the ioctl's number (linux/kvm.h).
const _: () = assert!(size_of::<Irqfd>() == 32);

/// `KVM_IRQFD`: each write to `eventfd` becomes an edge of the interrupt `gsi` from here on, or no
/// longer if `connected` is false. The end waits for interrupts in progress, so all writes before
/// the call have had their effect. A write without effect yet has it when the eventfd is connected.
///
/// # Safety
/// `vm` is the descriptor of a KVM virtual machine.
///
/// # Errors
/// `INVAL`: `eventfd` is no eventfd, or the VM has no interrupt controller; `BUSY`: it is connected
/// already; `NOMEM`.
pub unsafe fn irqfd(
    vm: BorrowedFd<'_>,
    eventfd: BorrowedFd<'_>,
    gsi: u32,
    connected: bool,
) -> io::Result<()> {
    let irqfd = Irqfd {
        fd: eventfd.as_raw_fd() as u32,
        gsi,
        flags: if connected { 0 } else { DEASSIGN },
        resamplefd: 0,
        pad: [0; 16],
    };
    // SAFETY: 1. KVM_IRQFD on a VM reads a `struct kvm_irqfd`.
    unsafe { ioctl(vm, Setter::<IRQFD, _>::new(irqfd)) }
}
