//! A snapshot: a folder with a VM's memory, configuration and state.
//!
//! ```text
//! manifest.json   version, the slots, the lengths of the others; the last file to be written
//! memory          the slots one behind the other, sparse: `file:PATH` of other commands reads it
//! config.json     the payload of Config, as the VMM has sent it
//! state.json      the payload of State
//! ```
//! A save writes a folder with a temporary name, syncs it, and renames it. So a folder with the
//! wanted name is complete.

use crate::error::OffloadError;
use crate::slots::{Slot, Slots};
use lacuna_addr::PageCount;
use lacuna_source::{FileError, MemoryFile, Policy};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use serde::{Deserialize, Serialize};
use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const VERSION: u32 = 1;
const MANIFEST: &str = "manifest.json";
/// The name of the memory file.
pub const MEMORY: &str = "memory";
/// The name of the configuration's file.
pub const CONFIG: &str = "config.json";
/// The name of the state's file.
pub const STATE: &str = "state.json";

/// What a snapshot consists of.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Manifest {
    version: u32,
    /// Whether the VM was running when it was saved. A restored one runs then too.
    pub was_running: bool,
    /// Whether the VMM has given its memory files away. It then takes memory files too.
    pub has_memory_files: bool,
    config_bytes: u64,
    state_bytes: u64,
    slots: Vec<Slot>,
}

/// A complete snapshot.
#[derive(Debug)]
pub struct Snapshot {
    folder: PathBuf,
    /// Its manifest.
    pub manifest: Manifest,
    slots: Slots,
}

impl Snapshot {
    /// Opens the snapshot in `folder`.
    ///
    /// # Errors
    /// It is no snapshot, of another version, or not whole.
    pub fn open(folder: &Path) -> Result<Self, OffloadError> {
        let wrong = |reason: String| OffloadError::Snapshot {
            folder: folder.to_owned(),
            reason,
        };
        let read = fs::read(folder.join(MANIFEST));
        let read = read.map_err(|error| {
            wrong(format!(
                "{MANIFEST}: {error}; give a folder of offload save"
            ))
        })?;
        let manifest: Manifest = serde_json::from_slice(&read)
            .map_err(|error| wrong(format!("{MANIFEST} is damaged ({error}): copy it again")))?;
        if manifest.version != VERSION {
            let version = manifest.version;
            return Err(wrong(format!(
                "it has version {version}, and this program reads version {VERSION}"
            )));
        }
        let slots = Slots::checked(manifest.slots.clone()).map_err(wrong)?;
        let lengths = [
            (MEMORY, slots.bytes()),
            (CONFIG, manifest.config_bytes),
            (STATE, manifest.state_bytes),
        ];
        for (name, length) in lengths {
            let path = folder.join(name);
            let found = fs::metadata(&path).map_err(OffloadError::file(&path))?;
            if !found.is_file() || found.len() != length {
                let has = found.len();
                return Err(wrong(format!(
                    "{name} has {has} bytes instead of {length}: copy the whole folder again"
                )));
            }
        }
        Ok(Self {
            folder: folder.to_owned(),
            manifest,
            slots,
        })
    }

    /// The VM's memory slots.
    pub fn slots(&self) -> &Slots {
        &self.slots
    }

    /// The path of one of its files.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Opens a source of its pages. Each has threads and a queue of its own.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn pages(&self) -> Result<MemoryFile, FileError> {
        let pages = PageCount::from_bytes(self.slots.bytes());
        let file = MemoryFile::open(&self.path(MEMORY), pages, Policy::default())?;
        Ok(file.answering_at_once())
    }
}

/// A snapshot in the making. Dropping it removes it.
pub struct Draft {
    temporary: TempDir,
    to: PathBuf,
    is_published: bool,
}

impl Draft {
    /// Begins a snapshot that will be at `to`, where there is nothing yet.
    ///
    /// # Errors
    /// There is something, or the folder around it cannot be written to.
    pub fn new(to: &Path) -> Result<Self, OffloadError> {
        let wrong = |reason: &str| OffloadError::Snapshot {
            folder: to.to_owned(),
            reason: reason.to_owned(),
        };
        let (Some(name), Some(around)) = (to.file_name(), to.parent()) else {
            return Err(wrong("give the path of a new folder"));
        };
        if fs::symlink_metadata(to).is_ok() {
            return Err(wrong("there is something already: give another path"));
        }
        let mut prefix = std::ffi::OsString::from(".");
        prefix.push(name);
        prefix.push(".partial-");
        // A guest's memory is for its user alone.
        let mut folder = tempfile::Builder::new();
        folder.permissions(Permissions::from_mode(0o700));
        let temporary = folder.prefix(&prefix).tempdir_in(match around.as_os_str() {
            around if around.is_empty() => ".".as_ref(),
            around => around,
        });
        Ok(Self {
            temporary: temporary.map_err(OffloadError::file(to))?,
            to: to.to_owned(),
            is_published: false,
        })
    }

    /// Makes one of its files.
    ///
    /// # Errors
    /// As `open(2)`.
    pub fn create(&self, name: &str) -> Result<File, OffloadError> {
        let path = self.path(name);
        File::create_new(&path).map_err(OffloadError::file(&path))
    }

    /// The path of one of its files.
    pub fn path(&self, name: &str) -> PathBuf {
        self.temporary.path().join(name)
    }

    /// Makes it the snapshot at its place, with all of it on the disk.
    ///
    /// # Errors
    /// A file cannot be written, or there is something at the place meanwhile.
    pub fn publish(
        &mut self,
        slots: &Slots,
        was_running: bool,
        has_memory_files: bool,
    ) -> Result<(), OffloadError> {
        let length = |name| {
            let path = self.path(name);
            fs::metadata(&path)
                .map(|found| found.len())
                .map_err(OffloadError::file(&path))
        };
        let manifest = Manifest {
            version: VERSION,
            was_running,
            has_memory_files,
            config_bytes: length(CONFIG)?,
            state_bytes: length(STATE)?,
            slots: slots.all().to_vec(),
        };
        let json = serde_json::to_vec_pretty(&manifest).expect("every field has a JSON form");
        let path = self.path(MANIFEST);
        fs::write(&path, json).map_err(OffloadError::file(&path))?;
        for name in [MEMORY, CONFIG, STATE, MANIFEST, "."] {
            let path = self.path(name);
            let synced = File::open(&path).and_then(|file| file.sync_all());
            synced.map_err(OffloadError::file(&path))?;
        }
        let (from, to) = (self.temporary.path(), &self.to);
        let renamed = renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE);
        renamed.map_err(|errno| OffloadError::file(to)(errno.into()))?;
        self.is_published = true;
        let around = self.to.join("..");
        let synced = File::open(&around).and_then(|file| file.sync_all());
        synced.map_err(OffloadError::file(&around))
    }

    /// The VMM has got its response, so the snapshot stays.
    pub fn keep(self) {
        let mut draft = self;
        draft.is_published = false;
        draft.temporary.disable_cleanup(true);
    }
}

impl Drop for Draft {
    /// The VMM has got no response, and keeps its VM. So there is no snapshot of it.
    fn drop(&mut self) {
        if self.is_published {
            // The caller reports why the save has failed.
            let _ = fs::remove_dir_all(&self.to);
        }
    }
}
