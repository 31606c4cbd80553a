//! Why a VM is not saved, restored or moved.

use crate::Snapshot;
use crate::stream::STREAMS_MAX;
use lacuna_addr::{Gpa, NoRoom};
use lacuna_machine::{
    DeviceError, DirtyError, ErrorKind, MemoryError, MemorySlotError, StateError,
};
use lacuna_source::{FileError, PathError, TouchesError};
use rustix::io::Errno;
use std::io;
use std::path::{Path, PathBuf};

/// Why a VM is not saved, restored or moved. If a save or a send fails, the guest resumes
/// unchanged. If a restore or a receive fails, drop the VM: it is of no use.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MigrateError {
    /// A file or folder cannot be used.
    #[error("{}: cannot {what}: {error}", shown(path))]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The attempted action.
        what: &'static str,
        /// The system's error.
        error: io::Error,
    },
    /// The place of the new snapshot is not empty.
    #[error("{} exists already: name another path, or remove it first", shown(.0))]
    Exists(PathBuf),
    /// A file of a snapshot is damaged, or is no such file.
    #[error(
        "{}: {wrong}: the snapshot is damaged, or another program has written it",
        shown(path)
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        wrong: String,
    },
    /// A snapshot of another version of the format.
    #[error(
        "{}: format {found}, and this release reads formats up to {known}: use the release that \
         wrote it",
        shown(path)
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: u32,
        /// The format of this release.
        known: u32,
    },
    /// The VM differs from the saved machine.
    #[error("the VM's {what} is {is}, and the saved machine's is {saved}: make the VM with that")]
    OtherMachine {
        /// The differing property.
        what: &'static str,
        /// The VM's.
        is: String,
        /// The saved machine's.
        saved: String,
    },
    /// The run of the guest is over, or has not begun.
    #[error("the guest does not run: there is nothing to save or move")]
    NotRunning,
    /// Memory slots changed meanwhile.
    #[error("the memory slots of the VM have changed meanwhile: try again when they stay")]
    SlotsChanged,
    /// A vCPU does not leave the middle of an instruction.
    #[error("{0}; it was tried again and again: answer the vCPU's exits, and try again")]
    Busy(StateError),
    /// The state of a vCPU or of the VM.
    #[error(transparent)]
    State(#[from] StateError),
    /// The devices or their state.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A page of the VM cannot be read or written.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The VM does not log writes.
    #[error(transparent)]
    Dirty(#[from] DirtyError),
    /// The VM does not take a memory slot.
    #[error(transparent)]
    Slot(#[from] MemorySlotError),
    /// The VM does not make its vCPUs.
    #[error("{0}")]
    Vcpus(String),
    /// The VMM of the destination makes no VM for the incoming guest.
    #[error("{0}")]
    NoVm(String),
    /// The caller's progress function has said `Break`.
    #[error("cancelled; the guest keeps running where it ran")]
    Cancelled,
    /// The host has no memory for a file's content.
    #[error("{}: {error}", shown(path))]
    NoRoom {
        /// The file.
        path: PathBuf,
        /// How much it needs.
        error: NoRoom,
    },
    /// A diff and its base are in two folders.
    #[error(
        "the new snapshot has to be in the folder of {}, which has its unchanged pages: give a \
         path there", shown(.0)
    )]
    Apart(PathBuf),
    /// The base of the new diff was removed, or another snapshot is in its place.
    #[error(
        "{}: the last snapshot of this guest is not there any more as it was saved, so its changes \
         cannot be saved: save the guest whole", shown(.0)
    )]
    NoBase(PathBuf),
    /// A diff would have more layers than a restore takes.
    #[error(
        "{}: it is made of {max} snapshots, and none can be made of more: save the guest whole",
        shown(.0), max = Snapshot::LAYERS_MAX
    )]
    Layers(PathBuf),
    /// An eager restore leaves out pages of zeros, which a page source would provide.
    #[error(
        "the VM has a page source: make it without one for this restore, or restore it lazily with \
         the pages of the snapshot as its source"
    )]
    HasSource,
    /// The memory file cannot be read on demand.
    #[error(transparent)]
    Source(#[from] FileError),
    /// A log of writes was turned off while it was needed.
    #[error(
        "the VMM has turned the log of a memory slot off meanwhile, so it is not known which pages \
         were written: leave it on"
    )]
    LogEnded,
    /// The host gives no thread.
    #[error(
        "cannot start a thread: {0}; raise the limit on processes (`ulimit -u`), and try again"
    )]
    Thread(io::Error),
    /// A message is longer than a stream carries.
    #[error(
        "the machine's state takes {bytes} bytes, and a stream carries {most}: move a machine of \
         fewer vCPUs"
    )]
    TooLong {
        /// Its size.
        bytes: usize,
        /// The most.
        most: usize,
    },
    /// The plan has no connection, or too many.
    #[error("a migration has 1 to {max} streams, and the plan says {0}", max = STREAMS_MAX)]
    Streams(u32),
    /// The connection to the other side of a migration has ended.
    #[error("the connection was cut: {0}")]
    Cut(io::Error),
    /// The system gives no random numbers for the name of a migration.
    #[error("the system gives no random numbers: {0}; try again")]
    Random(io::Error),
    /// There is no memory to compress or decompress pages.
    #[error("no memory to compress pages or decompress them: {0}; free memory, and try again")]
    Codec(io::Error),
    /// Pages are to be compressed with Zstandard, in a build without it.
    #[error("this build has no zstd (feature `zstd` of lacuna-migrate): compress with lz4")]
    NoZstd,
    /// The other side of a migration sends bytes that no release of Lacuna sends.
    #[error("the stream is damaged: {0}; use one release on both sides, and TLS on a bad network")]
    Stream(String),
    /// The other side of a migration has given up.
    #[error("the other side refused: {0}")]
    Refused(String),
    /// The other side of a migration speaks another version.
    #[error(
        "the other side speaks version {found}, and this release {known}: use one release on both \
         sides"
    )]
    PeerVersion {
        /// Its version.
        found: u32,
        /// The version of this release.
        known: u32,
    },
    /// A source wants to resume a migration, but this process has no guest of it.
    #[error(
        "this process has no guest of that migration: the process that had it has ended, or is at \
         another address"
    )]
    NotHere,
    /// A VM without missing memory cannot be restored lazily.
    #[error("the VM has no page source: make it with the source of the snapshot or migration")]
    NoSource,
    /// For a lazy restore, a post-copy or a hybrid, the guest's memory slots must be a new VM's.
    #[error("the guest's memory slots differ from a new VM's: use an eager restore or a pre-copy")]
    OtherSlots,
    /// A restore in place needs a VM whose memory is the snapshot's file.
    #[error(
        "the VM's memory is not the snapshot's file: make the VM with a private mapping of \
         Snapshot::memory_file, or restore into it by Snapshot::restore"
    )]
    OtherMemory,
    /// A record of first touches cannot be read or written.
    #[error(transparent)]
    Touches(TouchesError),
    /// First touches of another snapshot.
    #[error("the first touches were recorded with another snapshot: give this snapshot's record")]
    OtherSnapshot,
    /// A memory slot that no machine can have.
    #[error("the memory slot at {0} is not one that a machine can have")]
    Layout(Gpa),
}

/// Whether a connection failed because this host has no descriptor or memory for it.
fn is_of_this_host(error: &io::Error) -> bool {
    let of_host = [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::NOBUFS];
    let errno = error.raw_os_error();
    of_host
        .iter()
        .any(|known| errno == Some(known.raw_os_error()))
}

/// The longest text of another process that an error shows.
const SHOWN_MAX: usize = 4096;

/// Another process's text for a terminal: without control characters, and not too long.
pub(crate) fn printable(text: &str) -> String {
    let plain = |c: char| if c.is_control() { ' ' } else { c };
    let mut shown: String = text.chars().take(SHOWN_MAX).map(plain).collect();
    if text.chars().nth(SHOWN_MAX).is_some() {
        shown.push_str("...");
    }
    shown
}

/// A path, which a snapshot may have named.
fn shown(path: &Path) -> String {
    printable(&path.to_string_lossy())
}

impl From<PathError> for MigrateError {
    fn from(error: PathError) -> Self {
        let PathError { path, what, error } = error;
        Self::Io { path, what, error }
    }
}

/// An error of the system keeps its kind.
impl From<TouchesError> for MigrateError {
    fn from(error: TouchesError) -> Self {
        match error {
            TouchesError::Io(error) => error.into(),
            TouchesError::NoRoom { path, error } => Self::NoRoom { path, error },
            error => Self::Touches(error),
        }
    }
}

impl MigrateError {
    /// Where the cause lies.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Io { error, .. } => match error.kind() {
                io::ErrorKind::NotFound
                | io::ErrorKind::NotADirectory
                | io::ErrorKind::PermissionDenied
                | io::ErrorKind::ReadOnlyFilesystem
                | io::ErrorKind::InvalidFilename => ErrorKind::Request,
                _ => ErrorKind::Host,
            },
            Self::Exists(_)
            | Self::Damaged { .. }
            | Self::Version { .. }
            | Self::OtherMachine { .. }
            | Self::NotRunning
            | Self::NoZstd
            | Self::SlotsChanged
            | Self::LogEnded
            | Self::Layout(_)
            | Self::NoSource
            | Self::Apart(_)
            | Self::NoBase(_)
            | Self::Layers(_)
            | Self::HasSource
            | Self::Dirty(DirtyError::InUse)
            | Self::OtherSlots
            | Self::OtherMemory
            | Self::Touches(_)
            | Self::OtherSnapshot
            | Self::NotHere => ErrorKind::Request,
            Self::Cancelled => ErrorKind::Cancelled,
            Self::Streams(_) | Self::TooLong { .. } => ErrorKind::Request,
            Self::Stream(_) | Self::Refused(_) | Self::PeerVersion { .. } => ErrorKind::Peer,
            Self::Cut(error) if is_of_this_host(error) => ErrorKind::Host,
            Self::Cut(_) => ErrorKind::Peer,
            Self::Thread(_) | Self::Random(_) | Self::Codec(_) => ErrorKind::Host,
            Self::Source(FileError::Thread(_)) => ErrorKind::Host,
            Self::Source(_) => ErrorKind::Request,
            Self::Device(error) => error.kind(),
            Self::State(_) => ErrorKind::Request,
            Self::Busy(_) => ErrorKind::Guest,
            Self::Memory(error) => error.kind(),
            Self::Slot(error) => error.kind(),
            Self::Dirty(_) | Self::Vcpus(_) | Self::NoVm(_) | Self::NoRoom { .. } => {
                ErrorKind::Host
            }
        }
    }

    pub(crate) fn stream(wrong: impl Into<String>) -> Self {
        Self::Stream(printable(&wrong.into()))
    }

    pub(crate) fn io(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |error| Self::Io { path, what, error }
    }

    pub(crate) fn damaged(path: &Path, wrong: impl Into<String>) -> Self {
        Self::Damaged {
            path: path.to_owned(),
            wrong: printable(&wrong.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fault of the migration's other side is not this host's failure.
    #[test]
    fn a_cut_is_the_peers_unless_this_host_has_no_descriptor() {
        let cut = |error| MigrateError::Cut(error).kind();
        assert_eq!(cut(io::ErrorKind::UnexpectedEof.into()), ErrorKind::Peer);
        assert_eq!(cut(Errno::CONNRESET.into()), ErrorKind::Peer);
        assert_eq!(cut(Errno::MFILE.into()), ErrorKind::Host);
        assert_eq!(MigrateError::stream("?").kind(), ErrorKind::Peer);
        let refused = MigrateError::Refused("its swap is full".into());
        assert_eq!(refused.kind(), ErrorKind::Peer);
    }

    /// Another process's text reaches a terminal.
    #[test]
    fn texts_have_no_control_characters_and_an_end() {
        let hostile = format!("\u{1b}[2J\0\r{}", "x".repeat(70_000));
        let path = Path::new(&hostile);
        let io = |path| MigrateError::io(path, "read the file")(io::ErrorKind::NotFound.into());
        for error in [
            MigrateError::stream(&*hostile),
            MigrateError::damaged(path, &*hostile),
            io(path),
        ] {
            let text = error.to_string();
            assert!(!text.contains(char::is_control), "{text:?}");
            assert!(text.len() < 3 * SHOWN_MAX, "{}", text.len());
        }
    }
}
