//! Why a save or a restore has failed.

use crate::frame::{Command, FrameError};
use rustix::io::Errno;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Why a save or a restore has failed. A failed save leaves no snapshot.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OffloadError {
    /// The other process has another user.
    #[error("the process at the other end of the socket runs as user {0}: run both as one user")]
    User(u32),
    /// A wrong message.
    #[error("the VMM broke the protocol: {0}")]
    Frame(#[from] FrameError),
    /// A late message.
    #[error("the VMM sent nothing for {0:?} in the middle of the migration: look at its log")]
    Silent(Duration),
    /// The connection has ended.
    #[error("the VMM closed the connection {0}: look at its log")]
    Closed(&'static str),
    /// The sender has given the migration up.
    #[error("the VMM abandoned the migration: its VM stays with it")]
    Abandoned,
    /// The receiver has refused a request.
    #[error("the VMM refused {0}: its log says why")]
    Refused(Command),
    /// A configuration, a descriptor or memory that cannot be used, and what to do.
    #[error("the VM cannot be saved: {0}")]
    Unusable(String),
    /// The memory may have changed while it was copied.
    #[error(
        "the VMM closed the connection or sent more while its memory was copied, so the copy is \
         discarded: the VM is where it was"
    )]
    NotWaiting,
    /// An unusable snapshot.
    #[error("the snapshot {} cannot be used: {reason}", folder.display())]
    Snapshot {
        /// The snapshot.
        folder: PathBuf,
        /// The problem, and what to do.
        reason: String,
    },
    /// No VMM at the socket.
    #[error(
        "cannot connect to {}: {error}; let the VMM wait there first, by ch-remote \
         receive-migration", socket.display()
    )]
    Connect {
        /// The socket.
        socket: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// A failed access to a file.
    #[error("cannot read or write {}: {error}; the VM is where it was", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// A page that the source does not provide.
    #[error("page {page} of the snapshot's memory is lost, and the VM is not restored: {reason}")]
    Lost {
        /// Its number in the memory file.
        page: u64,
        /// The source's words.
        reason: String,
    },
    /// A failed system call.
    #[error("cannot {what}: {errno}")]
    System {
        /// What failed.
        what: &'static str,
        /// The system's error.
        errno: Errno,
    },
    /// Huge pages of shared memory.
    #[error(
        "the host gives shared memory huge pages ({0}), so a guest could read zeros beside a page \
         that is in place: write never to that file, or restore without --on-demand"
    )]
    HugePages(String),
    /// The caller has asked for the end.
    #[error("interrupted: the VM is where it was")]
    Interrupted,
}

impl OffloadError {
    /// Whether the VMM has failed or refused, rather than this host or the caller.
    pub const fn is_of_vmm(&self) -> bool {
        matches!(
            self,
            Self::Frame(_)
                | Self::Silent(_)
                | Self::Closed(_)
                | Self::Abandoned
                | Self::Refused(_)
                | Self::Unusable(_)
                | Self::Connect { .. }
                | Self::NotWaiting
        )
    }

    pub(crate) fn file(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        |error| Self::File { path, error }
    }

    pub(crate) fn system(what: &'static str) -> impl FnOnce(Errno) -> Self {
        move |errno| Self::System { what, errno }
    }
}
