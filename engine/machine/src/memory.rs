//! Guest memory as bytes.

mod page_map;

pub use page_map::PageMap;

use crate::ErrorKind;
use lacuna_addr::{GfnRange, Gpa, PageCount};
use lacuna_source::FailureKind;

/// Why an access to guest memory failed.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
pub enum MemoryError {
    /// Not every byte lies in a memory slot.
    #[error("guest memory has no slot at {0}")]
    NoSlot(Gpa),
    /// The VM does not allow this access in its present state.
    #[error("guest memory at {gpa}: {cause}")]
    Refused {
        /// First address that failed.
        gpa: Gpa,
        /// The message of the backend.
        cause: String,
    },
    /// The host could not supply the page: it is lost, or no frame could be freed.
    #[error("guest memory at {gpa}: {cause}")]
    Backing {
        /// First address that failed.
        gpa: Gpa,
        /// The origin of the error: a panic of the source belongs to the program.
        kind: FailureKind,
        /// The message of the backend.
        cause: String,
    },
}

impl MemoryError {
    /// The origin of the error, if a page is not provided.
    pub const fn failure_kind(&self) -> FailureKind {
        match self {
            Self::Backing { kind, .. } => *kind,
            _ => FailureKind::Lost,
        }
    }

    /// The kind of the cause.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::NoSlot(_) | Self::Refused { .. } => ErrorKind::Request,
            Self::Backing { .. } => ErrorKind::Host,
        }
    }
}

/// Reads and writes of a guest's memory by its VMM. [`GuestMemory::read`] and
/// [`GuestMemory::write`] sleep until non-resident pages have arrived.
///
/// The vCPUs may access the same bytes at the same time. An access of 1, 2, 4 or 8 bytes at a
/// multiple of its size is one atomic access with relaxed ordering. A larger access consists of
/// several of those.
pub trait GuestMemory {
    /// Copies `bytes` into the guest. Dirty tracking reports the pages, as after a guest's write.
    fn write(&self, gpa: Gpa, bytes: &[u8]) -> Result<(), MemoryError>;

    /// Copies out of the guest.
    fn read(&self, gpa: Gpa, into: &mut [u8]) -> Result<(), MemoryError>;

    /// Copies out of the guest without I/O. Returns `false` if a page is not resident or has no
    /// memory slot.
    fn peek(&self, gpa: Gpa, into: &mut [u8]) -> bool;
}

/// Takes unneeded memory back from a guest, as a balloon device does.
pub trait Balloon {
    /// Discards the pages of `gfns`, which lie in slots: they read as zeros from now on, without a
    /// request to a page source. On return no vCPU sees the old bytes. Dirty tracking reports the
    /// pages, as after a write.
    ///
    /// # Errors
    /// No slot holds all of `gfns`, or the backend cannot discard pages of that slot: parts of huge
    /// pages of a memory file, for example. Pages before it may be discarded.
    fn discard(&self, gfns: GfnRange) -> Result<(), MemoryError>;
}

/// Pages out memory that Linux gives to the backend page by page, such as a private file. Nothing
/// else of the backend evicts such pages.
pub trait PageOut {
    /// Asks Linux to page out the pages of `gfns`, which lie in slots, and returns how many have
    /// left. A vCPU's next access of one does not read it inside guest code: the guest gets
    /// page-not-present, or the vCPU waits. Any other access waits.
    ///
    /// Pages stay that the guest has not touched yet, that an instruction in progress needs, or
    /// that Linux has no place for: a written page needs a swap device, a clean page of a file does
    /// not. Takes as long as Linux writes, and holds up only vCPUs that need one of the 512 pages
    /// that are being paged out.
    ///
    /// # Errors
    /// No slot holds all of `gfns`, or they are not such memory. Huge pages of hugetlbfs never
    /// leave. Pages before it may have left.
    fn page_out(&self, gfns: GfnRange) -> Result<PageCount, MemoryError>;
}
