//! Sleep of a vCPU thread in a halt: until an interrupt, a kick, or its timer.

use lacuna_sync::{Clock, Condvar, Mutex, MutexGuard, Nanos, lock_order};
use std::time::Duration;

/// The place where one thread sleeps. A wake-up before the sleep is not lost.
#[derive(Default)]
pub(crate) struct Parker {
    state: Mutex<ParkState, lock_order::SoftParker>,
    condvar: Condvar,
}

#[derive(Default)]
struct ParkState {
    woken: bool,
    /// Whether the thread sleeps. If not, a wake-up needs no system call.
    sleeping: bool,
}

impl Parker {
    /// Wakes the sleeping thread, or makes its next [`Parker::park`] return at once.
    pub(crate) fn wake(&self) {
        let mut state = self.lock();
        state.woken = true;
        let sleeping = state.sleeping;
        drop(state);
        if sleeping {
            self.condvar.notify_one();
        }
    }

    /// Sleeps until a wake-up or until `deadline`.
    pub(crate) fn park(&self, clock: &dyn Clock, deadline: Option<Nanos>) {
        let mut state = self.lock();
        state.sleeping = true;
        while !state.woken {
            let left = deadline.map(|at| at.since(clock.now()));
            state = match left {
                None => self.condvar.wait(state).expect(UNPOISONED),
                Some(0) => break,
                Some(ns) => {
                    let timeout = Duration::from_nanos(ns);
                    let waited = self.condvar.wait_timeout(state, timeout);
                    waited.expect(UNPOISONED)
                }
            };
        }
        *state = ParkState::default();
    }

    fn lock(&self) -> MutexGuard<'_, ParkState> {
        self.state.lock().expect(UNPOISONED)
    }
}

const UNPOISONED: &str = "no panic under this lock";
