//! Files that are there whole or not at all.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// The system's error about a file or folder.
#[derive(Debug, thiserror::Error)]
#[error("{}: cannot {what}: {error}", path.display())]
pub struct PathError {
    /// The file or folder.
    pub path: PathBuf,
    /// The attempted action.
    pub what: &'static str,
    /// The system's error.
    pub error: io::Error,
}

impl PathError {
    /// For `map_err`.
    pub fn of<'a>(path: &'a Path, what: &'static str) -> impl FnOnce(io::Error) -> Self + 'a {
        move |error| {
            let path = path.to_owned();
            Self { path, what, error }
        }
    }
}

/// Makes a new file that only this user can read.
///
/// # Errors
/// As `open(2)`.
pub fn create_file(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
}

/// Renames `partial`, whose content is on the disk, to `path` beside it. After a power failure,
/// `path` is the whole content, what it was before, or nothing. After an error there is no new
/// name, but an old file at `path` may have been replaced.
///
/// # Errors
/// The file or folder that cannot be used.
pub fn rename_durably(partial: &Path, path: &Path) -> Result<(), PathError> {
    let parent = path.parent().filter(|path| !path.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    // Opened before the rename, so that an error comes before the new name.
    let folder = File::open(parent).map_err(PathError::of(parent, "open the folder"))?;
    let is_new = path.symlink_metadata().is_err();
    let renamed = fs::rename(partial, path);
    renamed.map_err(PathError::of(path, "rename the finished file"))?;
    let synced = folder.sync_all();
    if synced.is_err() && is_new {
        // The caller learns of the first error.
        let _ = fs::rename(path, partial);
    }
    synced.map_err(PathError::of(parent, "write the folder"))
}
