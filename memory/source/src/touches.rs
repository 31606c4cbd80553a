//! The order in which a guest has requested its pages, and the file of this order.
//!
//! docs/formats.md describes the file. It is not in a snapshot's folder, which stays as it is.

use crate::SourcePage;
use crate::durable::{PathError, create_file, rename_durably};
use lacuna_addr::{NoRoom, room_for};
use lacuna_sync::{Mutex, lock, lock_order};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The first bytes of a record.
const MAGIC: [u8; 8] = *b"LACTOUCH";
const VERSION: u32 = 1;
/// Magic, version, the snapshot's checksum, its pages, the number of entries.
const HEADER: usize = 32;
const ENTRY: usize = size_of::<u64>();
const CHECKSUM: usize = size_of::<u32>();

/// The memory of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TouchedMemory {
    /// The CRC-32 of the file `checksums` of a Lacuna snapshot, which stands for all of its
    /// content. A raw memory file has none. Two memories are compared by it only if both have it.
    pub checksum: Option<NonZeroU32>,
    /// Its pages of 4 KiB.
    pub pages: u64,
}

/// Why a record of first touches is not read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TouchesError {
    /// A file or folder cannot be used.
    #[error(transparent)]
    Io(#[from] PathError),
    /// This process has no memory for the record.
    #[error("{}: {error}", path.display())]
    NoRoom {
        /// The file.
        path: PathBuf,
        /// The missing memory.
        error: NoRoom,
    },
    /// The record has another version.
    #[error(
        "{}: the record has version {found}, and this release knows {known}: record the first \
         touches anew",
        path.display()
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// The version of this release.
        known: u32,
    },
    /// A file is no whole record of first touches.
    #[error("{}: {wrong}: record the first touches anew", path.display())]
    NoRecord {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        wrong: &'static str,
    },
    /// A record was made with another memory.
    #[error("{}: the record is of another memory: give the one of this memory", .0.display())]
    OtherMemory(PathBuf),
}

/// The pages that a guest has requested, in the order of first touch: its working set.
/// [`Recorder::touches`] has them. To replay them is to provide them before the guest asks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Touches {
    memory: TouchedMemory,
    pages: Vec<SourcePage>,
}

/// Records each page that a guest requests. A clone records in the same list.
#[derive(Clone)]
pub struct Recorder {
    memory: TouchedMemory,
    asked: Arc<Mutex<Vec<SourcePage>, lock_order::Touches>>,
}

impl Recorder {
    /// An empty recorder for a guest with this memory.
    pub fn new(memory: TouchedMemory) -> Self {
        Self {
            memory,
            asked: Arc::default(),
        }
    }

    /// Notes a request.
    pub fn note(&self, page: SourcePage) {
        lock(&self.asked).push(page);
    }

    /// The pages requested so far.
    pub fn touches(&self) -> Touches {
        Touches {
            memory: self.memory,
            pages: lock(&self.asked).clone(),
        }
    }
}

impl Touches {
    /// A size for the first part of [`Touches::split_at`], to replay before the vCPUs run: 16 MiB.
    /// From a file in the page cache this took 50 ms on the soft backend and 70 ms on kvm.
    pub const HEAD_START: usize = 4096;

    /// The first `pages` of the record, or all, and the others.
    pub fn split_at(&self, pages: usize) -> (Self, Self) {
        let (first, others) = self.pages.split_at(pages.min(self.pages.len()));
        let part = |pages: &[SourcePage]| Self {
            memory: self.memory,
            pages: pages.to_vec(),
        };
        (part(first), part(others))
    }

    /// The pages, in their order.
    pub fn pages(&self) -> &[SourcePage] {
        &self.pages
    }

    /// Whether the record may be of `memory`.
    pub fn is_of(&self, memory: TouchedMemory) -> bool {
        self.memory.may_be(memory)
    }

    /// Writes the record to `path`, whole or not at all. Replaces an existing file.
    ///
    /// # Errors
    /// [`TouchesError::Io`].
    pub fn save(&self, path: &Path) -> Result<(), TouchesError> {
        let partial = Partial::beside(path);
        let bytes = self.to_bytes();
        let written = partial.create().and_then(|mut file| {
            file.write_all(&bytes)?;
            file.sync_all()
        });
        written.map_err(PathError::of(&partial.0, "write the file"))?;
        Ok(rename_durably(&partial.0, path)?)
    }

    /// Whether [`Touches::save`] can write there: `path` is no folder, and the temporary file can
    /// be made. Removes that file again.
    ///
    /// # Errors
    /// [`TouchesError::Io`].
    pub fn check_target(path: &Path) -> Result<(), TouchesError> {
        if path.is_dir() {
            let error = io::Error::new(
                io::ErrorKind::InvalidFilename,
                "it is a folder: name a file",
            );
            return Err(PathError::of(path, "write the file")(error).into());
        }
        let partial = Partial::beside(path);
        let made = partial.create().map(drop);
        Ok(made.map_err(PathError::of(&partial.0, "write the file"))?)
    }

    /// Reads the record at `path`, which must be of `memory`.
    ///
    /// # Errors
    /// It cannot be read, is damaged, has another version, or is of another memory.
    pub fn load(path: &Path, memory: TouchedMemory) -> Result<Self, TouchesError> {
        let io = |what| PathError::of(path, what);
        // Examined before it is opened, because opening a pipe waits for its writer.
        let found = fs::metadata(path).map_err(io("read the file"))?;
        if !found.is_file() {
            return Err(not_a_record(path, "it is no regular file"));
        }
        let max = (HEADER + CHECKSUM) as u64 + memory.pages * ENTRY as u64;
        room_for::<u8>(found.len().min(max)).map_err(|error| TouchesError::NoRoom {
            path: path.to_owned(),
            error,
        })?;
        let mut bytes = Vec::new();
        let file = File::open(path).map_err(io("open the file"))?;
        let read = file.take(max + 1).read_to_end(&mut bytes);
        read.map_err(io("read the file"))?;
        Self::from_bytes(path, &bytes, memory)
    }

    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER + self.pages.len() * ENTRY + CHECKSUM);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        let checksum = self.memory.checksum.map_or(0, NonZeroU32::get);
        bytes.extend(checksum.to_le_bytes());
        bytes.extend(self.memory.pages.to_le_bytes());
        bytes.extend((self.pages.len() as u64).to_le_bytes());
        for page in &self.pages {
            bytes.extend(page.0.to_le_bytes());
        }
        bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
        bytes
    }

    fn from_bytes(path: &Path, bytes: &[u8], memory: TouchedMemory) -> Result<Self, TouchesError> {
        let number = |at: usize| u64::from_le_bytes(word(bytes, at));
        let half = |at: usize| u32::from_le_bytes(word(bytes, at));
        if !bytes.starts_with(&MAGIC) || bytes.len() < HEADER + CHECKSUM {
            return Err(not_a_record(
                path,
                "it does not begin as a record of first touches does",
            ));
        }
        if half(8) != VERSION {
            return Err(TouchesError::Version {
                path: path.to_owned(),
                found: half(8),
                known: VERSION,
            });
        }
        let found = TouchedMemory {
            checksum: NonZeroU32::new(half(12)),
            pages: number(16),
        };
        if !found.may_be(memory) {
            return Err(TouchesError::OtherMemory(path.to_owned()));
        }
        let content = &bytes[..bytes.len() - CHECKSUM];
        // The length is compared by a division: a multiplication could overflow.
        let entries = content.len() - HEADER;
        if !entries.is_multiple_of(ENTRY) || (entries / ENTRY) as u64 != number(24) {
            return Err(not_a_record(
                path,
                "its length does not fit its number of entries",
            ));
        }
        if crc32fast::hash(content) != half(content.len()) {
            return Err(not_a_record(path, "its checksum differs"));
        }
        let pages = (0..entries / ENTRY).map(|index| SourcePage(number(HEADER + index * ENTRY)));
        let pages: Vec<_> = pages.collect();
        if pages.iter().any(|page| page.0 >= memory.pages) {
            return Err(not_a_record(path, "a page is beyond the memory"));
        }
        Ok(Self { memory, pages })
    }
}

impl TouchedMemory {
    fn may_be(self, other: Self) -> bool {
        let differ = self.checksum.zip(other.checksum);
        self.pages == other.pages && differ.is_none_or(|(one, two)| one == two)
    }
}

/// `N` bytes of `bytes` at `at`.
fn word<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let word = bytes[at..].first_chunk();
    *word.expect("the length was checked")
}

fn not_a_record(path: &Path, wrong: &'static str) -> TouchesError {
    let path = path.to_owned();
    TouchesError::NoRecord { path, wrong }
}

/// The temporary file of a record. Dropped, it is removed if it is still there.
struct Partial(PathBuf);

impl Partial {
    fn beside(path: &Path) -> Self {
        // Two threads may save one record at the same time.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let (process, next) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".partial.{process}.{next}"));
        Self(path.with_file_name(name))
    }

    /// Makes the file. Replaces a leftover file of an earlier process with this number.
    fn create(&self) -> io::Result<File> {
        // Most often there is no such file.
        let _ = fs::remove_file(&self.0);
        create_file(&self.0)
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // After the rename there is no such file.
        let _ = fs::remove_file(&self.0);
    }
}
