//! The calling thread's signal mask.
//!
//! UNSAFETY: two calls of the C library that have no safe form.

use std::os::raw::c_int;

/// Unblocks `signal` for the calling thread: its creator may have blocked the signal.
pub fn unblock(signal: c_int) {
    // SAFETY: 1. all zeros is a valid `sigset_t`, which `sigemptyset` initialises. 2. The calls
    // change the set, and the calling thread's mask.
    let result = unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, signal);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut())
    };
    debug_assert_eq!(result, 0, "a valid signal");
}
