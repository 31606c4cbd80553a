//! The Linux memory of one region: its addresses, its userfaultfds, and the threads that use it.
//!
//! # Users
//! A vCPU's use of a page ends with the invalidation of its leaf. Any other thread is a *user* of
//! the region while it copies or fills ([`LinuxMemory::enter`]). It reads the page word after it
//! has entered. A thread that takes pages away first changes their words, and then waits for the
//! users. So either that thread sees the user and waits, or the user sees the changed word. Without
//! this order a user's late copy could land in the next region at these addresses.

use super::addresses::LinuxAddresses;
use super::handler::FillHandler;
use super::parts::{Parts, Touched};
use super::shared_file::{LinuxBacking, SharedMemory, locked};
use crate::error::HostError;
use crate::striped::Striped;
use lacuna_addr::{Hva, HvaRange, PAGE_SIZE, PageCount, Pfn};
use lacuna_frames::Pool;
use lacuna_sys::{Errno, TakenPages, Userfaultfd, Waiters};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering, fence};

/// A run of pages that one system call put in place.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Run {
    pub len: usize,
    /// The number of pages whose content counts.
    pub taken: usize,
}

/// The Linux memory of one region.
pub(crate) struct LinuxMemory {
    /// The frame number of the region's first page.
    pub first: Pfn,
    pub addresses: HvaRange,
    /// Where missing pages are filled; `None`: Linux fills them with zeros on first touch, or a
    /// handler does.
    pub parts: Option<Parts>,
    /// A handler fills the region, with its own userfaultfds.
    pub outside: Option<Arc<FillHandler>>,
    /// The mapped file; `None`: the memory is anonymous.
    pub shared: Option<SharedMemory>,
    pub users: Striped<Users>,
}

/// The counts of one group of threads. A vCPU that fills its own pages writes here several times a
/// page.
#[derive(Default)]
pub(crate) struct Users {
    /// Threads that copy or fill.
    pub inside: AtomicUsize,
    /// Pages put in place, less pages discarded, for statistics.
    pub in_place: AtomicI64,
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
    pub fn new(
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
                    Filled::BySource(_) | Filled::FromOutside(_) => shared.check_source()?,
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
                    Filled::BySource(_) | Filled::ByLinux => None,
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
                    Errno::MFILE => HostError::Userfaultfd(format!(
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

    /// Where the page at `index` of the region is filled; `None`: Linux fills it with zeros.
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
pub(crate) enum Filled {
    /// The region's page source, or the VMM.
    BySource(Touched),
    /// Linux, with zeros.
    ByLinux,
    /// A handler outside of this host, or the VMM.
    FromOutside(Arc<FillHandler>),
}
