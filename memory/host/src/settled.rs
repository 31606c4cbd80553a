//! Something in flight has come to rest: what direct reclaim and region removal wait for.

use crate::host::lock;
use lacuna_sync::{Condvar, Mutex, lock_order};
use std::sync::PoisonError;
use std::time::Duration;

/// A generation that moves whenever frames are freed or an operation completes.
#[derive(Default)]
pub(crate) struct Settled {
    generation: Mutex<u64, lock_order::SettledCount>,
    moved: Condvar,
}

impl Settled {
    /// Read before looking, so that nothing is missed.
    pub fn generation(&self) -> u64 {
        *lock(&self.generation)
    }

    /// Something came to rest.
    pub fn bump(&self) {
        *lock(&self.generation) += 1;
        self.moved.notify_all();
    }

    /// Waits until the generation is not `seen`, but not longer than `patience`: another thread's
    /// isolation of a frame ends without notice.
    pub fn wait_past(&self, seen: u64, patience: Duration) {
        let guard = lock(&self.generation);
        let waited = self
            .moved
            .wait_timeout_while(guard, patience, |now| *now == seen);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}
