//! Where a new snapshot goes.
//!
//! ```text
//! a folder          files in NAME.partial.PID beside it ─► made durable ─► renamed to NAME
//! an object store   files in a temporary folder ─► objects, `checksums` last
//! ```
//! The pages of a running guest are copied several times, and an object is written once. So a
//! snapshot for a store is written to files first, on the disk of the temporary folder
//! ([`std::env::temp_dir`]). A reader opens `checksums` first: without it there is no snapshot.

use super::files::{CHECKSUMS, MEMORY, PAGES, STATE, create_folder};
use crate::MigrateError;
use lacuna_source::{Folder, LocalFolder, rename_durably};
use std::env;
use std::fs::{self, File};
use std::io;
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

/// Where a new snapshot goes.
#[derive(Clone, Copy)]
pub enum Target<'a> {
    /// A new folder of a file system.
    Folder(&'a Path),
    /// A place in an object store without a snapshot.
    Store(Store<'a>),
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
        }
    }

    /// Refuses a nonempty place.
    ///
    /// # Errors
    /// [`MigrateError::Exists`], or the store cannot be asked.
    pub fn check_new(&self) -> Result<(), MigrateError> {
        let exists = match self {
            Self::Folder(path) => path.symlink_metadata().is_ok(),
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

    /// The folder `name` beside it, as a reader has it.
    pub(super) fn beside(&self, name: &str) -> io::Result<Arc<dyn Folder>> {
        match self {
            Self::Folder(path) => Ok(Arc::new(LocalFolder::new(&path.with_file_name(name)))),
            Self::Store(store) => store.folder.beside(name),
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
