//! What a vCPU does with its time.
//!
//! A vCPU's thread reads the clock where it begins and ends a sleep, and where a kick makes it
//! leave the guest. These times are exact. The time of faults without a wait is estimated from one
//! in 64 ([`SAMPLED`]).

use crate::stall::SAMPLED;
use lacuna_machine::VcpuTimes;
use lacuna_sync::Nanos;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
use std::time::Duration;

/// What a vCPU does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum VcpuState {
    /// Its thread is elsewhere: it has not run yet, or a kick has made it leave.
    Outside,
    Running,
    Halted,
    Waiting,
}

const STATES: usize = 4;

/// The times of one vCPU. Its thread writes them; others read them.
#[derive(Default)]
pub(crate) struct Times {
    state: AtomicUsize,
    /// When the vCPU entered the state.
    since: AtomicU64,
    /// Nanoseconds in each state, before `since`.
    spent: [AtomicU64; STATES],
    /// Nanoseconds in measured faults.
    faults: AtomicU64,
}

impl Times {
    /// The vCPU's thread enters `state`.
    pub fn enter(&self, state: VcpuState, now: Nanos) {
        let before = self.state.load(Ordering::Relaxed);
        let spent = now.since(Nanos(self.since.load(Ordering::Relaxed)));
        // A reader that sees one of these stores sees that `since` has changed: see `read`.
        add(&self.spent[before], spent);
        self.state.store(state as usize, Ordering::Release);
        self.since.store(now.0, Ordering::Release);
    }

    /// The vCPU's thread has measured a fault without a wait.
    pub fn faulted(&self, ns: u64) {
        add(&self.faults, ns);
    }

    /// The times at `now`. The sum may be one state's last stay too long or too short, if the vCPU
    /// changes its state meanwhile.
    pub fn read(&self, now: Nanos) -> VcpuTimes {
        let mut spent = self.spent.each_ref().map(|ns| ns.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let since = Nanos(self.since.load(Ordering::Acquire));
        spent[self.state.load(Ordering::Acquire)] += now.since(since);
        let of = |state: VcpuState| spent[state as usize];
        let running = of(VcpuState::Running);
        let faulting = (self.faults.load(Ordering::Relaxed) * SAMPLED).min(running);
        VcpuTimes {
            running: Duration::from_nanos(running - faulting),
            faulting: Duration::from_nanos(faulting),
            halted: Duration::from_nanos(of(VcpuState::Halted)),
            waiting: Duration::from_nanos(of(VcpuState::Waiting)),
        }
    }
}

/// Adds to a value that only the calling thread writes.
fn add(value: &AtomicU64, count: u64) {
    value.store(value.load(Ordering::Relaxed) + count, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_state_has_its_time() {
        let times = Times::default();
        times.enter(VcpuState::Running, Nanos(1_000));
        times.enter(VcpuState::Halted, Nanos(1_500));
        times.enter(VcpuState::Running, Nanos(1_700));
        times.faulted(2);
        times.enter(VcpuState::Waiting, Nanos(2_000));
        let read = |now| {
            let VcpuTimes {
                running,
                faulting,
                halted,
                waiting,
            } = times.read(Nanos(now));
            [running, faulting, halted, waiting].map(|time| time.as_nanos())
        };
        assert_eq!(read(2_004), [672, 128, 200, 4]);
        times.enter(VcpuState::Outside, Nanos(2_010));
        assert_eq!(read(9_000), [672, 128, 200, 10]);
    }
}
