//! Descriptors for shared memory files, whose pages may be in the file before they are mapped.

use super::events::FEATURE_EVENT_REMOVE;
use super::{Errno, FEATURE_THREAD_ID, MODE_MISSING, Range, Userfaultfd, Waiters, all};
use lacuna_addr::{HvaRange, PAGE_SIZE};
use rustix::fd::AsRawFd as _;
use rustix::io;
use rustix::ioctl::{Opcode, opcode};

const CONTINUE: Opcode = opcode::read_write::<Continue>(super::TYPE, 0x07);
/// `UFFDIO_REGISTER_MODE_MINOR`, since Linux 5.13.
const MODE_MINOR: u64 = 4;
/// `UFFD_FEATURE_MISSING_SHMEM`, since Linux 4.11.
const FEATURE_MISSING_SHMEM: u64 = 1 << 5;
/// `UFFD_FEATURE_MINOR_SHMEM`, since Linux 5.14.
const FEATURE_MINOR_SHMEM: u64 = 1 << 10;
/// `UFFDIO_CONTINUE_MODE_DONTWAKE`.
const DONTWAKE: u64 = 1;

/// `struct uffdio_continue`.
#[repr(C)]
struct Continue {
    range: Range,
    mode: u64,
    mapped: i64,
}

// The size is part of the ioctl's number (linux/userfaultfd.h).
const _: () = assert!(size_of::<Continue>() == 32);

/// The accesses that a descriptor reports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Accesses {
    /// By all threads and by the kernel, as for a guest of KVM. It needs `CAP_SYS_PTRACE` or access
    /// to `/dev/userfaultfd`.
    All,
    /// By threads in user space. A system call on a missing page fails with `FAULT`.
    User,
}

/// The memory of a VMM whose pages a pager provides.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum VmmMemory {
    /// Private anonymous memory.
    Anonymous,
    /// A private mapping of a memory file. A fault on a page in the file waits for
    /// [`Userfaultfd::resume`].
    File,
}

/// The kinds of pages of a shared memory file for which a thread waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Minor {
    /// For a page that the file lacks. The kernel maps a page of the file by itself.
    Mapped,
    /// For every unmapped page, until [`Userfaultfd::resume`].
    Waits,
}

impl Userfaultfd {
    /// As [`open_user`](Self::open_user), for shared mappings of memory files.
    ///
    /// # Errors
    /// As [`open_user`](Self::open_user); `INVAL` before Linux 5.14 for [`Minor::Waits`].
    pub fn open_user_shared(minor: Minor) -> io::Result<Self> {
        let (features, modes) = match minor {
            Minor::Mapped => (0, 0),
            Minor::Waits => (FEATURE_MINOR_SHMEM, MODE_MINOR),
        };
        let features = features | FEATURE_THREAD_ID | FEATURE_MISSING_SHMEM;
        Self::user_with(features, modes | MODE_MISSING)
    }

    /// A non-blocking descriptor that a VMM sends to its pager. It reports removed pages.
    ///
    /// # Errors
    /// `PERM` for [`Accesses::All`] without the right to it; `NOSYS` if the kernel was built
    /// without userfaultfd; `INVAL` before Linux 5.14 for [`VmmMemory::File`].
    pub fn open_for_pager(accesses: Accesses, memory: VmmMemory) -> io::Result<Self> {
        let (features, modes) = match memory {
            VmmMemory::Anonymous => (0, 0),
            VmmMemory::File => (FEATURE_MISSING_SHMEM | FEATURE_MINOR_SHMEM, MODE_MINOR),
        };
        let (features, modes) = (features | FEATURE_EVENT_REMOVE, modes | MODE_MISSING);
        match accesses {
            Accesses::All => Self::with(features, modes),
            Accesses::User => Self::user_with(features, modes),
        }
    }

    /// Whether it reports removed pages, also if another process has made it.
    ///
    /// # Errors
    /// As `read(2)` of `/proc/self/fdinfo`; `INVAL`: the file says nothing about it.
    pub fn reports_removals(&self) -> io::Result<bool> {
        let path = format!("/proc/self/fdinfo/{}", self.fd.as_raw_fd());
        let text = std::fs::read_to_string(path);
        let text = text.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        // Such as `API:	aa:80000428:80000000000001ff`; the second number has the enabled features.
        let line = text.lines().find_map(|line| line.strip_prefix("API:"));
        let features = line.and_then(|line| line.split(':').nth(1));
        let features = features.and_then(|hex| u64::from_str_radix(hex, 16).ok());
        Ok(features.ok_or(Errno::INVAL)? & FEATURE_EVENT_REMOVE != 0)
    }

    /// Maps the pages of `range`, which are in their file. Returns the number of pages it has
    /// mapped. In a private mapping they are read-only, and a write copies its page.
    ///
    /// # Errors
    /// Why no page is mapped: `FAULT`: the file lacks the first one; `EXIST`: it is already mapped;
    /// `NOENT`, `AGAIN`: as [`copy`](Self::copy).
    pub fn resume(&self, range: HvaRange, waiters: Waiters) -> Result<u64, Errno> {
        let mut resume = Continue {
            range: all(range),
            mode: match waiters {
                Waiters::Wake => 0,
                Waiters::LeaveAsleep => DONTWAKE,
            },
            mapped: 0,
        };
        // SAFETY: 1. UFFDIO_CONTINUE takes a `struct uffdio_continue`. 2. It maps pages of
        // registered ranges, which may change by the contract of `register`.
        let resumed = unsafe { self.update::<{ CONTINUE }, _>(&mut resume) };
        let mapped = u64::try_from(resume.mapped).unwrap_or(0) / PAGE_SIZE as u64;
        match resumed {
            Ok(()) => Ok(range.pages()),
            Err(errno) if mapped == 0 => Err(errno),
            Err(_) => Ok(mapped),
        }
    }
}
