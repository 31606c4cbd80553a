//! A guest's memory: pages of the host manager (`lacuna_host`), at addresses that KVM's slots use.
//!
//! | memory | its pages are | a missing page |
//! |---|---|---|
//! | all resident, no page source | Linux memory | none: Linux fills it, or has it in a file |
//! | all resident, a page source | Linux memory | the manager fills it in place (`UFFDIO_COPY`) |
//! | more than the budget | in frames of the budget | is mapped in the window (`window`) |
//!
//! Linux memory is anonymous, or in a shared or private file. A handler may fill anonymous memory
//! (`lacuna_source::External`): threads that touch a missing page wait for it in the kernel, and
//! this process takes no part.
//!
//! The slots of the boot layout lie one after the other in one region of the manager. A slot added
//! later has a mapping of its own (`slots`).
//!
//! UNSAFETY: Linux memory is registered so that the kernel records writes to it, or so that a
//! handler fills it.

use crate::error::KvmError;
use crate::mapping;
use crate::tracker::Tracker;
pub use crate::window::Page;
use crate::window::{Mapped, Window};
use lacuna_addr::{
    Access, BackingAddr, BackingRange, Gpa, Hva, HvaRange, Level, PAGE_SIZE, PageCount,
};
use lacuna_host::{
    Background, Host, HostConfig, HostError, HugePages, Io, Latency, LinuxBacking, MemoryKind,
    MmuNotifier, PageSource, PerCpuPages, Resolution, SourcePage, Swap, Touched, linux_room,
};
use lacuna_machine::{External, HandlerRegion, Layout};
use lacuna_sync::{HostClock, LatencySetting};
use lacuna_sys::{Errno, Pagemap, Userfaultfd};
use std::ops::Range;
use std::sync::Arc;

/// The smallest budget for a part of a guest's pages. The pages of every vCPU's last few
/// instructions stay mapped.
pub const BUDGET_MIN: u64 = 512;

/// What a guest's memory is made from.
pub struct MemoryConfig {
    /// What the guest sees.
    pub size: PageCount,
    /// The place of its pages.
    pub kind: MemoryKind,
    /// The VMM's own memory, in place of memory of `kind`.
    pub backing: Option<LinuxBacking>,
    /// Whether it may be in huge pages: of the manager if it is more than the budget, otherwise of
    /// Linux. The VMM advises them for all of the memory.
    pub huge: HugePages,
    /// How many of its pages may be resident, of [`MemoryKind::Budget`].
    pub resident: PageCount,
    /// Where the other pages are.
    pub swap: Swap,
    /// The delay added to every swap transfer.
    pub latency: LatencySetting,
    /// Provides each page once; `None`: they are zeros.
    pub source: Option<Arc<dyn PageSource>>,
    /// The detector of writes.
    pub tracker: Tracker,
}

impl MemoryConfig {
    /// Whether no page is ever swapped out.
    pub fn is_whole(&self) -> bool {
        let is_linux = self.backing.is_some() || self.kind != MemoryKind::Budget;
        is_linux || self.resident >= self.size
    }

    /// Whether it is private memory that Linux fills with zeros.
    fn is_filled_by_linux(&self) -> bool {
        self.is_anonymous() && self.is_whole() && self.source.is_none()
    }

    /// The Linux memory of a guest that is all resident.
    fn linux_backing(&self) -> Result<LinuxBacking, HostError> {
        match &self.backing {
            Some(backing) => Ok(backing.clone()),
            None => Ok(self.kind.backing(self.size)?.unwrap_or_default()),
        }
    }

    fn is_anonymous(&self) -> bool {
        match &self.backing {
            Some(backing) => !backing.is_file(),
            None => matches!(self.kind, MemoryKind::Budget | MemoryKind::Linux),
        }
    }

    /// Whether a handler fills it, and not this process.
    pub fn has_handler(&self) -> bool {
        let source = self.source.as_ref();
        source.is_some_and(|source| source.external().is_some())
    }
}

/// A guest's memory.
pub struct Memory {
    /// The slots' places in the guest's address space.
    pub layout: Layout,
    /// Dropped before `host`: the end of its thread must not be the end of the host, which waits
    /// for the thread that drops the memory if that is one of the host's.
    _background: Option<Background>,
    pub host: Arc<Host>,
    /// Its pages in the host manager.
    region: BackingRange,
    /// Its pages in this process, where KVM's slots are.
    addresses: HvaRange,
    kind: Kind,
    /// Whether a page source, or the VMM, provides its pages.
    pub has_source: bool,
    /// The page table, of Linux memory.
    pagemap: Option<Pagemap>,
    /// What Linux memory is made of.
    pub backing: LinuxBacking,
}

enum Kind {
    /// Linux memory.
    Linux {
        /// The descriptors of its parts, if a page source fills it.
        parts: Vec<(HvaRange, Arc<Userfaultfd>)>,
        /// Records writes, where `parts` do not.
        recorder: Option<Userfaultfd>,
        /// Fills it instead of a page source.
        handler: Option<Arc<dyn PageSource>>,
    },
    /// Frames of the budget.
    Frames(Arc<Window>),
}

/// KVM has an MMU notifier of its own: Linux calls it whenever it takes a page away.
struct KvmsOwn;

impl MmuNotifier for KvmsOwn {
    fn invalidate(&self, _: &[BackingRange]) {}
    fn age(&self, _: &[BackingRange], _: &mut [bool]) {}
    fn split_huge(&self, _: BackingRange) {}
    fn end_of_aging(&self) {}
}

impl Memory {
    /// Zero-filled memory.
    ///
    /// # Errors
    /// The size is not possible, or the kernel refuses.
    pub fn new(config: MemoryConfig) -> Result<Self, KvmError> {
        let layout = Layout::new(config.size)?;
        if u32::try_from(config.size.get()).is_err() {
            return Err(KvmError::TooLarge(config.size.bytes()));
        }
        if config.huge != HugePages::Never && config.is_whole() && !config.is_filled_by_linux() {
            return Err(KvmError::HugePages);
        }
        if config.has_handler() && !(config.is_whole() && config.is_anonymous()) {
            return Err(KvmError::HandlerMemory);
        }
        let is_recorded = config.tracker == Tracker::Pagemap;
        if is_recorded && matches!(config.backing, Some(LinuxBacking::Private(_))) {
            return Err(KvmError::RecordedFile);
        }
        match config.is_whole() {
            true => Self::linux(layout, config),
            false => Self::frames(layout, config),
        }
    }

    fn linux(layout: Layout, config: MemoryConfig) -> Result<Self, KvmError> {
        let (has_handler, backing) = (config.has_handler(), config.linux_backing()?);
        let MemoryConfig {
            size,
            huge,
            source,
            tracker,
            ..
        } = config;
        // Nothing is swapped out. The manager needs a device and a few frames all the same.
        let budget = Host::minimum_budget(1);
        let room = linux_room(backing.page_size(), [size]);
        let host = HostConfig {
            budget,
            huge: HugePages::Never,
            swap: Swap::Memory.open(budget)?,
            io: Io::Threads { readers: 1 },
            clock: Arc::new(HostClock::default()),
        };
        let host = Host::with_linux_memory(host, room)?;
        let touched = match tracker {
            Tracker::Kvm => Touched::Sleeps,
            Tracker::Pagemap => Touched::SleepsAndRecords,
        };
        let (handler, source) = match has_handler {
            true => (source, None),
            false => (None, source),
        };
        let has_source = source.is_some();
        let origin = source.map(|source| (source, SourcePage(0)));
        let notifier = Arc::new(KvmsOwn);
        let region = host.add_guest_region(backing.clone(), origin, size, touched, notifier)?;
        let addresses = host.addresses(region).expect("Linux memory has addresses");
        if huge != HugePages::Never {
            let advised = mapping::advise_huge(addresses);
            advised.map_err(KvmError::no_huge_pages)?;
        }
        let recorder = match (tracker, has_source) {
            (Tracker::Pagemap, false) => Some(record(addresses)?),
            _ => None,
        };
        if let Some(external) = handler.as_ref().and_then(|handler| handler.external()) {
            wait_for(external, addresses)?;
        }
        let parts = host.userfaultfds(region);
        Ok(Self {
            layout,
            region,
            addresses,
            kind: Kind::Linux {
                parts,
                recorder,
                handler,
            },
            has_source,
            // Without the page table, each page that the VMM accesses is touched.
            pagemap: Pagemap::open().ok(),
            backing,
            host,
            _background: None,
        })
    }

    fn frames(layout: Layout, config: MemoryConfig) -> Result<Self, KvmError> {
        let size = config.size;
        // Twice the memory, so that runs of free places for clusters are easy to find.
        let capacity = PageCount::new(size.get().saturating_mul(2));
        let host = Host::new(HostConfig {
            budget: config.resident,
            huge: config.huge,
            swap: Box::new(Latency::new(config.swap.open(capacity)?, config.latency)),
            io: Io::Ring { readers: 4 },
            clock: Arc::new(HostClock::default()),
        })?;
        let window = Window::new(&host, size)?;
        let (window, has_source) = (Arc::new(window), config.source.is_some());
        let notifier = Arc::clone(&window) as Arc<dyn MmuNotifier>;
        let region = match config.source {
            Some(source) => host.add_region_from(source, SourcePage(0), size, notifier)?,
            None => host.add_region(size, notifier)?,
        };
        window.set_first(region.start());
        host.advise_huge(region)?;
        Ok(Self {
            layout,
            region,
            addresses: window.range(),
            kind: Kind::Frames(window),
            has_source,
            pagemap: None,
            backing: LinuxBacking::default(),
            _background: Some(host.spawn_background()?),
            host,
        })
    }

    /// Each slot: its guest address, its host address, its size in bytes.
    pub fn slots(&self) -> impl Iterator<Item = (Gpa, Hva, u64)> {
        let mut at = self.addresses.start().get();
        self.layout.ranges().iter().map(move |range| {
            let bytes = range.pages() * PAGE_SIZE as u64;
            let hva = Hva::new(at);
            at += bytes;
            (range.start().gpa(), hva, bytes)
        })
    }

    /// The address of `page` in this process.
    pub fn hva(&self, page: Page) -> Hva {
        Hva::new(self.addresses.start().get() + u64::from(page) * PAGE_SIZE as u64)
    }

    /// The page at `hva`, if it lies in this memory.
    pub fn page(&self, hva: Hva) -> Option<Page> {
        let offset = hva.get().checked_sub(self.addresses.start().get())?;
        let index = offset / PAGE_SIZE as u64;
        (index < self.addresses.pages()).then_some(index as Page)
    }

    /// The host manager's address of `page`.
    pub fn backing(&self, page: Page) -> BackingAddr {
        let addr = self.region.start().checked_add_pages(u64::from(page));
        addr.expect("a page of the region")
    }

    /// The pages that are provided together with `page`: its huge page's pages, or it alone.
    pub fn provided_with(&self, page: Page) -> Range<Page> {
        let together = self.host.provided_with(self.backing(page));
        let first = (together.start().get() - self.region.start().get()) / PAGE_SIZE as u64;
        first as Page..(first + together.pages()) as Page
    }

    /// Whether neither the page source nor the VMM has provided `page` yet.
    pub fn is_missing(&self, page: Page) -> bool {
        self.has_source && self.host.was_never_provided(self.backing(page))
    }

    /// The descriptors that report faults.
    pub fn userfaultfds(&self) -> Vec<Arc<Userfaultfd>> {
        match &self.kind {
            Kind::Linux { parts, .. } => parts.iter().map(|(_, uffd)| Arc::clone(uffd)).collect(),
            Kind::Frames(window) => vec![Arc::clone(window.userfaultfd())],
        }
    }

    /// Whether Linux fills each page at its first touch.
    pub fn is_filled_by_linux(&self) -> bool {
        let is_linux = matches!(self.kind, Kind::Linux { .. });
        is_linux && !self.has_source && self.handler().is_none()
    }

    /// The handler that fills it.
    pub fn handler(&self) -> Option<&External> {
        match &self.kind {
            Kind::Linux { handler, .. } => handler.as_ref()?.external(),
            Kind::Frames(_) => None,
        }
    }

    /// Whether a resident page has to be mapped ([`Memory::map`]) before a thread finds it.
    pub fn is_mapped_by_moves(&self) -> bool {
        matches!(self.kind, Kind::Frames(_))
    }

    /// Wakes the threads that wait for `page`. Where it is missing, they fault again.
    pub fn wake(&self, page: Page) -> Result<(), Errno> {
        let hva = self.hva(page);
        match &self.kind {
            Kind::Frames(window) => window.userfaultfd().wake(hva),
            Kind::Linux { parts, .. } => {
                let part = parts.iter().find(|(part, _)| part.contains(hva));
                part.map_or(Ok(()), |(_, uffd)| uffd.wake(hva))
            }
        }
    }

    /// Maps `page` where the guest sees it, if it is resident, and wakes the threads that wait for
    /// it.
    pub fn map(&self, page: Page, cache: &mut PerCpuPages) -> Mapped {
        let addr = self.backing(page);
        match &self.kind {
            Kind::Frames(window) => window.map(&self.host, (page, addr), cache),
            Kind::Linux { .. } => {
                let resolution = self.host.resolve(addr, Access::Write, Level::L4K, cache);
                cache.unpin_all();
                match resolution {
                    // It was filled while the fault was being reported.
                    Resolution::Ready(_) => {
                        let woken = self.wake(page);
                        woken.map_or_else(Mapped::Refused, |()| Mapped::Yes)
                    }
                    other => Mapped::No(other),
                }
            }
        }
    }

    /// Ends the waits of all threads for missing pages, because the VM ends: they find zeros.
    pub fn close(&self) {
        match &self.kind {
            Kind::Frames(window) => window.close(),
            Kind::Linux { parts, .. } => {
                let of_handler = self.handler().into_iter();
                let of_handler = of_handler.flat_map(|handler| parts_of(handler, self.addresses));
                let own = parts.iter().map(|(part, uffd)| (*part, &**uffd));
                for (part, uffd) in own.chain(of_handler) {
                    let unregistered = uffd.unregister(part);
                    debug_assert!(unregistered.is_ok(), "{unregistered:?}");
                }
            }
        }
    }

    /// Allows writes to `range` without a record.
    ///
    /// # Errors
    /// As [`Userfaultfd::unprotect`].
    pub fn unprotect(&self, range: HvaRange) -> Result<(), Errno> {
        let Kind::Linux {
            parts, recorder, ..
        } = &self.kind
        else {
            return Ok(());
        };
        if let Some(recorder) = recorder {
            return recorder.unprotect(range);
        }
        let parts = parts.iter();
        let parts = parts.filter_map(|(part, uffd)| Some((part.intersect(range)?, uffd)));
        parts
            .into_iter()
            .try_for_each(|(part, uffd)| uffd.unprotect(part))
    }

    /// Whether each page of `range` was ever touched: an untouched page has zeros. `None`: only an
    /// access can tell.
    pub fn touched(&self, range: HvaRange) -> Option<Vec<bool>> {
        // A page of a file may have content before its first touch.
        let has_zeros = self.is_filled_by_linux() && !self.backing.is_file();
        let pagemap = self.pagemap.as_ref().filter(|_| has_zeros)?;
        let is_inside = self.addresses.intersect(range) == Some(range);
        is_inside.then(|| pagemap.touched(range).ok()).flatten()
    }

    /// Pages in memory at present.
    pub fn resident(&self) -> PageCount {
        match &self.kind {
            Kind::Frames(_) => PageCount::new(self.host.stats().resident),
            Kind::Linux { .. } if self.has_source => self.host.linux_pages(),
            Kind::Linux { .. } => PageCount::new(self.present(self.addresses).unwrap_or(0)),
        }
    }

    /// Pages of `range` in memory, by the page table; `None` if it cannot be read.
    pub fn present(&self, range: HvaRange) -> Option<u64> {
        self.pagemap.as_ref()?.present(range).ok()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.handler().into_iter().for_each(External::finish);
    }
}

/// The parts of `addresses`, each with the descriptor of its handler.
fn parts_of(
    handler: &External,
    addresses: HvaRange,
) -> impl Iterator<Item = (HvaRange, &Userfaultfd)> {
    let parts = handler.parts_of(0..addresses.pages());
    parts.map(move |(pages, uffd)| {
        let start = addresses.start().checked_add_pages(pages.start);
        let part = start.and_then(|start| HvaRange::new(start, pages.end - pages.start));
        (part.expect("a part of the addresses"), uffd)
    })
}

/// From now on, threads that touch a page wait for `handler`, which gets the addresses.
fn wait_for(handler: &External, addresses: HvaRange) -> Result<(), KvmError> {
    if !handler.is_for_kernel() {
        return Err(KvmError::HandlerOfUserSpace);
    }
    let refused = |errno| KvmError::Userfaultfd {
        step: "register memory",
        errno,
    };
    for (part, uffd) in parts_of(handler, addresses) {
        // SAFETY: 1. the range is Linux memory of the manager, which `Memory` keeps until it is
        // closed. 2. It is accessed by atomics only.
        unsafe { uffd.register(part) }.map_err(refused)?;
    }
    // SAFETY: 1. no thread has used the memory yet.
    unsafe { mapping::drop_bytes(addresses) }.map_err(refused)?;
    handler.begin(&[HandlerRegion {
        memory: addresses,
        first: SourcePage(0),
        page: Level::L4K,
    }])?;
    Ok(())
}

fn record(addresses: HvaRange) -> Result<Userfaultfd, KvmError> {
    let refused = |errno| KvmError::Userfaultfd {
        step: "record writes without a message for each (Linux 6.7)",
        errno,
    };
    let recorder = Userfaultfd::open_recording().map_err(refused)?;
    // SAFETY: 1. the range is Linux memory of the manager, which `Memory` keeps longer than the
    // descriptor. 2. It is accessed by atomics only.
    unsafe { recorder.register(addresses) }.map_err(refused)?;
    Ok(recorder)
}
