//! Touching a page that may be missing, such that another thread can end the wait.
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
//! arrives. A signal wakes a thread that sleeps for a page of a userfaultfd. The kernel runs the
//! handler before it repeats the load, and the handler moves the thread past the load.
//!
//! A signal that arrives late changes nothing, because the thread is outside the range. System
//! calls that it meets are restarted (`SA_RESTART`).
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

/// What a touch has come to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Touched {
    /// The page was there, or has come.
    Present,
    /// Another thread has ended the wait, or there was a reason not to begin it.
    Interrupted,
}

/// Lets other threads end a thread's touch of a page. One thread touches with it at a time.
#[derive(Debug, Default)]
pub struct Toucher {
    interrupt: AtomicBool,
    /// The thread that touches, as `gettid(2)` numbers it. 0: none.
    thread: AtomicU32,
}

impl Toucher {
    /// Whether threads of this process can touch pages so. Installs the signal handler.
    ///
    /// # Errors
    /// `NOSYS` on processors for which the touch is not written; `BUSY` if the program uses every
    /// real-time signal.
    pub fn check() -> Result<(), Errno> {
        signal().map(|_| ())
    }

    /// Loads a byte of `page`. If the page is missing, the calling thread sleeps until the page is
    /// there, or until [`Toucher::interrupt`]. `is_over` is asked once, before the touch: it says
    /// whether a reason for an interruption exists.
    ///
    /// # Safety
    /// `page` is a mapped address, and stays mapped until the call returns.
    ///
    /// # Panics
    /// If another thread is touching with it, or [`Toucher::check`] fails.
    pub unsafe fn touch(&self, page: Hva, is_over: impl FnOnce() -> bool) -> Touched {
        // At each touch: the program may have changed the thread's mask since the last one.
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

    /// Ends the touch that is in progress, if there is one. The caller has set the reason before,
    /// which `is_over` of a later touch sees.
    pub fn interrupt(&self) {
        fence(Ordering::SeqCst);
        self.interrupt.store(true, Ordering::SeqCst);
        match self.thread.load(Ordering::SeqCst) {
            0 => {}
            thread => signal_thread(thread),
        }
    }
}

/// The signal of an interruption: from the sixth real-time signal on, the first one for which the
/// program has no handler when it is asked for. Other code may use the first signals, and the kicks
/// of `lacuna-kvm` are the fifth.
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
/// interrupts that thread's touch, which is tried again.
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
