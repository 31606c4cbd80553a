//! An interruptible touch of a page that may be missing.
//!
//! ```text
//! touching thread                              interrupting thread
//! interrupt flag = false                       the reason is set
//! its number is stored                         interrupt flag = true
//! is there a reason? then Interrupted          is a number stored? then a signal to that thread
//! the range begins
//!   interrupt flag set? then Interrupted
//!   load a byte: may sleep in the kernel       the handler of the signal: if the thread is inside
//! the range ends: Present                      the range, it continues at the exit: Interrupted
//! ```
//! No interruption is lost. If the flag is set before the thread clears it, the thread sees the
//! reason. If it is set later, the thread sees the flag, or it is inside the range when the signal
//! arrives. A signal wakes a thread that waits for a page of a userfaultfd. The kernel runs the
//! handler before it repeats the load, and the handler moves the thread past the load.
//!
//! A late signal changes nothing, because the thread is outside the range. Interrupted system calls
//! are restarted (`SA_RESTART`).
//!
//! UNSAFETY: a load from an address that the caller vouches for, a signal handler, and a signal to
//! a thread of this process. The handler reads and writes nothing but the saved registers.

mod arch;

use crate::Errno;
use crate::signals::unblock;
use lacuna_addr::Hva;
use std::os::raw::{c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};

/// The result of a touch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Touched {
    /// The page was present, or has arrived.
    Present,
    /// Another thread has ended the wait, or there was a reason not to begin it.
    Interrupted,
}

/// Lets other threads end a thread's touch of a page. One thread at a time uses it for a touch.
#[derive(Debug, Default)]
pub struct Toucher {
    interrupt: AtomicBool,
    /// The touching thread's number from `gettid(2)`. 0: none.
    thread: AtomicU32,
}

impl Toucher {
    /// Whether threads of this process can touch pages so. Installs the signal handler.
    ///
    /// # Errors
    /// `NOSYS` on processors without an implementation of the touch; `BUSY` if the program uses
    /// every real-time signal.
    pub fn check() -> Result<(), Errno> {
        signal().map(|_| ())
    }

    /// Loads a byte of `page`. If the page is missing, the calling thread sleeps until the page is
    /// there, or until [`Toucher::interrupt`]. Calls `is_over` once, before the touch: it returns
    /// whether a reason for an interruption exists.
    ///
    /// # Safety
    /// `page` is a mapped address, and stays mapped until the call returns.
    ///
    /// # Panics
    /// If another thread's touch uses this value, or [`Toucher::check`] fails.
    pub unsafe fn touch(&self, page: Hva, is_over: impl FnOnce() -> bool) -> Touched {
        // Unblock at each touch: the program may have changed the thread's mask since the last one.
        unblock(signal().expect("the caller has checked"));
        self.interrupt.store(false, Ordering::SeqCst);
        let before = self.thread.swap(thread_number(), Ordering::SeqCst);
        assert_eq!(before, 0, "two threads touch with one toucher");
        // With the fence of `interrupt`: that thread finds this one's number, or this thread sees
        // the reason.
        fence(Ordering::SeqCst);
        let touched = match is_over() {
            true => Touched::Interrupted,
            // SAFETY: 1. the caller vouches for the page. 2. The flag lives as long as `self`.
            false => match unsafe { arch::touch(self.interrupt.as_ptr(), page.get()) } {
                0 => Touched::Present,
                _ => Touched::Interrupted,
            },
        };
        self.thread.store(0, Ordering::SeqCst);
        touched
    }

    /// Ends the touch in progress, if there is one. The caller has already set the reason, so
    /// `is_over` of a later touch sees it.
    pub fn interrupt(&self) {
        fence(Ordering::SeqCst);
        self.interrupt.store(true, Ordering::SeqCst);
        match self.thread.load(Ordering::SeqCst) {
            0 => {}
            thread => signal_thread(thread),
        }
    }
}

/// The signal of an interruption: the first signal without a handler, from the sixth real-time
/// signal on, at the first call. Other code may use the first four, and `lacuna-kvm` kicks vCPUs
/// with the fifth.
fn signal() -> Result<c_int, Errno> {
    static SIGNAL: OnceLock<Result<c_int, Errno>> = OnceLock::new();
    *SIGNAL.get_or_init(|| {
        if !arch::SUPPORTED {
            return Err(Errno::NOSYS);
        }
        let free = (libc::SIGRTMIN() + 5..=libc::SIGRTMAX()).find(|&signal| install(signal));
        free.ok_or(Errno::BUSY)
    })
}

/// The thread may have ended, and another thread may have its number: the signal is lost, or it
/// interrupts a touch of that thread, which retries.
fn signal_thread(thread: u32) {
    let process = rustix::process::getpid().as_raw_nonzero().get();
    let signal = signal().expect("a thread touches");
    // SAFETY: 1. tgkill takes three numbers, and changes no memory.
    unsafe { libc::syscall(libc::SYS_tgkill, process, thread, signal) };
}

/// The calling thread's number, from one system call for each thread.
fn thread_number() -> u32 {
    thread_local! {
        static NUMBER: u32 = rustix::thread::gettid().as_raw_nonzero().get() as u32;
    }
    NUMBER.with(|number| *number)
}

extern "C" fn handle(_: c_int, _: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: 1. the kernel passes a `ucontext_t` to a handler with SA_SIGINFO, and reads it back
    // when the handler returns. 2. No other code has it.
    let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
    arch::leave_touch(context);
}

/// Installs the handler of `signal`, unless the program has one.
fn install(signal: c_int) -> bool {
    let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = handle;
    // SAFETY: 1. all zeros is a valid `sigaction` with an empty mask; the first call writes one.
    // 2. The handler has the signature of SA_SIGINFO, and is async-signal-safe: it compares and
    // sets one register.
    unsafe {
        let mut before: libc::sigaction = std::mem::zeroed();
        let asked = libc::sigaction(signal, std::ptr::null(), &raw mut before);
        if asked != 0 || before.sa_sigaction != libc::SIG_DFL {
            return false;
        }
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART | libc::SA_ONSTACK;
        libc::sigaction(signal, &raw const action, std::ptr::null_mut()) == 0
    }
}
