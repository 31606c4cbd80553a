//! The calls of KVM's dirty logging that `kvm-ioctls` lacks (`Documentation/virt/kvm/api.rst`):
//! clearing a part of the log, and resetting the rings.
//!
//! UNSAFETY: one ioctl reads a bitmap by its address. The ioctls change no memory of this process,
//! only which guest writes KVM notices.

use crate::counted::Counted;
use rustix::fd::BorrowedFd;
use rustix::io;
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};

/// `KVMIO`.
const TYPE: u8 = 0xae;
const CLEAR_DIRTY_LOG: Opcode = opcode::read_write::<ClearDirtyLog>(TYPE, 0xc0);
const RESET_DIRTY_RINGS: Opcode = opcode::none(TYPE, 0xc7);

/// `struct kvm_clear_dirty_log`.
#[repr(C)]
struct ClearDirtyLog {
    slot: u32,
    num_pages: u32,
    first_page: u64,
    dirty_bitmap: u64,
}

// The size is part of the ioctl's number (linux/kvm.h).
const _: () = assert!(size_of::<ClearDirtyLog>() == 24);

/// `KVM_CLEAR_DIRTY_LOG`: clears and write-protects pages of a slot. `mask` has a bit for each of
/// `pages` pages, beginning with `first_page`. Needs `KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2`.
///
/// # Safety
/// `vm` is the descriptor of a KVM virtual machine.
///
/// # Errors
/// `NOENT`: the slot does not log; `INVAL`: the range is not whole words, or beyond the slot;
/// `NXIO`: the VM has rings.
///
/// # Panics
/// If `mask` does not have a bit for each page.
pub unsafe fn clear_dirty_log(
    vm: BorrowedFd<'_>,
    slot: u32,
    first_page: u64,
    pages: u32,
    mask: &[u64],
) -> io::Result<()> {
    assert!(pages as usize <= mask.len() * 64, "a bit for each page");
    let mut clear = ClearDirtyLog {
        slot,
        num_pages: pages,
        first_page,
        dirty_bitmap: mask.as_ptr().expose_provenance() as u64,
    };
    // SAFETY: 1. KVM_CLEAR_DIRTY_LOG on a VM takes a `struct kvm_clear_dirty_log`. 2. It reads a
    // bit for each page, which `mask` has, rounded up to whole words, and writes nothing.
    unsafe { ioctl(vm, Updater::<CLEAR_DIRTY_LOG, _>::new(&mut clear)) }
}

/// `KVM_RESET_DIRTY_RINGS`: frees the ring entries marked as harvested, write-protects their pages
/// again and flushes. Returns the number of entries; a signal may end it early.
///
/// # Safety
/// `vm` is the descriptor of a KVM virtual machine.
///
/// # Errors
/// `INVAL`: the VM has no rings.
pub unsafe fn reset_dirty_rings(vm: BorrowedFd<'_>) -> io::Result<usize> {
    // SAFETY: 1. KVM_RESET_DIRTY_RINGS on a VM ignores its argument.
    unsafe { ioctl(vm, Counted::<RESET_DIRTY_RINGS, ()>::new(&mut ())) }
}
