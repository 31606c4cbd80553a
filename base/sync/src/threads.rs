//! Threads at their end.

use std::thread::JoinHandle;

/// Waits for the end of `thread`, unless it is the calling thread. A thread that drops the last
/// reference to the owner of its own handle must not wait for itself.
pub fn join(thread: JoinHandle<()>) {
    if thread.thread().id() != std::thread::current().id() {
        // A panicked thread has reported its panic.
        let ended = thread.join();
        debug_assert!(ended.is_ok() || std::thread::panicking());
    }
}
