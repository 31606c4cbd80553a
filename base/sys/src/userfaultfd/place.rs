//! Descriptors for memory that only user space touches, and runs of pages put in place there.

use super::{COPY, Copy, Errno, FEATURE_THREAD_ID, MODE_MISSING, Range, Userfaultfd, all};
use lacuna_addr::{Hva, HvaRange, PAGE_SIZE};
use rustix::fd::{FromRawFd as _, OwnedFd};
use rustix::fs::{Mode, OFlags, open};
use rustix::io;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl, opcode};
use rustix::mm::{UserfaultfdFlags, userfaultfd};
use std::ffi::c_void;
use std::ptr::without_provenance_mut;

/// `UFFD_USER_MODE_ONLY`, since Linux 5.11.
const USER_MODE_ONLY: u32 = 1;
/// `UFFDIO_COPY_MODE_DONTWAKE`.
const DONTWAKE: u64 = 1;
/// `UFFD_FEATURE_MISSING_HUGETLBFS`, since Linux 4.11.
const FEATURE_MISSING_HUGETLBFS: u64 = 1 << 4;
/// `UFFD_FEATURE_MISSING_SHMEM`, since Linux 4.11.
const FEATURE_MISSING_SHMEM: u64 = 1 << 5;
/// `UFFD_FEATURE_SIGBUS`, since Linux 4.14.
const FEATURE_SIGBUS: u64 = 1 << 7;
const POISON: Opcode = opcode::read_write::<Poison>(super::TYPE, 0x08);
const ZEROPAGE: Opcode = opcode::read_write::<ZeroPage>(super::TYPE, 0x04);
const UNREGISTER: Opcode = opcode::read::<Range>(super::TYPE, 0x01);
/// The device that makes descriptors for processes without the right to the system call.
const DEVICE: &str = "/dev/userfaultfd";

/// `struct uffdio_poison`.
#[repr(C)]
struct Poison {
    range: Range,
    mode: u64,
    updated: i64,
}

/// `struct uffdio_zeropage`.
#[repr(C)]
struct ZeroPage {
    range: Range,
    mode: u64,
    zeroed: i64,
}

// The sizes are part of the ioctls' numbers (linux/userfaultfd.h).
const _: () = assert!(size_of::<Poison>() == 32 && size_of::<ZeroPage>() == 32);

/// Whether a placed page's waiting threads are woken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Waiters {
    /// They are woken. The kernel searches all threads that wait at the descriptor.
    Wake,
    /// They sleep until [`Userfaultfd::wake`].
    LeaveAsleep,
}

/// Only a part of a run of pages was put in place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Partial {
    /// How many pages are in place, from the first on.
    pub done: usize,
    /// Why the next page is not in place.
    pub errno: Errno,
}

impl Userfaultfd {
    /// A non-blocking descriptor for faults of user space only. A system call on a missing page of
    /// its ranges fails with `FAULT`. If the process may not call `userfaultfd(2)`,
    /// `/dev/userfaultfd` makes the descriptor; otherwise no privilege is needed.
    ///
    /// # Errors
    /// The system call's, if the device cannot be opened either: `NOSYS` if the kernel was built
    /// without userfaultfd, `PERM` if a filter of system calls forbids it.
    pub fn open_user() -> io::Result<Self> {
        Self::user_with(FEATURE_THREAD_ID, MODE_MISSING)
    }

    /// As [`open_user`](Self::open_user), for private memory and memory files of any page size, but
    /// no thread ever sleeps: a thread that touches a missing page gets `SIGBUS`. There are no
    /// events to read. For huge pages, each call takes whole ones.
    ///
    /// # Errors
    /// As [`open_user`](Self::open_user).
    pub fn open_without_events() -> io::Result<Self> {
        let memory = FEATURE_MISSING_SHMEM | FEATURE_MISSING_HUGETLBFS;
        Self::user_with(FEATURE_SIGBUS | memory, MODE_MISSING)
    }

    /// A non-blocking descriptor for faults of user space and of the kernel, KVM included, in
    /// private memory and memory files of any page size.
    ///
    /// # Errors
    /// As [`open`](Self::open), but `INVAL` only before Linux 4.14.
    pub fn open_for_guest() -> io::Result<Self> {
        let memory = FEATURE_MISSING_SHMEM | FEATURE_MISSING_HUGETLBFS;
        Self::with(FEATURE_THREAD_ID | memory, MODE_MISSING)
    }

    pub(super) fn user_with(features: u64, modes: u64) -> io::Result<Self> {
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
        let flags = flags | UserfaultfdFlags::from_bits_retain(USER_MODE_ONLY);
        Self::enable(descriptor(flags)?, features, modes)
    }

    /// Ends [`register`](Self::register) of `range`, and wakes the threads that wait there: they
    /// find pages of zeros.
    ///
    /// # Errors
    /// `INVAL`: not a range of mappings that userfaultfd supports.
    pub fn unregister(&self, range: HvaRange) -> io::Result<()> {
        let mut range = all(range);
        // SAFETY: 1. UFFDIO_UNREGISTER takes a `struct uffdio_range`. 2. It changes no byte.
        unsafe { self.update::<{ UNREGISTER }, _>(&mut range) }
    }

    /// Marks the missing pages of `range` as poisoned, since Linux 6.6: each access gets `SIGBUS`,
    /// until the page is taken away. Wakes the threads that wait there.
    ///
    /// # Errors
    /// The error of the first page that the call cannot poison: as [`copy`](Self::copy). `INVAL`:
    /// the kernel does not know the call.
    pub fn poison(&self, range: HvaRange) -> io::Result<()> {
        let mut poison = Poison {
            range: all(range),
            mode: 0,
            updated: 0,
        };
        // SAFETY: 1. UFFDIO_POISON takes a `struct uffdio_poison`. 2. It changes only missing pages
        // of registered ranges, which may change by the contract of `register`.
        unsafe { self.update::<{ POISON }, _>(&mut poison) }
    }

    /// Maps the kernel's page of zeros at the missing page `to`, which needs no memory until it is
    /// written, and wakes the threads that wait for it. Not for huge pages.
    ///
    /// # Errors
    /// As [`copy`](Self::copy).
    pub fn zero(&self, to: Hva) -> io::Result<()> {
        let mut zero = ZeroPage {
            range: super::one(to),
            mode: 0,
            zeroed: 0,
        };
        // SAFETY: 1. UFFDIO_ZEROPAGE takes a `struct uffdio_zeropage`. 2. It fills only missing
        // pages of registered ranges, which may change by the contract of `register`.
        unsafe { self.update::<{ ZEROPAGE }, _>(&mut zero) }
    }

    /// Puts `pages` in place from the missing page `to` on.
    ///
    /// # Errors
    /// The error of the first page that is not in place: as [`copy`](Self::copy). `AGAIN` also
    /// while an event of the descriptor is unread.
    pub fn place(
        &self,
        pages: &[[u8; PAGE_SIZE]],
        to: Hva,
        waiters: Waiters,
    ) -> Result<(), Partial> {
        let mut done = 0;
        while done < pages.len() {
            let rest = &pages[done..];
            let mut copy = Copy {
                dst: to.get() + (done * PAGE_SIZE) as u64,
                src: rest.as_ptr() as u64,
                len: size_of_val(rest) as u64,
                mode: match waiters {
                    Waiters::Wake => 0,
                    Waiters::LeaveAsleep => DONTWAKE,
                },
                done: 0,
            };
            // SAFETY: 1. UFFDIO_COPY takes a `struct uffdio_copy`. 2. It fills only missing pages
            // of registered ranges, which may change by the contract of `register`.
            let copied = unsafe { self.update::<{ COPY }, _>(&mut copy) };
            // The kernel stops at the first page that it cannot place. It reports the bytes before
            // that page, or the error if there are none.
            let bytes = usize::try_from(copy.done).unwrap_or(0);
            match copied {
                Ok(()) => break,
                Err(errno) if bytes == 0 => return Err(Partial { done, errno }),
                Err(_) => done += bytes / PAGE_SIZE,
            }
        }
        Ok(())
    }
}

/// A descriptor, by the system call, or by the device if the call is refused.
pub(super) fn descriptor(flags: UserfaultfdFlags) -> io::Result<OwnedFd> {
    // SAFETY: 1. it acts on no memory before `register`, whose caller makes the promise.
    match unsafe { userfaultfd(flags) } {
        Ok(fd) => Ok(fd),
        Err(errno) => by_device(flags).map_err(|_| errno),
    }
}

fn by_device(flags: UserfaultfdFlags) -> io::Result<OwnedFd> {
    let device = open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    // SAFETY: 1. `New` describes USERFAULTFD_IOC_NEW, which changes no memory.
    unsafe { ioctl(&device, New(flags)) }
}

/// `USERFAULTFD_IOC_NEW`: makes a descriptor. Its argument is the flags.
struct New(UserfaultfdFlags);

// SAFETY: 1. the argument is no pointer, so the kernel writes no memory. 2. A result that is no
// error is a new descriptor, which no other code owns.
unsafe impl Ioctl for New {
    type Output = OwnedFd;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        opcode::none(super::TYPE, 0x00)
    }

    fn as_ptr(&mut self) -> *mut c_void {
        without_provenance_mut(self.0.bits() as usize)
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> io::Result<OwnedFd> {
        // SAFETY: 1. by the trait's contract the call did not fail; see the second point above.
        Ok(unsafe { OwnedFd::from_raw_fd(out) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The device gives descriptors as good as the system call's.
    #[test]
    fn the_device_makes_a_descriptor() {
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
        let fd = match by_device(flags) {
            Ok(fd) => fd,
            Err(errno @ (Errno::NOENT | Errno::ACCESS | Errno::PERM | Errno::NXIO)) => {
                return lacuna_skip::skip(format!("{DEVICE}: {errno}"));
            }
            Err(errno) => panic!("{errno}"),
        };
        let uffd = Userfaultfd::enable(fd, FEATURE_THREAD_ID, MODE_MISSING).unwrap();
        let mut faults = Vec::new();
        uffd.faults(&mut faults).unwrap();
        assert_eq!(faults, []);
    }
}
