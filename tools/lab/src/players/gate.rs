//! The gate at which the threads of a VM's vCPUs wait between two turns.

use crate::native::thread_cpu_ns;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::Instant;

/// Whether vCPUs may run, and how long they have run.
#[derive(Default)]
pub(super) struct Gate {
    /// A copy of `state.closed`, so that a vCPU between two steps takes no lock.
    closed: AtomicBool,
    state: Mutex<Inside>,
    changed: Condvar,
}

/// The data under the gate's lock.
#[derive(Default)]
struct Inside {
    closed: bool,
    /// vCPUs that have entered and not left.
    vcpus: usize,
    /// Nanoseconds of all finished turns: by the wall clock, and by the threads' clocks.
    ns: [u64; 2],
}

impl Gate {
    /// Called by a vCPU's thread between two steps. While the gate is closed, the thread leaves and
    /// waits.
    pub(super) fn pass<'a>(&'a self, turn: &mut Option<Turn<'a>>) {
        if self.closed.load(Ordering::Relaxed) {
            drop(turn.take());
            *turn = Some(self.enter());
        }
    }

    pub(super) fn enter(&self) -> Turn<'_> {
        let state = self.state.lock().expect("no panic under this lock");
        let opened = self.changed.wait_while(state, |state| state.closed);
        opened.expect("no panic under this lock").vcpus += 1;
        Turn {
            gate: self,
            wall: Instant::now(),
            cpu_ns: thread_cpu_ns(),
        }
    }

    pub(super) fn open(&self) {
        let mut state = self.state.lock().expect("no panic under this lock");
        state.closed = false;
        self.closed.store(false, Ordering::Relaxed);
        self.changed.notify_all();
    }

    /// From now on no vCPU passes.
    pub(super) fn shut(&self) {
        self.state.lock().expect("no panic under this lock").closed = true;
        self.closed.store(true, Ordering::Relaxed);
    }

    /// Waits until no vCPU is inside.
    pub(super) fn wait(&self) {
        let state = self.state.lock().expect("no panic under this lock");
        let left = self.changed.wait_while(state, |state| state.vcpus > 0);
        drop(left.expect("no panic under this lock"));
    }

    /// The sum over all vCPUs: by the wall clock, and by the threads' clocks.
    pub(super) fn spent_ns(&self) -> [f64; 2] {
        let state = self.state.lock().expect("no panic under this lock");
        state.ns.map(|ns| ns as f64)
    }
}

/// A vCPU's turn. It ends when this is dropped.
pub(super) struct Turn<'a> {
    gate: &'a Gate,
    wall: Instant,
    cpu_ns: u64,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let wall = u64::try_from(self.wall.elapsed().as_nanos())
            .expect("a turn is shorter than centuries");
        let cpu = thread_cpu_ns() - self.cpu_ns;
        let mut state = self.gate.state.lock().expect("no panic under this lock");
        state.vcpus -= 1;
        for (sum, ns) in state.ns.iter_mut().zip([wall, cpu]) {
            *sum += ns;
        }
        self.gate.changed.notify_all();
    }
}
