//! How this crate locks.

use lacuna_sync::lock_order::LockClass;
use lacuna_sync::{Mutex, MutexGuard};
use std::sync::PoisonError;
use std::sync::atomic::AtomicBool;

/// The stop flag of a wait that cannot be stopped.
pub(crate) static NEVER: AtomicBool = AtomicBool::new(false);

#[track_caller]
pub(crate) fn lock<T, C: LockClass>(mutex: &Mutex<T, C>) -> MutexGuard<'_, T> {
    // Each critical section of this crate leaves its data consistent at each step that may panic.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
