//! Faults of the guest's missing pages: threads read them from userfaultfds, and bring the pages.
//!
//! ```text
//! vCPU, KVM's worker, VMM ── touches a missing page ──► userfaultfd ──► reader
//!    waits                                                           │ resolves the page
//!      ▲                                                             ├ resident: maps it
//!      │                                                             ├ in flight: maps it later
//!      └─────────────────────── page in place ◄──────────────────────┴ slot exits: a vCPU exits
//! ```
//! The host manager (`lacuna_host`) asks the page source, reads from swap and makes room. A page
//! that it has filled in Linux memory is in place. A page in a frame of the budget is mapped in
//! the window, by the thread that has completed it.
//!
//! UNSAFETY: a system call that asks whether a thread belongs to this process, and one that sets
//! the readers' priority.

mod state;

pub use state::{Failure, FaultState};

use crate::kick::{Comes, MissingPage, Reported, VcpuKicks};
use crate::memory::{Memory, Page};
use crate::provider::Provider;
use crate::slots::SlotTable;
use crate::window::Mapped;
use lacuna_addr::PAGE_SHIFT;
use lacuna_host::{Arrivals, PerCpuPages, Resolution, Ticket};
use lacuna_sys::{Errno, Fault, Userfaultfd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::AsFd as _;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tracing::trace;

/// The delay after Linux could not put a page in place.
const RETRY: Duration = Duration::from_millis(1);
/// How long Linux may lack memory for every tried page.
const SHORTAGE_MAX: Duration = Duration::from_secs(10);
/// How long a failed VM waits for vCPUs to leave the guest, before it wakes the threads that wait
/// for pages.
const LEAVE_MAX: Duration = Duration::from_millis(100);

/// The readers of a VM's faults. They end when this is dropped.
pub struct Faults {
    pub state: Arc<FaultState>,
    threads: Vec<JoinHandle<()>>,
}

impl Faults {
    /// Starts the readers for `memory`, which `slots` describes. If a page cannot be brought, they
    /// end the run with `kicks`.
    ///
    /// # Errors
    /// The step that the kernel refused.
    pub fn start(
        memory: Arc<Memory>,
        slots: Arc<SlotTable>,
        kicks: Arc<VcpuKicks>,
    ) -> Result<Self, (&'static str, Errno)> {
        let vcpus = kicks.count();
        let state = FaultState::new(memory, slots, kicks).map_err(|e| ("make an eventfd", e))?;
        let state = Arc::new(state);
        let mut readers: Vec<Vec<Arc<Userfaultfd>>> = Vec::new();
        // No more readers than vCPUs can wait at once: each one's parts are dealt out in turn.
        for (part, uffd) in state.memory.userfaultfds().into_iter().enumerate() {
            match readers.get_mut(part % vcpus) {
                Some(reader) => reader.push(uffd),
                None => readers.push(vec![uffd]),
            }
        }
        if let Some(handler) = state.memory.handler() {
            // One that reads no faults, and ends the waits of all threads if the VM fails.
            readers.push(Vec::new());
            let state = Arc::downgrade(&state);
            handler.on_gone(move || {
                if let Some(state) = state.upgrade() {
                    state.handler_is_gone();
                }
            });
        }
        let mut this = Self {
            state,
            threads: Vec::new(),
        };
        let is_sure = is_in_initial_pid_namespace();
        for (number, uffds) in readers.into_iter().enumerate() {
            let mut reader = Reader {
                state: Arc::clone(&this.state),
                uffds,
                is_first: number == 0,
                is_sure,
                arrivals: None,
                again: Vec::new(),
                short_since: None,
            };
            let named = thread::Builder::new().name("lacuna-faults".into());
            let thread = named.spawn(move || reader.run());
            let thread = thread.map_err(|_| ("start a thread", Errno::AGAIN))?;
            this.threads.push(thread);
        }
        Ok(this)
    }

    /// Faults read so far. Several threads that wait for one page may count as one or as several.
    pub fn count(&self) -> u64 {
        self.state.faults.load(Ordering::Relaxed)
    }

    /// Slots were changed. Brings the held pages that cause no exit any more.
    pub fn slots_changed(&self) {
        if self.state.provider.is_some() {
            self.state.slots_changed();
        }
    }

    /// Ends the supply. Missing pages are zeros from now on, and their waiting threads continue:
    /// the VM is being dropped, and no guest reads them. This call does not wait for a reader,
    /// which may be the caller: a page source may drop the VM during a request.
    pub fn close(&self) {
        self.state.end();
        self.state.memory.close();
    }
}

impl Drop for Faults {
    fn drop(&mut self) {
        self.state.end();
        let own = thread::current().id();
        // A page source may drop the VM during a request. Then this is a reader, and another one
        // may wait for the same source: they end by themselves.
        if self
            .threads
            .iter()
            .any(|thread| thread.thread().id() == own)
        {
            return;
        }
        for thread in self.threads.drain(..) {
            let ended = thread.join();
            debug_assert!(ended.is_ok(), "a reader does not panic");
        }
    }
}

/// One reader.
struct Reader {
    state: Arc<FaultState>,
    uffds: Vec<Arc<Userfaultfd>>,
    /// Whether it handles the notices.
    is_first: bool,
    /// Whether a number of a thread names one thread. Linux reports a worker of KVM by its number
    /// in the initial PID namespace. In another namespace, a thread of this process may have the
    /// same number.
    is_sure: bool,
    /// What arrives in the ring of its own reads.
    arrivals: Option<Arrivals>,
    /// Pages to be tried again after [`RETRY`].
    again: Vec<Page>,
    /// Since when Linux has lacked memory.
    short_since: Option<Instant>,
}

impl Reader {
    fn run(&mut self) {
        raise_priority();
        let mut faults = Vec::new();
        self.arrivals = self.state.memory.host.arrivals();
        while !self.state.is_over() {
            let (uffds, has_notice) = self.wait();
            self.arrivals.iter().for_each(|ring| _ = ring.take());
            if has_notice {
                self.take_notices();
            }
            for page in std::mem::take(&mut self.again) {
                self.bring(page, Asks::UnlessItExits);
            }
            faults.clear();
            for uffd in uffds {
                if let Err(errno) = self.uffds[uffd].faults(&mut faults) {
                    self.state
                        .cannot("read page faults from userfaultfd", &errno);
                }
            }
            for fault in faults.drain(..) {
                self.touched(fault);
            }
        }
        self.arrivals = None;
        // Waiting threads will find zeros. A vCPU in the guest would continue with these zeros.
        if self.state.failure().is_some() {
            self.state.kicks.wait_until_left(LEAVE_MAX);
            self.state.memory.close();
        }
    }

    /// Waits for a fault, a notice, or the time to try again. Returns the descriptors with faults,
    /// and whether there is a notice. A read of each descriptor would be up to 16 system calls for
    /// a fault.
    fn wait(&self) -> (Vec<usize>, bool) {
        let retry = Timespec {
            tv_sec: 0,
            tv_nsec: i64::from(RETRY.subsec_nanos()),
        };
        let timeout = (!self.again.is_empty()).then_some(&retry);
        let wait_for = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let uffds = self.uffds.iter().map(|uffd| wait_for(uffd.as_fd()));
        let mut fds: Vec<_> = uffds.chain([wait_for(self.state.end.as_fd())]).collect();
        if self.is_first {
            fds.push(wait_for(self.state.doorbell.as_fd()));
        }
        fds.extend(self.arrivals.as_ref().map(|ring| wait_for(ring.as_fd())));
        // If a signal ends the wait early, nothing is ready.
        let _ = poll(&mut fds, timeout);
        let (uffds, notices) = fds.split_at(self.uffds.len());
        // An error is ready too: the read returns it.
        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let ready = (0..uffds.len()).filter(|at| is_ready(&uffds[*at]));
        (ready.collect(), self.is_first && is_ready(&notices[1]))
    }

    /// Takes notices: pages to be brought again, and changed slots.
    fn take_notices(&mut self) {
        // The read fails if there was no wake-up, which is no error.
        let _ = rustix::io::read(&self.state.doorbell, &mut [0; 8]);
        self.again.extend(self.state.take_again());
        if self.state.slots_changed.swap(false, Ordering::AcqRel)
            && let Some(provider) = &self.state.provider
        {
            for page in provider.held_without_exit() {
                self.bring(page, Asks::UnlessItExits);
            }
        }
    }

    fn touched(&mut self, fault: Fault) {
        self.state.faults.fetch_add(1, Ordering::Relaxed);
        let Some(page) = self.state.memory.page(fault.page) else {
            let why = format!("{:?} is not the guest's", fault.page);
            return self.state.cannot("handle a page fault", &why);
        };
        if self.state.lose_if_removed(page) {
            return;
        }
        let asks = match &self.state.provider {
            Some(provider) if provider.exits(page).is_some() => {
                match self.exit(provider, page, fault) {
                    None => return,
                    Some(asks) => asks,
                }
            }
            _ => Asks::UnlessItExits,
        };
        if let Some(ticket) = self.bring(page, asks)
            && !ticket.is_done()
        {
            let (vcpu, access) = (self.state.kicks.vcpu_of(fault.thread), fault.access);
            let number = ticket.page().get() >> PAGE_SHIFT;
            trace!(target: "lacuna::fault", vcpu, page = number, ?access, "fault");
            self.comes_by_itself(page, fault);
        }
    }

    /// Brings `page` to the threads that wait for it. Returns its ticket if it is on its way.
    fn bring(&mut self, page: Page, asks: Asks) -> Option<Ticket> {
        self.state.release(page);
        let host = Arc::clone(&self.state.memory.host);
        host.with_spare_cache(|cache| self.bring_with(page, asks, cache))
    }

    fn bring_with(&mut self, page: Page, asks: Asks, cache: &mut PerCpuPages) -> Option<Ticket> {
        let state = Arc::clone(&self.state);
        let host = &state.memory.host;
        loop {
            match state.memory.map(page, cache) {
                // It was made missing again. Its threads fault again, and the VMM gets an exit.
                Mapped::No(Resolution::Missing(_))
                    if asks == Asks::UnlessItExits && state.exits(page) =>
                {
                    if let Err(errno) = state.memory.wake(page) {
                        state.cannot("wake the threads that wait for a page", &errno);
                    }
                    return None;
                }
                Mapped::Yes => {
                    self.short_since = None;
                    return None;
                }
                Mapped::No(Resolution::Pending(ticket) | Resolution::Missing(ticket)) => {
                    host.start(&ticket);
                    if ticket.is_done() {
                        continue;
                    }
                    state.map_later(page, &ticket);
                    return Some(ticket);
                }
                Mapped::No(Resolution::NoMemory) => {
                    let _asleep = self.arrivals.as_ref().map(Arrivals::set_aside);
                    if let Err(error) = host.reclaim_direct_until(cache, &state.over) {
                        state.cannot("make room for a page", &error);
                        return None;
                    }
                    if state.is_over() {
                        return None;
                    }
                }
                Mapped::No(Resolution::Lost(lost)) => {
                    state.lose(page, &lost);
                    return None;
                }
                // Another thread discards the page.
                Mapped::No(Resolution::Busy | Resolution::Ready(_)) => break,
                Mapped::Later(Errno::NOMEM) => {
                    let since = *self.short_since.get_or_insert_with(Instant::now);
                    if since.elapsed() > SHORTAGE_MAX {
                        state.cannot("put a page in place", &Errno::NOMEM);
                        return None;
                    }
                    break;
                }
                Mapped::Later(_) => break,
                Mapped::Refused(errno) => {
                    state.cannot("put a page in place", &errno);
                    return None;
                }
            }
        }
        self.again.push(page);
        None
    }

    /// Handles a thread that waits for a missing page in a slot that exits.
    ///
    /// | what waits | what happens |
    /// |---|---|
    /// | a vCPU's thread, in the guest | the vCPU exits |
    /// | the same, for an access of KVM's own | the source is asked |
    /// | a worker of KVM, for its async page fault | a vCPU exits |
    /// | another thread of this process | the source is asked |
    ///
    /// A worker that seems to be a vCPU is treated as one. But KVM reports its fault only once. So
    /// if a provided page has to be mapped, it is held: the vCPU exits for it until it is provided,
    /// and it is mapped then. A worker that seems to be another thread gets its page from the
    /// source.
    ///
    /// `None`: the VMM provides the page.
    fn exit(&self, provider: &Provider, page: Page, fault: Fault) -> Option<Asks> {
        let missing = MissingPage {
            page,
            access: fault.access,
            comes: Comes::FromVmm,
            search: None,
        };
        let kicks = &self.state.kicks;
        match kicks.vcpu_of(fault.thread) {
            Some(vcpu) => match kicks.report(vcpu, missing) {
                Reported::Left if !self.is_sure => {
                    provider.hold(page);
                    kicks.report_for_any(missing);
                }
                Reported::Leaves if self.is_sure || !self.state.memory.is_mapped_by_moves() => {}
                Reported::Leaves | Reported::Waits => _ = provider.hold(page),
                Reported::Left => {}
                Reported::Stays => return Some(Asks::TheSource),
            },
            None if is_of_this_process(fault.thread) => return Some(Asks::TheSource),
            // If the page is held, the VMM already got an exit. This worker may act for another
            // vCPU, which may get the event too.
            None => {
                if provider.hold(page) || provider.notifies_guest() {
                    kicks.report_for_any(missing);
                }
            }
        }
        // The VMM may have provided the page before it was held.
        let is_missing = self.state.memory.is_missing(page);
        (!is_missing).then_some(Asks::UnlessItExits)
    }

    /// A thread waits for a page that arrives without the VMM. If the thread is a worker of KVM, a
    /// vCPU notifies its guest.
    fn comes_by_itself(&self, page: Page, fault: Fault) {
        let kicks = &self.state.kicks;
        let provider = self.state.provider.as_ref();
        if provider.is_some_and(Provider::notifies_guest)
            && kicks.vcpu_of(fault.thread).is_none()
            && !is_of_this_process(fault.thread)
        {
            kicks.report_for_any(MissingPage {
                page,
                access: fault.access,
                comes: Comes::ByItself,
                search: None,
            });
        }
    }
}

/// Whether the source is asked for a page that turns out to be missing.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Asks {
    TheSource,
    UnlessItExits,
}

/// Whether `thread` belongs to this process. KVM's threads for async page faults belong to the
/// kernel.
fn is_of_this_process(thread: u32) -> bool {
    // SAFETY: 1. signal 0 is not sent: the call only looks for the thread.
    let found = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, 0) };
    found == 0
}

/// Whether this process is in the initial PID namespace, which has this number in every kernel
/// (`PROC_PID_INIT_INO`).
fn is_in_initial_pid_namespace() -> bool {
    let namespace = std::fs::read_link("/proc/self/ns/pid");
    namespace.is_ok_and(|namespace| namespace.as_os_str() == "pid:[4026531836]")
}

/// Gives the calling thread real-time priority, if that is permitted, and exact timers: vCPUs wait
/// for it, and a reader that waits for their processors would delay them by a time slice.
fn raise_priority() {
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
    let parameters = libc::sched_param { sched_priority: 1 };
    // SAFETY: 1. it reads one `sched_param`. 2. The thread sleeps whenever it has nothing to do.
    let _ = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &parameters) };
}

#[cfg(test)]
mod tests;
