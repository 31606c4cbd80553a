//! Guest memory as bytes.

use lacuna_addr::Gpa;

/// Why bytes could not be moved.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
pub enum MemoryError {
    /// Not every byte lies in a memory slot.
    #[error("guest memory has no slot at {0}")]
    NoSlot(Gpa),
    /// The slot is read-only, or the page lost.
    #[error("guest memory at {gpa}: {cause}")]
    Backing {
        /// First address that failed.
        gpa: Gpa,
        /// What the backend says.
        cause: String,
    },
}

/// Reads and writes of a guest's memory by its VMM. May sleep for pages that are elsewhere.
pub trait GuestMemory {
    /// Copies `bytes` into the guest. Seen by dirty tracking like a guest's own write.
    fn write(&self, gpa: Gpa, bytes: &[u8]) -> Result<(), MemoryError>;

    /// Copies out of the guest.
    fn read(&self, gpa: Gpa, into: &mut [u8]) -> Result<(), MemoryError>;

    /// Copies out of the guest if it costs no I/O; `false` when a page is not resident or absent.
    fn peek(&self, gpa: Gpa, into: &mut [u8]) -> bool;
}
