//! Getting vCPUs out of `KVM_RUN`.
//!
//! ```text
//! kicker: stopping = 1; each vCPU that is entered: immediate_exit = 1, then a signal
//! vCPU:   entered (under its lock); stopping? ; KVM_RUN ; no longer entered
//! ```
//! A vCPU that enters after the kicker has passed sees `stopping`. One that entered before gets
//! both: `immediate_exit` if it is not in `KVM_RUN` yet, the signal if it is. The signal's handler
//! does nothing; its arrival ends the sleep or the guest's run with `EINTR`.
//!
//! UNSAFETY: a signal handler, a signal to a thread, and a store to a vCPU's shared page. The
//! thread and the page are there as long as the vCPU is entered, which the lock of its bell keeps.

use std::os::raw::c_int;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Mutex, Once};

/// A vCPU that is in `KVM_RUN`, or about to.
struct Entered {
    thread: libc::pthread_t,
    immediate_exit: NonNull<u8>,
}

// SAFETY: 1. the pointer is used only through `AtomicU8`, under the bell's lock.
unsafe impl Send for Entered {}

/// How all vCPUs of a VM are stopped.
pub struct Bells {
    stopping: AtomicBool,
    vcpus: Box<[Mutex<Option<Entered>>]>,
}

/// While it lives the vCPU may be kicked.
pub struct Entry<'a>(&'a Mutex<Option<Entered>>);

impl Bells {
    /// For `vcpus` vCPUs.
    pub fn new(vcpus: usize) -> Self {
        install_handler();
        Self {
            stopping: AtomicBool::new(false),
            vcpus: (0..vcpus).map(|_| Mutex::new(None)).collect(),
        }
    }

    /// Whether the run is over.
    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// Gets every vCPU out, for good.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        for vcpu in &self.vcpus {
            if let Some(entered) = &*vcpu.lock().expect("no panic under this lock") {
                // SAFETY: 1. the byte is in the vCPU's shared page, mapped while it is entered.
                // 2. The kernel reads it, and nobody else writes it.
                let exit = unsafe { AtomicU8::from_ptr(entered.immediate_exit.as_ptr()) };
                exit.store(1, Ordering::SeqCst);
                // SAFETY: 1. the thread runs: it takes this lock before it can end.
                let sent = unsafe { libc::pthread_kill(entered.thread, signal()) };
                debug_assert_eq!(sent, 0, "a valid signal to a thread that lives");
            }
        }
    }

    /// Announces that the calling thread is about to run vCPU `index`.
    ///
    /// # Safety
    /// `immediate_exit` is that field of the vCPU's `struct kvm_run`, valid as long as the result.
    pub unsafe fn enter(&self, index: usize, immediate_exit: NonNull<u8>) -> Entry<'_> {
        let bell = &self.vcpus[index];
        *bell.lock().expect("no panic under this lock") = Some(Entered {
            // SAFETY: 1. it has no preconditions.
            thread: unsafe { libc::pthread_self() },
            immediate_exit,
        });
        Entry(bell)
    }
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        *self.0.lock().expect("no panic under this lock") = None;
    }
}

/// The first real-time signal that the C library leaves to programs, plus some distance to those
/// that others may take.
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
