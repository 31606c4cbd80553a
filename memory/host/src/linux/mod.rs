//! Linux memory: regions whose pages are in memory that this process has mapped, not in frames of
//! the budget. Linux takes a page for it when it is filled, and may itself swap that page.
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
//! Only this module puts pages in place, so the page words alone record it. So a fault is answered
//! without a system call: the frame number of a page follows from its number. There are no
//! descriptors, so reclaim, aging and compound pages never see Linux memory.
//!
//! A region with a page source is registered with userfaultfds (see `parts`): a never provided page
//! is missing, and no access reads it as zeros. No thread touches a missing page, because every
//! access first reads the page word.
//!
//! Another process may fill a region from outside: see `outside`. The pages of a huge page are
//! filled together: see `units`.
//!
//! # Users
//! A vCPU's use of a page ends with the invalidation of its leaf. Any other thread is a *user* of
//! the region while it copies or fills ([`LinuxMemory::enter`]). It reads the page word after it
//! has entered. A thread that takes pages away first changes their words, and then waits for the
//! users. So either that thread sees the user and waits, or the user sees the changed word. Without
//! this order a user's late copy could land in the next region at these addresses.

mod addresses;
mod discard;
mod fill;
mod losses;
mod outside;
mod parts;
mod remove;
mod shared;
mod units;

pub(crate) use addresses::LinuxAddresses;
pub(crate) use losses::Losses;
pub use losses::SeenLosses;
pub use shared::{LinuxBacking, SharedFill, SharedMemory};
pub(crate) use units::{Gathered, Gathering, UnitContent};

use crate::error::HostError;
use crate::host::{Core, Host};
use crate::pool::Pool;
use crate::region::{MmuNotifier, Region};
use crate::residency::PageNo;
use crate::source::Origin;
use crate::striped::Striped;
use lacuna_addr::{BackingRange, Hva, HvaRange, PAGE_SIZE, PageCount, Pfn};
use lacuna_source::{PageSource, SourcePage};
use lacuna_sys::{Errno, TakenPages, Userfaultfd};
use outside::FillHandler;
use parts::Parts;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering, fence};

/// The Linux memory of one region.
pub(crate) struct LinuxMemory {
    /// The frame number of the region's first page.
    first: Pfn,
    addresses: HvaRange,
    /// Where missing pages are filled; `None`: Linux fills them with zeros on first touch, or a
    /// handler does.
    parts: Option<Parts>,
    /// A handler fills the region, with its own userfaultfds.
    outside: Option<Arc<FillHandler>>,
    /// The mapped file; `None`: the memory is anonymous.
    shared: Option<SharedMemory>,
    users: Striped<Users>,
}

/// The counts of one group of threads. A vCPU that fills its own pages writes here several times a
/// page.
#[derive(Default)]
struct Users {
    /// Threads that copy or fill.
    inside: AtomicUsize,
    /// Pages put in place, less pages discarded, for statistics.
    in_place: AtomicI64,
}

/// A thread that uses pages of the region, see the module's documentation.
#[must_use]
pub(crate) struct User<'a>(&'a Users);

impl Drop for User<'_> {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, Ordering::Release);
    }
}

impl LinuxMemory {
    /// Takes memory for `pages` pages. Unless `filled` says that Linux fills them, they are missing
    /// until they are filled.
    fn new(
        pool: &Pool,
        addresses: &LinuxAddresses,
        pages: PageCount,
        (filled, backing): (Filled, LinuxBacking),
    ) -> Result<Self, HostError> {
        if pages.get() == 0 {
            return Err(HostError::BadRegion(pages));
        }
        let shared = match backing {
            LinuxBacking::Anonymous => None,
            LinuxBacking::Shared(shared)
                if matches!(filled, Filled::FromOutside(_)) && !shared.is_huge() =>
            {
                return Err(HostError::SharedMemory {
                    reason: "a handler outside of this process fills private memory, or huge pages"
                        .into(),
                });
            }
            LinuxBacking::Shared(shared) => {
                let offset = shared.offset(pages)?;
                match filled {
                    Filled::ByLinux => shared.take_huge_pages(offset, pages)?,
                    Filled::BySource | Filled::FromOutside(_) => shared.check_source()?,
                }
                Some((offset, shared))
            }
        };
        let first = addresses.take(pool, pages)?;
        let count = pages.get() as usize;
        let registered = shared.as_ref().map_or(Ok(()), |(offset, shared)| {
            let mapped = pool.map_linux(first, count, shared.file(), *offset);
            mapped.map_err(|errno| shared.refused(pages, errno))
        });
        let shared = shared.map(|(_, shared)| shared);
        let registered = registered
            .and_then(|()| Self::register(pool, first, count, (&filled, shared.as_ref())));
        match registered {
            Ok(parts) => Ok(Self {
                first,
                addresses: pool.range(first, count),
                parts,
                outside: match filled {
                    Filled::FromOutside(outside) => Some(outside),
                    Filled::BySource | Filled::ByLinux => None,
                },
                shared,
                users: Striped::default(),
            }),
            Err(error) => {
                // A part of the memory may be registered. If the kernel refuses, no region gets the
                // addresses again.
                if pool.renew_linux(first, count).is_ok() {
                    addresses.give(first);
                }
                Err(error)
            }
        }
    }

    fn register(
        pool: &Pool,
        first: Pfn,
        pages: usize,
        (filled, shared): (&Filled, Option<&SharedMemory>),
    ) -> Result<Option<Parts>, HostError> {
        let refused = |errno: rustix::io::Errno| HostError::Userfaultfd(errno.to_string());
        pool.advise_linux(first, pages).map_err(refused)?;
        let register = |(part, uffd): (Range<u64>, &Userfaultfd)| {
            let from = Pfn::new(first.index() as u32 + part.start as u32);
            let part = pool.range(from, (part.end - part.start) as usize);
            // SAFETY: the range is memory of the pool, anonymous or a shared memory file. It stays
            // mapped while it is registered: `remove` unregisters it before it replaces the
            // mapping, and the pool is unmapped when no region is left. All accesses go through
            // `FramePtr`, which uses atomics, except the load of a touch.
            unsafe { uffd.register(part) }.map_err(refused)
        };
        match shared {
            _ if matches!(filled, Filled::ByLinux) => {}
            // Where this process locks its memory, the new mapping already has all of its pages.
            None => pool.drop_linux(first, pages).map_err(refused)?,
            Some(_) if Pool::locks_new_mappings().map_err(refused)? => {
                return Err(shared::locked());
            }
            Some(_) => {}
        }
        match filled {
            Filled::ByLinux => Ok(None),
            Filled::BySource => {
                // An access past the page words, or to a page that other code has removed from a
                // memory file, gets SIGBUS: the page is lost. With events instead, the thread would
                // sleep for ever: no thread reads them.
                let parts = Parts::open(pages as u64).map_err(|errno| match errno {
                    Errno::MFILE => HostError::Userfaultfd(format!(
                        "{errno}: a region takes up to {} descriptors, raise `ulimit -n`",
                        Parts::MOST
                    )),
                    errno => refused(errno),
                })?;
                parts.cut(0..pages as u64).try_for_each(register)?;
                Ok(Some(parts))
            }
            Filled::FromOutside(outside) => {
                outside.parts(0..pages as u64).try_for_each(register)?;
                Ok(None)
            }
        }
    }

    /// Pages in place.
    pub fn pages_in_place(&self) -> u64 {
        let counts = self.users.iter();
        let sum: i64 = counts
            .map(|users| users.in_place.load(Ordering::Relaxed))
            .sum();
        // A thread that is counting now may make the sum negative.
        sum.try_into().unwrap_or(0)
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

    /// Where the page at `index` of the region is filled; `None`: Linux fills it with zeros.
    fn uffd_of(&self, index: u64) -> Option<&Userfaultfd> {
        match &self.outside {
            Some(outside) => Some(outside.userfaultfd(index)),
            None => self.parts.as_ref().map(|parts| parts.of(index)),
        }
    }

    /// Where the pages with the indices `pages` are filled, cut where another userfaultfd begins.
    /// Empty: Linux fills them with zeros.
    fn uffds(&self, pages: Range<u64>) -> impl Iterator<Item = (Range<u64>, &Userfaultfd)> {
        let own = self.parts.iter();
        let own = own.flat_map({
            let pages = pages.clone();
            move |parts| parts.cut(pages.clone())
        });
        let outside = self.outside.iter();
        own.chain(outside.flat_map(move |outside| outside.parts(pages.clone())))
    }

    /// Ends the registration of the pages with the indices `pages`. Threads that sleep for these
    /// pages find zeros.
    fn unregister(&self, pages: Range<u64>) -> Result<(), Errno> {
        self.uffds(pages).try_for_each(|(part, uffd)| {
            let pages = part.end - part.start;
            let part = HvaRange::new(self.hva(part.start), pages).expect("in the region");
            uffd.unregister(part)
        })
    }

    /// Makes the calling thread a user, which reads the page word after this call. A user finishes
    /// soon: it waits for no other thread.
    fn enter(&self) -> User<'_> {
        TakenPages::unblock_signal();
        let own = self.users.own();
        own.inside.fetch_add(1, Ordering::Relaxed);
        // Pairs with the fence of `wait_for_users`: either the thread that takes pages away sees
        // this user, or this thread sees the changed words.
        fence(Ordering::SeqCst);
        User(own)
    }

    /// Waits until no thread uses the pages whose words the caller has changed.
    fn wait_for_users(&self) {
        fence(Ordering::SeqCst);
        for users in self.users.iter() {
            while users.inside.load(Ordering::Acquire) != 0 {
                std::thread::yield_now();
            }
        }
    }
}

/// The provider of a page at its first touch.
enum Filled {
    /// The region's page source, or the VMM.
    BySource,
    /// Linux, with zeros.
    ByLinux,
    /// A handler outside of this host, or the VMM.
    FromOutside(Arc<FillHandler>),
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
    /// process page by page, outside the budget. This host never evicts its pages: Linux may swap
    /// them. [`Host::with_linux_memory`] has set the limit for all such regions.
    ///
    /// # Errors
    /// The limit is reached, or a userfaultfd cannot be made, which a region with a source needs.
    pub fn add_linux_region(
        &self,
        origin: Option<(Arc<dyn PageSource>, SourcePage)>,
        pages: PageCount,
        notifier: Arc<dyn MmuNotifier>,
    ) -> Result<BackingRange, HostError> {
        self.add_linux_region_in(LinuxBacking::Anonymous, origin, pages, notifier)
    }

    /// As [`Host::add_linux_region`], with memory of the kind `backing`.
    ///
    /// # Errors
    /// As there. The file has fewer pages, or cannot be mapped for reads and writes.
    pub fn add_linux_region_in(
        &self,
        backing: LinuxBacking,
        origin: Option<(Arc<dyn PageSource>, SourcePage)>,
        pages: PageCount,
        notifier: Arc<dyn MmuNotifier>,
    ) -> Result<BackingRange, HostError> {
        let core = &self.core;
        let refused = |errno: Errno| HostError::Userfaultfd(errno.to_string());
        let filled = match &origin {
            Some((source, first)) => {
                match FillHandler::of(core, source, *first).map_err(refused)? {
                    Some(outside) => Filled::FromOutside(outside),
                    None => Filled::BySource,
                }
            }
            None => Filled::ByLinux,
        };
        let linux = LinuxMemory::new(&core.frames.pool, &core.linux, pages, (filled, backing))?;
        let first = linux.first;
        let origin = origin.map(|(source, first)| Origin::new(core, source, first));
        let added = core.regions.add(pages, notifier, origin, Some(linux));
        match &added {
            Ok(range) => {
                let region = core.regions.find(PageNo::of(range.start()));
                region
                    .into_iter()
                    .for_each(|region| core.losses.add(region));
            }
            Err(_) => core.give_linux(first, pages.get() as usize, None),
        }
        added
    }

    /// The addresses of `region`, a whole region of Linux memory, in this process.
    pub fn addresses(&self, region: BackingRange) -> Option<HvaRange> {
        let found = self.core.regions.find(PageNo::of(region.start()))?;
        Some(found.linux.as_ref()?.addresses)
    }

    /// Pages in place in Linux memory, of all regions.
    pub fn linux_pages(&self) -> PageCount {
        let regions = self.core.regions.snapshot();
        let linux = regions.iter().filter_map(|region| region.linux.as_ref());
        PageCount::new(linux.map(LinuxMemory::pages_in_place).sum())
    }
}

impl Core {
    /// Gives back Linux memory that no region, leaf or thread uses. A handler of `outside` may
    /// still fill it.
    fn give_linux(&self, first: Pfn, pages: usize, outside: Option<&FillHandler>) {
        // If the kernel refuses, the addresses keep their bytes, and no region gets them again.
        if self.frames.pool.renew_linux(first, pages).is_err() {
            return;
        }
        match outside {
            Some(outside) => self.linux.give_later(first, outside.source()),
            None => self.linux.give(first),
        }
    }
}
