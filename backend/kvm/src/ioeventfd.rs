//! Writes of a guest that signal an eventfd: `KVM_IOEVENTFD`.
//!
//! UNSAFETY: the VM's descriptor is borrowed from `kvm-ioctls` as a raw number, because its type
//! does not implement `AsFd`.

use kvm_ioctls::VmFd;
use lacuna_machine::{GuestWrite, IoAddress, IoEventFdError, WriteMatch};
use lacuna_sys::{IoWrites, ioeventfd};
use rustix::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use rustix::io::{self, Errno};

fn set(vm: &VmFd, write: GuestWrite, eventfd: &OwnedFd, assigned: bool) -> io::Result<()> {
    let (is_port, address) = match write.address {
        IoAddress::Port(port) => (true, port.into()),
        IoAddress::Memory(gpa) => (false, gpa.get()),
    };
    let (bytes, value) = match write.matches {
        WriteMatch::AnyWidth => (0, None),
        WriteMatch::Width(width) => (width as u32, None),
        WriteMatch::Value(width, value) => (width as u32, Some(value)),
    };
    let writes = IoWrites {
        is_port,
        address,
        bytes,
        value,
    };
    // SAFETY: 1. the descriptor is open as long as `vm` is borrowed.
    let vm = unsafe { BorrowedFd::borrow_raw(vm.as_raw_fd()) };
    // SAFETY: 1. it is the VM's descriptor.
    unsafe { ioeventfd(vm, eventfd.as_fd(), &writes, assigned) }
}

pub(crate) fn assign(
    vm: &VmFd,
    write: GuestWrite,
    eventfd: &OwnedFd,
) -> Result<(), IoEventFdError> {
    set(vm, write, eventfd, true).map_err(|errno| match errno {
        Errno::EXIST => IoEventFdError::InUse(write),
        errno => IoEventFdError::Host {
            write,
            cause: errno.to_string(),
        },
    })
}

pub(crate) fn deassign(vm: &VmFd, write: GuestWrite, eventfd: &OwnedFd) {
    let ended = set(vm, write, eventfd, false);
    debug_assert!(ended.is_ok(), "it was assigned: {ended:?}");
}
