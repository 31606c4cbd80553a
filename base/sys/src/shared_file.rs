//! A memory file that one process fills, and that other processes map and cannot change.
//!
//! UNSAFETY: this file maps and registers memory. The mapping has one owner, and its bytes are
//! accessed by atomics alone.

use crate::area::Mapping;
use crate::{Errno, Minor, Userfaultfd};
use lacuna_addr::PAGE_SIZE;
use rustix::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use rustix::fs::{
    MemfdFlags, Mode, OFlags, SealFlags, fchmod, fcntl_add_seals, ftruncate, memfd_create, open,
};
use rustix::io::pread;
use rustix::mm::{Advice, MapFlags};

/// A memory file whose pages are missing until [`SharedFile::fill`].
///
/// Its seals forbid every write and every change of its size. This process fills it through a
/// mapping that is older than the seals. Other processes can still make missing pages appear with
/// zeros: they touch a mapping of theirs, or call `fallocate(2)`. So whether a page is in the file
/// does not say that it was filled: the caller must remember the filled pages.
#[derive(Debug)]
pub struct SharedFile {
    // Dropped before the mapping, which must stay as long as it is registered.
    uffd: Userfaultfd,
    mapping: Mapping,
    file: OwnedFd,
}

impl SharedFile {
    /// A file of `pages` missing pages, at least one. It has no huge pages, whose missing parts
    /// would appear with zeros.
    ///
    /// # Errors
    /// As [`Userfaultfd::open_user_shared`], `memfd_create(2)` and `mmap(2)`.
    pub fn new(pages: u64) -> Result<Self, Errno> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("lacuna-shared", flags)?;
        let bytes = pages.checked_mul(PAGE_SIZE as u64).ok_or(Errno::FBIG)?;
        ftruncate(&file, bytes)?;
        let mapping = Mapping::new(pages, Some((file.as_fd(), MapFlags::SHARED)))?;
        mapping.advise(Advice::LinuxNoHugepage)?;
        // Other users can only open it for reading.
        fchmod(&file, Mode::from_raw_mode(0o444))?;
        let size = SealFlags::SHRINK | SealFlags::GROW;
        fcntl_add_seals(&file, size | SealFlags::FUTURE_WRITE | SealFlags::SEAL)?;
        let uffd = Userfaultfd::open_user_shared(Minor::Mapped)?;
        // SAFETY: 1. a shared mapping of a memory file, this value's own, which lives longer than
        // the descriptor. 2. Its bytes are accessed by atomics alone.
        unsafe { uffd.register(mapping.range) }?;
        Ok(Self {
            uffd,
            mapping,
            file,
        })
    }

    /// A new descriptor, for reading, that another process may have.
    ///
    /// # Errors
    /// As `open(2)` of `/proc/self/fd`.
    pub fn reader(&self) -> Result<OwnedFd, Errno> {
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
    }

    /// Fills page `index`. A thread of another process sees all of the content or none. Only if
    /// another process has made the page appear before, it sees the zeros and parts of the content
    /// meanwhile.
    ///
    /// # Errors
    /// `NOMEM`, `NOSPC`: there is no memory for the page.
    ///
    /// # Panics
    /// If the file is smaller.
    pub fn fill(&self, index: u64, content: &[u8; PAGE_SIZE]) -> Result<(), Errno> {
        let range = self.mapping.range;
        let page = range.start().checked_add_pages(index);
        let page = page.filter(|page| range.contains(*page)).expect("a page");
        match self.uffd.copy(content, page) {
            // The page stays in the file, because the seals forbid its removal.
            Err(Errno::EXIST) => {
                self.mapping.write(index * PAGE_SIZE as u64, content);
                Ok(())
            }
            filled => filled,
        }
    }

    /// The content of page `index`, which was filled.
    ///
    /// # Errors
    /// As `pread(2)`.
    pub fn read(&self, index: u64) -> Result<[u8; PAGE_SIZE], Errno> {
        let mut content = [0; PAGE_SIZE];
        match pread(&self.file, &mut content, index * PAGE_SIZE as u64)? {
            PAGE_SIZE => Ok(content),
            _ => Err(Errno::IO),
        }
    }
}
