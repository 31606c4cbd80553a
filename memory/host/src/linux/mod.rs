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
//!                              |------------------------------> Zero -----'
//!                              '--> Empty (made missing again)
//!         any state at rest --> Gone (region removed)
//!
//!       InPlace --> Discarding --> PagedOut --> PagingIn --> InPlace: see `page_out`
//! ```
//! Only this module puts pages in place, so the page words alone record it. So a fault is answered
//! without a system call: the frame number of a page follows from its number. There are no
//! descriptors, so reclaim, aging and compound pages never see Linux memory.
//!
//! A region with a page source is registered with userfaultfds: a never provided page is missing,
//! and no access reads it as zeros. No thread touches a missing page, because every access first
//! reads the page word.
//!
//! Another process may fill a region from outside: see `outside`. The pages of a huge page are
//! filled together: see `units`.

mod discard;
mod fill;
pub(crate) mod limit;
pub(crate) mod loss_list;
mod losses;
mod outside;
mod page_out;
mod remove;
mod shared;
mod units;

pub use loss_list::SeenLosses;

use crate::core::Core;
use crate::error::HostError;
use crate::host::Host;
use crate::origin::Origin;
use crate::region::{MmuNotifier, Region};
use lacuna_addr::{BackingRange, HvaRange, PageCount, Pfn};
use lacuna_frames::PageNo;
use lacuna_linux::{FillHandler, Filled, LinuxBacking, LinuxError, LinuxMemory, Touched};
use lacuna_source::{PageSource, SourcePage};
use lacuna_sys::{Errno, Userfaultfd};
use std::sync::Arc;

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
    /// process page by page, outside the budget. Linux may swap its pages, and
    /// [`Host::page_out`] asks Linux to. [`Host::with_linux_memory`] has set the limit for all such
    /// regions.
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
        let refused = |errno: Errno| LinuxError::Userfaultfd(errno.to_string());
        let filled = match &origin {
            Some((source, first)) => {
                match FillHandler::of(Arc::downgrade(core) as _, source, *first).map_err(refused)? {
                    Some(outside) => Filled::FromOutside(outside),
                    None => Filled::BySource(Touched::Signals),
                }
            }
            None => Filled::ByLinux,
        };
        self.add_linux((filled, backing), origin, pages, notifier)
    }

    /// Adds a region of Linux memory of the kind `backing`, for a guest such as KVM's, whose
    /// accesses do not resolve pages first. Without a source, Linux fills a page with zeros at its
    /// first touch. With one, a thread that touches a missing page sleeps, as `touched` says, until
    /// the page is filled: the caller reads [`Host::userfaultfds`], and resolves and starts the
    /// page of each fault.
    ///
    /// # Errors
    /// As [`Host::add_linux_region`]. A source that a handler fills from outside
    /// ([`PageSource::external`](crate::PageSource::external)) is refused.
    pub fn add_guest_region(
        &self,
        backing: LinuxBacking,
        origin: Option<(Arc<dyn PageSource>, SourcePage)>,
        pages: PageCount,
        touched: Touched,
        notifier: Arc<dyn MmuNotifier>,
    ) -> Result<BackingRange, HostError> {
        let filled = match &origin {
            Some((source, _)) if source.external().is_some() => {
                let reason = "a handler fills memory only of guests that resolve their pages";
                return Err(LinuxError::Userfaultfd(reason.into()).into());
            }
            Some(_) => Filled::BySource(touched),
            None => Filled::ByLinux,
        };
        self.add_linux((filled, backing), origin, pages, notifier)
    }

    /// The descriptors of a region of [`Host::add_guest_region`] with a source, each with the
    /// addresses of its part. They report the faults of threads that sleep. Empty for other
    /// regions.
    pub fn userfaultfds(&self, region: BackingRange) -> Vec<(HvaRange, Arc<Userfaultfd>)> {
        let found = self.core.regions.find(PageNo::of(region.start()));
        let linux = found.as_ref().and_then(|region| region.linux.as_ref());
        linux.map_or_else(Vec::new, LinuxMemory::userfaultfds)
    }

    fn add_linux(
        &self,
        (filled, backing): (Filled, LinuxBacking),
        origin: Option<(Arc<dyn PageSource>, SourcePage)>,
        pages: PageCount,
        notifier: Arc<dyn MmuNotifier>,
    ) -> Result<BackingRange, HostError> {
        let core = &self.core;
        if pages.get() == 0 {
            return Err(HostError::BadRegion(pages));
        }
        let linux = LinuxMemory::new(&core.frames.pool, &core.linux, pages, (filled, backing))?;
        let first = linux.first;
        let origin = origin.map(|(source, first)| Origin::new(core.answers(), source, first));
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
        PageCount::new(self.core.linux_pages())
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
