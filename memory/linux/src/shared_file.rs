//! A shared memory file.

use crate::error::LinuxError;
use crate::private_file::{HUGETLBFS, PrivateFile, offset_in};
use lacuna_addr::{Level, PAGE_SIZE, PageCount};
use lacuna_sys::Errno;
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, fstat, fstatfs, ftruncate, memfd_create};
use rustix::io::retry_on_intr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// The place of a guest's pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum MemoryKind {
    /// In frames of the resident budget. Reclaim evicts them to swap.
    #[default]
    Budget,
    /// In memory that Linux gives to this process page by page, beside the budget. The host never
    /// evicts them; Linux may swap them. With a page source they need userfaultfd.
    Linux,
    /// As `Linux`, in a shared memory file ([`SharedMemory::new`]).
    Shared,
    /// As `Shared`, in the machine's reserved huge pages of 2 MiB of hugetlbfs
    /// ([`SharedMemory::huge`]). The memory is a multiple of 2 MiB.
    Hugetlbfs,
    /// As `Hugetlbfs`, in huge pages of 1 GiB. The memory is a multiple of 1 GiB, and has no page
    /// source.
    Hugetlbfs1G,
}

impl MemoryKind {
    /// New Linux memory of `pages` pages; `None`: memory of this kind is in frames.
    ///
    /// # Errors
    /// As [`SharedMemory::new`] and [`SharedMemory::huge`].
    pub fn backing(self, pages: PageCount) -> Result<Option<LinuxBacking>, LinuxError> {
        let shared = match self {
            Self::Budget => return Ok(None),
            Self::Linux => return Ok(Some(LinuxBacking::Anonymous)),
            Self::Shared => SharedMemory::new(pages, SharedFill::CopiedIn),
            Self::Hugetlbfs => SharedMemory::huge(pages, Level::L2M),
            Self::Hugetlbfs1G => SharedMemory::huge(pages, Level::L1G),
        };
        shared.map(|shared| Some(LinuxBacking::Shared(shared)))
    }

    /// The size of its pages, if they are never smaller.
    pub const fn page_size(self) -> Level {
        match self {
            Self::Budget | Self::Linux | Self::Shared => Level::L4K,
            Self::Hugetlbfs => Level::L2M,
            Self::Hugetlbfs1G => Level::L1G,
        }
    }
}

/// The Linux memory for which a host needs addresses, for regions of these numbers of pages, in
/// pages of the size `page`.
pub fn linux_room(page: Level, regions: impl IntoIterator<Item = PageCount>) -> PageCount {
    // Each region begins with a block, or with a page of 1 GiB. The budget before them does not end
    // there.
    let align = page.max(Level::L2M).pages();
    let whole = |pages: PageCount| pages.get().next_multiple_of(align);
    let gap = if page == Level::L1G { align } else { 0 };
    PageCount::new(regions.into_iter().map(whole).sum::<u64>() + gap)
}

/// What Linux memory is made of.
#[derive(Clone, Debug, Default)]
pub enum LinuxBacking {
    /// Private memory of this process, zeros at first.
    #[default]
    Anonymous,
    /// A shared memory file: its content is the guest's memory.
    Shared(SharedMemory),
    /// A file whose content is the guest's memory at first. No write changes the file.
    Private(PrivateFile),
}

impl LinuxBacking {
    /// The same, from its page `pages` on.
    #[must_use]
    pub fn part(&self, pages: u64) -> Self {
        match self {
            Self::Anonymous => Self::Anonymous,
            Self::Shared(shared) => Self::Shared(shared.part(pages)),
            Self::Private(file) => Self::Private(file.part(pages)),
        }
    }

    /// The shared memory file.
    pub const fn shared(&self) -> Option<&SharedMemory> {
        match self {
            Self::Shared(shared) => Some(shared),
            Self::Anonymous | Self::Private(_) => None,
        }
    }

    /// The size of its pages.
    pub const fn page_size(&self) -> Level {
        match self {
            Self::Shared(shared) => shared.page,
            Self::Anonymous | Self::Private(_) => Level::L4K,
        }
    }

    /// Whether its pages may have content at first.
    pub const fn is_file(&self) -> bool {
        !matches!(self, Self::Anonymous)
    }
}

/// How a page source fills a shared memory file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SharedFill {
    /// Its answers are copied in.
    #[default]
    CopiedIn,
    /// It may write to the file, and then calls `Host::provide_from_file`.
    InFile,
}

/// A shared memory file, or a part of one. If another process makes the file shorter, the removed
/// pages are lost.
#[derive(Clone, Debug)]
pub struct SharedMemory {
    file: Arc<OwnedFd>,
    pub(super) first: u64,
    pub(super) fill: SharedFill,
    /// The size of its pages: above 4 KiB in huge pages of hugetlbfs.
    pub(super) page: Level,
    /// A write by other code to a page of the file may also put its neighbours in place, as zeros:
    /// the file is in a tmpfs with transparent huge pages.
    has_neighbours: bool,
}

/// `TMPFS_MAGIC` of `linux/magic.h`.
const TMPFS: u32 = 0x0102_1994;

impl SharedMemory {
    /// A new file of `pages` pages of zeros.
    ///
    /// # Errors
    /// Linux cannot make such a file.
    pub fn new(pages: PageCount, fill: SharedFill) -> Result<Self, LinuxError> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let made = memfd_create("lacuna-memory", flags);
        let made = made.and_then(|file| ftruncate(&file, pages.bytes()).map(|()| file));
        let file = made.map_err(|errno| LinuxError::SharedMemory {
            reason: errno.to_string(),
        })?;
        Ok(Self {
            file: Arc::new(file),
            first: 0,
            fill,
            page: Level::L4K,
            has_neighbours: false,
        })
    }

    /// A new file of `pages` pages of zeros, in reserved huge pages of the size `page`. Adding a
    /// region of the file takes its huge pages from the machine's reserve, so none is missing
    /// later. With a page source, the 512 pages of a huge page of 2 MiB are provided together. Huge
    /// pages of 1 GiB have no source.
    ///
    /// # Errors
    /// The pages do not fill huge pages, or this machine has no such pages.
    ///
    /// # Panics
    /// If `page` is 4 KiB.
    pub fn huge(pages: PageCount, page: Level) -> Result<Self, LinuxError> {
        let unit = page.pages();
        let refused = |errno| no_huge_pages(pages, page, errno);
        if !pages.get().is_multiple_of(unit) {
            return Err(LinuxError::SharedMemory {
                reason: format!("{pages} pages do not fill huge pages of {unit}"),
            });
        }
        let size = match page {
            Level::L4K => panic!("a page of 4 KiB is not huge"),
            Level::L2M => MemfdFlags::HUGE_2MB,
            Level::L1G => MemfdFlags::HUGE_1GB,
        };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | size;
        let file = memfd_create("lacuna-huge", flags).map_err(refused)?;
        ftruncate(&file, pages.bytes()).map_err(refused)?;
        Ok(Self {
            file: Arc::new(file),
            first: 0,
            fill: SharedFill::CopiedIn,
            page,
            has_neighbours: false,
        })
    }

    /// The file `file` from its page `first` on. Another process may have it too.
    ///
    /// # Errors
    /// It is not a memory file of small pages.
    pub fn of_file(file: OwnedFd, first: u64, fill: SharedFill) -> Result<Self, LinuxError> {
        let refused = |reason: &str| LinuxError::SharedMemory {
            reason: reason.into(),
        };
        let system = fstatfs(&file).map_err(|errno| refused(&errno.to_string()))?;
        // The type of the number differs from architecture to architecture.
        match u32::try_from(system.f_type) {
            Ok(TMPFS) => {}
            Ok(HUGETLBFS) => {
                return Err(refused(
                    "the file is in hugetlbfs; SharedMemory::huge makes memory in huge pages",
                ));
            }
            // A thread can wait only for missing pages of memory files.
            _ => {
                return Err(refused(
                    "it is no memory file (memfd_create, or a file of tmpfs)",
                ));
            }
        }
        // tmpfs reports its preferred page size as the block size.
        let block = fstat(&file).map_or(0, |stat| stat.st_blksize);
        Ok(Self {
            file: Arc::new(file),
            first,
            fill,
            page: Level::L4K,
            has_neighbours: usize::try_from(block) != Ok(PAGE_SIZE),
        })
    }

    /// Refuses a file whose pages a page source cannot fill: not one by one, or not in pieces that
    /// are small enough to be gathered before they are put in place.
    pub(super) fn check_source(&self) -> Result<(), LinuxError> {
        match self.has_neighbours {
            false if self.page == Level::L1G => Err(LinuxError::SharedMemory {
                reason: "a page source does not fill huge pages of 1 GiB: a guest would wait for \
                         all of one at its first touch; use huge pages of 2 MiB"
                    .into(),
            }),
            false => Ok(()),
            true => Err(LinuxError::SharedMemory {
                reason: "its tmpfs makes huge pages: a write to one page puts zeros in the place \
                         of others, which the source has not provided; mount it with huge=never, \
                         or give the memory no source"
                    .into(),
            }),
        }
    }

    /// The same file, from its page `pages` on.
    #[must_use]
    pub fn part(&self, pages: u64) -> Self {
        let first = self.first.saturating_add(pages);
        Self {
            first,
            ..self.clone()
        }
    }

    /// The file, to be sent to another process.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The number of the file's page at which this memory begins.
    pub const fn first(&self) -> u64 {
        self.first
    }

    /// The byte offset of its first page in the file, if it has at least `pages` pages.
    pub(super) fn offset(&self, pages: PageCount) -> Result<u64, LinuxError> {
        let refused = |reason: String| LinuxError::SharedMemory { reason };
        let unit = self.page.pages();
        if !(self.first | pages.get()).is_multiple_of(unit) {
            return Err(refused(format!(
                "{pages} pages do not fill huge pages of {unit}"
            )));
        }
        offset_in(self.file(), self.first, pages)
    }

    /// Whether its pages are huge pages of hugetlbfs ([`SharedMemory::huge`]).
    pub const fn is_huge(&self) -> bool {
        self.page_size() as u8 > Level::L4K as u8
    }

    /// The size of its pages.
    pub const fn page_size(&self) -> Level {
        self.page
    }

    /// Why `pages` pages cannot be allocated.
    pub(super) fn refused(&self, pages: PageCount, errno: Errno) -> LinuxError {
        match self.is_huge() {
            true => no_huge_pages(pages, self.page, errno),
            false => LinuxError::SharedMemory {
                reason: match errno {
                    Errno::ACCESS => "its descriptor is for reads only, or for writes only; open \
                                      the file for both"
                        .into(),
                    Errno::PERM => {
                        "the file is sealed against writes; give one without that seal, \
                                    or map it privately (LinuxBacking::Private)"
                            .into()
                    }
                    errno => errno.to_string(),
                },
            },
        }
    }

    /// Takes huge pages of zeros for `pages` pages from byte `offset` of the file on, where the
    /// file has none. Small pages are allocated on first touch.
    pub(super) fn take_huge_pages(&self, offset: u64, pages: PageCount) -> Result<(), LinuxError> {
        let taken = self.allocate(offset, pages.bytes());
        taken.map_err(|errno| self.refused(pages, errno))
    }

    pub(super) fn allocate(&self, offset: u64, bytes: u64) -> Result<(), Errno> {
        if !self.is_huge() {
            return Ok(());
        }
        // A file shortened by another process stays short. A pending signal ends the call between
        // two huge pages; the next call continues there.
        retry_on_intr(|| fallocate(&self.file, FallocateFlags::KEEP_SIZE, offset, bytes))
    }
}

/// The error if the process locks a memory file that a page source is to fill.
pub(super) fn locked() -> LinuxError {
    LinuxError::SharedMemory {
        reason: "this process locks its memory (mlockall, MCL_FUTURE): the file gets all of its \
                 pages at once, and none is missing; do not lock memory that a source fills"
            .into(),
    }
}

fn no_huge_pages(pages: PageCount, page: Level, errno: Errno) -> LinuxError {
    let (size, reserve) = reserve_of(page);
    let help = match errno {
        Errno::NOMEM | Errno::NOSPC => format!("; reserve more of them ({reserve})"),
        _ => String::new(),
    };
    let count = pages.get() / page.pages();
    LinuxError::SharedMemory {
        reason: format!("no {count} huge pages of {size}: {errno}{help}"),
    }
}

/// The size of huge pages in words, and the file in which root reserves them.
pub fn reserve_of(page: Level) -> (&'static str, &'static str) {
    match page {
        Level::L1G => (
            "1 GiB",
            "/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages",
        ),
        _ => ("2 MiB", "/proc/sys/vm/nr_hugepages"),
    }
}
