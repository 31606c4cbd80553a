//! Kicks: vCPUs leave `KVM_RUN` to return to their VMM, for a moment, or for good.
//!
//! ```text
//! kicker   request: stays until a run of that vCPU has returned Interrupted for it
//!          flush:   all vCPUs out once, and waits until those entries have ended
//!          stop:    for good
//!          each: if the vCPU is entered, immediate_exit = 1, then a signal
//! vCPU     entered, immediate_exit = requested (under its lock); stopping? ; KVM_RUN; not entered
//! ```
//! A vCPU that enters after the kicker has passed sees the request or `stopping`. One that entered
//! before gets both: `immediate_exit` if it is not in `KVM_RUN` yet, the signal if it is. The
//! signal's handler does nothing; the arrival of the signal ends the sleep or the guest's run with
//! `EINTR`. With `immediate_exit` set, `KVM_RUN` first completes an access that was answered, then
//! returns.
//!
//! UNSAFETY: a signal handler, a signal to a thread, and a store to a vCPU's shared page. The
//! thread and the page exist while the vCPU is entered. It leaves under its `VcpuKick`'s lock.

use lacuna_sync::{Condvar, Mutex, MutexGuard, lock_order};
use std::os::raw::c_int;
use std::ptr::NonNull;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

/// A vCPU that is in `KVM_RUN`, or about to enter it.
struct Entered {
    thread: libc::pthread_t,
    immediate_exit: NonNull<u8>,
}

// SAFETY: 1. the pointer is used only through `AtomicU8`, under that lock.
unsafe impl Send for Entered {}

impl Entered {
    fn kick(&self) {
        // SAFETY: 1. the byte is in the vCPU's shared page, mapped while it is entered. 2. The
        // kernel reads it, and all others write it under that lock.
        let exit = unsafe { AtomicU8::from_ptr(self.immediate_exit.as_ptr()) };
        exit.store(1, Ordering::SeqCst);
        // SAFETY: 1. the thread runs: it takes that lock before it can end.
        let sent = unsafe { libc::pthread_kill(self.thread, signal()) };
        debug_assert_eq!(sent, 0, "a valid signal to a thread that lives");
    }
}

#[derive(Default)]
struct State {
    entered: Option<Entered>,
    /// The number of entries.
    entries: u64,
    /// The number of threads that wait for an entry to end.
    waiting: usize,
    /// The VMM has requested its vCPU.
    requested: bool,
}

/// The kick state of one vCPU.
#[derive(Default)]
struct VcpuKick {
    state: Mutex<State, lock_order::KvmKick>,
    left: Condvar,
}

impl VcpuKick {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under this lock")
    }
}

/// How all vCPUs of a VM are stopped.
pub struct VcpuKicks {
    stopping: AtomicBool,
    vcpus: Box<[VcpuKick]>,
    /// No vCPU may enter the guest.
    holding: AtomicBool,
    turn: Mutex<(), lock_order::KvmHold>,
}

/// While it lives, no vCPU is in the guest.
pub struct Held<'a> {
    kicks: &'a VcpuKicks,
    _turn: MutexGuard<'a, ()>,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.kicks.holding.store(false, Ordering::SeqCst);
        for vcpu in &self.kicks.vcpus {
            // Under the lock: a vCPU that has just seen the flag is asleep by then.
            let _state = vcpu.state();
            vcpu.left.notify_all();
        }
    }
}

/// While this exists the vCPU may be kicked.
pub struct Entry<'a>(&'a VcpuKick);

impl VcpuKicks {
    /// For `vcpus` vCPUs.
    pub fn new(vcpus: usize) -> Self {
        install_handler();
        Self {
            stopping: AtomicBool::new(false),
            vcpus: (0..vcpus).map(|_| VcpuKick::default()).collect(),
            holding: AtomicBool::new(false),
            turn: Mutex::new(()),
        }
    }

    /// Whether the run has ended.
    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// Requests that vCPU `index` returns to its VMM, from this run or else from its next.
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

    /// As [`VcpuKicks::request`], for every vCPU.
    pub fn request_all(&self) {
        (0..self.vcpus.len()).for_each(|index| self.request(index));
    }

    /// Whether vCPU `index` was requested. The request is taken: its VMM gets the vCPU now.
    pub fn take_request(&self, index: usize) -> bool {
        std::mem::take(&mut self.vcpus[index].state().requested)
    }

    /// Gets every vCPU out and keeps it out. Not for a vCPU's own thread.
    pub fn hold(&self) -> Held<'_> {
        let turn = self.turn.lock().expect("no panic under this lock");
        self.holding.store(true, Ordering::SeqCst);
        self.flush();
        Held {
            kicks: self,
            _turn: turn,
        }
    }

    /// Gets every vCPU out, for good.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        for vcpu in &self.vcpus {
            if let Some(entered) = &vcpu.state().entered {
                entered.kick();
            }
        }
    }

    /// Makes every vCPU leave once, and returns when each has been outside since the call. A vCPU's
    /// own thread must not call this.
    pub fn flush(&self) {
        let kick = |vcpu: &VcpuKick| {
            let state = vcpu.state();
            state.entered.as_ref().inspect(|entered| entered.kick());
            state.entries
        };
        // All of them are kicked before any is waited for.
        let entries: Vec<u64> = self.vcpus.iter().map(kick).collect();
        for (vcpu, entry) in self.vcpus.iter().zip(entries) {
            let mut state = vcpu.state();
            state.waiting += 1;
            let inside = |state: &mut State| state.entered.is_some() && state.entries == entry;
            let left = vcpu.left.wait_while(state, inside);
            left.expect("no panic under this lock").waiting -= 1;
        }
    }

    /// Announces that the calling thread is about to run vCPU `index`.
    ///
    /// # Safety
    /// `immediate_exit` is that field of the vCPU's `struct kvm_run`, valid as long as the result.
    pub unsafe fn enter(&self, index: usize, immediate_exit: NonNull<u8>) -> Entry<'_> {
        let vcpu = &self.vcpus[index];
        let held = |_: &mut State| self.holding.load(Ordering::SeqCst);
        let state = vcpu.left.wait_while(vcpu.state(), held);
        let mut state = state.expect("no panic under this lock");
        // SAFETY: 1. valid by the contract. 2. The vCPU is not in `KVM_RUN`, and all that write it
        // hold the lock.
        unsafe { AtomicU8::from_ptr(immediate_exit.as_ptr()) }
            .store(u8::from(state.requested), Ordering::SeqCst);
        state.entries += 1;
        state.entered = Some(Entered {
            // SAFETY: 1. it has no preconditions.
            thread: unsafe { libc::pthread_self() },
            immediate_exit,
        });
        Entry(vcpu)
    }
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.entered = None;
        // Exits are frequent and waiting threads are rare: a wake-up is a system call.
        if state.waiting > 0 {
            self.0.left.notify_all();
        }
    }
}

/// The first real-time signal that the C library leaves to programs, plus some distance to those
/// that other code may use.
fn signal() -> c_int {
    libc::SIGRTMIN() + 4
}

extern "C" fn nothing(_: c_int) {}

fn install_handler() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: 1. all zeros is a valid `sigaction`: no flags, so that system calls end with
        // EINTR, and an empty mask. 2. The handler does nothing, which is async-signal-safe.
        let result = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as extern "C" fn(c_int) as usize;
            libc::sigaction(signal(), &action, std::ptr::null_mut())
        };
        debug_assert_eq!(result, 0, "a valid signal");
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{Timespec, poll};
    use std::sync::atomic::AtomicUsize;
    use std::thread;
    use std::time::Duration;

    /// Simulates `KVM_RUN`: sleeps until a signal, or not at all if it is told to exit at once.
    fn enter(kicks: &VcpuKicks, shared: &AtomicU8, entered: &AtomicUsize) {
        let immediate_exit = NonNull::new(shared.as_ptr()).unwrap();
        // SAFETY: 1. the byte outlives the entry.
        let _entry = unsafe { kicks.enter(0, immediate_exit) };
        entered.fetch_add(1, Ordering::SeqCst);
        while shared.load(Ordering::SeqCst) == 0 && !kicks.is_stopping() {
            // Not `thread::sleep`, which goes on after a signal; and not for ever, since here,
            // unlike in KVM, a signal may come between the look and the sleep.
            let brief = Timespec {
                tv_sec: 0,
                tv_nsec: 5_000_000,
            };
            let _ = poll(&mut [], Some(&brief));
        }
    }

    #[test]
    fn a_kick_is_one_exit_and_a_stop_is_for_good() {
        let (kicks, shared, entered) = (VcpuKicks::new(2), AtomicU8::new(0), AtomicUsize::new(0));
        thread::scope(|scope| {
            scope.spawn(|| {
                while !kicks.is_stopping() {
                    enter(&kicks, &shared, &entered);
                }
            });
            for _ in 0..200 {
                let before = entered.load(Ordering::SeqCst);
                kicks.flush();
                let now = entered.load(Ordering::SeqCst);
                assert!((before..=before + 3).contains(&now), "{before} {now}");
            }
            while entered.load(Ordering::SeqCst) < 2 {
                kicks.flush();
            }
            // The vCPU is inside, and stays there.
            let before = entered.load(Ordering::SeqCst);
            thread::sleep(Duration::from_millis(50));
            let inside = entered.load(Ordering::SeqCst);
            assert!(inside <= before + 1);
            kicks.flush();
            thread::sleep(Duration::from_millis(50));
            assert_eq!(entered.load(Ordering::SeqCst), inside + 1);
            kicks.stop();
        });
    }
}
