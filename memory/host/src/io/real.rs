//! Real time: the ring and the reader threads for reads, the timer for completions before their
//! time.

use super::readers::Readers;
use super::ring::{Arrivals, Onward, Ring};
use super::timer::{Slept, Timer, sleep_until};
use super::watch::Watch;
use super::{Completion, Reading};
use crate::core::Core;
use crate::counters::Counters;
use crate::error::LostPage;
use crate::region::Region;
use crate::settled::TICK;
use crate::ticket::Ticket;
use lacuna_swap::Reads;
use lacuna_sync::Nanos;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

thread_local! {
    /// The executor of the thread's last read, and the thread's place there.
    static PLACE: Cell<(u64, usize)> = const { Cell::new((0, 0)) };
}

fn next_number() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

pub(crate) struct Real {
    core: Arc<Core>,
    watch: Arc<Watch>,
    /// One for each core, so that submitting vCPUs do not wait for each other; none where io_uring
    /// is refused. Dropped before `readers` and `timer`, which take their completions.
    rings: Vec<Ring>,
    /// The executor's own number, from 1.
    number: u64,
    /// The number of threads with a ring.
    dealt: AtomicUsize,
    readers: Arc<Readers>,
    timer: Arc<Timer>,
    name: String,
}

impl Real {
    pub fn new(core: Arc<Core>, reading: Reading, readers: usize) -> Self {
        let watch = Arc::new(Watch::default());
        let timer = Arc::new(Timer::new(core.clone(), watch.clone()));
        let readers = Arc::new(Readers::new(core.clone(), timer.clone(), readers));
        let (rings, name) = match (reading, core.store.reads()) {
            (_, Reads::Immediate) => (Vec::new(), "on the starter's thread".into()),
            (Reading::Ring, Reads::File(_)) => {
                let ring = |_| {
                    Ring::new(Onward {
                        core: core.clone(),
                        watch: watch.clone(),
                        timer: timer.clone(),
                        readers: readers.clone(),
                    })
                };
                match (0..cores()).map(ring).collect() {
                    Ok(rings) => (rings, "io_uring".into()),
                    Err(error) => (Vec::new(), format!("reader threads (io_uring: {error})")),
                }
            }
            _ => (Vec::new(), "reader threads".into()),
        };
        Self {
            core,
            watch,
            rings,
            number: next_number(),
            dealt: AtomicUsize::new(0),
            readers,
            timer,
            name,
        }
    }

    /// The calling thread's ring. Threads get rings in the order in which they first need one.
    fn own_ring(&self) -> Option<&Ring> {
        let (executor, place) = PLACE.get();
        let place = if executor == self.number {
            place
        } else {
            let place = self.dealt.fetch_add(1, Ordering::Relaxed);
            PLACE.set((self.number, place));
            place
        };
        self.rings.get(place.checked_rem(self.rings.len())?)
    }

    /// The calling thread's ring, if the thread has one.
    fn used_ring(&self) -> Option<&Ring> {
        let (executor, _) = PLACE.get();
        (executor == self.number).then(|| self.own_ring())?
    }

    pub fn describe(&self) -> &str {
        &self.name
    }

    /// Carries out claimed reads without waiting for them.
    pub fn read(&self, tickets: impl Iterator<Item = Ticket>, due: Nanos) {
        let core = &self.core;
        let mut tickets = tickets
            .inspect(|_| Counters::add(&core.stats.reads_started, 1))
            .peekable();
        let by_thread = |ticket| self.readers.read(ticket, due);
        let is_linux = |ticket: &Ticket| ticket.region().linux.is_some();
        match (core.store.reads(), self.own_ring()) {
            // Linux reads its own memory, on a thread that may sleep. All tickets have one region.
            _ if tickets.peek().is_some_and(is_linux) => tickets.for_each(by_thread),
            (Reads::Immediate, _) => tickets.for_each(|ticket| {
                let result = core.read(&ticket);
                let completion = Completion::Read(ticket, result);
                self.timer.complete_at(due, completion);
            }),
            (Reads::File(file), Some(ring)) => ring.read(file, tickets, due, by_thread),
            _ => tickets.for_each(by_thread),
        }
    }

    /// Carries out a claimed read on the caller's thread. If the caller must stop before the read
    /// is due, it leaves the completion to another thread.
    pub fn read_here(&self, ticket: &Ticket, due: Nanos, stop: &AtomicBool) {
        let result = self.core.read(ticket);
        let completion = Completion::Read(ticket.clone(), result);
        // Sleep no longer than the region exists: its removal waits for its reads.
        match sleep_until(&self.core, due, stop, Some(ticket.region())) {
            Slept::UntilDue => self.core.complete(completion),
            Slept::Stopped => self.timer.complete_at(due, completion),
        }
    }

    /// Waits for a read in progress, unless the caller must stop. All others may rely on this
    /// thread for polling, so it polls now and then.
    pub fn wait(&self, ticket: &Ticket, stop: &AtomicBool) -> Result<(), LostPage> {
        loop {
            self.poll(self.core.clock.now());
            if let Some(result) = ticket.sleep(TICK) {
                return result;
            }
            if stop.load(Ordering::Acquire) {
                return Ok(());
            }
        }
    }

    /// Polls until the read of `ticket` is complete, or until `end`. Returns whether it completed.
    pub fn poll_for(&self, ticket: &Ticket, end: Nanos) -> bool {
        loop {
            let now = self.core.clock.now();
            self.poll(now);
            if ticket.is_done() || now >= end {
                return ticket.is_done();
            }
            // This thread has no work; another thread may need the core.
            std::thread::yield_now();
        }
    }

    pub fn complete_at(&self, due: Nanos, completion: Completion) {
        self.timer.complete_at(due, completion);
    }

    /// Waits until an operation completes or a frame is freed. The caller checks which one.
    pub fn help(&self, seen: u64, patience: Duration) {
        if self.poll(self.core.clock.now()) == 0 {
            self.core.settled.wait_past(seen, patience);
        }
    }

    pub fn deliver_all(&self) {
        self.timer.deliver_all();
    }

    pub fn hurry(&self, region: &Region) {
        self.timer.hurry(region);
    }

    pub fn poll(&self, now: Nanos) -> usize {
        self.used_ring().into_iter().for_each(Ring::finish);
        let arrived = self.rings.iter().map(Ring::poll).sum::<usize>();
        let delivered = self.timer.poll(now);
        if arrived + delivered > 0 {
            Counters::add(&self.core.stats.polled, (arrived + delivered) as u64);
        }
        arrived + delivered
    }

    /// When the next completion is due, if all operations in flight only wait for their due time.
    pub fn next_due(&self) -> Option<Nanos> {
        match self.core.store.reads() {
            Reads::Immediate => self.timer.first(),
            Reads::Blocking | Reads::File(_) => None,
        }
    }

    /// What arrives in the calling thread's ring.
    pub fn arrivals(&self) -> Option<Arrivals> {
        self.own_ring().map(Ring::arrivals)
    }

    pub fn join(&self) {
        self.watch.join();
    }

    pub fn leave(&self) {
        if self.watch.leave() {
            self.timer.take_over();
            self.rings.iter().for_each(Ring::take_over);
        }
    }

    /// Ends the threads. Operations in flight are delivered first, because a completion owns frames
    /// and swap entries. Completions that only wait for their due time are delivered at once.
    pub fn shut_down(&mut self) {
        self.rings.clear();
        self.readers.shut_down();
        self.timer.shut_down();
    }
}
