//! The threads of the host.

use std::thread::JoinHandle;

/// Waits for the end of an executor's thread. If that thread itself drops the last reference to the
/// host, it runs this, and must not wait for itself. A panicked thread has reported its panic.
pub(crate) fn join(thread: JoinHandle<()>) {
    if thread.thread().id() != std::thread::current().id() {
        let _ = thread.join();
    }
}
