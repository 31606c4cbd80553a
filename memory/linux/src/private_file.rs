//! A file whose content is a guest's memory at first, such as the memory of a snapshot.
//!
//! It is mapped privately: Linux copies a page when the guest or the VMM writes to it. All other
//! pages are the file's own, in the page cache. So guests of several processes that begin with the
//! same file have its unchanged pages in memory once, and without a page source or a userfaultfd.

use crate::error::LinuxError;
use lacuna_addr::{PAGE_SIZE, PageCount};
use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat, fstatfs};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// `HUGETLBFS_MAGIC` of `linux/magic.h`.
pub(crate) const HUGETLBFS: u32 = 0x9584_58f6;

/// A file that is mapped privately, or a part of one.
///
/// Its content must not change while it is mapped: a page that the guest has not written yet
/// changes with the file. If the file becomes shorter, or a page of it cannot be read, the page is
/// lost. The file may be deleted, except on a network file system.
#[derive(Clone, Debug)]
pub struct PrivateFile {
    file: Arc<OwnedFd>,
    first: u64,
}

impl PrivateFile {
    /// The file `file` from its page `first` on. It may be open for reads only.
    ///
    /// # Errors
    /// It is not a regular file or a memory file, or not open for reads.
    pub fn of_file(file: OwnedFd, first: u64) -> Result<Self, LinuxError> {
        let refused = |reason: &str| LinuxError::SharedMemory {
            reason: reason.into(),
        };
        let failed = |errno: Errno| refused(&errno.to_string());
        let system = fstatfs(&file).map_err(failed)?;
        // The type of the number differs from architecture to architecture.
        if u32::try_from(system.f_type) == Ok(HUGETLBFS) {
            return Err(refused(
                "the file is in hugetlbfs, whose pages are not copied one by one",
            ));
        }
        let found = fstat(&file).map_err(failed)?;
        if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
            return Err(refused("it is no regular file and no memory file"));
        }
        let flags = fcntl_getfl(&file).map_err(failed)?;
        if flags & OFlags::RWMODE == OFlags::WRONLY || flags.contains(OFlags::PATH) {
            return Err(refused(
                "its descriptor is not for reads; open the file for reads",
            ));
        }
        Ok(Self {
            file: Arc::new(file),
            first,
        })
    }

    /// The same file, from its page `pages` on.
    #[must_use]
    pub fn part(&self, pages: u64) -> Self {
        Self {
            file: Arc::clone(&self.file),
            first: self.first.saturating_add(pages),
        }
    }

    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The byte offset of its first page in the file, if it has at least `pages` pages.
    pub(crate) fn offset(&self, pages: PageCount) -> Result<u64, LinuxError> {
        offset_in(self.file(), self.first, pages)
    }
}

/// The byte offset of the page `first` of `file`, if `pages` pages follow from there on.
pub(crate) fn offset_in(
    file: BorrowedFd<'_>,
    first: u64,
    pages: PageCount,
) -> Result<u64, LinuxError> {
    let refused = |reason: String| LinuxError::SharedMemory { reason };
    let size = fstat(file).map_err(|errno| refused(errno.to_string()))?;
    let has = u64::try_from(size.st_size).unwrap_or(0) / PAGE_SIZE as u64;
    match first.checked_add(pages.get()) {
        Some(end) if end <= has => Ok(first * PAGE_SIZE as u64),
        _ => Err(refused(format!(
            "the file has {has} pages, and the region has {pages} from its page {first} on; make \
             the file longer"
        ))),
    }
}
