//! How a vCPU thread sleeps in a halt: until an interrupt, a kick, or its timer.

use lacuna_sync::{Clock, Nanos};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// One thread's place to sleep; a wake-up before the sleep is not lost.
#[derive(Default)]
pub(crate) struct Parker {
    woken: Mutex<bool>,
    condvar: Condvar,
}

impl Parker {
    /// Wakes the sleeper, or makes its next [`Parker::park`] return at once.
    pub(crate) fn wake(&self) {
        *self.woken.lock().expect("no panic under this lock") = true;
        self.condvar.notify_one();
    }

    /// Sleeps until woken or until `deadline`.
    pub(crate) fn park(&self, clock: &dyn Clock, deadline: Option<Nanos>) {
        let mut woken = self.woken.lock().expect("no panic under this lock");
        while !*woken {
            let Some(deadline) = deadline else {
                woken = self.condvar.wait(woken).expect("no panic under this lock");
                continue;
            };
            let left = deadline.since(clock.now());
            if left == 0 {
                break;
            }
            let timeout = Duration::from_nanos(left);
            woken = self
                .condvar
                .wait_timeout(woken, timeout)
                .expect("no panic under this lock")
                .0;
        }
        *woken = false;
    }
}
