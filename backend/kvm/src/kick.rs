//! Kicks make vCPUs leave `KVM_RUN`, once, for a while, or for ever.
//!
//! ```text
//! kicking thread   request: one vCPU's run returns Interrupted, this run or else the next
//!                  kick_all_and_wait: every vCPU leaves once; waits until each has left
//!                  pause: as kick_all_and_wait, and no vCPU enters while the guard lives
//!                  stop: every vCPU leaves, and none enters again
//!                  each: if the vCPU is entered, immediate_exit = 1, then a signal
//! vCPU's thread    under its lock: entered, immediate_exit = requested
//!                  is the VM stopping? ; KVM_RUN ; not entered
//! ```
//! If a vCPU enters after the kicking thread has looked at it, it sees the request or `stopping`.
//! If it entered before, it gets `immediate_exit`, which ends a `KVM_RUN` that has not begun, and
//! the signal, which ends a `KVM_RUN` in progress. The signal's handler does nothing: the arrival
//! of a signal ends `KVM_RUN` with `EINTR`. With `immediate_exit` set, `KVM_RUN` completes an
//! answered access, and then returns.
//!
//! UNSAFETY: a signal to a thread, and a store to a vCPU's shared page. The
//! thread and the page exist while the vCPU is entered, and a vCPU leaves under its `VcpuKick`'s
//! lock.

mod missing;
mod signal;

pub use missing::{Comes, MissingPage, Reported};
pub use signal::{KickSignalError, set_kick_signal};
pub(crate) use signal::{install_handler, signal};

use lacuna_sync::{Condvar, Mutex, MutexGuard, lock_order};
use lacuna_sys::VcpuStatistic;
use missing::Missing;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};

/// A vCPU in `KVM_RUN`, or about to enter it.
struct Entered {
    thread: libc::pthread_t,
    immediate_exit: NonNull<u8>,
}

// SAFETY: 1. the pointer is used only through `AtomicU8`, under the `VcpuKick`'s lock.
unsafe impl Send for Entered {}

impl Entered {
    fn kick(&self) {
        // SAFETY: 1. the byte is in the vCPU's shared page, mapped while it is entered. 2. The
        // kernel reads it, and this process writes it only under the `VcpuKick`'s lock.
        let exit = unsafe { AtomicU8::from_ptr(self.immediate_exit.as_ptr()) };
        exit.store(1, Ordering::SeqCst);
        // SAFETY: 1. the thread exists: it takes the `VcpuKick`'s lock before it can end.
        let sent = unsafe { libc::pthread_kill(self.thread, signal()) };
        debug_assert_eq!(sent, 0, "a valid signal to a thread that lives");
    }
}

#[derive(Default)]
struct KickState {
    entered: Option<Entered>,
    /// The number of entries.
    entries: u64,
    /// The number of threads that wait for an entry to end.
    waiting: usize,
    /// Whether the vCPU's next return to the VMM is `Interrupted`.
    requested: bool,
    /// Whether the vCPU's next entry ends at once, without a return to the VMM.
    woken: bool,
    missing: Missing,
}

/// The kick state of one vCPU.
#[derive(Default)]
struct VcpuKick {
    /// The number from `gettid(2)` of the thread that has entered the vCPU. 0: none. Written under
    /// the lock.
    thread: AtomicU32,
    state: Mutex<KickState, lock_order::KvmKick>,
    /// The vCPU has left, or vCPUs may enter again.
    changed: Condvar,
    /// Whether KVM has halted the vCPU at present, if KVM has this statistic.
    blocked: OnceLock<VcpuStatistic>,
}

impl VcpuKick {
    fn state(&self) -> MutexGuard<'_, KickState> {
        self.state.lock().expect("no panic under this lock")
    }
}

/// The kick states of a VM's vCPUs.
pub struct VcpuKicks {
    stopping: AtomicBool,
    vcpus: Box<[VcpuKick]>,
    /// No vCPU may enter the guest.
    paused: AtomicBool,
    turn: Mutex<(), lock_order::KvmPause>,
    /// The start of the next search for any vCPU.
    any: AtomicU32,
}

/// While this exists, no vCPU is in the guest.
pub struct Paused<'a> {
    kicks: &'a VcpuKicks,
    _turn: MutexGuard<'a, ()>,
}

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        self.kicks.paused.store(false, Ordering::SeqCst);
        for vcpu in &self.kicks.vcpus {
            // The lock prevents a lost wake-up: a vCPU that has seen the flag set sleeps by now.
            let _state = vcpu.state();
            vcpu.changed.notify_all();
        }
    }
}

/// While this exists, a vCPU is entered and can be kicked.
pub struct EnteredVcpu<'a>(&'a VcpuKick);

impl VcpuKicks {
    /// For `vcpus` vCPUs.
    pub fn new(vcpus: usize) -> Self {
        install_handler();
        Self {
            stopping: AtomicBool::new(false),
            vcpus: (0..vcpus).map(|_| VcpuKick::default()).collect(),
            paused: AtomicBool::new(false),
            turn: Mutex::new(()),
            any: AtomicU32::new(0),
        }
    }

    /// The number of vCPUs.
    pub fn count(&self) -> usize {
        self.vcpus.len()
    }

    /// Whether the run has ended.
    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// Requests a return of vCPU `index` to its VMM, from its present run or else from its next.
    pub fn request(&self, index: usize) {
        let Some(vcpu) = self.vcpus.get(index) else {
            return;
        };
        let mut state = vcpu.state();
        state.requested = true;
        if let Some(entered) = &state.entered {
            entered.kick();
        }
    }

    /// Makes vCPU `index` leave the guest, from its present entry or else from its next. Its thread
    /// then looks for work, and enters it again.
    pub fn wake(&self, index: usize) {
        let mut state = self.vcpus[index].state();
        match &state.entered {
            Some(entered) => entered.kick(),
            None => state.woken = true,
        }
    }

    /// As [`VcpuKicks::request`], for every vCPU.
    pub fn request_all(&self) {
        (0..self.vcpus.len()).for_each(|index| self.request(index));
    }

    /// Takes the request for vCPU `index`, and returns whether there was one.
    pub fn take_request(&self, index: usize) -> bool {
        std::mem::take(&mut self.vcpus[index].state().requested)
    }

    /// Makes every vCPU leave, and keeps each outside until the result is dropped. No thread
    /// calls this while its vCPU is in the guest.
    pub fn pause(&self) -> Paused<'_> {
        let turn = self.turn.lock().expect("no panic under this lock");
        self.paused.store(true, Ordering::SeqCst);
        self.kick_all_and_wait();
        Paused {
            kicks: self,
            _turn: turn,
        }
    }

    /// Makes every vCPU leave, and keeps each outside for ever.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        for vcpu in &self.vcpus {
            if let Some(entered) = &vcpu.state().entered {
                entered.kick();
            }
        }
    }

    /// Makes every vCPU leave once, and returns when each has been outside since the call. No
    /// thread calls this while its vCPU is in the guest.
    pub fn kick_all_and_wait(&self) {
        let kick = |vcpu: &VcpuKick| {
            let state = vcpu.state();
            state.entered.as_ref().inspect(|entered| entered.kick());
            state.entries
        };
        // Every vCPU is kicked before the wait for the first, so that the waits overlap.
        let entries: Vec<u64> = self.vcpus.iter().map(kick).collect();
        for (vcpu, entry) in self.vcpus.iter().zip(entries) {
            let mut state = vcpu.state();
            state.waiting += 1;
            let inside = |state: &mut KickState| state.entered.is_some() && state.entries == entry;
            let left = vcpu.changed.wait_while(state, inside);
            left.expect("no panic under this lock").waiting -= 1;
        }
    }

    /// Records that the calling thread is about to run vCPU `index`.
    ///
    /// # Safety
    /// `immediate_exit` is that field of the vCPU's `struct kvm_run`, valid as long as the result.
    pub unsafe fn enter(&self, index: usize, immediate_exit: NonNull<u8>) -> EnteredVcpu<'_> {
        let vcpu = &self.vcpus[index];
        let paused = |_: &mut KickState| self.paused.load(Ordering::SeqCst);
        let state = vcpu.changed.wait_while(vcpu.state(), paused);
        let mut state = state.expect("no panic under this lock");
        let woken = std::mem::take(&mut state.woken);
        let leaves = state.requested || woken || state.missing.is_found();
        // SAFETY: 1. valid by the contract. 2. The vCPU is not in `KVM_RUN`, and all code that
        // writes the byte holds the lock.
        unsafe { AtomicU8::from_ptr(immediate_exit.as_ptr()) }
            .store(u8::from(leaves), Ordering::SeqCst);
        vcpu.thread.store(thread_number(), Ordering::SeqCst);
        state.entries += 1;
        state.entered = Some(Entered {
            // SAFETY: 1. it has no preconditions.
            thread: unsafe { libc::pthread_self() },
            immediate_exit,
        });
        EnteredVcpu(vcpu)
    }
}

impl Drop for EnteredVcpu<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        self.0.thread.store(0, Ordering::SeqCst);
        state.entered = None;
        // A wake-up is a system call. Exits are frequent, and waiting threads are rare.
        if state.waiting > 0 {
            self.0.changed.notify_all();
        }
    }
}

/// The calling thread's number, from one system call for each thread.
fn thread_number() -> u32 {
    thread_local! {
        static NUMBER: u32 = rustix::thread::gettid().as_raw_nonzero().get() as u32;
    }
    NUMBER.with(|number| *number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{Timespec, poll};
    use std::thread;
    use std::time::{Duration, Instant};

    /// Simulates `KVM_RUN`: sleeps until a signal, or returns at once if `immediate_exit` is set.
    fn enter(kicks: &VcpuKicks, shared: &AtomicU8) {
        let immediate_exit = NonNull::new(shared.as_ptr()).unwrap();
        // SAFETY: 1. the byte outlives the entry.
        let _entry = unsafe { kicks.enter(0, immediate_exit) };
        while shared.load(Ordering::SeqCst) == 0 && !kicks.is_stopping() {
            // `thread::sleep` would continue after a signal. The sleep is brief because here,
            // unlike in KVM, a signal may arrive between the load and the sleep.
            let brief = Timespec {
                tv_sec: 0,
                tv_nsec: 5_000_000,
            };
            let _ = poll(&mut [], Some(&brief));
        }
    }

    /// Waits at most 10 s until vCPU 0 is inside after more than `before` entries. Returns the
    /// number of its entries.
    fn wait_until_inside(kicks: &VcpuKicks, before: u64) -> u64 {
        let began = Instant::now();
        loop {
            let state = kicks.vcpus[0].state();
            let is_inside = state.entered.is_some() && state.entries > before;
            if is_inside || began.elapsed() > Duration::from_secs(10) {
                return state.entries;
            }
            drop(state);
            thread::yield_now();
        }
    }

    #[test]
    fn a_kick_is_one_exit_and_a_stop_is_for_ever() {
        let (kicks, shared) = (VcpuKicks::new(2), AtomicU8::new(0));
        let entries = || kicks.vcpus[0].state().entries;
        thread::scope(|scope| {
            scope.spawn(|| {
                while !kicks.is_stopping() {
                    enter(&kicks, &shared);
                }
            });
            for _ in 0..200 {
                let before = entries();
                kicks.kick_all_and_wait();
                let now = entries();
                assert!((before..=before + 3).contains(&now), "{before} {now}");
            }
            while entries() < 2 {
                kicks.kick_all_and_wait();
            }
            // Once the vCPU is inside, it stays there until the next kick, which is one exit.
            let inside = wait_until_inside(&kicks, 0);
            thread::sleep(Duration::from_millis(50));
            let kicked = entries();
            kicks.kick_all_and_wait();
            let again = wait_until_inside(&kicks, kicked);
            thread::sleep(Duration::from_millis(50));
            let stopped = entries();
            // Stop before the assertion: if it fails, the scope still waits for the vCPU's thread.
            kicks.stop();
            let expected = (inside, inside + 1, inside + 1);
            assert_eq!((kicked, again, stopped), expected);
        });
    }
}
