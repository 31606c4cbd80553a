//! Linux memory: regions whose pages are not in frames of the budget but in memory that this
//! process has mapped. Linux takes a page for it when it is filled, and may swap that page itself.
//!
//! ```text
//!               fault, a source                       provided: UFFDIO_COPY into place
//!         .---------------------> Fetching ------------------------------.
//!       Empty                                                            v
//!         | provided; or fault, no source: Linux fills with zeros ---> InPlace
//!         | discard                                                   |   ^
//!         '--------------> Discarding <-------------------------------'   | fault: zeros
//!                              | unmapped everywhere, MADV_DONTNEED       | into place
//!                              '------------------------------> Zero -----'
//!         any state at rest --> Gone (region removed)
//! ```
//! The page words are the only record of what is in place: pages appear by this module alone. So a
//! fault is answered without a system call: the frame number of a page follows from its number.
//! There are no descriptors, so reclaim, aging and compound pages never see Linux memory.
//!
//! A region with a page source is registered with a userfaultfd: a page that was never provided is
//! missing, and no access reads it as zeros. No thread touches a missing page, because every access
//! is preceded by a look at the page word.
//!
//! # Users
//! A vCPU's use of a page ends with the invalidation of its leaf. A thread that is no vCPU is a
//! *user* of the region while it copies or fills ([`LinuxMemory::enter`]). It reads the page word
//! after it has entered. A thread that takes pages away changes their words first and waits for the
//! users then. So either that thread sees the user and waits, or the user sees the changed word.
//! Otherwise a late copy would land in the memory of the next region at these addresses.

mod discard;
mod fill;
mod remove;
mod room;

pub(crate) use room::Room;

use crate::error::HostError;
use crate::host::{Core, Host};
use crate::pool::Pool;
use crate::region::{MmuNotifier, Region};
use crate::residency::PageNo;
use crate::source::Origin;
use lacuna_addr::{BackingRange, Hva, HvaRange, PAGE_SIZE, PageCount, Pfn};
use lacuna_source::{PageSource, SourcePage};
use lacuna_sync::CachePadded;
use lacuna_sys::Userfaultfd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};

/// The Linux memory of one region.
pub(crate) struct LinuxMemory {
    /// The frame number of the region's first page.
    first: Pfn,
    addresses: HvaRange,
    /// Where missing pages are filled; `None`: Linux fills them with zeros when they are touched.
    uffd: Option<Userfaultfd>,
    /// Pages in place, for statistics.
    in_place: AtomicU64,
    /// Threads that copy or fill.
    users: CachePadded<AtomicUsize>,
}

/// A thread uses pages of the region, see the module's documentation.
#[must_use]
pub(crate) struct User<'a>(&'a LinuxMemory);

impl Drop for User<'_> {
    fn drop(&mut self) {
        self.0.users.fetch_sub(1, Ordering::Release);
    }
}

impl LinuxMemory {
    /// Takes memory for `pages` pages. If `filled` says that they come from a source, they are
    /// missing until they are filled.
    fn new(pool: &Pool, room: &Room, pages: PageCount, filled: Filled) -> Result<Self, HostError> {
        if pages.get() == 0 {
            return Err(HostError::BadRegion(pages));
        }
        let first = room.take(pool, pages)?;
        let count = pages.get() as usize;
        match Self::register(pool, first, count, filled) {
            Ok(uffd) => Ok(Self {
                first,
                addresses: pool.range(first, count),
                uffd,
                in_place: AtomicU64::new(0),
                users: CachePadded::new(AtomicUsize::new(0)),
            }),
            Err(error) => {
                room.give(first);
                Err(error)
            }
        }
    }

    fn register(
        pool: &Pool,
        first: Pfn,
        pages: usize,
        filled: Filled,
    ) -> Result<Option<Userfaultfd>, HostError> {
        let refused = |errno: rustix::io::Errno| HostError::Userfaultfd(errno.to_string());
        pool.advise_linux(first, pages).map_err(refused)?;
        if filled == Filled::ByLinux {
            return Ok(None);
        }
        let uffd = Userfaultfd::open_user().map_err(refused)?;
        // SAFETY: the range is private anonymous memory of the pool. It stays mapped while it is
        // registered: `remove` unregisters it before it replaces the mapping, and the pool is
        // unmapped when no region is left. All accesses go through `FramePtr`, which uses atomics.
        unsafe { uffd.register(pool.range(first, pages)) }.map_err(refused)?;
        Ok(Some(uffd))
    }

    /// Pages in place.
    pub fn pages_in_place(&self) -> u64 {
        self.in_place.load(Ordering::Relaxed)
    }

    /// The frame number of the page at `index` of the region.
    #[inline]
    fn pfn(&self, index: u64) -> Pfn {
        Pfn::new(self.first.index() as u32 + index as u32)
    }

    /// The address of the page at `index` of the region.
    fn hva(&self, index: u64) -> Hva {
        Hva::new(self.addresses.start().get() + index * PAGE_SIZE as u64)
    }

    /// Makes the calling thread a user. It reads the page word afterwards. A user finishes soon: it
    /// waits for no other thread.
    fn enter(&self) -> User<'_> {
        self.users.fetch_add(1, Ordering::Relaxed);
        // With the fence of `wait_for_users`: that thread sees this user, or this thread sees the
        // words that that one has changed before.
        fence(Ordering::SeqCst);
        User(self)
    }

    /// Waits until no thread uses the pages whose words the caller has changed.
    fn wait_for_users(&self) {
        fence(Ordering::SeqCst);
        while self.users.load(Ordering::Acquire) != 0 {
            std::thread::yield_now();
        }
    }
}

/// What fills a page that is touched first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Filled {
    /// The region's page source, or the VMM.
    BySource,
    /// Linux, with zeros.
    ByLinux,
}

impl Region {
    /// The frame number of `page`, in a region of Linux memory.
    #[inline]
    pub(crate) fn linux_frame(&self, page: PageNo) -> Option<Pfn> {
        let linux = self.linux.as_ref()?;
        Some(linux.pfn(self.index_of(page)))
    }
}

impl Host {
    /// As [`Host::add_region`] and [`Host::add_region_from`], with memory that Linux gives to this
    /// process page by page, beside the budget. Its pages are never evicted by this host: Linux may
    /// swap them. [`Host::with_linux_memory`] has said how much there may be.
    ///
    /// # Errors
    /// No room is left, or this process gets no userfaultfd, which a region with a source needs.
    pub fn add_linux_region(
        &self,
        origin: Option<(Arc<dyn PageSource>, SourcePage)>,
        pages: PageCount,
        notifier: Arc<dyn MmuNotifier>,
    ) -> Result<BackingRange, HostError> {
        let filled = match origin {
            Some(_) => Filled::BySource,
            None => Filled::ByLinux,
        };
        let core = &self.core;
        let linux = LinuxMemory::new(&core.frames.pool, &core.linux, pages, filled)?;
        let first = linux.first;
        let origin = origin.map(|(source, first)| Origin::new(core, source, first));
        let added = core.regions.add(pages, notifier, origin, Some(linux));
        if added.is_err() {
            self.core.give_linux(first, pages.get() as usize);
        }
        added
    }

    /// Pages of Linux memory that are in place, of all regions.
    pub fn linux_pages(&self) -> PageCount {
        let regions = self.core.regions.snapshot();
        let linux = regions.iter().filter_map(|region| region.linux.as_ref());
        PageCount::new(linux.map(LinuxMemory::pages_in_place).sum())
    }
}

impl Core {
    /// Gives Linux memory back that no region, leaf or thread uses.
    fn give_linux(&self, first: Pfn, pages: usize) {
        // If the kernel refuses, the addresses keep their bytes, and no region gets them again.
        if self.frames.pool.renew_linux(first, pages).is_ok() {
            self.linux.give(first);
        }
    }
}
