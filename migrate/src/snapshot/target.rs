//! Where a new snapshot goes.
//!
//! ```text
//! a folder          files in NAME.partial.PID beside it ─► made durable ─► renamed to NAME
//! open files        files of a folder that another process has made, and names afterwards
//! an object store   files in a temporary folder ─► objects, `checksums` last
//! ```
//! The pages of a running guest are copied several times, and an object is written once. So a
//! snapshot for a store is written to files first, on the disk of the temporary folder
//! ([`std::env::temp_dir`]). A reader opens `checksums` first: without it there is no snapshot.

use super::files::{CHECKSUMS, MEMORY, PAGES, STATE, create_folder};
use super::reader::{CHECKSUMS_MAX, checksums_of};
use crate::MigrateError;
use lacuna_source::{Folder, LocalFolder, create_file, rename_durably};
use std::env;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A place in an object store for a new snapshot.
#[derive(Clone, Copy)]
pub struct Store<'a> {
    /// The objects there.
    pub folder: &'a dyn Folder,
    /// Makes the object of this name with a file's content. Replaces an existing object.
    pub put: &'a (dyn Fn(&str, &File) -> io::Result<()> + Sync),
    /// Removes the object of this name, if it exists.
    pub remove: &'a (dyn Fn(&str) -> io::Result<()> + Sync),
}

/// The open files of a new snapshot, for a process in a sandbox. Another process has made them, and
/// gives their folder its name after the save.
pub struct OpenFiles {
    /// The place of the whole snapshot.
    pub path: PathBuf,
    /// New files that can be read and written, in the order of [`OpenFiles::NAMES`].
    pub files: [File; 4],
    /// The file `checksums` of the base.
    pub base: Option<File>,
}

impl OpenFiles {
    /// The names of the files.
    pub const NAMES: [&str; 4] = [MEMORY, STATE, PAGES, CHECKSUMS];
}

/// The folder of [`OpenFiles`], in the process that makes it. A drop removes it.
pub struct NewFolder {
    path: PathBuf,
    partial: PathBuf,
}

impl NewFolder {
    /// Makes the files of a new snapshot at `path`, beside its last place. `base` is the snapshot
    /// that has the other pages.
    ///
    /// # Errors
    /// [`MigrateError`].
    pub fn make(path: &Path, base: Option<&Path>) -> Result<(Self, OpenFiles), MigrateError> {
        let target = Target::Folder(path);
        target.check_new()?;
        let base = base.map(|base| {
            let file = File::open(base.join(CHECKSUMS));
            file.map_err(|_| MigrateError::NoBase(base.to_owned()))
        });
        let base = base.transpose()?;
        let partial = target.begin()?;
        let path = path.to_owned();
        let folder = Self { path, partial };
        let make = |name| {
            let path = folder.partial.join(name);
            create_file(&path).map_err(MigrateError::io(&path, "make the file"))
        };
        let [memory, state, pages, checksums] = OpenFiles::NAMES.map(make);
        let open = OpenFiles {
            path: folder.path.clone(),
            files: [memory?, state?, pages?, checksums?],
            base,
        };
        Ok((folder, open))
    }

    /// Makes the saved files durable, and gives the folder its name.
    ///
    /// # Errors
    /// [`MigrateError`].
    pub fn finish(self) -> Result<(), MigrateError> {
        Target::Folder(&self.path).finish(&self.partial)
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        // After `finish` there is no such folder.
        let _ = fs::remove_dir_all(&self.partial);
    }
}

/// Where a new snapshot goes.
#[derive(Clone, Copy)]
pub enum Target<'a> {
    /// A new folder of a file system.
    Folder(&'a Path),
    /// A place in an object store without a snapshot.
    Store(Store<'a>),
    /// The files of a new folder.
    Files(&'a OpenFiles),
}

impl<'a> From<&'a Path> for Target<'a> {
    fn from(path: &'a Path) -> Self {
        Self::Folder(path)
    }
}

impl<'a> From<&'a PathBuf> for Target<'a> {
    fn from(path: &'a PathBuf) -> Self {
        Self::Folder(path)
    }
}

impl Target<'_> {
    /// Its name: a path, or for a store a URL or the like.
    pub fn path(&self) -> &Path {
        match self {
            Self::Folder(path) => path,
            Self::Store(store) => store.folder.path(),
            Self::Files(open) => &open.path,
        }
    }

    /// Refuses a nonempty place.
    ///
    /// # Errors
    /// [`MigrateError::Exists`], or the store cannot be asked.
    pub fn check_new(&self) -> Result<(), MigrateError> {
        let exists = match self {
            Self::Folder(path) => path.symlink_metadata().is_ok(),
            Self::Files(open) => {
                let is_empty = |file: &File| file.metadata().is_ok_and(|found| found.len() == 0);
                !open.files.iter().all(is_empty)
            }
            Self::Store(store) => match store.folder.open(CHECKSUMS) {
                Ok(_) => true,
                Err(error) if error.kind() == io::ErrorKind::NotFound => false,
                Err(error) => {
                    let path = store.folder.path().join(CHECKSUMS);
                    return Err(MigrateError::io(&path, "look for the object")(error));
                }
            },
        };
        match exists {
            true => Err(MigrateError::Exists(self.path().to_owned())),
            false => Ok(()),
        }
    }

    /// The CRC-32 of [`CHECKSUMS`] of the snapshot `name` beside it.
    pub(super) fn checksums_beside(&self, name: &str) -> Result<u32, MigrateError> {
        let folder: Arc<dyn Folder> = match self {
            Self::Folder(path) => Arc::new(LocalFolder::new(&path.with_file_name(name))),
            Self::Store(store) => store
                .folder
                .beside(name)
                .map_err(MigrateError::io(self.path(), "find the folder beside it"))?,
            Self::Files(open) => {
                let mut text = Vec::new();
                let read = open.base.as_ref().map_or(Ok(0), |file| {
                    file.take(CHECKSUMS_MAX).read_to_end(&mut text)
                });
                read.map_err(MigrateError::io(self.path(), "read its base"))?;
                return Ok(crc32fast::hash(&text));
            }
        };
        checksums_of(&*folder)
    }

    /// Makes the file `name` of the snapshot, in `partial` if it goes to a folder.
    pub(super) fn create(&self, partial: &Path, name: &str) -> io::Result<File> {
        match self {
            Self::Folder(_) | Self::Store(_) => create_file(&partial.join(name)),
            Self::Files(open) => {
                let at = OpenFiles::NAMES.iter().position(|known| *known == name);
                open.files[at.expect("a file of a snapshot")].try_clone()
            }
        }
    }

    /// Makes the folder in which the files are written.
    pub(super) fn begin(&self) -> Result<PathBuf, MigrateError> {
        static STARTED: AtomicU64 = AtomicU64::new(0);
        let pid = std::process::id();
        let partial = match self {
            Self::Folder(path) => {
                let mut name = path.file_name().unwrap_or_default().to_owned();
                name.push(format!(".partial.{pid}"));
                path.with_file_name(name)
            }
            Self::Files(open) => return Ok(open.path.clone()),
            Self::Store(_) => {
                let number = STARTED.fetch_add(1, Ordering::Relaxed);
                env::temp_dir().join(format!("lacuna-snapshot.partial.{pid}.{number}"))
            }
        };
        create_folder(&partial).map_err(|error| {
            let what = match error.kind() {
                io::ErrorKind::AlreadyExists => {
                    "make the folder, which an interrupted save has left (remove it)"
                }
                _ => "make the folder",
            };
            MigrateError::io(&partial, what)(error)
        })?;
        Ok(partial)
    }

    /// Removes what is left of a failed save in `partial`.
    pub(super) fn abandon(&self, partial: &Path) {
        match self {
            // The process that has made the files removes them.
            Self::Files(_) => {}
            Self::Folder(_) | Self::Store(_) => drop(fs::remove_dir_all(partial)),
        }
    }

    /// Makes the snapshot from the files in `partial`, and removes that folder.
    pub(super) fn finish(&self, partial: &Path) -> Result<(), MigrateError> {
        match self {
            Self::Folder(path) => {
                for name in [MEMORY, STATE, PAGES, CHECKSUMS] {
                    let path = partial.join(name);
                    let synced = File::open(&path).and_then(|file| file.sync_all());
                    synced.map_err(MigrateError::io(&path, "write the file"))?;
                }
                let synced = File::open(partial).and_then(|folder| folder.sync_all());
                synced.map_err(MigrateError::io(partial, "write the folder"))?;
                Ok(rename_durably(partial, path)?)
            }
            // The process that has made the files makes them durable.
            Self::Files(_) => Ok(()),
            Self::Store(store) => {
                let names = [MEMORY, STATE, PAGES, CHECKSUMS];
                let done = names.iter().try_for_each(|name| {
                    let put =
                        File::open(partial.join(name)).and_then(|file| (store.put)(name, &file));
                    put.map_err(|error| (*name, error))
                });
                let Err((name, error)) = done else {
                    // The objects are there, so leftover files do no harm.
                    let _ = fs::remove_dir_all(partial);
                    return Ok(());
                };
                // `checksums` first: the store may have made it although its answer was an error.
                // Without it the others are no snapshot, and the next save replaces them.
                for name in names.iter().rev() {
                    let _ = (store.remove)(name);
                }
                Err(match error.kind() {
                    io::ErrorKind::Interrupted => MigrateError::Cancelled,
                    _ => {
                        MigrateError::io(&store.folder.path().join(name), "write the object")(error)
                    }
                })
            }
        }
    }
}
