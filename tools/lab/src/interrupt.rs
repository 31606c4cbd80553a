//! The request to end an experiment early, as by Ctrl-C.
//!
//! A signal is for the whole process, so there is one flag. Experiments check it at every step of
//! their progress and whenever they let a guest run. What they have measured stays in the report.

use crate::experiment::{LabError, LabResult};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};

static REQUESTED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// The flag, for a signal handler to set.
pub fn flag() -> Arc<AtomicBool> {
    Arc::clone(&REQUESTED)
}

/// Returns an error if the end was requested.
///
/// # Errors
/// [`LabError::Interrupted`].
pub fn check() -> LabResult {
    if REQUESTED.load(Ordering::Relaxed) {
        return Err(LabError::Interrupted);
    }
    Ok(())
}
