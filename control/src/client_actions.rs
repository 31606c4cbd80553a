//! The clients' part in the end of a run.

use crate::threads::lock;
use lacuna::migrate::session::Migrated;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};

/// What clients have done to a run.
#[derive(Default)]
pub(crate) struct ClientActions {
    stopped: AtomicBool,
    /// The guest runs elsewhere, or may, and needs pages of this process.
    needed: Mutex<bool>,
    moved: OnceLock<Migrated>,
}

impl ClientActions {
    /// A client has ended the run.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Notes whether the guest runs elsewhere, or may, and needs pages of this process.
    pub fn set_needed(&self, needed: bool) {
        *lock(&self.needed) = needed;
    }

    pub fn unless_needed(&self, end: impl FnOnce()) -> bool {
        let needed = lock(&self.needed);
        if !*needed {
            end();
        }
        !*needed
    }

    /// The guest runs elsewhere.
    pub fn has_moved_by(&self, migrated: Migrated) {
        // A guest moves once.
        let _ = self.moved.set(migrated);
    }

    pub fn has_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    pub fn moved(&self) -> Option<&Migrated> {
        self.moved.get()
    }
}
