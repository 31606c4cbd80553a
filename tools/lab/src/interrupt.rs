//! The request to end an experiment early, as by Ctrl-C.
//!
//! A signal concerns the whole process, so this is the process's. Experiments look at every step of
//! their progress and whenever they let a guest run: what they have measured stays in the report.

use crate::experiment::LabError;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};

static REQUESTED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// What a signal handler sets.
pub fn flag() -> Arc<AtomicBool> {
    Arc::clone(&REQUESTED)
}

/// Goes on unless the end was requested.
///
/// # Errors
/// [`LabError::Interrupted`].
pub fn check() -> Result<(), LabError> {
    if REQUESTED.load(Ordering::Relaxed) {
        return Err(LabError::Interrupted);
    }
    Ok(())
}
