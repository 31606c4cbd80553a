//! Which thread handles completions: polling vCPUs, or a thread of the device that sleeps until a
//! completion arrives.
//!
//! Waking a thread costs more than handling the completion, and takes a core from a vCPU if every
//! core runs one. So while any thread *polls*, the device's thread stays asleep, or polls rarely.
//! When the last poller stops, the device's thread takes over the operations in flight.
//!
//! ```text
//! starter: pending += 1; fence; no poller?           -> wake        thread: pending and no
//! poller:  pollers -= 1; fence; none left, pending?  -> wake                poller? work : park
//! ```
//! A Dekker exchange: one of the two sees the other's store. A thread that is woken before it parks
//! does not park.

use lacuna_sync::shim::atomic::{AtomicUsize, Ordering, fence};
use std::time::Duration;

/// The period at which a device's thread checks whether the pollers are late.
pub const POLLERS_LATE: Duration = Duration::from_millis(5);

/// The number of polling threads.
#[derive(Default)]
pub struct Watch(AtomicUsize);

impl Watch {
    /// The caller polls from now on.
    pub fn join(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// The caller stops polling. True if no other thread polls: then pending operations, read after
    /// this call, need the device's thread.
    #[must_use]
    pub fn leave(&self) -> bool {
        let last = self.0.fetch_sub(1, Ordering::Relaxed) == 1;
        fence(Ordering::SeqCst);
        last
    }

    /// Whether a thread polls. The caller has already recorded its pending operation.
    #[must_use]
    pub fn is_polled(&self) -> bool {
        fence(Ordering::SeqCst);
        self.0.load(Ordering::Relaxed) > 0
    }
}
