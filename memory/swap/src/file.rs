//! Swap on an unnamed file.

use crate::entry::SwapEntry;
use crate::error::{SetupFailed, SwapError, WriteFailed};
use crate::page::Page;
use crate::store::{Reads, SwapStore};
use lacuna_addr::{PAGE_SIZE, PageCount};
use rustix::fs::{
    Advice, CWD, FallocateFlags, Mode, OFlags, fadvise, fallocate, open, openat, unlink,
};
use rustix::io::{Errno, IoSlice, pread, pwritev};
use std::num::NonZeroU64;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A file in a directory, unlinked from the start: after a crash nothing is left of it. It grows as
/// entries are used. Opened with O_DIRECT where the file system allows it. Elsewhere
/// `posix_fadvise(DONTNEED)` follows every operation, so that the host's page cache does not become
/// a second, uncounted budget.
///
/// A process that may make no files later makes it first, and then its VM ([`Swap::Made`]).
///
/// [`Swap::Made`]: crate::Swap::Made
#[derive(Clone, Debug)]
pub struct SwapFile(Arc<Unnamed>);

#[derive(Debug)]
struct Unnamed {
    file: OwnedFd,
    dir: PathBuf,
    caching: Caching,
    /// Set while a device has the file.
    is_taken: AtomicBool,
}

/// A device on a [`SwapFile`].
pub struct FileStore {
    on: Arc<Unnamed>,
    capacity: PageCount,
    /// Allocated bytes, approximately.
    reserved: AtomicU64,
}

/// The step by which the file grows, in bytes. A write that adds blocks to a file, or moves its
/// end, excludes its readers; io_uring then hands their reads to its own threads, at twice the
/// cost.
const GROWTH: u64 = 16 << 20;
/// The most pages of one system call: `IOV_MAX`, limits.h.
const SLICES_MAX: usize = 1024;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Caching {
    Direct,
    Buffered,
}

impl SwapFile {
    /// Makes a file in the folder `dir`.
    ///
    /// # Errors
    /// The system's error: `dir` is no folder, or takes no files.
    pub fn create(dir: &Path) -> Result<Self, SetupFailed> {
        let failed = |error: Errno| SetupFailed::Create {
            folder: dir.display().to_string(),
            reason: error.to_string(),
        };
        let (file, caching) = match open_unlinked(dir, OFlags::DIRECT) {
            // tmpfs and some network file systems.
            Err(Errno::INVAL) => (
                open_unlinked(dir, OFlags::empty()).map_err(failed)?,
                Caching::Buffered,
            ),
            other => (other.map_err(failed)?, Caching::Direct),
        };
        Ok(Self(Arc::new(Unnamed {
            file,
            dir: dir.to_owned(),
            caching,
            is_taken: AtomicBool::new(false),
        })))
    }
}

impl FileStore {
    /// A device of at most `capacity` pages on a new file in the folder `dir`.
    ///
    /// # Errors
    /// As [`SwapFile::create`].
    pub fn create(dir: &Path, capacity: PageCount) -> Result<Self, SetupFailed> {
        Self::on(&SwapFile::create(dir)?, capacity)
    }

    /// A device of at most `capacity` pages on `file`, until it is dropped.
    ///
    /// # Errors
    /// Another device has the file.
    pub fn on(file: &SwapFile, capacity: PageCount) -> Result<Self, SetupFailed> {
        if file.0.is_taken.swap(true, Ordering::Acquire) {
            return Err(SetupFailed::Taken(file.0.dir.display().to_string()));
        }
        Ok(Self {
            on: Arc::clone(&file.0),
            capacity,
            reserved: AtomicU64::new(0),
        })
    }

    /// Whether I/O bypasses the host's page cache.
    pub fn is_direct(&self) -> bool {
        self.on.caching == Caching::Direct
    }

    /// Makes the file system allocate blocks for the bytes before `end`.
    fn reserve(&self, end: u64) {
        let reserved = self.reserved.load(Ordering::Relaxed);
        if end <= reserved || self.on.caching == Caching::Buffered {
            return;
        }
        let target = end.next_multiple_of(GROWTH).min(self.capacity.bytes());
        let len = target.saturating_sub(reserved);
        // Advice: without enough room, or without such a call, the write itself will fail.
        if fallocate(&self.on.file, FallocateFlags::empty(), reserved, len).is_ok() {
            self.reserved.fetch_max(target, Ordering::Relaxed);
        }
    }

    fn forget(&self, entry: SwapEntry, pages: usize) {
        if self.on.caching == Caching::Buffered {
            let len = NonZeroU64::new((pages * PAGE_SIZE) as u64);
            // Advice: if the file system ignores it, that costs memory, not correctness.
            let _ = fadvise(&self.on.file, entry.offset(), len, Advice::DontNeed);
        }
    }
}

impl Drop for FileStore {
    fn drop(&mut self) {
        self.on.is_taken.store(false, Ordering::Release);
    }
}

/// O_TMPFILE where the file system has it; otherwise creates a file and unlinks it.
fn open_unlinked(dir: &Path, extra: OFlags) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | extra;
    let mode = Mode::RUSR | Mode::WUSR;
    match open(dir, flags | OFlags::TMPFILE, mode) {
        Err(Errno::OPNOTSUPP | Errno::ISDIR) => {}
        other => return other,
    }
    let name = format!(
        ".lacuna-swap-{}-{:x}",
        std::process::id(),
        fastrand::u64(..)
    );
    let path = dir.join(name);
    let file = openat(CWD, &path, flags | OFlags::CREATE | OFlags::EXCL, mode)?;
    unlink(&path)?;
    Ok(file)
}

impl SwapStore for FileStore {
    fn describe(&self) -> String {
        format!("swap file in {}", self.on.dir.display())
    }

    fn capacity(&self) -> PageCount {
        self.capacity
    }

    fn is_cached(&self) -> bool {
        !self.is_direct()
    }

    fn read(&self, entry: SwapEntry, page: &mut Page) -> Result<(), SwapError> {
        let mut done = 0;
        while done < PAGE_SIZE {
            match pread(
                &self.on.file,
                &mut page.0[done..],
                entry.offset() + done as u64,
            ) {
                Ok(0) => return Err(SwapError::Io("the file ends before the swap entry".into())),
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(error) => return Err(SwapError::Io(error.to_string())),
            }
        }
        self.forget(entry, 1);
        Ok(())
    }

    fn reads(&self) -> Reads<'_> {
        match self.on.caching {
            Caching::Direct => Reads::File(self.on.file.as_fd()),
            Caching::Buffered => Reads::Blocking,
        }
    }

    fn write(&self, first: SwapEntry, pages: &[Page]) -> Result<(), WriteFailed> {
        let bytes = pages.len() * PAGE_SIZE;
        self.reserve(first.offset() + bytes as u64);
        let mut done = 0;
        while done < bytes {
            let (page, within) = (done / PAGE_SIZE, done % PAGE_SIZE);
            let rest = pages[page + 1..].iter().take(SLICES_MAX - 1);
            let whole = rest.map(|page| IoSlice::new(&page.0));
            let slices: Vec<_> = [IoSlice::new(&pages[page].0[within..])]
                .into_iter()
                .chain(whole)
                .collect();
            match pwritev(&self.on.file, &slices, first.offset() + done as u64) {
                Ok(count) if count > 0 => done += count,
                Err(Errno::INTR) => {}
                result => {
                    let error = result.err().unwrap_or(Errno::NOSPC);
                    return Err(WriteFailed {
                        done: done / PAGE_SIZE,
                        error: classify(error),
                    });
                }
            }
        }
        self.forget(first, pages.len());
        Ok(())
    }

    /// The file keeps the space, because punching a hole costs more than reusing the entry.
    fn discard(&self, _entry: SwapEntry) {}
}

fn classify(error: Errno) -> SwapError {
    match error {
        // Old entries have their blocks; new entries get none.
        Errno::NOSPC | Errno::DQUOT | Errno::FBIG => SwapError::Ends(error.to_string()),
        other => SwapError::Io(other.to_string()),
    }
}
