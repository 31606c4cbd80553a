//! A program that uses a real-time signal itself keeps its handler, and touches are still
//! interruptible. The process chooses the signal once.

use lacuna_sys::{Errno, MissingArea, Touched, Toucher};
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

static CALLED: AtomicUsize = AtomicUsize::new(0);

extern "C" fn own(_: c_int) {
    CALLED.fetch_add(1, Ordering::SeqCst);
}

#[test]
fn a_program_keeps_its_signal() {
    if !lacuna_skip::alone() {
        return;
    }
    let own_signal = libc::SIGRTMIN() + 5;
    let handler: extern "C" fn(c_int) = own;
    // SAFETY: 1. all zeros is a valid `sigaction`. 2. The handler has the signature that it asks
    // for, and is async-signal-safe.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as usize;
        assert_eq!(
            libc::sigaction(own_signal, &raw const action, std::ptr::null_mut()),
            0
        );
    }
    if Toucher::check() == Err(Errno::NOSYS) {
        return lacuna_skip::skip("no touch on this processor");
    }
    // SAFETY: 1. the signal has the handler from above.
    assert_eq!(unsafe { libc::raise(own_signal) }, 0);
    assert_eq!(CALLED.load(Ordering::SeqCst), 1);
    let area = match MissingArea::new(1) {
        Ok(area) => area,
        Err(errno) => return lacuna_skip::skip(format!("no userfaultfd: {errno}")),
    };
    let (toucher, over) = (Toucher::default(), AtomicBool::new(false));
    thread::scope(|scope| {
        let touching = scope.spawn(|| {
            // SAFETY: 1. the page stays mapped until the thread is joined.
            unsafe { toucher.touch(area.page(0), || over.load(Ordering::SeqCst)) }
        });
        let mut faults = Vec::new();
        while faults.is_empty() {
            area.userfaultfd().faults(&mut faults).unwrap();
            thread::yield_now();
        }
        over.store(true, Ordering::SeqCst);
        toucher.interrupt();
        assert_eq!(touching.join().unwrap(), Touched::Interrupted);
    });
    assert_eq!(CALLED.load(Ordering::SeqCst), 1);
}
