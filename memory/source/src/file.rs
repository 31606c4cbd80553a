//! A memory file: page n is at offset 4096 * n.
//!
//! ```text
//! fetch, any thread ─► asked ─► the source's thread ─┬─ a hole ─────────────────► zeros
//!                                                    ├─ io_uring ─► 4 KiB ──────► the page
//!                                                    │         ├──► fewer ──────► lost: truncated
//!                                                    └─ no ring ▼ an error
//!                                                       readers: pread, again until the deadline
//! ```
//! The file must not change while a guest runs from it. Before every answer, also for a hole, the
//! source compares the file's length and time of modification with those at the start. So a
//! truncated file loses pages, also if it is written anew; the source never provides zeros in place
//! of lost content.

use crate::holes::Holes;
use crate::policy::{Asked, Outage, Policy};
use crate::readers::{ReadError, ReadPages, Readers};
use crate::{MemoryId, PageRequest, PageSource};
use lacuna_addr::{PAGE_SIZE, PageCount};
use lacuna_sync::{Mutex, MutexGuard, join, lock_order};
use lacuna_sys::{PageReads, Waker};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use std::collections::VecDeque;
use std::fs::{File, Metadata};
use std::io::{self, IoSliceMut};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Reads in flight.
const DEPTH: u32 = 64;
const ZEROS: [u8; PAGE_SIZE] = [0; PAGE_SIZE];

/// A raw memory file, sparse or not.
pub struct MemoryFile {
    shared: Arc<FileShared>,
    ring: Option<Ring>,
    answers_at_once: bool,
}

/// Why a memory file cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// It cannot be opened or examined.
    #[error("cannot open the memory file {}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// It is a folder, a pipe or a device.
    #[error("the memory file {} is not a regular file: copy it into one", .0.display())]
    NotAFile(PathBuf),
    /// The guest has more memory than the file.
    #[error(
        "the memory file {} has {has} pages of 4 KiB and the guest needs {needs}: give the guest \
         less memory, or the whole file", path.display()
    )]
    TooShort {
        /// The file.
        path: PathBuf,
        /// Whole pages in the file.
        has: u64,
        /// Pages of the guest.
        needs: u64,
    },
    /// The diff was not made for the base.
    #[error(
        "the diff {} has {has} bytes and its base has {base}: give the diffs of this base, oldest \
         first", path.display()
    )]
    OtherSize {
        /// The diff.
        path: PathBuf,
        /// Its bytes.
        has: u64,
        /// Bytes of the base.
        base: u64,
    },
    /// The diff has data everywhere, so no page of the base would be used.
    #[error(
        "the diff {} has no hole: it is a whole memory file, which needs no base, or a copy that \
         has lost the holes: copy it with cp --sparse=auto", .0.display()
    )]
    NoHoles(PathBuf),
    /// A thread cannot be started.
    #[error("cannot start a thread to read the memory file: {0}; raise the limit (ulimit -u)")]
    Thread(io::Error),
}

/// The thread of a ring.
struct Ring {
    waker: Waker,
    thread: Option<JoinHandle<()>>,
}

struct FileShared {
    file: Arc<Opened>,
    readers: Readers<Opened>,
    inbox: Mutex<Inbox, lock_order::SourceAsked>,
    stop: AtomicBool,
}

/// The work of the ring's thread.
#[derive(Default)]
struct Inbox {
    asked: VecDeque<Asked>,
    /// How the thread sleeps. A requesting thread reads this under the lock, wakes the sleeper
    /// once, and makes no system call while the ring's thread is awake.
    sleep: Sleep,
}

#[derive(Clone, Copy, Default)]
enum Sleep {
    #[default]
    Awake,
    /// No read is in flight. Waking a parked thread takes less time than waking a thread that waits
    /// in the ring.
    Parked,
    InRing,
}

/// The opened file.
struct Opened {
    file: File,
    path: PathBuf,
    pages: PageCount,
    state: FileState,
    memory: MemoryId,
    outage: Outage,
}

/// A change of the file's content changes this.
#[derive(Clone, Copy, PartialEq, Eq)]
struct FileState {
    length: u64,
    modified: (i64, i64),
}

impl FileState {
    fn of(found: &Metadata) -> Self {
        Self {
            length: found.len(),
            modified: (found.mtime(), found.mtime_nsec()),
        }
    }
}

/// The identity of the memory in a file. Different content has a different identity.
fn memory_of(found: &Metadata) -> MemoryId {
    let numbers = [found.dev(), found.ino(), found.len()].map(u64::to_le_bytes);
    let times = [found.mtime(), found.mtime_nsec()].map(i64::to_le_bytes);
    MemoryId::of(&[b"file", numbers.as_flattened(), times.as_flattened()])
}

impl MemoryFile {
    /// Opens the file at `path` for a guest of `pages` pages. io_uring reads the file, or threads
    /// where io_uring is refused.
    ///
    /// # Errors
    /// The file cannot be opened, is not a regular file, or has fewer pages.
    pub fn open(path: &Path, pages: PageCount, policy: Policy) -> Result<Self, FileError> {
        let opened = Arc::new(Opened::open(path, pages, policy)?);
        let file = opened.file.try_clone();
        let reads = file.and_then(|file| PageReads::new(OwnedFd::from(file), DEPTH));
        Self::start(opened, reads.ok())
    }

    /// As [`MemoryFile::open`], without io_uring.
    ///
    /// # Errors
    /// As [`MemoryFile::open`].
    pub fn open_without_ring(
        path: &Path,
        pages: PageCount,
        policy: Policy,
    ) -> Result<Self, FileError> {
        Self::start(Arc::new(Opened::open(path, pages, policy)?), None)
    }

    fn start(file: Arc<Opened>, reads: Option<PageReads<Asked>>) -> Result<Self, FileError> {
        let shared = Arc::new(FileShared {
            readers: Readers::new(Arc::clone(&file)).map_err(FileError::Thread)?,
            file,
            inbox: Mutex::default(),
            stop: AtomicBool::new(false),
        });
        let ring = reads.map(|reads| {
            let waker = reads.waker();
            let runs = Arc::clone(&shared);
            let named = std::thread::Builder::new().name("lacuna-source".into());
            let thread = named.spawn(move || runs.run(reads))?;
            Ok(Ring {
                waker,
                thread: Some(thread),
            })
        });
        let ring = ring.transpose().map_err(FileError::Thread)?;
        Ok(Self {
            shared,
            ring,
            answers_at_once: false,
        })
    }

    /// Answers a request for a page in the kernel's page cache on the thread that makes it. That
    /// costs less than another thread, and costs the caller the copy of a page: so it is for a
    /// pager's threads, and not for those of vCPUs.
    #[must_use]
    pub fn answering_at_once(mut self) -> Self {
        self.answers_at_once = true;
        self
    }

    /// The opened file, its path and its length in bytes.
    pub(crate) fn file(&self) -> (&File, &Path, u64) {
        let opened = &self.shared.file;
        (&opened.file, &opened.path, opened.state.length)
    }

    /// Whether io_uring reads the file.
    pub fn has_ring(&self) -> bool {
        self.ring.is_some()
    }
}

impl PageSource for MemoryFile {
    fn describe(&self) -> String {
        format!("the memory file {}", self.shared.file.path.display())
    }

    /// The identity of the file when it was opened, under any name.
    fn memory_id(&self) -> MemoryId {
        self.shared.file.memory
    }

    fn outage(&self) -> Option<String> {
        self.shared.file.outage.reason()
    }

    fn fetch(&self, request: PageRequest) {
        let asked = Asked::now(request);
        if self.answers_at_once
            && let Some(content) = self.shared.file.cached(asked.request.page().0)
        {
            return self.shared.file.provide(&asked, &content);
        }
        let Some(ring) = &self.ring else {
            return self.shared.readers.read(asked);
        };
        let mut inbox = self.shared.inbox();
        inbox.asked.push_back(asked);
        let sleep = std::mem::take(&mut inbox.sleep);
        drop(inbox);
        match sleep {
            Sleep::Awake => {}
            Sleep::Parked => ring.unpark(),
            Sleep::InRing => ring.waker.wake(),
        }
    }
}

impl Drop for MemoryFile {
    /// Ends the threads. Waits for the reads in flight; unanswered requests fail.
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        if let Some(ring) = &mut self.ring {
            ring.waker.wake();
            ring.unpark();
            ring.thread.take().into_iter().for_each(join);
        }
    }
}

impl Ring {
    fn unpark(&self) {
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }
}

impl FileShared {
    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread of the ring.
    fn run(&self, mut reads: PageReads<Asked>) {
        let (mut holes, mut waiting) = (Holes::default(), VecDeque::new());
        while !self.stop.load(Ordering::Acquire) {
            let arrived = std::mem::take(&mut *self.inbox());
            for asked in arrived.asked {
                match self.file.examine(asked.request.page().0, &mut holes) {
                    Ok(FilePlace::Data(offset)) => waiting.push_back((asked, offset)),
                    Ok(FilePlace::Hole) => self.file.provide(&asked, &ZEROS),
                    Err(reason) => _ = asked.request.fail(&reason),
                }
            }
            while reads.has_room()
                && let Some((asked, offset)) = waiting.pop_front()
            {
                // There is room.
                let _ = reads.start(asked, offset);
            }
            let mut inbox = self.inbox();
            if !inbox.asked.is_empty() && reads.has_room() {
                continue;
            }
            if reads.is_idle() {
                inbox.sleep = Sleep::Parked;
                drop(inbox);
                std::thread::park();
                continue;
            }
            inbox.sleep = Sleep::InRing;
            drop(inbox);
            if reads.wait().is_err() {
                std::thread::sleep(Duration::from_millis(1));
            }
            reads.finished(|asked, read| match read.map(<&[u8; PAGE_SIZE]>::try_from) {
                Ok(Ok(page)) => self.file.provide(&asked, page),
                Ok(Err(_)) => _ = asked.request.fail(&self.file.too_short()),
                // A waiting thread tries again, or reports the error.
                Err(_) => self.readers.read(asked),
            });
        }
    }
}

/// Where a page is.
enum FilePlace {
    Hole,
    Data(u64),
}

impl Opened {
    fn open(path: &Path, pages: PageCount, policy: Policy) -> Result<Self, FileError> {
        let path = path.to_owned();
        let failed = |source| FileError::Open {
            path: path.clone(),
            source,
        };
        // Examined before it is opened, because opening a pipe waits for its writer.
        if !std::fs::metadata(&path).map_err(failed)?.is_file() {
            return Err(FileError::NotAFile(path));
        }
        let file = File::open(&path).map_err(failed)?;
        let found = file.metadata().map_err(failed)?;
        let state = FileState::of(&found);
        let (has, needs) = (state.length / PAGE_SIZE as u64, pages.get());
        if has < needs {
            return Err(FileError::TooShort { path, has, needs });
        }
        Ok(Self {
            memory: memory_of(&found),
            file,
            path,
            pages,
            state,
            outage: Outage::new(policy),
        })
    }

    /// The page, if no read of the disk is needed for it.
    fn cached(&self, page: u64) -> Option<[u8; PAGE_SIZE]> {
        let mut content = [0; PAGE_SIZE];
        let offset = page.checked_mul(PAGE_SIZE as u64);
        let offset = offset.filter(|_| page < self.pages.get())?;
        let into = &mut [IoSliceMut::new(&mut content)];
        let read = preadv2(&self.file, into, offset, ReadWriteFlags::NOWAIT);
        (read == Ok(PAGE_SIZE)).then_some(content)
    }

    fn examine(&self, page: u64, holes: &mut Holes) -> Result<FilePlace, String> {
        if page >= self.pages.get() {
            let pages = self.pages.get();
            return Err(format!("page {page} is beyond the guest's {pages} pages"));
        }
        let offset = page * PAGE_SIZE as u64;
        Ok(match holes.is_hole(&self.file, offset) {
            true => FilePlace::Hole,
            false => FilePlace::Data(offset),
        })
    }

    /// Answers with content that was just read, if the file has not changed since it was opened.
    fn provide(&self, asked: &Asked, content: &[u8; PAGE_SIZE]) {
        // Late: the page was provided in another way, or its memory is gone.
        let _ = match self.check() {
            Ok(()) => {
                self.outage.provided();
                asked.request.provide(content)
            }
            Err(reason) => asked.request.fail(&reason),
        };
    }

    fn check(&self) -> Result<(), String> {
        let found = self.file.metadata().map_err(|error| error.to_string())?;
        let found = FileState::of(&found);
        if found.length < self.state.length {
            return Err(self.too_short());
        }
        if found != self.state {
            return Err("the file was written to after the guest was started from it".into());
        }
        Ok(())
    }

    fn too_short(&self) -> String {
        let length = self.state.length;
        format!("the file was truncated: it had {length} bytes when the guest was started from it")
    }
}

impl ReadPages for Opened {
    type Memo = Holes;

    fn read(
        &self,
        page: u64,
        holes: &mut Holes,
        into: &mut [u8; PAGE_SIZE],
    ) -> Result<(), ReadError> {
        match self.examine(page, holes).map_err(ReadError::Never)? {
            FilePlace::Hole => into.fill(0),
            FilePlace::Data(offset) => {
                let read = self.file.read_exact_at(into, offset);
                read.map_err(|error| self.read_error(&error))?;
            }
        }
        self.check().map_err(ReadError::Never)
    }

    fn outage(&self) -> &Outage {
        &self.outage
    }
}

impl Opened {
    fn read_error(&self, error: &io::Error) -> ReadError {
        if error.kind() == io::ErrorKind::UnexpectedEof {
            return ReadError::Never(self.too_short());
        }
        let reason = format!("a read failed: {error}");
        let again = [Errno::IO, Errno::AGAIN, Errno::INTR, Errno::NOMEM];
        match Errno::from_io_error(error) {
            Some(errno) if again.contains(&errno) => ReadError::Again(reason),
            _ => ReadError::Never(reason),
        }
    }
}
