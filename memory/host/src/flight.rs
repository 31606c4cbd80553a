//! Which thread may act on a page in flight: the state of a ticket.
//!
//! ```text
//!          start                 answer                   finish
//!   Idle ---------> Started ---------------> Answering ----------> Done
//!     |                |                       ^
//!     '----------------|-----------------------'  answer: a page may arrive without a request
//!                      '-----------------------------------------> Done
//!                         finish: the thread that carries out a read from swap
//! ```
//! A ticket is completed in one of two ways. The thread that won `start` carries out a read from
//! swap. Several threads may answer a fetch from a page source, early, late or twice, while another
//! thread removes the region. The thread that wins `answer` owns the page's frame until `finish`.

use lacuna_sync::shim::{AtomicU32, Ordering};

const IDLE: u32 = 0;
const STARTED: u32 = 1;
const ANSWERING: u32 = 2;
const DONE: u32 = 3;

/// The state of one ticket.
pub struct Flight(AtomicU32);

impl Flight {
    pub fn new() -> Self {
        Self(AtomicU32::new(IDLE))
    }

    /// Takes the duty to carry out the read, or to ask the source. True for one caller only.
    #[must_use]
    pub fn start(&self) -> bool {
        self.change(IDLE, STARTED)
    }

    /// Takes the right to complete a fetch. True for one caller only.
    #[must_use]
    pub fn answer(&self) -> bool {
        // Idle first: it may become Started in between, but Started never becomes Idle.
        self.change(IDLE, ANSWERING) || self.change(STARTED, ANSWERING)
    }

    /// The page is resident or lost. The caller won `start`, or `answer`.
    pub fn finish(&self) {
        self.0.store(DONE, Ordering::Release);
    }

    pub fn is_started(&self) -> bool {
        self.0.load(Ordering::Acquire) != IDLE
    }

    pub fn is_done(&self) -> bool {
        self.0.load(Ordering::Acquire) == DONE
    }

    fn change(&self, from: u32, to: u32) -> bool {
        self.0
            .compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }
}
