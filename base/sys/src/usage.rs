//! What Linux has done for the calling thread.
//!
//! UNSAFETY: a call of the C library that has no safe form.

/// The major faults of the calling thread so far: accesses for which Linux has read a page. The
/// call takes about 0.2 us.
pub fn major_faults() -> u64 {
    // SAFETY: 1. All zeros is a valid `rusage`. 2. The call changes nothing else.
    let (result, usage) = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        let result = libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage);
        (result, usage)
    };
    debug_assert_eq!(result, 0, "valid arguments");
    usage.ru_majflt.try_into().unwrap_or(0)
}
