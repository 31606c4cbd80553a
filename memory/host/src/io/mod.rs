//! Executors: which thread runs a swap device, and when its completions are delivered.
//!
//! | | reads | writes | completions |
//! |---|---|---|---|
//! | [`Io::Threads`] | readers, or the waiter | the reclaimer | at once, or by a timer thread |
//! | [`Io::Virtual`] | at submission | at submission | by [`crate::Host::poll`], time from a seed |
//!
//! A write never wakes a thread: whoever reclaims has nothing better to do, and waking an idle core
//! takes longer than the write.

mod threads;
mod virt;

use crate::error::{LostPage, SwapError, WriteFailed};
use crate::host::Core;
use crate::ticket::Ticket;
use crate::writeback::WriteBatch;
use lacuna_sync::Nanos;
use std::ops::Range;
use std::sync::Arc;
use threads::Threads;
use virt::Virtual;

/// Who carries out I/O.
#[derive(Clone, Debug)]
pub enum Io {
    /// Real threads in real time.
    Threads {
        /// Most threads that read for those who do not wait, started when first needed.
        readers: usize,
    },
    /// Nobody but the caller, under a virtual clock: bit-exact from a seed.
    Virtual {
        /// Where the latencies are drawn from.
        seed: u64,
        /// Their range in nanoseconds, on top of the device's own.
        latency_ns: Range<u64>,
    },
}

pub(crate) enum Executor {
    Threads(Threads),
    Virtual(Virtual),
}

/// An operation that is over but for its announcement.
pub(crate) enum Completion {
    Read(Ticket, Result<(), SwapError>),
    Write(WriteBatch, Result<(), WriteFailed>),
}

impl Executor {
    pub fn new(io: Io, core: Arc<Core>) -> Self {
        match io {
            Io::Threads { readers } => Self::Threads(Threads::new(core, readers)),
            Io::Virtual { seed, latency_ns } => Self::Virtual(Virtual::new(seed, latency_ns)),
        }
    }

    /// Carries out a claimed read without the caller.
    pub fn read(&self, core: &Core, ticket: Ticket) {
        match self {
            Self::Threads(threads) => threads.read(ticket),
            Self::Virtual(world) => {
                let result = core.read(&ticket);
                world.submit(core, Completion::Read(ticket, result));
            }
        }
    }

    /// Carries out a claimed read on the caller's thread, for [`Executor::wait`] to follow.
    pub fn read_here(&self, core: &Core, ticket: &Ticket) {
        match self {
            Self::Threads(_) => {
                let due = core.deadline();
                let result = core.read(ticket);
                threads::sleep_until(core, due);
                core.complete_read(ticket, result);
            }
            Self::Virtual(_) => self.read(core, ticket.clone()),
        }
    }

    /// Waits for a claimed read.
    pub fn wait(&self, core: &Core, ticket: &Ticket) -> Result<(), LostPage> {
        let Self::Virtual(world) = self else {
            return ticket.sleep();
        };
        loop {
            if let Some(result) = ticket.result() {
                return result;
            }
            assert!(
                world.deliver_next(core),
                "a claimed read is always in flight"
            );
        }
    }

    /// Carries out a write on the caller's thread; it completes when the device says.
    pub fn write(&self, core: &Core, batch: WriteBatch) {
        let due = core.deadline();
        let result = core.write(&batch);
        let completion = Completion::Write(batch, result);
        match self {
            Self::Threads(threads) => threads.complete_at(due, completion),
            Self::Virtual(world) => world.submit(core, completion),
        }
    }

    /// Something in flight must come to rest before the caller can go on.
    pub fn help(&self, core: &Core, seen: u64) {
        match self {
            Self::Threads(_) => core.settled.wait_past(seen),
            Self::Virtual(world) => _ = world.deliver_next(core),
        }
    }

    /// Whether a caller may wait for completions here: a seeded run may not, because time moves
    /// only when its scheduler says so.
    pub fn may_wait(&self) -> bool {
        matches!(self, Self::Threads(_))
    }

    pub fn next_completion(&self) -> Option<Nanos> {
        match self {
            Self::Threads(_) => None,
            Self::Virtual(world) => world.next_due(),
        }
    }

    pub fn poll(&self, core: &Core, now: Nanos) -> usize {
        match self {
            Self::Threads(_) => 0,
            Self::Virtual(world) => world.deliver_until(core, now),
        }
    }

    pub fn shut_down(&self) {
        if let Self::Threads(threads) = self {
            threads.shut_down();
        }
    }
}

impl Core {
    /// When an operation submitted now may complete at the earliest.
    fn deadline(&self) -> Nanos {
        self.clock.now().after(self.store.latency_ns())
    }

    fn complete(&self, completion: Completion) {
        match completion {
            Completion::Read(ticket, result) => self.complete_read(&ticket, result),
            Completion::Write(batch, result) => self.complete_write(batch, result),
        }
    }
}
