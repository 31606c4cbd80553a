//! Executors: which thread runs a swap device, and when its completions are delivered.
//!
//! | | reads with a waiter | reads without a waiter | writes |
//! |---|---|---|---|
//! | [`Io::Threads`] | the waiter | reader threads | the reclaimer |
//! | [`Io::Ring`] | the waiter | an io_uring a core; threads where refused | the reclaimer |
//! | [`Io::Virtual`] | at submission | at submission | at submission |
//!
//! In real time a completion that is not yet due waits in a timer. If the store never waits, the
//! thread that starts a read carries it out. Threads of the device handle arrivals, or polling
//! vCPUs: see [`crate::Host::polling`]. In virtual time [`crate::Host::poll`] delivers everything,
//! at times drawn from a seed.
//!
//! A write never wakes a thread: a reclaiming thread can carry it out itself, and waking an idle
//! core takes longer than the write.

mod readers;
mod real;
mod ring;
mod timer;
mod virt;
mod watch;

pub use ring::Arrivals;
pub use timer::fine_sleeps;

use crate::core::Core;
use crate::error::LostPage;
use crate::reclaim::writeback::WriteBatch;
use crate::region::Region;
use crate::settled::TICK;
use crate::ticket::Ticket;
use lacuna_swap::{SwapError, WriteFailed};
use lacuna_sync::{Nanos, lock};
use real::Real;
use std::iter::once;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use virt::Virtual;

/// How I/O is carried out.
#[derive(Clone, Debug)]
pub enum Io {
    /// Real threads in real time.
    Threads {
        /// The most threads that read for callers that do not wait. They start when first needed.
        readers: usize,
    },
    /// As `Threads`, but io_uring carries out the reads of a file with direct I/O, without a
    /// thread. Where the kernel refuses io_uring (EPERM, ENOSYS), threads do: see
    /// [`crate::Host::describe_io`].
    Ring {
        /// The most threads for reads that the ring does not take.
        readers: usize,
    },
    /// Only the caller, under a virtual clock: a seed repeats the run bit for bit.
    Virtual {
        /// The seed of the latencies.
        seed: u64,
        /// Their range in nanoseconds, in addition to the device's latency.
        latency_ns: Range<u64>,
    },
}

/// How reads are carried out for callers that do not wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Reading {
    Threads,
    Ring,
}

pub(crate) enum Executor {
    Real(Real),
    Virtual(Virtual),
}

/// An operation that the device has finished, before its delivery.
pub(crate) enum Completion {
    Read(Ticket, Result<(), SwapError>),
    Write(WriteBatch, Result<(), WriteFailed>),
    /// The delay of a request to a page source is over.
    Request(Ticket),
}

impl Completion {
    fn is_read_of(&self, ticket: &Ticket) -> bool {
        matches!(self, Self::Read(read, _) if read.is_same(ticket))
    }

    /// Whether a page of `region` waits for this completion.
    fn concerns(&self, region: &Region) -> bool {
        match self {
            Self::Read(ticket, _) | Self::Request(ticket) => {
                std::ptr::eq(&**ticket.region(), region)
            }
            Self::Write(batch, _) => batch.concerns(region),
        }
    }
}

impl Executor {
    pub fn new(io: Io, core: Arc<Core>) -> Self {
        match io {
            Io::Threads { readers } => Self::Real(Real::new(core, Reading::Threads, readers)),
            Io::Ring { readers } => Self::Real(Real::new(core, Reading::Ring, readers)),
            Io::Virtual { seed, latency_ns } => Self::Virtual(Virtual::new(seed, latency_ns)),
        }
    }

    pub fn describe(&self) -> &str {
        match self {
            Self::Real(real) => real.describe(),
            Self::Virtual(_) => "virtual time",
        }
    }

    pub fn seed(&self) -> Option<u64> {
        match self {
            Self::Real(_) => None,
            Self::Virtual(world) => Some(world.seed),
        }
    }

    /// Carries out a claimed read, and the reads of `ahead` with it; the caller does not wait.
    pub fn read(&self, core: &Core, ticket: Ticket, ahead: Vec<Ticket>) {
        let due = core.read_deadline();
        let tickets = once(ticket).chain(ahead);
        match self {
            Self::Real(real) => real.read(tickets, due),
            Self::Virtual(world) => tickets.for_each(|ticket| {
                let result = core.read(&ticket);
                world.submit(due, Completion::Read(ticket, result));
            }),
        }
    }

    /// Carries out a claimed read on the caller's thread, and the reads of `ahead` beside it;
    /// [`Executor::wait`] must follow.
    pub fn read_here(&self, core: &Core, ticket: &Ticket, ahead: Vec<Ticket>, stop: &AtomicBool) {
        match self {
            Self::Real(real) => {
                let due = core.read_deadline();
                real.read(ahead.into_iter(), due);
                real.read_here(ticket, due, stop);
            }
            Self::Virtual(_) => self.read(core, ticket.clone(), ahead),
        }
    }

    /// Waits for a claimed read, or until `stop` is set.
    pub fn wait(&self, core: &Core, ticket: &Ticket, stop: &AtomicBool) -> Result<(), LostPage> {
        match self {
            Self::Real(real) => real.wait(ticket, stop),
            Self::Virtual(world) => loop {
                if let Some(result) = ticket.result() {
                    return result;
                }
                if world.deliver_next(core) {
                    continue;
                }
                // A page source has its own threads. Such a thread changes the page word first, and
                // completes the ticket a moment later. A read is always in flight here.
                if ticket.region().origin.is_none() {
                    return ticket
                        .result()
                        .unwrap_or_else(|| panic!("{ticket:?} is in no queue"));
                }
                if let Some(result) = ticket.sleep(TICK) {
                    return result;
                }
                if stop.load(Ordering::Acquire) {
                    return Ok(());
                }
            },
        }
    }

    /// Requests the page of a ticket from its source when the added delay is over.
    pub fn request(&self, core: &Core, ticket: &Ticket) {
        let delay = core.delay_ns();
        if delay == 0 || ticket.region().outside().is_some() {
            return core.ask_source(ticket);
        }
        let due = core.clock.now().after(delay);
        let completion = Completion::Request(ticket.clone());
        match self {
            Self::Real(real) => real.complete_at(due, completion),
            Self::Virtual(world) => world.submit(due, completion),
        }
    }

    /// Whether a read passed to the executor completes by `end`.
    pub fn arrives_by(&self, ticket: &Ticket, end: Nanos) -> bool {
        match self {
            Self::Real(real) => real.poll_for(ticket, end),
            Self::Virtual(world) => ticket.is_done() || world.is_due_by(ticket, end),
        }
    }

    /// Carries out a write on the caller's thread. It completes when the device's latency is over.
    pub fn write(&self, core: &Core, batch: WriteBatch) {
        let due = core.write_deadline();
        let result = core.write(&batch);
        let completion = Completion::Write(batch, result);
        match self {
            Self::Real(real) => real.complete_at(due, completion),
            Self::Virtual(world) => world.submit(due, completion),
        }
    }

    /// Waits until an operation in flight completes or a frame is freed, at most for `patience`.
    pub fn help(&self, core: &Core, seen: u64, patience: Duration) {
        match self {
            Self::Real(real) => real.help(seen, patience),
            Self::Virtual(world) => _ = world.deliver_next(core),
        }
    }

    /// Delivers the completions of `region` that only wait for their due time. In virtual time
    /// [`Executor::help`] delivers early.
    pub fn hurry(&self, region: &Region) {
        if let Self::Real(real) = self {
            real.hurry(region);
        }
    }

    /// Delivers all completions that only wait for their due time.
    pub fn deliver_all(&self) {
        if let Self::Real(real) = self {
            real.deliver_all();
        }
    }

    /// Whether a caller may wait for completions here. A seeded run may not: only its scheduler
    /// advances time.
    pub fn may_wait(&self) -> bool {
        matches!(self, Self::Real(_))
    }

    pub fn next_due(&self) -> Option<Nanos> {
        match self {
            Self::Real(real) => real.next_due(),
            Self::Virtual(_) => None,
        }
    }

    pub fn next_completion(&self) -> Option<Nanos> {
        match self {
            Self::Real(_) => None,
            Self::Virtual(world) => world.next_due(),
        }
    }

    pub fn poll(&self, core: &Core, now: Nanos) -> usize {
        match self {
            Self::Real(real) => real.poll(now),
            Self::Virtual(world) => world.deliver_until(core, now),
        }
    }

    /// See [`crate::Host::arrivals`].
    pub fn arrivals(&self) -> Option<Arrivals> {
        match self {
            Self::Real(real) => real.arrivals(),
            Self::Virtual(_) => None,
        }
    }

    /// The caller polls from now on.
    pub fn join(&self) {
        if let Self::Real(real) = self {
            real.join();
        }
    }

    /// The caller stops polling.
    pub fn leave(&self) {
        if let Self::Real(real) = self {
            real.leave();
        }
    }

    pub fn shut_down(&mut self) {
        if let Self::Real(real) = self {
            real.shut_down();
        }
    }
}

impl Core {
    /// The earliest completion time of a read submitted now.
    fn read_deadline(&self) -> Nanos {
        self.after(|| self.store.read_latency_ns())
    }

    /// The earliest completion time of a write submitted now.
    fn write_deadline(&self) -> Nanos {
        self.after(|| self.store.latency_ns())
    }

    fn after(&self, latency_ns: impl FnOnce() -> u64) -> Nanos {
        let latency = match self.at_once.load(Ordering::Relaxed) {
            true => 0,
            false => latency_ns().saturating_add(self.delay_ns()),
        };
        self.clock.now().after(latency)
    }

    fn complete(&self, completion: Completion) {
        // Counted before the ticket is removed or the write ends: see `in_flight`.
        self.completing.fetch_add(1, Ordering::Relaxed);
        match completion {
            Completion::Read(ticket, result) => self.complete_read(&ticket, result),
            Completion::Write(batch, result) => self.complete_write(batch, result),
            // Otherwise the VMM has provided the page, or its region was removed.
            Completion::Request(ticket) if !ticket.is_done() => self.ask_source(&ticket),
            Completion::Request(_) => {}
        }
        self.completing.fetch_sub(1, Ordering::Release);
    }

    /// The number of pages being read or written. At 0, no thread of a device works on the host any
    /// more.
    ///
    /// The order matters: a completing thread is counted in `completing` before the operation
    /// leaves the other two counts, and until the thread has finished.
    pub fn in_flight(&self) -> usize {
        let writing = self.writing.load(Ordering::Acquire);
        let reading = lock(&self.tickets).len();
        writing + reading + self.completing.load(Ordering::Acquire)
    }
}
