//! The errors of the host memory manager. Each message says what happened, where, and what to do.

use lacuna_addr::{BackingAddr, NoRoom, PageCount};
use lacuna_source::FailureKind;
use std::sync::Arc;

/// Why the host memory manager cannot do what was asked. It can be cloned, because one error may be
/// reported on several threads.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostError {
    /// Fewer frames than the guests' vCPUs may need at once.
    #[error(
        "memory budget too small: {budget} pages for {vcpus} vCPUs, at least {minimum} pages \
         ({} KiB) are needed", minimum.bytes() / 1024
    )]
    BudgetTooSmall {
        /// The budget that was given.
        budget: PageCount,
        /// The number of vCPUs that must make progress in it.
        vcpus: usize,
        /// The smallest budget that suffices.
        minimum: PageCount,
    },
    /// More frames than a page word can name.
    #[error("memory budget too large: {budget} pages, at most {maximum} are supported")]
    BudgetTooLarge {
        /// The budget that was given.
        budget: PageCount,
        /// The largest possible.
        maximum: PageCount,
    },
    /// The kernel refused the memory of the budget.
    #[error(
        "cannot get {bytes} bytes of memory for the budget: {reason}; give a smaller budget, or \
         raise the limit on this process's memory (ulimit -v, cgroup)"
    )]
    Map {
        /// Bytes asked for.
        bytes: u64,
        /// The system's words.
        reason: String,
    },
    /// The manager's own tables do not fit.
    #[error(transparent)]
    Tables(#[from] NoRoom),
    /// A region of no page, or one that passes the end of the numbering.
    #[error("cannot add a region of {0} pages")]
    BadRegion(PageCount),
    /// The range is not a region's, or not the whole of one.
    #[error("no region begins at {0} with that length")]
    NoSuchRegion(BackingAddr),
    /// The swap device cannot be opened.
    #[error("cannot create a swap file in {path}: {reason}")]
    SwapSetup {
        /// The directory.
        path: String,
        /// The system's words.
        reason: String,
    },
    /// Nothing more fits on the swap device. Nothing was lost.
    #[error(
        "swap device full: {device}: {reason}; give it more space, or the guest a larger budget"
    )]
    SwapFull {
        /// Which device.
        device: String,
        /// The device's reason.
        reason: String,
    },
    /// A page could not be written out. It stays resident: nothing was lost.
    #[error("cannot write to swap: {device}: {reason}")]
    SwapWrite {
        /// Which device.
        device: String,
        /// The system's words.
        reason: String,
    },
    /// Every frame is pinned by an instruction in progress or in flight.
    #[error(
        "no frame can be reclaimed: {in_use} of {budget} frames in use, all pinned or in flight"
    )]
    Exhausted {
        /// Frames that hold a page.
        in_use: usize,
        /// Frames there are.
        budget: usize,
    },
    /// A shared memory file cannot be guest memory, or does not have a page.
    #[error("shared memory: {reason}")]
    SharedMemory {
        /// Why.
        reason: String,
    },
    /// Part of a unit was to be provided: its pages are only provided together.
    #[error(
        "{pages} pages from {from} on cannot be provided: the memory is in huge pages, each of \
         which comes at once; provide whole and aligned runs of {unit} pages"
    )]
    PartOfHugePage {
        /// The first page.
        from: BackingAddr,
        /// How many were given.
        pages: PageCount,
        /// Pages of a huge page.
        unit: u64,
    },
    /// The page's content is gone.
    #[error(transparent)]
    Lost(#[from] LostPage),
    /// More Linux memory than the host has addresses for.
    #[error(
        "no room for {pages} pages of Linux memory: the host has addresses for {room} pages, some \
         of them in use; let it reserve more when it is made, or end the handlers that may still \
         fill the memory of {late} regions that were removed"
    )]
    LinuxRoom {
        /// The requested pages.
        pages: PageCount,
        /// Pages that the host has addresses for, or that it could have.
        room: PageCount,
        /// Removed regions whose handlers are not gone.
        late: usize,
    },
    /// The kernel refused a userfaultfd.
    #[error(
        "cannot use userfaultfd for the guest's memory: {0}; allow the system call or \
         /dev/userfaultfd for this process, or take the memory from the host's own budget"
    )]
    Userfaultfd(String),
    /// The kernel does not take discarded pages back.
    #[error("cannot discard pages from {from} on: {reason}; they keep their bytes")]
    Discard {
        /// The first page.
        from: BackingAddr,
        /// The system's words.
        reason: String,
    },
    /// A thread of the manager's own could not be started.
    #[error("cannot start a thread: {0}; raise the limit on processes (ulimit -u)")]
    Thread(String),
}

/// The content of a page is lost.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("page {page} is lost: {reason}")]
pub struct LostPage {
    /// The page's address.
    pub page: BackingAddr,
    /// Why.
    pub reason: Arc<str>,
    /// Whose error it is.
    pub kind: FailureKind,
}

impl LostPage {
    pub(crate) fn new(page: BackingAddr, reason: impl Into<Arc<str>>) -> Self {
        let (reason, kind) = (reason.into(), FailureKind::Lost);
        Self { page, reason, kind }
    }
}

impl HostError {
    /// Whose error it is, if a page is not provided.
    pub const fn failure_kind(&self) -> FailureKind {
        match self {
            Self::Lost(lost) => lost.kind,
            _ => FailureKind::Lost,
        }
    }
}

/// Why a swap device failed a command.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SwapError {
    /// No space is left.
    #[error("{0}")]
    Full(String),
    /// The device has no room for this entry or any after it. Entries before it can be used.
    #[error("{0}")]
    Ends(String),
    /// The device failed.
    #[error("{0}")]
    Io(String),
    /// What was read is not what was written.
    #[error(
        "it is not what was written there: the device, or another program that wrote to it, has \
         damaged it; check the device, and start the guest anew"
    )]
    Damaged,
}

/// A write that stopped part-way: the first `done` pages are stored, the others are not.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{error} (after {done} pages)")]
pub struct WriteFailed {
    /// Pages stored before the failure.
    pub done: usize,
    /// The failure.
    pub error: SwapError,
}
