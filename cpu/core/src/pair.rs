//! Compare-and-swap of 16 bytes, for guest architectures that have it.

/// Replaces the two words at `at` by `new` if they are `old`, as one atomic access, sequentially
/// consistent. Returns the old words; `None` if the host has no such access.
///
/// # Safety
/// `at` is aligned to 16 bytes and valid for writes; all accesses to it are atomic.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn compare_exchange(
    at: *mut u8,
    old: [u64; 2],
    new: [u64; 2],
) -> Option<[u64; 2]> {
    if !std::arch::is_x86_feature_detected!("cmpxchg16b") {
        return None;
    }
    let ([mut low, mut high], [new_low, new_high]) = (old, new);
    // `std::arch` has the instruction, but a build without the target feature then needs a library
    // function that is not linked.
    // SAFETY: this function's contract; the processor has the instruction. RBX, which an operand
    // cannot name, is restored. The others are named, so that none of them is RBX.
    unsafe {
        std::arch::asm!(
            "xchg rsi, rbx",
            "lock cmpxchg16b [rdi]",
            "mov rbx, rsi",
            in("rdi") at,
            inout("rsi") new_low => _,
            in("rcx") new_high,
            inout("rax") low,
            inout("rdx") high,
            options(nostack),
        );
    }
    Some([low, high])
}

/// No such access is known here for this host.
///
/// # Safety
/// None is needed.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) unsafe fn compare_exchange(
    _at: *mut u8,
    _old: [u64; 2],
    _new: [u64; 2],
) -> Option<[u64; 2]> {
    None
}
