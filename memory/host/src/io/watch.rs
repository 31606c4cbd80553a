//! Who looks for what has come: vCPUs in passing, or a thread that sleeps until something has.
//!
//! Waking a thread costs more than taking in what it was woken for, and where every core runs a
//! vCPU it takes a core away from one. So while somebody *polls*, the thread of a device stays
//! asleep, or looks rarely; when the last poller stops, it takes over what is in flight.
//!
//! ```text
//! starter: pending += 1; fence; nobody polls?        -> wake        thread: pending and nobody
//! poller:  pollers -= 1; fence; none left, pending?  -> wake                polls? work : park
//! ```
//! A Dekker exchange: one of the two sees the other, and a thread that is woken before it parks
//! does not park.

use lacuna_sync::shim::atomic::{AtomicUsize, Ordering, fence};
use std::time::Duration;

/// What may pass before a thread looks whether those who poll have forgotten to.
pub const POLLERS_LATE: Duration = Duration::from_millis(5);

/// How many poll.
#[derive(Default)]
pub struct Watch(AtomicUsize);

impl Watch {
    /// The caller polls from now on.
    pub fn join(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// The caller polls no more. True when nobody does: then whatever is pending, read after this
    /// call, needs its thread.
    #[must_use]
    pub fn leave(&self) -> bool {
        let last = self.0.fetch_sub(1, Ordering::Relaxed) == 1;
        fence(Ordering::SeqCst);
        last
    }

    /// Whether somebody polls, after the caller has noted what is pending.
    #[must_use]
    pub fn is_polled(&self) -> bool {
        fence(Ordering::SeqCst);
        self.0.load(Ordering::Relaxed) > 0
    }
}
