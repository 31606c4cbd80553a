//! The page source: a thread that hears of missing pages and supplies them after a latency.
//!
//! ```text
//! vCPU, KVM's worker, VMM ── touches a missing page ──► userfaultfd ──► source thread
//!    waits                                                                │ asks `Pages`
//!      ▲                                                                  ├ zeros, or back from
//!      │                                                                  │ probation: at once
//!      └────────────────────────── page in place ◄────────────────────────┴ away: at its deadline
//! ```
//! A deadline counts from when the thread hears of the fault, so no page comes early. Any number
//! are on their way at a time. A page goes away by `UFFDIO_MOVE` into the store and comes back by
//! another: whoever writes it meanwhile has either written before it left or waits, so nothing can
//! be lost; KVM hears of it through its MMU notifier.
//!
//! UNSAFETY: pages are registered and moved by address. The addresses are of `Memory`'s two
//! mappings, which the thread keeps alive, and which everybody touches by atomics only.

use crate::dirty::Delivery;
use crate::kick::VcpuKicks;
use crate::memory::Memory;
use crate::pages::{FirstTouch, Need, Page, Pages};
use lacuna_addr::{HvaRange, PAGE_SIZE, PageCount};
use lacuna_sync::LatencySetting;
use lacuna_sys::{Errno, Fault, Userfaultfd};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::OwnedFd;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How the source behaves.
#[derive(Clone, Debug)]
pub struct SourceConfig {
    /// How much may be in memory, at least 2 MiB.
    pub resident: PageCount,
    /// How long a page that is away takes to come.
    pub latency: LatencySetting,
    /// And one that was never touched.
    pub first_touch: FirstTouch,
}

/// What a source has done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SourceStats {
    /// Faults heard of. Several waiters of one page may count as one or as several.
    pub faults: u64,
    /// Of all pages supplied, those that had never been touched.
    pub first_touches: u64,
    /// Pages supplied after the latency.
    pub fetched: u64,
    /// Pages given back at once, while on probation.
    pub reprieved: u64,
    /// Pages taken from the guest.
    pub evicted: u64,
    /// Pages that Linux would not part with when asked.
    pub refused: u64,
    /// Sum over the delayed pages of the time from hearing of the fault to the page's being in
    /// place, nanoseconds.
    pub delay_ns: u64,
}

#[derive(Default)]
struct Counters {
    faults: AtomicU64,
    first_touches: AtomicU64,
    fetched: AtomicU64,
    reprieved: AtomicU64,
    evicted: AtomicU64,
    refused: AtomicU64,
    delay_ns: AtomicU64,
}

fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

#[derive(Default)]
struct Shared {
    counters: Counters,
    failure: Mutex<Option<String>>,
    quit: AtomicBool,
}

impl Shared {
    fn has_failed(&self) -> bool {
        let failure = self.failure.lock();
        failure.expect("no panic under this lock").is_some()
    }
}

/// A running page source, until it is dropped.
pub struct Source {
    shared: Arc<Shared>,
    doorbell: OwnedFd,
    thread: Option<JoinHandle<()>>,
    /// The thread's, with which it goes.
    uffd: Weak<Userfaultfd>,
}

impl Source {
    /// A descriptor to start with: one that also notes writes, where the page map is to tell them.
    ///
    /// # Errors
    /// Of userfaultfd; the text says what was tried.
    pub fn open(delivery: Delivery) -> Result<Userfaultfd, (&'static str, Errno)> {
        match delivery {
            Delivery::Pagemap => Userfaultfd::open_tracking()
                .map_err(|e| ("note writes without a fault's message (Linux 6.7)", e)),
            Delivery::Bitmap | Delivery::Ring(_) => Userfaultfd::open().map_err(|e| ("open", e)),
        }
    }

    /// Starts supplying `memory`. When a page cannot be supplied, `kicks` end the run.
    ///
    /// # Errors
    /// Of userfaultfd; the text says which step.
    pub fn start(
        uffd: Userfaultfd,
        memory: Arc<Memory>,
        config: SourceConfig,
        kicks: Arc<VcpuKicks>,
    ) -> Result<Self, (&'static str, Errno)> {
        for mapping in [&memory.guest, &memory.store] {
            // SAFETY: 1. both are anonymous mappings of `memory`, which the thread below keeps
            // alive together with the descriptor. 2. They are touched as atomics only.
            unsafe { uffd.register(mapping.range()) }.map_err(|e| ("register memory", e))?;
        }
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let doorbell = eventfd(0, flags).map_err(|e| ("make an eventfd", e))?;
        let shared = Arc::new(Shared::default());
        let uffd = Arc::new(uffd);
        let lent = Arc::downgrade(&uffd);
        let count = memory.guest.range().pages() as usize;
        let mut worker = Worker {
            pages: Pages::new(count, config.resident.get() as usize, config.first_touch),
            doorbell: doorbell
                .try_clone()
                .map_err(|_| ("copy an eventfd", Errno::MFILE))?,
            shared: Arc::clone(&shared),
            due: BinaryHeap::new(),
            short_since: None,
            over_since: None,
            uffd,
            memory,
            config,
            kicks,
        };
        let thread = thread::Builder::new()
            .name("page-source".into())
            .spawn(move || worker.run())
            .map_err(|_| ("start a thread", Errno::AGAIN))?;
        Ok(Self {
            shared,
            doorbell,
            thread: Some(thread),
            uffd: lent,
        })
    }

    /// What it has done so far.
    pub fn stats(&self) -> SourceStats {
        let c = &self.shared.counters;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        SourceStats {
            faults: read(&c.faults),
            first_touches: read(&c.first_touches),
            fetched: read(&c.fetched),
            reprieved: read(&c.reprieved),
            evicted: read(&c.evicted),
            refused: read(&c.refused),
            delay_ns: read(&c.delay_ns),
        }
    }

    /// Lets the pages of `range` be written without their being noted. Nothing to do once the
    /// descriptor is gone, and its marks with it.
    ///
    /// # Errors
    /// As [`Userfaultfd::unprotect`].
    pub fn unprotect(&self, range: HvaRange) -> Result<(), Errno> {
        let uffd = self.uffd.upgrade();
        uffd.map_or(Ok(()), |uffd| uffd.unprotect(range))
    }

    /// Why a page could not be supplied, once that happened.
    pub fn failure(&self) -> Option<String> {
        let failure = self.shared.failure.lock();
        failure.expect("no panic under this lock").clone()
    }

    /// Wakes the thread, to see that the VM has stopped: pages then come without latency, so that
    /// the VM's end does not wait for KVM's workers.
    pub fn wake(&self) {
        let rung = rustix::io::write(&self.doorbell, &1u64.to_ne_bytes());
        debug_assert!(rung.is_ok(), "an eventfd is never full of ones");
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        self.shared.quit.store(true, Ordering::Release);
        self.wake();
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            debug_assert!(ended.is_ok(), "the source does not panic");
        }
    }
}

/// A page on its way, ordered by its deadline.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Owed {
    at: Instant,
    page: Page,
    /// When its fault was heard of.
    heard: Instant,
    why: Delay,
}

/// Why a page comes later than its fault.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Delay {
    /// The latency.
    Latency,
    /// Linux could not put it in place when it was due.
    Busy,
}

/// After Linux could not put a page in place.
const RETRY: Duration = Duration::from_millis(1);
/// How long Linux may be short of memory for every page that is tried.
const SHORTAGE_MAX: Duration = Duration::from_secs(10);
/// How long KVM's workers are kept waiting for a busy page once the run is over.
const END_MAX: Duration = Duration::from_secs(1);
/// How many pages that Linux would not part with are passed over at a time.
const REFUSALS_MAX: usize = 8;

/// How the supply of a page ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
enum Supply {
    /// The page is in place, or the source has failed.
    Done,
    /// Not now.
    Later,
}

static ZEROS: [u8; PAGE_SIZE] = [0; PAGE_SIZE];

struct Worker {
    uffd: Arc<Userfaultfd>,
    memory: Arc<Memory>,
    config: SourceConfig,
    kicks: Arc<VcpuKicks>,
    shared: Arc<Shared>,
    doorbell: OwnedFd,
    pages: Pages,
    due: BinaryHeap<Reverse<Owed>>,
    /// Since when Linux has been short of memory.
    short_since: Option<Instant>,
    /// Since when the run is over.
    over_since: Option<Instant>,
}

impl Worker {
    fn run(&mut self) {
        stand_out();
        let mut faults = Vec::new();
        // A failure ends it too: with this thread goes the descriptor, and with that everybody's
        // wait for a page that will not come.
        while !self.shared.quit.load(Ordering::Acquire) && !self.shared.has_failed() {
            self.wait();
            self.supply_due();
            faults.clear();
            if let Err(errno) = self.uffd.faults(&mut faults) {
                self.fail(format!("cannot hear of page faults: {errno}"));
                return;
            }
            let now = Instant::now();
            for &fault in &faults {
                self.touched(fault, now);
                self.make_room();
            }
        }
    }

    /// Until there is something to do.
    fn wait(&mut self) {
        let now = Instant::now();
        let timeout = self.due.peek().map(|Reverse(owed)| {
            let left = owed.at.saturating_duration_since(now);
            Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: i64::from(left.subsec_nanos()),
            }
        });
        let mut fds = [
            PollFd::new(&self.uffd, PollFlags::IN),
            PollFd::new(&self.doorbell, PollFlags::IN),
        ];
        // Interrupted or not: the caller looks at everything there is to look at.
        let _ = poll(&mut fds, timeout.as_ref());
        // Nothing to read is no matter either.
        let _ = rustix::io::read(&self.doorbell, &mut [0; 8]);
    }

    fn supply_due(&mut self) {
        let (now, over) = (Instant::now(), self.kicks.is_stopping());
        let mut later = Vec::new();
        while let Some(&Reverse(owed)) = self.due.peek() {
            if owed.at > now && !over {
                break;
            }
            self.due.pop();
            if self.supply(owed.page) == Supply::Later {
                later.push(Reverse(Owed {
                    at: now + RETRY,
                    ..owed
                }));
            } else if owed.why == Delay::Latency {
                count(&self.shared.counters.fetched, 1);
                let delay = owed.heard.elapsed().as_nanos() as u64;
                count(&self.shared.counters.delay_ns, delay);
            }
        }
        self.due.extend(later);
    }

    fn touched(&mut self, fault: Fault, now: Instant) {
        count(&self.shared.counters.faults, 1);
        let Some(page) = self.memory.guest.index(fault.page) else {
            // The store, which only this process could touch, and does not.
            return self.fail(format!("page fault at {:?}", fault.page));
        };
        match self.pages.touched(page) {
            Need::Zeros => self.supply_at_once(page, now),
            Need::Return => {
                self.supply_at_once(page, now);
                count(&self.shared.counters.reprieved, 1);
            }
            Need::Fetch => {
                let over = self.kicks.is_stopping();
                let latency = if over { 0 } else { self.config.latency.ns() };
                self.due.push(Reverse(Owed {
                    at: now + Duration::from_nanos(latency),
                    page,
                    heard: now,
                    why: Delay::Latency,
                }));
            }
            Need::Patience => {}
            Need::Wake => drop(self.uffd.wake(fault.page)),
        }
    }

    fn supply_at_once(&mut self, page: Page, now: Instant) {
        if self.supply(page) == Supply::Later {
            self.pages.delayed(page);
            self.due.push(Reverse(Owed {
                at: now + RETRY,
                page,
                heard: now,
                why: Delay::Busy,
            }));
        }
    }

    /// Puts `page` in place with its content: zeros if the store has none.
    ///
    /// A page that is pinned (`BUSY`) and a race (`AGAIN`) are for others to end, who may take as
    /// long as they like while the guest runs; other pages come meanwhile. A lack of memory may be
    /// for good.
    fn supply(&mut self, page: Page) -> Supply {
        let errno = match self.place(page) {
            Ok(()) => {
                self.short_since = None;
                self.pages.arrived(page);
                return Supply::Done;
            }
            Err(errno) => errno,
        };
        let now = Instant::now();
        let over = self.kicks.is_stopping();
        let (since, limit) = match errno {
            Errno::AGAIN | Errno::BUSY if !over => return Supply::Later,
            Errno::AGAIN | Errno::BUSY => (&mut self.over_since, END_MAX),
            Errno::NOMEM => (&mut self.short_since, SHORTAGE_MAX),
            _ => return self.cannot_supply(page, errno),
        };
        if now - *since.get_or_insert(now) < limit {
            return Supply::Later;
        }
        self.cannot_supply(page, errno)
    }

    fn cannot_supply(&self, page: Page, errno: Errno) -> Supply {
        let gpa = self.memory.gpa(page);
        self.fail(format!("cannot supply guest page {gpa:?}: {errno}"));
        Supply::Done
    }

    fn place(&self, page: Page) -> Result<(), Errno> {
        let (here, away) = (self.memory.guest.page(page), self.memory.store.page(page));
        // SAFETY: 1. the store is registered with this descriptor.
        match unsafe { self.uffd.shift(away, here) } {
            Err(Errno::NOENT) => {
                self.uffd.copy(&ZEROS, here)?;
                count(&self.shared.counters.first_touches, 1);
                Ok(())
            }
            result => result,
        }
    }

    /// Takes pages from the guest until it is within its budget, those on their way included.
    fn make_room(&mut self) {
        let mut refusals = 0;
        while let Some(page) = self.pages.victim() {
            let (here, away) = (self.memory.guest.page(page), self.memory.store.page(page));
            // SAFETY: 1. the guest's memory is registered with this descriptor.
            match unsafe { self.uffd.shift(here, away) } {
                Ok(()) => {
                    self.pages.left(page);
                    count(&self.shared.counters.evicted, 1);
                }
                // Somebody has it pinned, or is about to change it.
                Err(Errno::BUSY | Errno::AGAIN | Errno::NOMEM) => {
                    self.pages.refused(page);
                    count(&self.shared.counters.refused, 1);
                    refusals += 1;
                    if refusals == REFUSALS_MAX {
                        break;
                    }
                }
                Err(errno) => {
                    self.pages.refused(page);
                    return self.fail(format!("cannot take page {page} from the guest: {errno}"));
                }
            }
        }
        self.pages.settle();
    }

    /// The guest cannot go on without a page. The vCPUs come back, and say why.
    fn fail(&self, cause: String) {
        let failure = self.shared.failure.lock();
        failure
            .expect("no panic under this lock")
            .get_or_insert(cause);
        self.kicks.stop();
    }
}

/// The calling thread plays a device or another host, which do not wait for a turn on this host's
/// processors: it runs as soon as it can, where that is allowed, and its timers are exact.
fn stand_out() {
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
    let parameters = libc::sched_param { sched_priority: 1 };
    // SAFETY: 1. it reads one `sched_param`. 2. The thread sleeps whenever it has nothing to do.
    let _ = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &parameters) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use io_uring::IoUring;
    use lacuna_machine::GuestMemory;
    use std::sync::mpsc;

    const PAGES: u64 = 4096;

    /// A source whose first pages are in its store; `None`, and a recorded skip, where this
    /// host has none.
    fn source() -> Option<(Source, Arc<Memory>, Arc<VcpuKicks>)> {
        let uffd = match Source::open(Delivery::Bitmap) {
            Ok(uffd) => uffd,
            Err((what, errno)) => {
                lacuna_skip::skip(format!("userfaultfd: {what}: {errno}"));
                return None;
            }
        };
        let memory = Arc::new(Memory::new(PageCount::new(PAGES)).unwrap());
        let kicks = Arc::new(VcpuKicks::new(1));
        let config = SourceConfig {
            resident: PageCount::new(Pages::BUDGET_MIN as u64),
            latency: LatencySetting::default(),
            first_touch: FirstTouch::Immediate,
        };
        let source = Source::start(uffd, Arc::clone(&memory), config, Arc::clone(&kicks)).unwrap();
        for page in 0..PAGES as u32 {
            write(&memory, page, u64::from(page) + 1);
        }
        Some((source, memory, kicks))
    }

    fn write(memory: &Memory, page: Page, word: u64) {
        let gpa = memory.gpa(page).unwrap();
        memory.write(gpa, &word.to_ne_bytes()).unwrap();
    }

    fn read(memory: &Memory, page: Page) -> u64 {
        let mut word = [0; 8];
        let gpa = memory.gpa(page).unwrap();
        memory.read(gpa, &mut word).unwrap();
        u64::from_ne_bytes(word)
    }

    /// Pins the page that the store has of `page`, as a device does that reads from it: Linux does
    /// not move it then.
    fn pin(memory: &Memory, page: Page) -> Option<IoUring> {
        let ring = match IoUring::new(1) {
            Ok(ring) => ring,
            Err(error) => {
                lacuna_skip::skip(format!("io_uring: {error}"));
                return None;
            }
        };
        let pinned = libc::iovec {
            iov_base: std::ptr::with_exposed_provenance_mut(memory.store.page(page).get() as usize),
            iov_len: PAGE_SIZE,
        };
        // SAFETY: 1. the mapping outlives the ring, which never uses the buffer.
        unsafe { ring.submitter().register_buffers(&[pinned]) }.unwrap();
        Some(ring)
    }

    /// A page that cannot be moved for a while is waited for, and keeps no other from coming.
    #[test]
    fn a_busy_page_is_waited_for() {
        let Some((source, memory, _bells)) = source() else {
            return;
        };
        let Some(ring) = pin(&memory, 0) else { return };
        let (tell, told) = mpsc::channel();
        let reader = Arc::clone(&memory);
        let waits = thread::spawn(move || tell.send(read(&reader, 0)).unwrap());
        // Longer than whoever counts tries would wait.
        thread::sleep(Duration::from_millis(2500));
        assert_eq!(source.failure(), None);
        assert_eq!(read(&memory, 1), 2, "others come meanwhile");
        assert!(told.try_recv().is_err(), "it cannot have come");
        ring.submitter().unregister_buffers().unwrap();
        assert_eq!(told.recv().unwrap(), 1);
        waits.join().unwrap();
        assert_eq!(read(&memory, 0), 1);
        assert_eq!(source.failure(), None);
    }

    /// The end of a VM does not wait for a page that cannot come.
    #[test]
    fn a_busy_page_does_not_delay_the_end() {
        let Some((source, memory, kicks)) = source() else {
            return;
        };
        let Some(ring) = pin(&memory, 0) else { return };
        let reader = Arc::clone(&memory);
        let waits = thread::spawn(move || read(&reader, 0));
        while source.stats().faults <= PAGES {
            thread::yield_now();
        }
        kicks.stop();
        source.wake();
        waits.join().unwrap();
        drop((source, ring));
    }
}
