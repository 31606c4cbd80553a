//! Descriptors for shared memory files, whose pages may be in the file before they are mapped.

use super::{Errno, FEATURE_THREAD_ID, MODE_MISSING, Range, Userfaultfd, all};
use lacuna_addr::{HvaRange, PAGE_SIZE};
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

    /// Maps the pages of `range`, which are in their file. Leaves their waiting threads asleep
    /// until [`wake`](Self::wake). Returns the number of pages it has mapped.
    ///
    /// # Errors
    /// Why no page is mapped: `FAULT`: the file lacks the first one; `EXIST`: it is already mapped;
    /// `NOENT`, `AGAIN`: as [`copy`](Self::copy).
    pub fn resume(&self, range: HvaRange) -> Result<u64, Errno> {
        let mut resume = Continue {
            range: all(range),
            mode: DONTWAKE,
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
