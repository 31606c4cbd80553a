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
//! `UFFDIO_MOVE` evicts a page into the store, and another move brings it back from probation. From
//! the store, pages over the budget go to the swap device (`swap`). A thread writes to
//! the page before the move, or faults and waits, so no write is lost. Linux notifies KVM of each
//! move by KVM's MMU notifier.
//!
//! UNSAFETY: pages are registered and moved by address. The addresses are in `Memory`'s two
//! mappings. The thread keeps both alive, and all code accesses them only by atomics.

mod missing;
mod provision;
mod room;
mod shared;
mod swap;
mod untouched;

pub use provision::{PageState, Provider, Provision};
pub use shared::{Failure, SourceConfig, SourceStats};

use crate::kick::VcpuKicks;
use crate::memory::Memory;
use crate::pages::{FirstTouch, Need, Page, Pages};
use crate::slots::SlotTable;
use crate::tracker::Tracker;
use lacuna_addr::HvaRange;
use lacuna_machine::FailureKind;
use lacuna_swap::SwapStore;
use lacuna_sys::{Errno, Fault, Pagemap, Userfaultfd};
use missing::Handled;
use provision::Budget;
use room::NotPlaced;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use shared::{SourceShared, count};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt::Display;
use std::num::NonZeroU64;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use swap::SwapSide;

/// A running page source, until it is dropped.
pub struct Source {
    shared: Arc<SourceShared>,
    thread: Option<JoinHandle<()>>,
    /// The thread's descriptor, which is closed when the thread ends.
    uffd: Weak<Userfaultfd>,
    /// Provides pages at their first touch, instead of zeros from this source.
    provider: Option<Arc<Provider>>,
    /// The guest's memory, and the store.
    guest: HvaRange,
    store: HvaRange,
    /// The page table, if an untouched page has zeros and no page is evicted.
    pagemap: Option<Pagemap>,
}

impl Source {
    /// Opens a descriptor. With [`Tracker::Pagemap`], it also records writes.
    ///
    /// # Errors
    /// As userfaultfd; the text names the failed step.
    pub fn open(tracker: Tracker) -> Result<Userfaultfd, (&'static str, Errno)> {
        match tracker {
            Tracker::Pagemap => Userfaultfd::open_tracking()
                .map_err(|e| ("record writes without a message for each (Linux 6.7)", e)),
            Tracker::Kvm => Userfaultfd::open().map_err(|e| ("open", e)),
        }
    }

    /// Starts to supply `memory`, which `slots` describes. Pages beyond the budget go to `device`.
    /// If a page cannot be supplied, the source ends the run with `kicks`.
    ///
    /// # Errors
    /// As userfaultfd; the text names the failed step.
    pub fn start(
        uffd: Userfaultfd,
        memory: Arc<Memory>,
        slots: &Arc<SlotTable>,
        config: SourceConfig,
        device: Box<dyn SwapStore>,
        kicks: Arc<VcpuKicks>,
    ) -> Result<Self, (&'static str, Errno)> {
        for mapping in [&memory.guest, &memory.store] {
            // SAFETY: 1. both are anonymous mappings of `memory`, which the thread below keeps
            // alive together with the descriptor. 2. They are touched as atomics only.
            unsafe { uffd.register(mapping.range()) }.map_err(|e| ("register memory", e))?;
        }
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let doorbell = eventfd(0, flags).map_err(|e| ("make an eventfd", e))?;
        let shared = Arc::new(SourceShared::new(doorbell, kicks));
        let uffd = Arc::new(uffd);
        let lent = Arc::downgrade(&uffd);
        let count = memory.guest.range().pages() as usize;
        let resident = config.resident.get() as usize;
        let provider = config.from.as_ref().map(|from| {
            let provision = Provision::new(
                Arc::clone(&memory),
                Arc::clone(slots),
                Weak::clone(&lent),
                Arc::clone(&shared),
                match resident < count {
                    true => Budget::Some,
                    false => Budget::All,
                },
                from.describe(),
            );
            Arc::new(Provider::new(provision, Arc::clone(from)))
        });
        let first_touch = match provider {
            Some(_) => FirstTouch::Immediate,
            None => config.first_touch,
        };
        let all_fit = resident >= count && config.first_touch == FirstTouch::Immediate;
        let pagemap = (all_fit && provider.is_none()).then(Pagemap::open);
        let (guest, store) = (memory.guest.range(), memory.store.range());
        let swap = SwapSide::new(device, count, resident.min(count))
            .map_err(|e| ("map memory for compressed pages", e))?;
        let mut worker = Worker {
            pages: Pages::new(count, resident, first_touch),
            swap,
            shared: Arc::clone(&shared),
            in_flight: BinaryHeap::new(),
            short_since: None,
            over_since: None,
            uffd,
            memory,
            provider: provider.clone(),
            config,
        };
        let thread = thread::Builder::new()
            .name("page-source".into())
            .spawn(move || worker.run())
            .map_err(|_| ("start a thread", Errno::AGAIN))?;
        Ok(Self {
            shared,
            thread: Some(thread),
            uffd: lent,
            provider,
            guest,
            store,
            // Without the page table, each page that the VMM accesses is touched.
            pagemap: pagemap.and_then(Result::ok),
        })
    }

    /// Its counters so far.
    pub fn stats(&self) -> SourceStats {
        self.shared.counters.read()
    }

    /// The provider of pages at their first touch. `None`: the pages are zeros.
    pub fn provider(&self) -> Option<&Provider> {
        self.provider.as_deref()
    }

    /// Slots were changed. Requests the held pages of slots that exit no longer.
    pub fn slots_changed(&self) {
        if self.provider.is_some() {
            self.shared.notify(&self.shared.slots_changed);
        }
    }

    /// Ends the supply. Missing pages are zeros from now on, and their waiting threads continue:
    /// the VM is being dropped, and no guest reads them. This call does not wait for the page
    /// source's thread, which may be the caller: a page source may drop the VM during a request.
    pub fn close(&self) {
        self.shared.notify(&self.shared.quit);
        // A closed descriptor has already woken these threads.
        if let Some(uffd) = self.uffd.upgrade() {
            for mapping in [self.guest, self.store] {
                let unregistered = uffd.unregister(mapping);
                debug_assert!(unregistered.is_ok(), "{unregistered:?}");
            }
        }
    }

    /// Allows writes to `range` without a record. If the descriptor is closed, there is nothing to
    /// do, because its marks are gone too.
    ///
    /// # Errors
    /// As [`Userfaultfd::unprotect`].
    pub fn unprotect(&self, range: HvaRange) -> Result<(), Errno> {
        let uffd = self.uffd.upgrade();
        uffd.map_or(Ok(()), |uffd| uffd.unprotect(range))
    }

    /// The failure to supply a page, if there was one.
    pub fn failure(&self) -> Option<Failure> {
        self.shared.failure()
    }

    /// Wakes the thread, so that it sees that the VM has stopped. Pages then arrive without
    /// latency, so the end of the VM does not wait for KVM's workers.
    pub fn wake(&self) {
        self.shared.ring();
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        self.shared.notify(&self.shared.quit);
        let own = thread::current().id();
        // If a page source drops the VM during a request, this is the thread itself.
        if let Some(thread) = self.thread.take_if(|thread| thread.thread().id() != own) {
            let ended = thread.join();
            debug_assert!(ended.is_ok(), "the source does not panic");
        }
    }
}

/// A page in flight. The order is by deadline.
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
/// How long Linux may lack memory for every tried page.
const SHORTAGE_MAX: Duration = Duration::from_secs(10);
/// How long the source retries a busy page after the run has ended.
const END_MAX: Duration = Duration::from_secs(1);
/// How long a failed source waits for vCPUs to leave the guest, before it wakes the threads that
/// wait for pages.
const LEAVE_MAX: Duration = Duration::from_millis(100);

/// The result of an attempt to supply a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
enum Supply {
    /// The page is in place, or the source has failed and the run ends.
    Done,
    /// Linux cannot put the page in place now.
    Later,
}

struct Worker {
    uffd: Arc<Userfaultfd>,
    memory: Arc<Memory>,
    config: SourceConfig,
    provider: Option<Arc<Provider>>,
    shared: Arc<SourceShared>,
    pages: Pages,
    swap: SwapSide,
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
        // A failure also ends the loop. The thread closes the descriptor, so no other thread still
        // waits for a page that will not arrive.
        while !self.shared.quit.load(Ordering::Acquire) && !self.shared.has_failed() {
            self.wait();
            self.take_notices();
            self.supply_due();
            faults.clear();
            if let Err(errno) = self.uffd.faults(&mut faults) {
                self.fail(format!("cannot read page faults from userfaultfd: {errno}"));
                break;
            }
            let now = Instant::now();
            for &fault in &faults {
                self.touched(fault, now);
                self.make_room();
            }
        }
        // Waiting threads will find zeros. A vCPU in the guest would continue with these zeros.
        if self.shared.has_failed() {
            self.shared.kicks.wait_until_left(LEAVE_MAX);
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
            PollFd::new(&self.shared.doorbell, PollFlags::IN),
        ];
        // A signal may end the wait early; the caller checks all three.
        let _ = poll(&mut fds, timeout.as_ref());
        // The read fails if there was no wake-up, which is no error.
        let _ = rustix::io::read(&self.shared.doorbell, &mut [0; 8]);
    }

    pub fn supply_due(&mut self) {
        let (now, over) = (Instant::now(), self.shared.kicks.is_stopping());
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
            // Only this thread accesses the store, and only pages that are on probation there.
            return self.fail(format!("page fault in the page store at {:?}", fault.page));
        };
        if self.never_provided(page, fault) == Handled::Yes {
            return;
        }
        match self.pages.touched(page) {
            Need::Zeros => self.supply_at_once(page, now),
            Need::Return => {
                self.supply_at_once(page, now);
                count(&self.shared.counters.reprieved, 1);
            }
            Need::Fetch => {
                let over = self.shared.kicks.is_stopping();
                let latency = if over { 0 } else { self.config.latency.ns() };
                self.in_flight.push(Reverse(InFlight {
                    deadline: now + Duration::from_nanos(latency),
                    page,
                    received: now,
                    why: Delay::Latency,
                }));
                if latency > 0
                    && let Some(provider) = &self.provider
                {
                    let arrivals = provider.provision.arrivals(page);
                    self.comes_by_itself(page, arrivals, fault);
                }
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
    /// meanwhile. A lack of memory may last for ever, so the retries end after [`SHORTAGE_MAX`].
    fn supply(&mut self, page: Page) -> Supply {
        let errno = match self.place(page) {
            Ok(()) => {
                self.short_since = None;
                self.pages.arrived(page);
                if let Some(provider) = &self.provider {
                    provider.provision.arrived(page);
                }
                return Supply::Done;
            }
            Err(NotPlaced::Kernel(errno)) => errno,
            Err(NotPlaced::Device(error)) => return self.cannot_supply(page, &error),
        };
        let now = Instant::now();
        let over = self.shared.kicks.is_stopping();
        let (since, limit) = match errno {
            Errno::AGAIN | Errno::BUSY if !over => return Supply::Later,
            Errno::AGAIN | Errno::BUSY => (&mut self.over_since, END_MAX),
            Errno::NOMEM => (&mut self.short_since, SHORTAGE_MAX),
            _ => return self.cannot_supply(page, &errno),
        };
        if now - *since.get_or_insert(now) < limit {
            return Supply::Later;
        }
        self.cannot_supply(page, &errno)
    }

    fn cannot_supply(&self, page: Page, why: &dyn Display) -> Supply {
        let gpa = self.memory.gpa(page);
        self.fail(format!("cannot supply guest page {gpa:?}: {why}"));
        Supply::Done
    }

    fn fail(&self, cause: String) {
        self.shared.fail(Failure {
            lost: None,
            kind: FailureKind::Lost,
            cause,
        });
    }
}

/// Gives the calling thread real-time priority, if that is permitted, and exact timers. The thread
/// simulates a device or another host, which do not wait for this host's processors.
fn raise_priority() {
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
    let parameters = libc::sched_param { sched_priority: 1 };
    // SAFETY: 1. it reads one `sched_param`. 2. The thread sleeps whenever it has nothing to do.
    let _ = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &parameters) };
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod provided_tests;

#[cfg(test)]
mod swap_tests;
