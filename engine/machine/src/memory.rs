//! Guest memory as bytes.

use crate::ErrorKind;
use lacuna_addr::Gpa;

/// Why bytes could not be moved.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
pub enum MemoryError {
    /// Not every byte lies in a memory slot.
    #[error("guest memory has no slot at {0}")]
    NoSlot(Gpa),
    /// The VM is in a state in which it takes no such access.
    #[error("guest memory at {gpa}: {cause}")]
    Refused {
        /// First address that failed.
        gpa: Gpa,
        /// What the backend says.
        cause: String,
    },
    /// The host could not supply the page: it is lost, or no frame could be made free.
    #[error("guest memory at {gpa}: {cause}")]
    Backing {
        /// First address that failed.
        gpa: Gpa,
        /// What the backend says.
        cause: String,
    },
}

impl MemoryError {
    /// Where the cause lies.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::NoSlot(_) | Self::Refused { .. } => ErrorKind::Request,
            Self::Backing { .. } => ErrorKind::Host,
        }
    }
}

/// Reads and writes of a guest's memory by its VMM. May sleep for pages that are elsewhere.
///
/// The vCPUs access the same bytes meanwhile. An access of 1, 2, 4 or 8 bytes at a multiple of its
/// size is one atomic access with relaxed ordering. A larger access is made of those.
pub trait GuestMemory {
    /// Copies `bytes` into the guest. Seen by dirty tracking like a guest's own write.
    fn write(&self, gpa: Gpa, bytes: &[u8]) -> Result<(), MemoryError>;

    /// Copies out of the guest.
    fn read(&self, gpa: Gpa, into: &mut [u8]) -> Result<(), MemoryError>;

    /// Copies out of the guest if it costs no I/O; `false` when a page is not resident or absent.
    fn peek(&self, gpa: Gpa, into: &mut [u8]) -> bool;
}
