//! A vCPU's own corner of the manager: its magazine of free frames, its holds, its counters.
//!
//! The resident fault path takes no shared lock, because everything it changes besides the page
//! word and one descriptor is here. What others read of it is in [`Shared`], written by one thread.

use crate::frames::BATCH;
use crate::host::Core;
use crate::region::Region;
use crate::residency::PageNo;
use crate::turns::Turn;
use lacuna_addr::Pfn;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};

/// Pages that one instruction may fault on and keep: more than any instruction touches, page walks
/// of both stages included.
pub const MAX_HOLDS: usize = 64;
const REGIONS: usize = 4;

/// One vCPU's (or loader's) access to [`crate::Host::resolve`]. Gives its frames back on drop.
pub struct FrameCache {
    pub(crate) core: Arc<Core>,
    /// Free frames at hand.
    magazine: Vec<u32>,
    /// The regions used last, the very last first: one or two for a VM with few slots.
    regions: Vec<Arc<Region>>,
    pub(crate) shared: Arc<Shared>,
}

/// What reclaim and statistics read of a [`FrameCache`]. One writer, so plain loads and stores do.
#[repr(align(128))]
pub(crate) struct Shared {
    /// How many entries of `holds` count.
    held: AtomicU32,
    /// Frames in the magazine.
    pub cached: AtomicU32,
    pub count: FaultCounters,
    /// Frames given to the region used last and not reported to it yet.
    unreported: AtomicI64,
    /// A page of that region.
    reports_to: AtomicU64,
    /// Hazard pointers: reclaim reads them once a batch and skips these pages. One published too
    /// late for a batch is seen by the next, so a page is taken from an instruction at most once.
    holds: [AtomicU64; MAX_HOLDS],
}

/// Faults by kind.
#[derive(Default)]
pub(crate) struct FaultCounters {
    pub zero_fill: AtomicU64,
    pub resident: AtomicU64,
    pub rescued: AtomicU64,
    pub swap_in: AtomicU64,
    pub shared_ticket: AtomicU64,
    pub huge_fill: AtomicU64,
    pub huge_fallback: AtomicU64,
    pub zeroing_ns: AtomicU64,
}

impl FaultCounters {
    /// Adds one; only the owner calls it.
    #[inline]
    pub fn bump(counter: &AtomicU64) {
        Self::add(counter, 1);
    }

    /// Adds `count`; only the owner calls it.
    #[inline]
    pub fn add(counter: &AtomicU64, count: u64) {
        counter.store(counter.load(Ordering::Relaxed) + count, Ordering::Relaxed);
    }

    pub fn all(&self) -> [&AtomicU64; 8] {
        [
            &self.zero_fill,
            &self.resident,
            &self.rescued,
            &self.swap_in,
            &self.shared_ticket,
            &self.huge_fill,
            &self.huge_fallback,
            &self.zeroing_ns,
        ]
    }
}

impl Shared {
    fn new() -> Self {
        Self {
            held: AtomicU32::new(0),
            cached: AtomicU32::new(0),
            count: FaultCounters::default(),
            unreported: AtomicI64::new(0),
            reports_to: AtomicU64::new(0),
            holds: [const { AtomicU64::new(0) }; MAX_HOLDS],
        }
    }

    /// Adds the held pages to `out`.
    pub fn gather(&self, out: &mut Vec<PageNo>) {
        let held = (self.held.load(Ordering::Acquire) as usize).min(MAX_HOLDS);
        out.extend(
            self.holds[..held]
                .iter()
                .map(|h| PageNo::new(h.load(Ordering::Relaxed))),
        );
    }

    /// Adds a page to the holds. An instruction that faults on more than [`MAX_HOLDS`] pages does
    /// not exist; the oldest hold gives way if one is invented.
    #[inline]
    pub fn hold(&self, page: PageNo) {
        let held = self.held.load(Ordering::Relaxed) as usize;
        let known = self.holds.iter().take(held);
        if known
            .into_iter()
            .any(|hold| hold.load(Ordering::Relaxed) == page.get())
        {
            return;
        }
        self.holds[held % MAX_HOLDS].store(page.get(), Ordering::Relaxed);
        self.held
            .store((held as u32).wrapping_add(1), Ordering::Release);
    }

    #[inline]
    pub fn allocated(&self) {
        self.unreported.store(
            self.unreported.load(Ordering::Relaxed) + 1,
            Ordering::Relaxed,
        );
    }

    fn unreported(&self) -> i64 {
        self.unreported.load(Ordering::Relaxed)
    }

    /// Pages that `region` has more than it knows, for `verify`.
    pub fn unreported_to(&self, region: &Region) -> i64 {
        let own = region.contains(PageNo::new(self.reports_to.load(Ordering::Relaxed)));
        if own { self.unreported() } else { 0 }
    }

    fn report_to(&self, region: &Region) {
        region.add_resident(self.unreported());
        self.unreported.store(0, Ordering::Relaxed);
    }
}

impl FrameCache {
    pub(crate) fn new(core: Arc<Core>) -> Self {
        let shared = Arc::new(Shared::new());
        core.register(&shared);
        let magazine = Vec::with_capacity(2 * BATCH);
        Self {
            core,
            magazine,
            regions: Vec::with_capacity(REGIONS),
            shared,
        }
    }

    /// The instruction has retired: reclaim may have its pages. Also at a reset, and when the
    /// instruction is given up for an exception.
    #[inline]
    pub fn release_holds(&mut self) {
        if self.shared.held.load(Ordering::Relaxed) != 0 {
            self.shared.held.store(0, Ordering::Release);
        }
    }

    /// Gives the magazine back to the budget: the vCPU is going to be idle for long.
    pub fn flush(&mut self) {
        self.core.frames.give(self.magazine.drain(..));
        self.shared.cached.store(0, Ordering::Relaxed);
        self.report();
    }

    /// Makes the region of `page` the first of those kept. `None` when no region holds it.
    #[inline]
    pub(crate) fn find(&mut self, page: PageNo) -> Option<()> {
        match self.regions.first() {
            Some(region) if region.contains(page) => Some(()),
            _ => self.find_slow(page),
        }
    }

    /// The region that [`FrameCache::find`] found.
    #[inline]
    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.regions[0]
    }

    /// The next free frame, refilling the magazine when it is empty.
    #[inline]
    pub(crate) fn take(&mut self) -> Option<Pfn> {
        let index = match self.magazine.pop() {
            Some(index) => index,
            None => self.refill()?,
        };
        self.shared
            .cached
            .store(self.magazine.len() as u32, Ordering::Relaxed);
        Some(Pfn::new(index))
    }

    /// Takes back a frame that was not published.
    pub(crate) fn untake(&mut self, pfn: Pfn) {
        self.magazine.push(pfn.index() as u32);
        self.shared
            .cached
            .store(self.magazine.len() as u32, Ordering::Relaxed);
    }

    /// Refills the magazine of a thread that waits for its turn; how many frames are in it.
    pub(crate) fn refill_in_turn(&mut self, turn: Turn) -> usize {
        if self.magazine.is_empty() {
            self.core.frames.take_turn(turn, &mut self.magazine);
            self.shared
                .cached
                .store(self.magazine.len() as u32, Ordering::Relaxed);
        }
        self.magazine.len()
    }

    pub(crate) fn report(&self) {
        if let Some(region) = self.regions.first() {
            self.shared.report_to(region);
        }
    }

    #[cold]
    fn refill(&mut self) -> Option<u32> {
        self.report();
        self.core.frames.take_batch(&mut self.magazine);
        self.core.wake_background_if_low();
        self.magazine.pop()
    }

    #[cold]
    fn find_slow(&mut self, page: PageNo) -> Option<()> {
        self.report();
        self.shared.reports_to.store(page.get(), Ordering::Relaxed);
        self.regions.retain(|region| !region.is_removed());
        if let Some(at) = self.regions.iter().position(|region| region.contains(page)) {
            self.regions[..=at].rotate_right(1);
            return Some(());
        }
        let region = self.core.regions.find(page)?;
        self.regions.truncate(REGIONS - 1);
        self.regions.insert(0, region);
        Some(())
    }
}

impl Drop for FrameCache {
    fn drop(&mut self) {
        self.release_holds();
        self.flush();
        self.core.unregister(&self.shared);
    }
}
