//! The page source: a thread that receives faults of missing pages and supplies them after a
//! latency.
//!
//! ```text
//! vCPU, KVM's worker, VMM ── touches a missing page ──► userfaultfd ──► source thread
//!    waits                                                                │ asks `Pages`
//!      ▲                                                                  ├ zeros, or back from
//!      │                                                                  │ probation: at once
//!      └────────────────────────── page in place ◄────────────────────────┴ swapped out: later
//! ```
//! A swapped-out page arrives at its deadline. The deadline counts from the moment the thread
//! receives the fault, so no page arrives early. Any number of pages may be in flight.
//!
//! `UFFDIO_MOVE` evicts a page into the store, and another move brings it back. A thread that
//! writes the page writes it before the move, or faults and waits, so no write is lost. Linux
//! informs KVM of each move by KVM's MMU notifier.
//!
//! UNSAFETY: pages are registered and moved by address. The addresses are those of `Memory`'s two
//! mappings. The thread keeps both alive, and all code accesses them only by atomics.

use crate::kick::VcpuKicks;
use crate::memory::Memory;
use crate::pages::{FirstTouch, Need, Page, Pages};
use crate::tracker::Tracker;
use lacuna_addr::{HvaRange, PAGE_SIZE, PageCount};
use lacuna_sync::{LatencySetting, Mutex, lock_order};
use lacuna_sys::{Errno, Fault, Userfaultfd};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::OwnedFd;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The configuration of a source.
#[derive(Clone, Debug)]
pub struct SourceConfig {
    /// How many pages may be resident, at least 2 MiB.
    pub resident: PageCount,
    /// How long a swapped-out page takes to arrive.
    pub latency: LatencySetting,
    /// Whether this also holds for a page at its first touch.
    pub first_touch: FirstTouch,
}

/// Counters of a source.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SourceStats {
    /// Faults received. Several threads that wait for one page may count as one or as several.
    pub faults: u64,
    /// Of all pages supplied, those that had never been touched.
    pub first_touches: u64,
    /// Pages supplied after the latency.
    pub fetched: u64,
    /// Pages on probation that were mapped again at once.
    pub reprieved: u64,
    /// Pages evicted.
    pub evicted: u64,
    /// Pages that Linux refused to move.
    pub refused: u64,
    /// Sum over the delayed pages of the time from the receipt of the fault until the page was in
    /// place, in nanoseconds.
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
    failure: Mutex<Option<String>, lock_order::KvmSourceFailure>,
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
    /// The thread's descriptor, which is closed when the thread ends.
    uffd: Weak<Userfaultfd>,
}

impl Source {
    /// Opens a descriptor. With [`Tracker::Pagemap`], it also records writes.
    ///
    /// # Errors
    /// Those of userfaultfd; the text says which step failed.
    pub fn open(tracker: Tracker) -> Result<Userfaultfd, (&'static str, Errno)> {
        match tracker {
            Tracker::Pagemap => Userfaultfd::open_tracking()
                .map_err(|e| ("record writes without a message for each (Linux 6.7)", e)),
            Tracker::Kvm => Userfaultfd::open().map_err(|e| ("open", e)),
        }
    }

    /// Starts to supply `memory`. If a page cannot be supplied, the source ends the run with
    /// `kicks`.
    ///
    /// # Errors
    /// Those of userfaultfd; the text says which step failed.
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
            in_flight: BinaryHeap::new(),
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

    /// Its counters so far.
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

    /// Lets the pages of `range` be written without a record. If the descriptor is closed there is
    /// nothing to do, because its marks are gone too.
    ///
    /// # Errors
    /// As [`Userfaultfd::unprotect`].
    pub fn unprotect(&self, range: HvaRange) -> Result<(), Errno> {
        let uffd = self.uffd.upgrade();
        uffd.map_or(Ok(()), |uffd| uffd.unprotect(range))
    }

    /// Why a page could not be supplied, if that has happened.
    pub fn failure(&self) -> Option<String> {
        let failure = self.shared.failure.lock();
        failure.expect("no panic under this lock").clone()
    }

    /// Wakes the thread, so that it sees that the VM has stopped. Pages then arrive without
    /// latency, so the end of the VM does not wait for KVM's workers.
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

/// A page in flight. The order is that of the deadlines.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct InFlight {
    deadline: Instant,
    page: Page,
    /// When the thread received its fault.
    received: Instant,
    why: Delay,
}

/// Why a page arrives later than its fault.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Delay {
    /// The latency.
    Latency,
    /// Linux could not put the page in place at its deadline.
    Busy,
}

/// The delay after Linux could not put a page in place.
const RETRY: Duration = Duration::from_millis(1);
/// How long Linux may lack memory for every page that is tried.
const SHORTAGE_MAX: Duration = Duration::from_secs(10);
/// How long the source retries a busy page after the run has ended.
const END_MAX: Duration = Duration::from_secs(1);
/// How many refused pages end one attempt to make room.
const REFUSALS_MAX: usize = 8;

/// The result of an attempt to supply a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
enum Supply {
    /// The page is in place, or the source has failed and the run ends.
    Done,
    /// Linux cannot put the page in place now.
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
    in_flight: BinaryHeap<Reverse<InFlight>>,
    /// Since when Linux has lacked memory.
    short_since: Option<Instant>,
    /// Since when the run has ended.
    over_since: Option<Instant>,
}

impl Worker {
    fn run(&mut self) {
        raise_priority();
        let mut faults = Vec::new();
        // A failure also ends the loop. The thread closes the descriptor, so no other thread waits
        // any longer for a page that will not arrive.
        while !self.shared.quit.load(Ordering::Acquire) && !self.shared.has_failed() {
            self.wait();
            self.supply_due();
            faults.clear();
            if let Err(errno) = self.uffd.faults(&mut faults) {
                self.fail(format!("cannot read page faults from userfaultfd: {errno}"));
                return;
            }
            let now = Instant::now();
            for &fault in &faults {
                self.touched(fault, now);
                self.make_room();
            }
        }
    }

    /// Waits for a fault, a deadline or [`Source::wake`].
    fn wait(&mut self) {
        let now = Instant::now();
        let timeout = self.in_flight.peek().map(|Reverse(next)| {
            let left = next.deadline.saturating_duration_since(now);
            Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: i64::from(left.subsec_nanos()),
            }
        });
        let mut fds = [
            PollFd::new(&self.uffd, PollFlags::IN),
            PollFd::new(&self.doorbell, PollFlags::IN),
        ];
        // A signal may end the wait early; the caller checks all three.
        let _ = poll(&mut fds, timeout.as_ref());
        // The read fails if no wake-up came, which is no error.
        let _ = rustix::io::read(&self.doorbell, &mut [0; 8]);
    }

    fn supply_due(&mut self) {
        let (now, over) = (Instant::now(), self.kicks.is_stopping());
        let mut later = Vec::new();
        while let Some(&Reverse(next)) = self.in_flight.peek() {
            if next.deadline > now && !over {
                break;
            }
            self.in_flight.pop();
            if self.supply(next.page) == Supply::Later {
                later.push(Reverse(InFlight {
                    deadline: now + RETRY,
                    ..next
                }));
            } else if next.why == Delay::Latency {
                count(&self.shared.counters.fetched, 1);
                let delay = next.received.elapsed().as_nanos() as u64;
                count(&self.shared.counters.delay_ns, delay);
            }
        }
        self.in_flight.extend(later);
    }

    fn touched(&mut self, fault: Fault, now: Instant) {
        count(&self.shared.counters.faults, 1);
        let Some(page) = self.memory.guest.index(fault.page) else {
            // The store faults only on an access by this process, and no code accesses it.
            return self.fail(format!("page fault in the page store at {:?}", fault.page));
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
                self.in_flight.push(Reverse(InFlight {
                    deadline: now + Duration::from_nanos(latency),
                    page,
                    received: now,
                    why: Delay::Latency,
                }));
            }
            Need::InFlight => {}
            Need::Wake => drop(self.uffd.wake(fault.page)),
        }
    }

    fn supply_at_once(&mut self, page: Page, now: Instant) {
        if self.supply(page) == Supply::Later {
            self.pages.delayed(page);
            self.in_flight.push(Reverse(InFlight {
                deadline: now + RETRY,
                page,
                received: now,
                why: Delay::Busy,
            }));
        }
    }

    /// Puts `page` in place with its content: zeros if the store has none.
    ///
    /// A pinned page (`BUSY`) and a race (`AGAIN`) are retried until the run ends, and for
    /// [`END_MAX`] after it: another thread may keep the pin for any time, and other pages arrive
    /// meanwhile. A lack of memory may last for ever, so it is retried for [`SHORTAGE_MAX`].
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
        let (guest, store) = (self.memory.guest.page(page), self.memory.store.page(page));
        // SAFETY: 1. the store is registered with this descriptor.
        match unsafe { self.uffd.shift(store, guest) } {
            Err(Errno::NOENT) => {
                self.uffd.copy(&ZEROS, guest)?;
                count(&self.shared.counters.first_touches, 1);
                Ok(())
            }
            result => result,
        }
    }

    /// Evicts pages until the guest is within its budget. Pages in flight count as resident.
    fn make_room(&mut self) {
        let mut refusals = 0;
        while let Some(page) = self.pages.victim() {
            let (guest, store) = (self.memory.guest.page(page), self.memory.store.page(page));
            // SAFETY: 1. the guest's memory is registered with this descriptor.
            match unsafe { self.uffd.shift(guest, store) } {
                Ok(()) => {
                    self.pages.evicted(page);
                    count(&self.shared.counters.evicted, 1);
                }
                // The page is pinned, or another thread changes its mapping.
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
                    return self.fail(format!("cannot evict guest page {page}: {errno}"));
                }
            }
        }
        self.pages.end_probation();
    }

    /// Ends the run: the guest cannot continue without a page. The vCPUs return and report why.
    fn fail(&self, cause: String) {
        let failure = self.shared.failure.lock();
        failure
            .expect("no panic under this lock")
            .get_or_insert(cause);
        self.kicks.stop();
    }
}

/// Gives the calling thread real-time priority, if that is permitted, and exact timers. The thread
/// simulates a device or another host, and those do not wait for this host's processors.
fn raise_priority() {
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
    let parameters = libc::sched_param { sched_priority: 1 };
    // SAFETY: 1. it reads one `sched_param`. 2. The thread sleeps whenever it has nothing to do.
    let _ = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &parameters) };
}

#[cfg(test)]
mod tests;
