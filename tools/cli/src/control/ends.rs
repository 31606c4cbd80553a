//! What clients have done to the run.

use super::migration::Migrated;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// How clients have ended a run.
#[derive(Default)]
pub struct Ends {
    stopped: AtomicBool,
    /// The guest runs elsewhere, and needs pages of this process.
    needed: AtomicBool,
    moved: OnceLock<Migrated>,
}

impl Ends {
    /// A client has ended the run.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Whether the guest runs elsewhere, and needs pages of this process.
    pub(super) fn needs(&self, needed: bool) {
        self.needed.store(needed, Ordering::Relaxed);
    }

    /// Whether the guest runs elsewhere, and needs pages of this process.
    pub fn is_needed(&self) -> bool {
        self.needed.load(Ordering::Relaxed)
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
