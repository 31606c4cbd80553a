//! Opens the page sources that `--pages-from`, `--from` and `lacuna serve` name.

use crate::args::PagesFrom;
use crate::exit::Exit;
use lacuna::migrate::{MigrateError, Snapshot, StoredFile};
use lacuna::source::{
    External, FileError, LayeredFile, MemoryFile, PageSource, Peer, PeerError, Policy, WhenGone,
    Zeros,
};
use lacuna::{PAGE_SIZE, PageCount};
use lacuna_control::Refused;
use lacuna_control::store::{self, url};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Why a source cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// An unusable memory file.
    #[error(transparent)]
    File(#[from] FileError),
    /// An unusable snapshot.
    #[error(transparent)]
    Snapshot(#[from] MigrateError),
    /// An unusable object store.
    #[error(transparent)]
    Store(#[from] Refused),
    /// An unreachable or unusable peer.
    #[error("{from}: {error}")]
    Peer {
        /// The option's value.
        from: PagesFrom,
        /// The problem.
        error: PeerError,
    },
    /// A handler, in a process that gets no userfaultfd.
    #[error(
        "{from}: this process gets no userfaultfd ({cause}); allow the system call or \
         /dev/userfaultfd"
    )]
    Handler {
        /// The option's value.
        from: PagesFrom,
        /// The system's words.
        cause: String,
    },
    /// Pages that arrive in real time, in a seeded run.
    #[error(
        "--seed repeats a run only with zeros, because pages from {0} come in real time: leave one \
         of the two out"
    )]
    Seed(PagesFrom),
    /// A handler, as the source of other processes.
    #[error(
        "a handler fills memory itself and gives no pages to others: use zeros, file:PATH, \
         snapshot:PATH or peer:PATH"
    )]
    GivesNoPages,
    /// A source without a length of its own, and no `--memory`.
    #[error("{0} has no length: give its memory, as in --memory 512M")]
    NoLength(PagesFrom),
    /// More memory than the source has.
    #[error("{from} has {has} bytes, and {wanted} bytes were asked for: give less memory")]
    TooShort {
        /// The option's value.
        from: PagesFrom,
        /// Bytes of the source.
        has: u64,
        /// Bytes of the memory.
        wanted: u64,
    },
    /// Memory of no pages, or a part of one.
    #[error("{0} bytes of memory: give whole pages of 4 KiB, at least one")]
    NoWholePages(u64),
    /// A memory file of no pages, or of a part of one.
    #[error("the memory file {} has {bytes} bytes, which are no whole pages of 4 KiB: copy it \
             again, or give its memory, as in --memory 512M", path.display())]
    OddFile {
        /// The file.
        path: PathBuf,
        /// Its bytes.
        bytes: u64,
    },
}

impl SourceError {
    /// How the command ends.
    pub fn exit(&self) -> Exit {
        match self {
            Self::File(FileError::Thread(_))
            | Self::Peer {
                error: PeerError::Io(_),
                ..
            }
            | Self::Handler { .. } => Exit::Host,
            Self::Snapshot(error) => error.kind().into(),
            Self::Store(refused) => refused.kind.into(),
            _ => Exit::Usage,
        }
    }
}

impl From<SourceError> for (Exit, String) {
    fn from(error: SourceError) -> Self {
        (error.exit(), error.to_string())
    }
}

/// A source, and the pages that it provides.
pub type Opened = (Box<dyn PageSource>, PageCount);

/// Opens the source `from` for `pages` pages, or for as many as it has. `interrupt` ends a wait for
/// an object store.
///
/// # Errors
/// The source cannot be used, has fewer pages, or has no length and `pages` is `None`.
pub fn open(
    from: &PagesFrom,
    pages: Option<PageCount>,
    policy: Policy,
    interrupt: &Arc<AtomicBool>,
) -> Result<Opened, SourceError> {
    open_for(Asking::Guest, from, pages, policy, interrupt)
}

/// Whose threads ask for pages.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Asking {
    /// A guest's vCPUs: they do not wait for the copy of a page.
    Guest,
    /// This program's, for other processes.
    Server,
}

fn open_for(
    asking: Asking,
    from: &PagesFrom,
    pages: Option<PageCount>,
    policy: Policy,
    interrupt: &Arc<AtomicBool>,
) -> Result<Opened, SourceError> {
    let given = || pages.ok_or_else(|| SourceError::NoLength(from.clone()));
    let at_most = |has: PageCount| match pages {
        Some(pages) if pages > has => Err(SourceError::TooShort {
            from: from.clone(),
            has: has.bytes(),
            wanted: pages.bytes(),
        }),
        pages => Ok(pages.unwrap_or(has)),
    };
    // A memory file refuses too many pages itself.
    let of_file = |path: &Path| pages.map_or_else(|| pages_of_file(path), Ok);
    Ok(match from {
        PagesFrom::Zeros => (Box::new(Zeros), given()?),
        PagesFrom::File(path) => {
            let pages = of_file(path)?;
            let file = MemoryFile::open(path, pages, policy)?;
            match asking {
                Asking::Guest => (Box::new(file), pages),
                Asking::Server => (Box::new(file.answering_at_once()), pages),
            }
        }
        PagesFrom::Layers { base, diffs } => {
            let pages = of_file(base)?;
            let file = LayeredFile::open(base, diffs, pages, &policy)?;
            match asking {
                Asking::Guest => (Box::new(file), pages),
                Asking::Server => (Box::new(file.answering_at_once()), pages),
            }
        }
        PagesFrom::Snapshot(place) => {
            let snapshot = match url(place) {
                None => Snapshot::open(place)?,
                Some(url) => Snapshot::open_in(store::open(url, patience(&policy), interrupt)?)?,
            };
            let source = snapshot.pages_on_demand(policy)?;
            let pages = at_most(source.pages())?;
            (Box::new(source), pages)
        }
        PagesFrom::Object(url) => {
            let object = object(url, &policy, interrupt)?;
            let pages = at_most(whole_pages(object.length())?)?;
            (object.page_source(pages, policy)?, pages)
        }
        PagesFrom::Peer(path) => {
            let pages = given()?;
            let peer = Peer::connect(path, pages, policy);
            let peer = peer.map_err(|error| SourceError::Peer {
                from: from.clone(),
                error,
            })?;
            (Box::new(peer), pages)
        }
        PagesFrom::Handler(path) => {
            let external = External::process(path, policy);
            let external = external.map_err(|errno| no_handler(from, errno))?;
            (Box::new(external), given()?)
        }
    })
}

/// As [`open`], for other processes: a handler is refused.
///
/// # Errors
/// As [`open`]; [`SourceError::GivesNoPages`].
pub fn open_to_serve(
    from: &PagesFrom,
    pages: Option<PageCount>,
    policy: Policy,
    interrupt: &Arc<AtomicBool>,
) -> Result<Opened, SourceError> {
    match from {
        PagesFrom::Handler(_) => Err(SourceError::GivesNoPages),
        _ => open_for(Asking::Server, from, pages, policy, interrupt),
    }
}

/// The memory file at `address`, `s3://bucket/prefix/name`.
fn object(
    address: &str,
    policy: &Policy,
    interrupt: &Arc<AtomicBool>,
) -> Result<Box<dyn StoredFile>, SourceError> {
    let (folder, name) = address.rsplit_once('/').unwrap_or((address, ""));
    let folder = store::open(folder, patience(policy), interrupt)?;
    let file = folder.open(name).map_err(|source| FileError::Open {
        path: address.into(),
        source,
    });
    Ok(file?)
}

/// How long a thread waits for an object store.
fn patience(policy: &Policy) -> Duration {
    match policy.when_gone {
        WhenGone::Hold => Duration::MAX,
        _ => policy.patience,
    }
}

fn pages_of_file(path: &Path) -> Result<PageCount, SourceError> {
    let found = std::fs::metadata(path).map_err(|source| FileError::Open {
        path: path.to_owned(),
        source,
    });
    let found = found?;
    if !found.is_file() {
        return Err(FileError::NotAFile(path.to_owned()).into());
    }
    let odd = |_| SourceError::OddFile {
        path: path.to_owned(),
        bytes: found.len(),
    };
    whole_pages(found.len()).map_err(odd)
}

/// A handler that cannot be used.
pub fn no_handler(from: &PagesFrom, errno: impl ToString) -> SourceError {
    SourceError::Handler {
        from: from.clone(),
        cause: errno.to_string(),
    }
}

/// The pages of a source with `bytes` bytes.
///
/// # Errors
/// They are not whole pages.
pub fn whole_pages(bytes: u64) -> Result<PageCount, SourceError> {
    match bytes != 0 && bytes.is_multiple_of(PAGE_SIZE as u64) {
        true => Ok(PageCount::from_bytes(bytes)),
        false => Err(SourceError::NoWholePages(bytes)),
    }
}
