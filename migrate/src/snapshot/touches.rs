//! The order in which a guest has requested a snapshot's pages, and the file of this order.
//!
//! docs/formats.md describes the file. It is not in the snapshot's folder, which stays as it is.

use super::files::{create_file, rename_durably};
use super::reader::{Snapshot, SnapshotId};
use crate::MigrateError;
use lacuna_addr::room_for;
use lacuna_machine::SourcePage;
use lacuna_sync::{Mutex, lock_order};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

/// The first bytes of a record.
const MAGIC: [u8; 8] = *b"LACTOUCH";
const VERSION: u32 = 1;
/// Magic, version, the snapshot's checksum, its pages, the number of entries.
const HEADER: usize = 32;
const ENTRY: usize = size_of::<u64>();
const CHECKSUM: usize = size_of::<u32>();

/// The pages that a guest has requested after a lazy restore, in the order of first touch.
/// [`Recorder::touches`] has them, and [`Snapshot::replay`] provides them before the guest asks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Touches {
    snapshot: SnapshotId,
    pages: Vec<SourcePage>,
}

/// Records each page that a guest requests. A clone records in the same list.
#[derive(Clone)]
pub struct Recorder {
    snapshot: SnapshotId,
    asked: Arc<Mutex<Vec<SourcePage>, lock_order::Touches>>,
}

impl Recorder {
    pub(super) fn new(snapshot: SnapshotId) -> Self {
        Self {
            snapshot,
            asked: Arc::default(),
        }
    }

    pub(super) fn note(&self, page: SourcePage) {
        let asked = self.asked.lock();
        asked.unwrap_or_else(PoisonError::into_inner).push(page);
    }

    /// The pages requested so far.
    pub fn touches(&self) -> Touches {
        let asked = self.asked.lock();
        Touches {
            snapshot: self.snapshot,
            pages: asked.unwrap_or_else(PoisonError::into_inner).clone(),
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
            snapshot: self.snapshot,
            pages: pages.to_vec(),
        };
        (part(first), part(others))
    }

    /// The pages, in their order.
    pub fn pages(&self) -> &[SourcePage] {
        &self.pages
    }

    pub(super) fn is_of(&self, snapshot: SnapshotId) -> bool {
        self.snapshot == snapshot
    }

    /// Writes the record to `path`, whole or not at all. Replaces an existing file.
    ///
    /// # Errors
    /// [`MigrateError::Io`].
    pub fn save(&self, path: &Path) -> Result<(), MigrateError> {
        let partial = Partial::beside(path);
        let bytes = self.to_bytes();
        let written = partial.create().and_then(|mut file| {
            file.write_all(&bytes)?;
            file.sync_all()
        });
        written.map_err(MigrateError::io(&partial.0, "write the file"))?;
        rename_durably(&partial.0, path)
    }

    /// Whether [`Touches::save`] can write there: `path` is no folder, and the temporary file can
    /// be made. Removes that file again.
    ///
    /// # Errors
    /// [`MigrateError::Io`].
    pub fn check_target(path: &Path) -> Result<(), MigrateError> {
        if path.is_dir() {
            let error = io::Error::new(
                io::ErrorKind::InvalidFilename,
                "it is a folder: name a file",
            );
            return Err(MigrateError::io(path, "write the file")(error));
        }
        let partial = Partial::beside(path);
        let made = partial.create().map(drop);
        made.map_err(MigrateError::io(&partial.0, "write the file"))
    }

    /// Reads the record at `path`, which must be of `snapshot`.
    ///
    /// # Errors
    /// It cannot be read, is damaged, has another version, or is of another snapshot.
    pub fn load(path: &Path, snapshot: &Snapshot) -> Result<Self, MigrateError> {
        let io = |what| MigrateError::io(path, what);
        // Examined before it is opened, because opening a pipe waits for its writer.
        let found = fs::metadata(path).map_err(io("read the file"))?;
        if !found.is_file() {
            return Err(not_a_record(path, "it is no regular file"));
        }
        let max = (HEADER + CHECKSUM) as u64 + snapshot.id().pages * ENTRY as u64;
        room_for::<u8>(found.len().min(max)).map_err(|error| MigrateError::NoRoom {
            path: path.to_owned(),
            error,
        })?;
        let mut bytes = Vec::new();
        let file = File::open(path).map_err(io("open the file"))?;
        let read = file.take(max + 1).read_to_end(&mut bytes);
        read.map_err(io("read the file"))?;
        Self::from_bytes(path, &bytes, snapshot.id())
    }

    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER + self.pages.len() * ENTRY + CHECKSUM);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.snapshot.checksums.to_le_bytes());
        bytes.extend(self.snapshot.pages.to_le_bytes());
        bytes.extend((self.pages.len() as u64).to_le_bytes());
        for page in &self.pages {
            bytes.extend(page.0.to_le_bytes());
        }
        bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
        bytes
    }

    fn from_bytes(path: &Path, bytes: &[u8], snapshot: SnapshotId) -> Result<Self, MigrateError> {
        let number = |at: usize| u64::from_le_bytes(word(bytes, at));
        let half = |at: usize| u32::from_le_bytes(word(bytes, at));
        if !bytes.starts_with(&MAGIC) || bytes.len() < HEADER + CHECKSUM {
            return Err(not_a_record(
                path,
                "it does not begin as a record of first touches does",
            ));
        }
        if half(8) != VERSION {
            return Err(MigrateError::Version {
                path: path.to_owned(),
                found: half(8),
                known: VERSION,
            });
        }
        let found = SnapshotId {
            checksums: half(12),
            pages: number(16),
        };
        if found != snapshot {
            return Err(MigrateError::OtherRecord(path.to_owned()));
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
        if pages.iter().any(|page| page.0 >= snapshot.pages) {
            return Err(not_a_record(path, "a page is beyond the snapshot's memory"));
        }
        Ok(Self { snapshot, pages })
    }
}

/// `N` bytes of `bytes` at `at`.
fn word<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let word = bytes[at..].first_chunk();
    *word.expect("the length was checked")
}

fn not_a_record(path: &Path, wrong: &str) -> MigrateError {
    MigrateError::NoRecord {
        path: path.to_owned(),
        wrong: wrong.to_owned(),
    }
}

/// The temporary file of a record. Dropped, it is removed if it is still there.
struct Partial(PathBuf);

impl Partial {
    fn beside(path: &Path) -> Self {
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".partial.{}", std::process::id()));
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
