//! The errors of the host memory manager. Each message says what happened, where, and what to do.

use lacuna_addr::{BackingAddr, NoRoom, PageCount};
use lacuna_frames::MapFailed;
use lacuna_linux::LinuxError;
use lacuna_source::FailureKind;
use lacuna_swap::SetupFailed;
use std::sync::Arc;

/// Why the host memory manager cannot carry out a request. It can be cloned, because one error may
/// be reported on several threads.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostError {
    /// Fewer frames than the guests' vCPUs may need at once.
    #[error(
        "memory budget too small: {budget} pages for {vcpus} vCPUs, at least {minimum} pages \
         ({} KiB) are needed", minimum.bytes() / 1024
    )]
    BudgetTooSmall {
        /// The given budget.
        budget: PageCount,
        /// The number of vCPUs that must make progress in it.
        vcpus: usize,
        /// The smallest budget that suffices.
        minimum: PageCount,
    },
    /// More frames than a page word can name.
    #[error("memory budget too large: {budget} pages, at most {maximum} are supported")]
    BudgetTooLarge {
        /// The given budget.
        budget: PageCount,
        /// The largest possible budget.
        maximum: PageCount,
    },
    /// A larger budget than the host's pool.
    #[error(
        "memory budget too large: {budget} pages, and the VM was made with {pool}: give at most so \
         many, or start it with more"
    )]
    AbovePool {
        /// The given budget.
        budget: PageCount,
        /// The size of the pool.
        pool: PageCount,
    },
    /// The kernel refused the memory of the budget.
    #[error(transparent)]
    Map(#[from] MapFailed),
    /// The manager's own tables do not fit.
    #[error(transparent)]
    Tables(#[from] NoRoom),
    /// A region without pages, or beyond the end of the numbering.
    #[error("cannot add a region of {0} pages")]
    BadRegion(PageCount),
    /// The range is not in a region, or not a whole region.
    #[error("no region begins at {0} with that length")]
    NoSuchRegion(BackingAddr),
    /// The swap device cannot be opened.
    #[error(transparent)]
    SwapSetup(#[from] SetupFailed),
    /// Nothing more fits on the swap device. Nothing was lost.
    #[error(
        "swap device full: {device}: {reason}; give it more space, or the guest a larger budget"
    )]
    SwapFull {
        /// The device.
        device: String,
        /// The device's reason.
        reason: String,
    },
    /// A page could not be written out. It stays resident: nothing was lost.
    #[error("cannot write to swap: {device}: {reason}")]
    SwapWrite {
        /// The device.
        device: String,
        /// The system's error.
        reason: String,
    },
    /// Every frame is pinned by an instruction in progress, or in flight.
    #[error(
        "no frame can be reclaimed: {in_use} of {budget} frames in use, all pinned or in flight"
    )]
    Exhausted {
        /// Frames that hold a page.
        in_use: usize,
        /// Frames of the budget.
        budget: usize,
    },
    /// The page's content is gone.
    #[error(transparent)]
    Lost(#[from] LostPage),
    /// There is no such Linux memory.
    #[error(transparent)]
    Linux(#[from] LinuxError),
    /// The pages cannot be discarded.
    #[error("cannot discard pages from {from} on: {reason}; they keep their bytes")]
    Discard {
        /// The first page.
        from: BackingAddr,
        /// The reason.
        reason: String,
    },
    /// The pages cannot be paged out.
    #[error("cannot page out pages from {from} on: {reason}; they stay in memory")]
    PageOut {
        /// The first page.
        from: BackingAddr,
        /// The reason.
        reason: String,
    },
    /// A thread of the manager could not be started.
    #[error("cannot start a thread: {0}; raise the limit on processes (ulimit -u)")]
    Thread(String),
}

/// The content of a page is lost.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("page {page} is lost: {reason}")]
pub struct LostPage {
    /// The page's address.
    pub page: BackingAddr,
    /// The reason.
    pub reason: Arc<str>,
    /// Whether the source or the program failed.
    pub kind: FailureKind,
}

impl LostPage {
    pub(crate) fn new(page: BackingAddr, reason: impl Into<Arc<str>>) -> Self {
        let (reason, kind) = (reason.into(), FailureKind::Lost);
        Self { page, reason, kind }
    }
}

impl HostError {
    /// Whether another request could be carried out. Otherwise the cause lies in this machine.
    pub const fn is_of_request(&self) -> bool {
        match self {
            Self::Linux(error) => error.is_of_request(),
            Self::BudgetTooSmall { .. }
            | Self::BudgetTooLarge { .. }
            | Self::AbovePool { .. }
            | Self::BadRegion(_)
            | Self::NoSuchRegion(_) => true,
            Self::Map(_)
            | Self::Tables(_)
            | Self::SwapSetup(_)
            | Self::SwapFull { .. }
            | Self::SwapWrite { .. }
            | Self::Exhausted { .. }
            | Self::Discard { .. }
            | Self::PageOut { .. }
            | Self::Lost(_)
            | Self::Thread(_) => false,
        }
    }

    /// The kind of a failure to provide a page.
    pub const fn failure_kind(&self) -> FailureKind {
        match self {
            Self::Lost(lost) => lost.kind,
            _ => FailureKind::Lost,
        }
    }
}

/// The failed writes since the last successful one.
pub(crate) struct Failure {
    pub error: HostError,
    pub count: usize,
}
