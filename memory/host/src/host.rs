//! The manager: its parts, its configuration, and its regions.

use crate::core::{Core, minimum_budget};
use crate::counters::Counters;
use crate::error::HostError;
use crate::io::{Arrivals, Executor, Io};
use crate::linux::loss_list::Losses;
use crate::origin::Origin;
use crate::per_cpu_pages::PerCpuPages;
use crate::read_ahead_window::ReadAheadWindow;
use crate::region::{HugePages, MmuNotifier, Regions};
use crate::settled::Settled;
use crate::spare_caches::SpareCaches;
use crate::switches::Switches;
use crate::ticket::Ticket;
use lacuna_addr::{
    BackingAddr, BackingRange, HvaRange, Level, PageCount, Pfn, room_for, room_for_threads,
};
use lacuna_frames::{BLOCK, BudgetFrames, Desc, FramePtr, Frames, MAX_FRAMES, PageNo, Pool};
use lacuna_linux::{LinuxAddresses, LinuxError};
use lacuna_source::{PageSource, SourcePage};
use lacuna_swap::{SwapMap, SwapStore};
use lacuna_sync::{Clock, Mutex, Nanos, lock};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};

/// The configuration of a [`Host`].
pub struct HostConfig {
    /// Frames of the resident budget, shared by every region.
    pub budget: PageCount,
    /// The swap device, for pages that reclaim evicts.
    pub swap: Box<dyn SwapStore>,
    /// Where the host makes compound pages.
    pub huge: HugePages,
    /// The executor that carries out reads and completes operations.
    pub io: Io,
    /// The clock of the device latencies.
    pub clock: Arc<dyn Clock>,
}

/// The host memory manager: it has the memory of one VM or of several, and reclaims and swaps it.
pub struct Host {
    pub(crate) core: Arc<Core>,
    pub(crate) io: Executor,
    /// Page caches for threads that are not vCPUs', between two operations.
    pub(crate) spare_caches: SpareCaches,
}

impl Host {
    /// Makes a host without regions. It reserves the budget's addresses. The kernel backs them on
    /// first touch, 2 MiB at a time where it can, or at [`Host::prefault`].
    pub fn new(config: HostConfig) -> Result<Arc<Self>, HostError> {
        Self::with_linux_memory(config, PageCount::new(0))
    }

    /// As [`Host::new`], and reserves addresses for `linux` pages of Linux memory
    /// ([`Host::add_linux_region`]). Each region takes whole blocks of 2 MiB of them.
    pub fn with_linux_memory(config: HostConfig, linux: PageCount) -> Result<Arc<Self>, HostError> {
        let HostConfig {
            budget,
            huge,
            swap: mut store,
            io,
            clock,
        } = config;
        check_budget(budget, 1)?;
        if budget > MAX_FRAMES {
            return Err(HostError::BudgetTooLarge {
                budget,
                maximum: MAX_FRAMES,
            });
        }
        room_for::<Desc>(budget.get())?;
        // Two blocks: each part is rounded up to a block.
        let room = MAX_FRAMES
            .get()
            .saturating_sub(budget.get() + 2 * BLOCK as u64);
        let room = PageCount::new(room);
        if linux > room {
            return Err(LinuxError::Room {
                pages: linux,
                room,
                late: 0,
            }
            .into());
        }
        let pool = Pool::new(budget.get() as usize, linux.get() as usize)?;
        let frames = Arc::new(Frames::new(pool));
        // One for the thread that waits for a swap file.
        room_for_threads(1)?;
        store.attach(Arc::new(BudgetFrames(frames.clone())));
        let core = Core {
            frames,
            linux: LinuxAddresses::default(),
            linux_limit: AtomicU64::new(u64::MAX),
            losses: Losses::default(),
            regions: Regions::default(),
            settings: Switches::new(huge),
            device: store.describe(),
            entries: Mutex::new(SwapMap::new(store.capacity().get())),
            store,
            tickets: Mutex::default(),
            read_ahead: ReadAheadWindow::default(),
            lost: Mutex::default(),
            caches: Mutex::default(),
            hand: AtomicUsize::new(0),
            sampled_splits: Mutex::default(),
            collapsing: Mutex::default(),
            collapser: Mutex::new(PageNo::new(0)),
            buffers: Mutex::default(),
            writing: AtomicUsize::new(0),
            completing: AtomicUsize::new(0),
            swapped_out_now: AtomicI64::new(0),
            at_once: AtomicBool::new(false),
            settled: Settled::default(),
            stats: Counters::default(),
            clock,
            failure: Mutex::default(),
            background: Mutex::default(),
        };
        let core = Arc::new(core);
        Ok(Arc::new(Self {
            io: Executor::new(io, core.clone()),
            core,
            spare_caches: SpareCaches::default(),
        }))
    }

    /// Lets the kernel back all memory of the budget now, so that no fault waits for that later.
    /// For 512 MiB it took 0.07 s on a host with backed memory, and 1.0 s on a host whose
    /// hypervisor had to back its memory first. `each` is called before each step of 16 MiB, and
    /// ends the call by `Break`.
    ///
    /// # Errors
    /// The kernel has not enough memory.
    pub fn prefault(&self, each: &mut dyn FnMut() -> ControlFlow<()>) -> Result<(), HostError> {
        Ok(self.core.frames.pool.prefault(each)?)
    }

    /// The smallest budget in which `vcpus` vCPUs make progress, whatever their guests do.
    pub const fn minimum_budget(vcpus: usize) -> PageCount {
        minimum_budget(vcpus)
    }

    /// Makes the per-CPU page cache of one more vCPU. [`HostError::BudgetTooSmall`] if the budget
    /// does not suffice for the progress of that vCPU too.
    pub fn per_cpu_pages(&self) -> Result<PerCpuPages, HostError> {
        // These caches belong to no vCPU, and hold frames that the new vCPU may need.
        self.spare_caches.drain();
        let cache = PerCpuPages::new(self.core.clone());
        // After its registration: a smaller budget that is set meanwhile counts it.
        check_budget(self.budget(), self.core.with_caches(<[_]>::len))?;
        Ok(cache)
    }

    /// Adds a region of `pages` pages of zeros. `notifier` handles their mappings.
    pub fn add_region(
        &self,
        pages: PageCount,
        notifier: Arc<dyn MmuNotifier>,
    ) -> Result<BackingRange, HostError> {
        self.core.regions.add(pages, notifier, None, None)
    }

    /// Adds a region of `pages` pages that `source` provides, from its page `first` on. A fault on
    /// a missing page resolves to [`Resolution::Missing`](crate::Resolution::Missing). `notifier`
    /// handles the pages' mappings.
    pub fn add_region_from(
        &self,
        source: Arc<dyn PageSource>,
        first: SourcePage,
        pages: PageCount,
        notifier: Arc<dyn MmuNotifier>,
    ) -> Result<BackingRange, HostError> {
        let origin = Origin::new(self.core.answers(), source, first);
        self.core.regions.add(pages, notifier, Some(origin), None)
    }

    /// Whether `range` lies in one region, and `notifier` handles its mappings. The answer stays
    /// true, because a removed region's addresses are never used again.
    pub fn is_notified(&self, range: BackingRange, notifier: &dyn MmuNotifier) -> bool {
        let region = self.core.regions.find(PageNo::of(range.start()));
        region.is_some_and(|region| {
            region.range().intersect(range) == Some(range)
                && std::ptr::addr_eq(Arc::as_ptr(&region.notifier), notifier)
        })
    }

    /// Whether a page source provides the pages of `addr`'s region.
    pub fn has_source(&self, addr: BackingAddr) -> bool {
        let region = self.core.regions.find(PageNo::of(addr));
        region.is_some_and(|region| region.origin.is_some())
    }

    /// Under [`HugePages::Madvise`]: from now on the host makes compound pages, if possible, of the
    /// blocks wholly inside `range`.
    pub fn advise_huge(&self, range: BackingRange) -> Result<(), HostError> {
        let region = self.core.regions.find(PageNo::of(range.start()));
        let region = region.filter(|region| region.range().intersect(range) == Some(range));
        let region = region.ok_or(HostError::NoSuchRegion(range.start()))?;
        region.advise(range);
        Ok(())
    }

    /// The policy with which it was made.
    pub fn huge_pages(&self) -> HugePages {
        self.core.settings.huge
    }

    /// Prepares all frames for a caller that maps a page by copying it from its frame to memory of
    /// its own, and unmaps it by moving it back (`UFFDIO_MOVE`). No child process shares them then,
    /// and the kernel backs them page by page if the host never makes huge pages. Returns their
    /// addresses, in the order of their numbers. The caller empties the frame of a page that is
    /// away, at the latest before it moves the page back: reclaim may read there until it sees that
    /// the page was taken back.
    ///
    /// [`Host::copy_in`], [`Host::copy_out`] and [`Host::peek`] do not see a page's bytes while it
    /// is away.
    ///
    /// # Errors
    /// As `madvise(2)`.
    pub fn frames_to_move(&self) -> Result<HvaRange, HostError> {
        let whole_blocks = self.core.settings.huge != HugePages::Never;
        Ok(self.core.frames.pool.to_be_moved(whole_blocks)?)
    }

    /// The bytes of frame `pfn`. The caller knows their page, from a [`crate::Resolution::Ready`]
    /// that has not been invalidated.
    #[inline]
    pub fn frame(&self, pfn: Pfn) -> FramePtr<'_> {
        self.core.frames.pool.frame(pfn)
    }

    /// Prefetches the descriptor of frame `pfn`, because [`Host::mark_dirty`] will follow soon.
    /// Changes nothing.
    #[inline]
    pub fn prefetch(&self, pfn: Pfn) {
        self.core.frames.prefetch(pfn);
    }

    /// Records that the page in `pfn`, or the block of pages that begins there, was written: a leaf
    /// with D that maps it was removed, or is known.
    #[inline]
    pub fn mark_dirty(&self, pfn: Pfn, level: Level) {
        self.core.frames.mark_dirty(pfn, level);
    }

    /// The failure of the last write-out; `None` after a successful one.
    pub fn failure(&self) -> Option<HostError> {
        lock(&self.core.failure)
            .as_ref()
            .map(|failure| failure.error.clone())
    }

    /// How the executor carries out reads, such as `io_uring`.
    pub fn describe_io(&self) -> &str {
        self.io.describe()
    }

    /// The seed of a host in virtual time; `None` in real time.
    pub fn seed(&self) -> Option<u64> {
        self.io.seed()
    }

    /// The latency that the swap device states, in nanoseconds, and the added delay: no read
    /// completes earlier.
    pub fn stated_latency_ns(&self) -> u64 {
        self.core
            .store
            .latency_ns()
            .saturating_add(self.core.delay_ns())
    }

    /// Whether a read takes less time than reporting it to a guest: the device answers at once, and
    /// no latency is added. Linux memory has devices of its own.
    pub fn reads_at_once(&self, ticket: &Ticket) -> bool {
        ticket.region().linux.is_none() && self.core.reads_at_once()
    }

    /// The time until which a polling thread may sleep: when the first completion is due. `None` if
    /// a completion may arrive at any time, or none is expected.
    pub fn next_due(&self) -> Option<Nanos> {
        self.io.next_due()
    }

    /// When the next completion of a virtual executor is due. `None` in real time.
    pub fn next_completion(&self) -> Option<Nanos> {
        self.io.next_completion()
    }

    /// Delivers the arrived completions that are due at `now`; returns their number. In virtual
    /// time nothing else delivers them. In real time this saves the wake-up of a thread; it costs a
    /// few nanoseconds if nothing has arrived. Callbacks run here
    /// ([`Ticket::on_done`](crate::Ticket::on_done)), so the caller holds no lock.
    pub fn poll(&self, now: Nanos) -> usize {
        self.io.poll(&self.core, now)
    }

    /// Ends simulated latency ([`SwapStore::latency_ns`]): completions that wait for it are
    /// delivered, and later ones do not wait. Call it after a run, so that a reader of the guest's
    /// memory need not wait for a slow device. No effect in virtual time.
    pub fn end_latency(&self) {
        self.core.at_once.store(true, Ordering::SeqCst);
        self.io.deliver_all();
    }

    /// Promises that the caller will call [`Host::poll`] about every 50 us for the life of the
    /// guard. While any guard exists, the delivering threads stay asleep. A thread drops its guard
    /// before it goes to sleep: otherwise operations in flight would wait for it.
    pub fn polling(&self) -> Polling<'_> {
        self.io.join();
        Polling(self)
    }

    /// The calling thread promises to handle the arrivals of the reads that it starts, for the life
    /// of the result: it sleeps in `poll(2)` on this descriptor too, and calls [`Arrivals::take`]
    /// when it wakes. If it may sleep elsewhere, it calls [`Arrivals::set_aside`]. This saves the
    /// wake-up of another thread for each read. Other threads' reads may arrive there too. `None`
    /// if no io_uring reads.
    pub fn arrivals(&self) -> Option<Arrivals> {
        self.io.arrivals()
    }
}

/// A thread polls: see [`Host::polling`].
#[must_use]
pub struct Polling<'a>(&'a Host);

impl Drop for Polling<'_> {
    fn drop(&mut self) {
        self.0.io.leave();
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        for region in self.core.regions.snapshot().iter() {
            region
                .outside()
                .into_iter()
                .for_each(|outside| outside.end());
        }
        self.io.shut_down();
    }
}

pub(crate) fn check_budget(budget: PageCount, vcpus: usize) -> Result<(), HostError> {
    let minimum = Host::minimum_budget(vcpus);
    if budget < minimum {
        return Err(HostError::BudgetTooSmall {
            budget,
            vcpus,
            minimum,
        });
    }
    Ok(())
}
