//! The integers that a processor moves to and from guest memory in one atomic access.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

/// An unsigned integer of 1, 2, 4 or 8 bytes.
///
/// The accessors are `unsafe` because they take raw pointers into guest memory. They are atomic
/// because other vCPUs access the same bytes. On x86 hosts, acquire and release are plain moves,
/// and keep x86's own order.
pub trait Word: Copy + Eq + sealed::Sealed {
    /// Width in bytes.
    const BYTES: usize;

    /// Zero-extends.
    fn widen(self) -> u64;

    /// Truncates.
    fn narrow(value: u64) -> Self;

    /// # Safety
    /// `at` is aligned to the width and valid for reads; all writes to it are atomic.
    unsafe fn load(at: *mut u8) -> Self;

    /// # Safety
    /// `at` is aligned to the width and valid for writes; all accesses to it are atomic.
    unsafe fn store(at: *mut u8, value: Self);

    /// Replaces the word by `new(old)` atomically, sequentially consistent; returns the old value.
    /// `new` may be called more than once.
    ///
    /// # Safety
    /// As for [`Word::store`].
    unsafe fn update_locked(at: *mut u8, new: impl FnMut(Self) -> Self) -> Self;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! word {
    ($int:ident, $atomic:ident) => {
        impl sealed::Sealed for $int {}

        impl Word for $int {
            const BYTES: usize = size_of::<$int>();

            #[inline(always)]
            fn widen(self) -> u64 {
                u64::from(self)
            }

            #[inline(always)]
            fn narrow(value: u64) -> Self {
                value as Self
            }

            #[inline(always)]
            unsafe fn load(at: *mut u8) -> Self {
                // SAFETY: aligned and valid, by this function's contract.
                unsafe { (*at.cast::<$atomic>()).load(Ordering::Acquire) }
            }

            #[inline(always)]
            unsafe fn store(at: *mut u8, value: Self) {
                // SAFETY: aligned and valid, by this function's contract.
                unsafe { (*at.cast::<$atomic>()).store(value, Ordering::Release) }
            }

            #[inline]
            unsafe fn update_locked(at: *mut u8, mut new: impl FnMut(Self) -> Self) -> Self {
                // SAFETY: aligned and valid, by this function's contract.
                let word = unsafe { &*at.cast::<$atomic>() };
                let mut old = word.load(Ordering::SeqCst);
                loop {
                    let value = new(old);
                    match word.compare_exchange(old, value, Ordering::SeqCst, Ordering::SeqCst) {
                        Ok(_) => return old,
                        Err(now) => old = now,
                    }
                }
            }
        }
    };
}

word!(u8, AtomicU8);
word!(u16, AtomicU16);
word!(u32, AtomicU32);
word!(u64, AtomicU64);
