//! One page of guest memory, as a processor touches it.

use lacuna_addr::PAGE_SIZE;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

/// A host pointer to a guest page, with what may be done through it.
#[derive(Clone, Copy, Debug)]
pub struct HostPage {
    base: NonNull<u8>,
    writable: bool,
    watched: bool,
}

macro_rules! access {
    ($load:ident, $store:ident, $atomic:ident, $int:ident, $width:literal) => {
        /// Loads with acquire order: on x86 hosts a plain load, which keeps x86's order. `offset` must be
        /// aligned to the width and inside the page.
        #[inline(always)]
        pub fn $load(self, offset: usize) -> $int {
            assert!(offset & !(PAGE_SIZE - $width) == 0, "misaligned or outside the page");
            // SAFETY: base is page-aligned and valid for PAGE_SIZE bytes until the vCPU's next quiescent
            // point (HostPage::new's contract); the assertion keeps the access inside and aligned.
            unsafe { (*self.base.as_ptr().add(offset).cast::<$atomic>()).load(Ordering::Acquire) }
        }

        /// Stores with release order. Same conditions, and the page must be writable.
        #[inline(always)]
        pub fn $store(self, offset: usize, value: $int) {
            assert!(offset & !(PAGE_SIZE - $width) == 0, "misaligned or outside the page");
            debug_assert!(self.writable);
            // SAFETY: as for the load; writability is the caller's check of `is_writable`.
            unsafe {
                (*self.base.as_ptr().add(offset).cast::<$atomic>()).store(value, Ordering::Release)
            }
        }
    };
}

impl HostPage {
    /// # Safety
    /// `base` is page-aligned and valid for reads of a page (and writes, if `writable`) by any thread
    /// until the vCPU that it is handed to passes its next quiescent point. Everyone who touches the
    /// page meanwhile uses atomics.
    pub const unsafe fn new(base: NonNull<u8>, writable: bool, watched: bool) -> Self {
        Self { base, writable, watched }
    }

    /// Whether stores are allowed.
    pub const fn is_writable(self) -> bool {
        self.writable
    }

    /// Whether decoded instructions of this page exist: a writer must call `Bus::code_written`, and no
    /// TLB may hold it as writable.
    pub const fn is_watched(self) -> bool {
        self.watched
    }

    /// The first byte's address, for a TLB's addend.
    pub const fn base(self) -> NonNull<u8> {
        self.base
    }

    access!(load_u8, store_u8, AtomicU8, u8, 1);
    access!(load_u16, store_u16, AtomicU16, u16, 2);
    access!(load_u32, store_u32, AtomicU32, u32, 4);
    access!(load_u64, store_u64, AtomicU64, u64, 8);

    /// The aligned 8-byte word at `offset` as an atomic, for page-table entries and locked operations.
    /// The reference is to an atomic, which other threads may write: no plain reference to guest
    /// bytes is formed. It must not be kept past the next quiescent point.
    #[inline]
    pub fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset & !(PAGE_SIZE - 8) == 0, "misaligned or outside the page");
        // SAFETY: as above; the lifetime is bounded by this short-lived handle.
        unsafe { &*self.base.as_ptr().add(offset).cast::<AtomicU64>() }
    }
}
