//! The errors of Linux memory.

use lacuna_addr::PageCount;

/// Why Linux memory cannot be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LinuxError {
    /// A file cannot be guest memory, or does not have a page.
    #[error("memory file: {reason}")]
    SharedMemory {
        /// The reason.
        reason: String,
    },
    /// More Linux memory than the host has addresses for.
    #[error(
        "no room for {pages} pages of Linux memory: the host has addresses for {room} pages, some \
         of them in use; let it reserve more when it is made, or end the handlers that may still \
         fill the memory of {late} regions that were removed"
    )]
    Room {
        /// The requested pages.
        pages: PageCount,
        /// Pages that the host has addresses for, or could have.
        room: PageCount,
        /// Removed regions with handlers that still exist.
        late: usize,
    },
    /// The kernel refused a userfaultfd.
    #[error(
        "cannot use userfaultfd for the guest's memory: {0}; allow the system call or \
         /dev/userfaultfd for this process, or take the memory from the host's own budget"
    )]
    Userfaultfd(String),
}

impl LinuxError {
    /// Whether another request could be carried out. Otherwise the cause lies in this machine.
    pub const fn is_of_request(&self) -> bool {
        match self {
            Self::Room { .. } | Self::SharedMemory { .. } => true,
            Self::Userfaultfd(_) => false,
        }
    }
}
