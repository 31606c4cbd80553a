//! A thread beside a client's, and locks.

use std::io;
use std::panic::resume_unwind;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, Builder};
use std::time::Duration;

/// The time between two messages of progress.
pub(crate) const PROGRESS: Duration = Duration::from_millis(100);

/// Calls `work` on a thread of its own, and `look` ten times a second meanwhile.
///
/// # Errors
/// The host has no thread.
pub(crate) fn beside<T: Send>(
    name: &str,
    work: impl FnOnce() -> T + Send,
    look: &mut dyn FnMut(),
) -> io::Result<T> {
    let client = thread::current();
    thread::scope(|scope| {
        let worker = Builder::new().name(name.into()).spawn_scoped(scope, || {
            let done = work();
            client.unpark();
            done
        })?;
        while !worker.is_finished() {
            thread::park_timeout(PROGRESS);
            look();
        }
        Ok(worker.join().unwrap_or_else(|panic| resume_unwind(panic)))
    })
}

/// Each value behind these locks is whole between two statements, so a panic leaves it usable.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
