//! The end of operations in flight, for which direct reclaim and region removal wait.

use lacuna_sync::{Condvar, Mutex, lock, lock_order};
use std::sync::PoisonError;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Longest single wait for an event that notifies no waiter. Example: another thread ends its
/// isolation of a frame.
pub(crate) const TICK: Duration = Duration::from_millis(1);

/// The stop flag of a wait that cannot be stopped.
pub(crate) static NEVER: AtomicBool = AtomicBool::new(false);

/// A generation that moves whenever frames are freed or an operation completes.
#[derive(Default)]
pub(crate) struct Settled {
    generation: Mutex<u64, lock_order::SettledCount>,
    moved: Condvar,
}

impl Settled {
    /// Read the generation before the check, so that no later change is missed.
    pub fn generation(&self) -> u64 {
        *lock(&self.generation)
    }

    /// Called when an operation has ended, or frames were freed.
    pub fn bump(&self) {
        *lock(&self.generation) += 1;
        self.moved.notify_all();
    }

    /// Waits until the generation is not `seen`, but at most for `patience`: another thread ends
    /// its isolation of a frame without notice.
    pub fn wait_past(&self, seen: u64, patience: Duration) {
        let guard = lock(&self.generation);
        let waited = self
            .moved
            .wait_timeout_while(guard, patience, |now| *now == seen);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}
