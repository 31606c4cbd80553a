//! `KVM_IOEVENTFD` for any descriptor of an eventfd: `kvm-ioctls` takes only a type of its own.
//!
//! UNSAFETY: the ioctl changes no memory of this process.

use rustix::fd::{AsRawFd, BorrowedFd};
use rustix::io;
use rustix::ioctl::{Opcode, Setter, ioctl, opcode};

const IOEVENTFD: Opcode = opcode::write::<IoEventFd>(0xae, 0x79);
const DATAMATCH: u32 = 1 << 0;
const PIO: u32 = 1 << 1;
const DEASSIGN: u32 = 1 << 2;

/// `struct kvm_ioeventfd`.
#[repr(C)]
struct IoEventFd {
    datamatch: u64,
    addr: u64,
    len: u32,
    fd: i32,
    flags: u32,
    pad: [u8; 36],
}

// The size is part of the ioctl's number (linux/kvm.h).
const _: () = assert!(size_of::<IoEventFd>() == 64);

/// Writes of a guest for [`ioeventfd`].
#[derive(Clone, Copy, Debug)]
pub struct IoWrites {
    /// Whether `address` is a port.
    pub is_port: bool,
    /// The port, or the guest-physical address.
    pub address: u64,
    /// The bytes of a write: 1, 2, 4 or 8; 0 for writes of every width.
    pub bytes: u32,
    /// The written value; `None` for every value.
    pub value: Option<u64>,
}

/// `KVM_IOEVENTFD`: each of these writes adds 1 to `eventfd` from here on, or no longer if
/// `assigned` is false. After the end no vCPU adds to it.
///
/// # Safety
/// `vm` is the descriptor of a KVM virtual machine.
///
/// # Errors
/// `INVAL`: `eventfd` is no eventfd; `EXIST`: an eventfd has some of these writes; `NOENT`: it has
/// not been assigned; `NOSPC`: the VM has 1,000 devices in the kernel.
pub unsafe fn ioeventfd(
    vm: BorrowedFd<'_>,
    eventfd: BorrowedFd<'_>,
    writes: &IoWrites,
    assigned: bool,
) -> io::Result<()> {
    let flag = |is_set: bool, flag: u32| if is_set { flag } else { 0 };
    let ioeventfd = IoEventFd {
        datamatch: writes.value.unwrap_or(0),
        addr: writes.address,
        len: writes.bytes,
        fd: eventfd.as_raw_fd(),
        flags: flag(writes.value.is_some(), DATAMATCH)
            | flag(writes.is_port, PIO)
            | flag(!assigned, DEASSIGN),
        pad: [0; 36],
    };
    // SAFETY: 1. KVM_IOEVENTFD on a VM reads a `struct kvm_ioeventfd`.
    unsafe { ioctl(vm, Setter::<IOEVENTFD, _>::new(ioeventfd)) }
}
