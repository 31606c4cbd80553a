//! Threads of a VM: each may wait for a page, or for the handler to read a removal.

use crate::queue::LOOK;
use crate::verdict::{Stop, Verdict};
use rustix::thread::gettid;
use std::fs;
use std::sync::mpsc;
use std::thread::{self, Scope, ScopedJoinHandle};

/// A thread.
pub(crate) struct Worker<'scope> {
    number: i32,
    handle: ScopedJoinHandle<'scope, Verdict>,
}

impl<'scope> Worker<'scope> {
    /// Starts a thread that does `work`.
    pub(crate) fn start(
        scope: &'scope Scope<'scope, '_>,
        work: impl FnOnce() -> Verdict + Send + 'scope,
    ) -> Self {
        let (sender, receiver) = mpsc::channel();
        let handle = scope.spawn(move || {
            // The receiver waits for this message.
            let _ = sender.send(gettid().as_raw_nonzero().get());
            work()
        });
        let number = receiver.recv().expect("the thread sends its number first");
        Self { number, handle }
    }

    /// Waits until the thread sleeps in the kernel, or has ended. Its work begins with a system
    /// call or an access that must wait.
    pub(crate) fn wait_until_asleep(&self) {
        while !self.handle.is_finished() && !is_asleep(self.number) {
            thread::sleep(LOOK);
        }
    }

    pub(crate) fn join(self) -> Verdict {
        let panicked = |_| Err(Stop::Skipped("a thread of the suite has panicked".into()));
        self.handle.join().unwrap_or_else(panicked)
    }
}

/// Joins all of them. The result is the first one that stops the rule.
pub(crate) fn join_all(workers: Vec<Worker<'_>>) -> Verdict {
    let ends: Vec<Verdict> = workers.into_iter().map(Worker::join).collect();
    ends.into_iter().collect()
}

/// Whether a thread of this process sleeps: its state in proc(5) is S or D.
fn is_asleep(number: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/self/task/{number}/stat")).unwrap_or_default();
    // The name before the state may have spaces and parentheses.
    let state = stat.rsplit_once(") ").map(|(_, fields)| fields);
    state.is_some_and(|fields| fields.starts_with(['S', 'D']))
}
