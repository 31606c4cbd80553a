//! A place with files of pages.

use crate::{FileError, MemoryFile, PageSource, Policy};
use lacuna_addr::PageCount;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A place with files: a folder of a file system ([`LocalFolder`]), or objects of a store.
pub trait Folder: Send + Sync {
    /// Its name in messages.
    fn path(&self) -> &Path;

    /// Opens the file `name`.
    ///
    /// # Errors
    /// The file cannot be opened. [`io::ErrorKind::InvalidInput`]: it is not a regular file.
    fn open(&self, name: &str) -> io::Result<Box<dyn StoredFile>>;

    /// The folder `name` next to this folder.
    ///
    /// # Errors
    /// This folder cannot be found.
    fn beside(&self, name: &str) -> io::Result<Arc<dyn Folder>>;
}

/// A file of a [`Folder`]. It does not change while it is open.
pub trait StoredFile: Send + Sync {
    /// Its length in bytes.
    fn length(&self) -> u64;

    /// Reads all of `into` from `offset` on. May wait.
    ///
    /// # Errors
    /// The file ends earlier, or cannot be read.
    fn read_exact_at(&self, into: &mut [u8], offset: u64) -> io::Result<()>;

    /// Its pages, each read on request. Page n is at offset 4096 * n.
    ///
    /// # Errors
    /// The file has fewer pages, or a thread cannot be started.
    fn page_source(
        &self,
        pages: PageCount,
        policy: Policy,
    ) -> Result<Box<dyn PageSource>, FileError>;

    /// The file, if it is one of this machine's file systems.
    fn local(&self) -> Option<&File> {
        None
    }
}

/// A folder of a file system.
pub struct LocalFolder(PathBuf);

struct LocalFile {
    file: File,
    path: PathBuf,
    length: u64,
}

impl LocalFolder {
    /// The folder at `path`.
    pub fn new(path: &Path) -> Self {
        Self(path.to_owned())
    }
}

impl Folder for LocalFolder {
    fn path(&self) -> &Path {
        &self.0
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn StoredFile>> {
        let path = self.0.join(name);
        // Examined before it is opened, because opening a pipe waits for its writer.
        let found = fs::metadata(&path)?;
        if !found.is_file() {
            let wrong = "it is no regular file";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, wrong));
        }
        Ok(Box::new(LocalFile {
            file: File::open(&path)?,
            path,
            length: found.len(),
        }))
    }

    fn beside(&self, name: &str) -> io::Result<Arc<dyn Folder>> {
        let whole = self.0.canonicalize()?;
        let parent = whole.parent().ok_or(io::ErrorKind::NotFound)?;
        Ok(Arc::new(Self(parent.join(name))))
    }
}

impl StoredFile for LocalFile {
    fn length(&self) -> u64 {
        self.length
    }

    fn read_exact_at(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(into, offset)
    }

    fn page_source(
        &self,
        pages: PageCount,
        policy: Policy,
    ) -> Result<Box<dyn PageSource>, FileError> {
        Ok(Box::new(MemoryFile::open(&self.path, pages, policy)?))
    }

    fn local(&self) -> Option<&File> {
        Some(&self.file)
    }
}
