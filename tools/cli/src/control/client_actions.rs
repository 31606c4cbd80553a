//! The clients' part in the end of a run.

use lacuna::migrate::session::Migrated;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// What clients have done to a run.
#[derive(Default)]
pub struct ClientActions {
    stopped: AtomicBool,
    /// The guest runs elsewhere, or may, and needs pages of this process.
    needed: Mutex<bool>,
    moved: OnceLock<Migrated>,
}

impl ClientActions {
    /// A client has ended the run.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    fn needed(&self) -> MutexGuard<'_, bool> {
        self.needed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes whether the guest runs elsewhere, or may, and needs pages of this process.
    pub(super) fn set_needed(&self, needed: bool) {
        *self.needed() = needed;
    }

    /// Calls `end`, unless the guest needs pages of this process. The guest does not begin to need
    /// them meanwhile. Returns whether `end` was called.
    pub fn unless_needed(&self, end: impl FnOnce()) -> bool {
        let needed = self.needed();
        if !*needed {
            end();
        }
        !*needed
    }

    /// The guest runs elsewhere.
    pub(super) fn has_moved_by(&self, migrated: Migrated) {
        // A guest moves once.
        let _ = self.moved.set(migrated);
    }

    /// Whether a client has ended the run.
    pub fn has_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// How the guest has moved elsewhere.
    pub fn moved(&self) -> Option<&Migrated> {
        self.moved.get()
    }
}
