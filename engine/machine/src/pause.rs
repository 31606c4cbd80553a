//! Pauses the vCPUs of a run, so that their state can be saved.

use crate::{Exit, Kick, Vcpu, VcpuError};
use lacuna_sync::{Condvar, Mutex, MutexGuard, lock_order};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a vCPU's thread waits for its vCPU after the run has an ending. Within this time a
/// controller notices the ending, unless it has forgotten its [`Paused`].
const PATIENCE: Duration = Duration::from_secs(60);
/// How often a waiting thread looks for the run's ending.
const LOOK: Duration = Duration::from_millis(100);

/// Pauses of one [`Running`](crate::Running).
///
/// ```text
/// controller                        vCPU's thread
/// Pause::begin: wanted, kick all ─► run returns Interrupted ─► hands its vCPU over, and waits
///   all vCPUs are here: Paused
///   save, restore
/// drop(Paused) ───────────────────► takes its vCPU back, and continues
/// ```
///
/// Any thread but a vCPU's may pause a run. Meanwhile another controller waits in `Pause::begin`.
pub(crate) struct Pause<V> {
    /// A controller waits for the vCPUs, or has them.
    wanted: AtomicBool,
    state: Mutex<PauseState<V>, lock_order::RunPause>,
    changed: Condvar,
    patience: Duration,
}

/// Where the vCPUs are.
struct PauseState<V> {
    /// Whether a run has begun.
    has_begun: bool,
    /// The number of running vCPU threads.
    running: usize,
    /// The number of threads that wait for their vCPUs.
    threads_waiting: usize,
    /// vCPUs of waiting threads that no controller has.
    waiting: Vec<V>,
    /// vCPUs that their ended threads have left behind.
    left_behind: Vec<usize>,
    /// Whether a pause is in progress.
    is_paused: bool,
    /// The number of ended pauses: a thread waits until its own pause ends.
    ended: u64,
}

/// The paused vCPUs of a [`Running`](crate::Running). They run again when this value is dropped.
///
/// If this value is forgotten ([`std::mem::forget`]), the guest stays paused, and another
/// [`Running::pause`](crate::Running::pause) waits, until the guest has an ending. The vCPUs'
/// threads then wait for 60 s and end without their vCPUs. The same happens if a controller keeps
/// this value for 60 s after the ending.
pub struct Paused<'a, V> {
    pause: &'a Pause<V>,
    vcpus: Vec<V>,
    /// The numbers of these vCPUs.
    numbers: Vec<usize>,
}

impl<V> PauseState<V> {
    /// Whether all threads have ended.
    const fn is_over(&self) -> bool {
        self.has_begun && self.running + self.threads_waiting == 0
    }
}

impl<V> Default for Pause<V> {
    fn default() -> Self {
        let state = PauseState {
            has_begun: false,
            running: 0,
            threads_waiting: 0,
            waiting: Vec::new(),
            left_behind: Vec::new(),
            is_paused: false,
            ended: 0,
        };
        Self {
            wanted: AtomicBool::new(false),
            state: Mutex::new(state),
            changed: Condvar::new(),
            patience: PATIENCE,
        }
    }
}

impl<V: Vcpu> Pause<V> {
    /// [`Running::pause`](crate::Running::pause).
    pub fn begin(&self, kick: &impl Kick) -> Option<Paused<'_, V>> {
        let mut state = self.lock();
        while state.is_paused {
            if state.is_over() {
                return None;
            }
            state = self.changed.wait(state).expect("no panic under this lock");
        }
        state.is_paused = true;
        self.wanted.store(true, Ordering::SeqCst);
        drop(state);
        kick.kick_all();
        let mut state = self.lock();
        while state.running > 0 {
            state = self.changed.wait(state).expect("no panic under this lock");
        }
        let mut vcpus = std::mem::take(&mut state.waiting);
        let left_behind = state.left_behind.clone();
        // Dropping a vCPU may take locks.
        drop(state);
        vcpus.retain(|vcpu| !left_behind.contains(&vcpu.index()));
        vcpus.sort_by_key(Vcpu::index);
        let numbers = vcpus.iter().map(Vcpu::index).collect();
        let paused = Paused {
            pause: self,
            vcpus,
            numbers,
        };
        // Without vCPUs, the drop here ends the pause.
        (!paused.vcpus.is_empty()).then_some(paused)
    }

    /// Whether the run has begun. It may be over.
    pub fn has_begun(&self) -> bool {
        self.lock().has_begun
    }

    /// Waits for `time` at most, and returns whether all threads have ended.
    pub fn wait_end(&self, time: Duration) -> bool {
        let runs = |state: &mut PauseState<V>| !state.is_over();
        let waited = self.changed.wait_timeout_while(self.lock(), time, runs);
        waited.expect("no panic under this lock").is_over()
    }

    /// `vcpus` threads are about to run their vCPUs.
    pub(crate) fn enter(&self, vcpus: usize) {
        let mut state = self.lock();
        state.has_begun = true;
        state.running += vcpus;
    }

    /// A vCPU's thread has ended.
    pub(crate) fn leave(&self) {
        self.lock().running -= 1;
        self.changed.notify_all();
    }

    /// Whether a controller wants a vCPU that has left with `exit`.
    ///
    /// A vCPU with another exit may be in the middle of an instruction. It runs again, and leaves
    /// with `Interrupted`, because a kick stays until a run takes it. A vCPU with a full dirty ring
    /// does not run before a harvest, so the controller takes it as it is.
    pub(crate) fn wants(&self, exit: &Result<Exit, VcpuError>) -> bool {
        matches!(exit, Ok(Exit::Interrupted | Exit::DirtyRingFull))
            && self.wanted.load(Ordering::SeqCst)
    }

    /// Hands the vCPU over to the controller, and returns it afterwards. `None`: the controller has
    /// kept the vCPU too long after the run's ending, which `has_ended` finds.
    #[cold]
    pub(crate) fn hand_over(&self, vcpu: V, has_ended: impl Fn() -> bool) -> Option<V> {
        let index = vcpu.index();
        let mut state = self.lock();
        if !state.is_paused {
            return Some(vcpu);
        }
        let pause = state.ended;
        state.waiting.push(vcpu);
        state.running -= 1;
        state.threads_waiting += 1;
        self.changed.notify_all();
        let mut since = None;
        while state.ended == pause {
            let waited = self.changed.wait_timeout(state, LOOK);
            // `has_ended` takes a lock.
            drop(waited.expect("no panic under this lock"));
            let has_ended = has_ended();
            state = self.lock();
            if has_ended && state.ended == pause {
                let since = *since.get_or_insert_with(Instant::now);
                if since.elapsed() >= self.patience {
                    // The caller's thread ends, and decrements `running`.
                    state.left_behind.push(index);
                    state.threads_waiting -= 1;
                    state.running += 1;
                    return None;
                }
            }
        }
        state.threads_waiting -= 1;
        let place = state.waiting.iter().position(|v| v.index() == index);
        let place = place.expect("the controller has given it back");
        Some(state.waiting.swap_remove(place))
    }
}

impl<V> Pause<V> {
    fn lock(&self) -> MutexGuard<'_, PauseState<V>> {
        self.state.lock().expect("no panic under this lock")
    }
}

impl<V> Paused<'_, V> {
    /// The vCPUs, in the order of their numbers. A vCPU is missing if its thread has ended.
    pub fn vcpus(&mut self) -> &mut [V] {
        &mut self.vcpus
    }
}

impl<V> Drop for Paused<'_, V> {
    fn drop(&mut self) {
        let mut state = self.pause.lock();
        // The threads count as running before they wake, so the next controller waits for them.
        let mut numbers = std::mem::take(&mut self.numbers);
        numbers.retain(|number| !state.left_behind.contains(number));
        state.running += numbers.len();
        state.waiting.append(&mut self.vcpus);
        state.is_paused = false;
        state.ended += 1;
        self.pause.wanted.store(false, Ordering::SeqCst);
        drop(state);
        self.pause.changed.notify_all();
    }
}

#[cfg(test)]
mod tests;
