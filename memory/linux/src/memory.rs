//! The Linux memory of one region: its addresses, its userfaultfds, and the threads that use it.
//!
//! # Users
//! A vCPU's use of a page ends with the invalidation of its leaf. Any other thread is a *user* of
//! the region while it copies or fills ([`LinuxMemory::enter`]). It reads the page word after it
//! has entered. A thread that takes pages away first changes their words, and then waits for the
//! users. So either that thread sees the user and waits, or the user sees the changed word. Without
//! this order a user's late copy could land in the next region at these addresses.

use crate::addresses::LinuxAddresses;
use crate::error::LinuxError;
use crate::handler::FillHandler;
use crate::parts::{Parts, Touched};
use crate::shared_file::{LinuxBacking, SharedFill, SharedMemory, locked};
use lacuna_addr::{Hva, HvaRange, Level, PAGE_SIZE, PageCount, Pfn};
use lacuna_frames::Pool;
use lacuna_sync::Striped;
use lacuna_sys::{Errno, TakenPages, Userfaultfd, Waiters};
use rustix::mm::MapFlags;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering, fence};

/// The Linux memory of one region.
pub struct LinuxMemory {
    /// The frame number of the region's first page.
    pub first: Pfn,
    /// Its addresses in this process.
    pub addresses: HvaRange,
    /// Where missing pages are filled; `None`: Linux fills them on first touch, or a handler does.
    pub(crate) parts: Option<Parts>,
    /// A handler fills the region, with its own userfaultfds.
    pub outside: Option<Arc<FillHandler>>,
    /// What the memory is made of.
    pub backing: LinuxBacking,
    /// Linux has the advice to bring a page of a private file back without its neighbours.
    pub is_read_singly: AtomicBool,
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
pub struct User<'a>(&'a Users);

impl Drop for User<'_> {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, Ordering::Release);
    }
}

impl LinuxMemory {
    /// Takes memory for `pages` pages. Unless `filled` says that Linux fills them, they are missing
    /// until they are filled.
    pub fn new(
        pool: &Pool,
        addresses: &LinuxAddresses,
        pages: PageCount,
        (filled, backing): (Filled, LinuxBacking),
    ) -> Result<Self, LinuxError> {
        assert!(pages.get() > 0, "a region has pages");
        let offset = filled.offset(&backing, pages)?;
        let first = addresses.take(pool, pages, backing.page_size())?;
        let count = pages.get() as usize;
        let mapped = match &backing {
            LinuxBacking::Anonymous => Ok(()),
            LinuxBacking::Shared(shared) => pool
                .map_linux(first, count, (shared.file(), offset), MapFlags::SHARED)
                .map_err(|errno| shared.refused(pages, errno)),
            LinuxBacking::Private(file) => {
                let sharing = MapFlags::PRIVATE | MapFlags::NORESERVE;
                let mapped = pool.map_linux(first, count, (file.file(), offset), sharing);
                mapped.map_err(|errno| LinuxError::SharedMemory {
                    reason: errno.to_string(),
                })
            }
        };
        let registered =
            mapped.and_then(|()| Self::register(pool, first, count, (&filled, backing.shared())));
        match registered {
            Ok(parts) => Ok(Self {
                first,
                addresses: pool.range(first, count),
                parts,
                outside: match filled {
                    Filled::FromOutside(outside) => Some(outside),
                    Filled::BySource(_) | Filled::ByLinux => None,
                },
                backing,
                is_read_singly: AtomicBool::new(false),
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
    ) -> Result<Option<Parts>, LinuxError> {
        let refused = |errno: rustix::io::Errno| LinuxError::Userfaultfd(errno.to_string());
        pool.advise_linux(first, pages).map_err(refused)?;
        let register = |(part, uffd): (Range<u64>, &Userfaultfd)| {
            let from = Pfn::new(first.index() as u32 + part.start as u32);
            let pages = (part.end - part.start) as usize;
            pool.register_linux(from, pages, uffd).map_err(refused)
        };
        match shared {
            _ if matches!(filled, Filled::ByLinux) => {}
            // Where this process locks its memory, the new mapping already has all of its pages.
            None => pool.drop_linux(first, pages).map_err(refused)?,
            Some(_) if Pool::locks_new_mappings().map_err(refused)? => {
                return Err(locked());
            }
            Some(_) => {}
        }
        match filled {
            Filled::ByLinux => Ok(None),
            Filled::BySource(touched) => {
                // An access past the page words, or to a page that other code has removed from a
                // memory file, gets SIGBUS: the page is lost. With events instead, the thread would
                // sleep for ever: no thread reads them.
                let parts = Parts::open(pages as u64, *touched).map_err(|errno| match errno {
                    Errno::MFILE => LinuxError::Userfaultfd(format!(
                        "{errno}: a region takes up to {} descriptors, raise `ulimit -n`",
                        Parts::MOST
                    )),
                    errno => refused(errno),
                })?;
                let mut all = parts.cut(0..pages as u64);
                all.try_for_each(|(part, uffd)| register((part, uffd)))?;
                drop(all);
                Ok(Some(parts))
            }
            Filled::FromOutside(outside) => {
                outside.parts(0..pages as u64).try_for_each(register)?;
                Ok(None)
            }
        }
    }

    /// Whether its file may have content that no page word records.
    pub fn has_content(&self) -> bool {
        self.backing.is_file()
    }

    /// The size of its pages.
    pub fn page_size(&self) -> Level {
        self.backing
            .shared()
            .map_or(Level::L4K, SharedMemory::page_size)
    }

    /// The number of pages that are filled together: a huge page's pages, or one.
    pub fn unit(&self) -> u64 {
        self.page_size().pages()
    }

    /// Whether `pages` pages from `index` on are whole huge pages, if its pages are huge.
    pub fn is_whole(&self, index: u64, pages: u64) -> bool {
        (index | pages).is_multiple_of(self.unit())
    }

    /// Counts `pages` more pages in place, or fewer.
    pub fn note_in_place(&self, pages: i64) {
        let own = self.users.own();
        own.in_place.fetch_add(pages, Ordering::Relaxed);
    }

    /// Counts a page less, which the kernel has taken away.
    pub fn note_lost(&self) {
        self.users.own().in_place.fetch_sub(1, Ordering::Relaxed);
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
    pub fn pfn(&self, index: u64) -> Pfn {
        Pfn::new(self.first.index() as u32 + index as u32)
    }

    /// The address of the page at `index` of the region.
    pub fn hva(&self, index: u64) -> Hva {
        Hva::new(self.addresses.start().get() + index * PAGE_SIZE as u64)
    }

    /// Where the page at `index` of the region is filled; `None`: Linux fills it.
    pub fn uffd_of(&self, index: u64) -> Option<&Userfaultfd> {
        match &self.outside {
            Some(outside) => Some(outside.userfaultfd(index)),
            None => self.parts.as_ref().map(|parts| &**parts.of(index)),
        }
    }

    /// Whether a fill wakes the threads that sleep for its pages. Otherwise see
    /// [`LinuxMemory::wake_touching`].
    pub fn waiters(&self) -> Waiters {
        self.parts
            .as_ref()
            .map_or(Waiters::LeaveAsleep, Parts::waiters)
    }

    /// Where the pages with the indices `pages` are filled, cut where another userfaultfd begins.
    /// Empty: Linux fills them with zeros.
    pub fn uffds(&self, pages: Range<u64>) -> impl Iterator<Item = (Range<u64>, &Userfaultfd)> {
        let own = self.parts.iter();
        let own = own.flat_map({
            let pages = pages.clone();
            move |parts| parts.cut(pages.clone()).map(|(part, uffd)| (part, &**uffd))
        });
        let outside = self.outside.iter();
        own.chain(outside.flat_map(move |outside| outside.parts(pages.clone())))
    }

    /// The descriptors of a region that this process fills, each with the addresses of its part.
    pub fn userfaultfds(&self) -> Vec<(HvaRange, Arc<Userfaultfd>)> {
        let parts = self.parts.iter();
        let parts = parts.flat_map(|parts| parts.cut(0..self.addresses.pages()));
        let part = |(pages, uffd): (Range<u64>, &Arc<Userfaultfd>)| {
            let part = HvaRange::new(self.hva(pages.start), pages.end - pages.start);
            (part.expect("in the region"), Arc::clone(uffd))
        };
        parts.map(part).collect()
    }

    /// Whether its page source fills it in its file ([`SharedFill::InFile`]).
    pub fn is_filled_in_file(&self) -> bool {
        let fill = self.backing.shared().map(|shared| shared.fill);
        self.parts.is_some() && fill == Some(SharedFill::InFile)
    }

    /// Ends the registration of the pages with the indices `pages`. Threads that sleep for these
    /// pages find zeros.
    pub fn unregister(&self, pages: Range<u64>) -> Result<(), Errno> {
        self.uffds(pages).try_for_each(|(part, uffd)| {
            let pages = part.end - part.start;
            let part = HvaRange::new(self.hva(part.start), pages).expect("in the region");
            uffd.unregister(part)
        })
    }

    /// Makes the calling thread a user, which reads the page word after this call. A user finishes
    /// soon: it waits for no other thread.
    pub fn enter(&self) -> User<'_> {
        TakenPages::unblock_signal();
        let own = self.users.own();
        own.inside.fetch_add(1, Ordering::Relaxed);
        // Pairs with the fence of `wait_for_users`: either the thread that takes pages away sees
        // this user, or this thread sees the changed words.
        fence(Ordering::SeqCst);
        User(own)
    }

    /// Waits until no thread uses the pages whose words the caller has changed.
    pub fn wait_for_users(&self) {
        fence(Ordering::SeqCst);
        for users in self.users.iter() {
            while users.inside.load(Ordering::Acquire) != 0 {
                std::thread::yield_now();
            }
        }
    }
}

/// The provider of a page at its first touch.
pub enum Filled {
    /// The region's page source, or the VMM.
    BySource(Touched),
    /// Linux: with zeros, or from the file.
    ByLinux,
    /// A handler outside of this host, or the VMM.
    FromOutside(Arc<FillHandler>),
}

impl Filled {
    /// The byte offset of the first of `pages` pages in the file of `backing`, if they can be
    /// filled in this way. Huge pages are taken from the machine's reserve.
    fn offset(&self, backing: &LinuxBacking, pages: PageCount) -> Result<u64, LinuxError> {
        let refused = |reason: &str| LinuxError::SharedMemory {
            reason: reason.into(),
        };
        match (backing, self) {
            (LinuxBacking::Anonymous, _) => Ok(0),
            (LinuxBacking::Private(file), Self::ByLinux) => file.offset(pages),
            (LinuxBacking::Private(_), _) => Err(refused(
                "a private file has the guest's whole memory: leave the page source out",
            )),
            (LinuxBacking::Shared(shared), Self::FromOutside(_)) if !shared.is_huge() => Err(
                refused("a handler outside of this process fills private memory, or huge pages"),
            ),
            (LinuxBacking::Shared(shared), _) => {
                let offset = shared.offset(pages)?;
                match self {
                    Self::ByLinux => shared.take_huge_pages(offset, pages)?,
                    Self::BySource(_) | Self::FromOutside(_) => shared.check_source()?,
                }
                Ok(offset)
            }
        }
    }
}
