//! The settings of a daemon.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

/// Takes a message for the user, on any thread.
pub type Report = Arc<dyn Fn(&str) + Send + Sync>;

/// How far a daemon is, in bytes of the VM's memory.
#[derive(Default, Debug)]
pub struct Progress {
    /// Bytes that are done. Memory that a VMM sends twice counts twice.
    pub done: AtomicU64,
    /// All bytes; 0 before a VMM has described them.
    pub all: AtomicU64,
}

/// The settings of a daemon.
#[derive(Clone)]
pub struct Settings {
    /// How long the VMM may be silent in the middle of a migration. It pauses its VM and restores
    /// devices meanwhile.
    pub patience: Duration,
    /// The caller wants the end. A VM that gets its memory from this daemon is served to its end.
    pub stop: Arc<AtomicBool>,
    /// Takes messages: refused connections, lost pages.
    pub report: Report,
    /// Takes the progress.
    pub progress: Arc<Progress>,
}

impl Settings {
    pub(crate) fn say(&self, text: &str) {
        tracing::warn!(target: "lacuna::offload", "{text}");
        (self.report)(text);
    }
}

/// A minute, and messages go to `tracing` alone.
impl Default for Settings {
    fn default() -> Self {
        Self {
            patience: Duration::from_secs(60),
            stop: Arc::default(),
            report: Arc::new(|_| {}),
            progress: Arc::default(),
        }
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Settings");
        debug
            .field("patience", &self.patience)
            .finish_non_exhaustive()
    }
}
