//! One page of guest memory, as a processor accesses it.

use crate::{Word, pair};
use lacuna_addr::PAGE_SIZE;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

/// The range that a [`HostPage`] describes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Span {
    /// This page.
    Page,
    /// The aligned 2 MiB block of guest-physical memory around it. The block is contiguous in host
    /// memory, every page of it allows the same accesses, and none of them is write-tracked.
    Block,
}

/// How a [`HostPage`] treats stores.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stores {
    /// Stores are allowed.
    pub allowed: bool,
    /// Decoded instructions of the page exist: see [`HostPage::is_write_tracked`].
    pub tracked: bool,
}

/// A host pointer to a guest page, and the accesses that the page allows.
#[derive(Clone, Copy, Debug)]
pub struct HostPage {
    base: NonNull<u8>,
    stores: Stores,
    span: Span,
}

macro_rules! access {
    ($load:ident, $store:ident, $atomic:ident, $int:ident, $width:literal) => {
        /// Loads with acquire order: on x86 hosts a plain load, which keeps x86's order. `offset`
        /// must be aligned to the width and inside the page.
        #[inline(always)]
        pub fn $load(self, offset: usize) -> $int {
            assert!(
                offset & !(PAGE_SIZE - $width) == 0,
                "misaligned or outside the page"
            );
            // SAFETY: base is page-aligned and valid for PAGE_SIZE bytes until the vCPU's next
            // quiescent point (HostPage::new's contract); the assertion keeps the access inside and
            // aligned.
            unsafe { (*self.base.as_ptr().add(offset).cast::<$atomic>()).load(Ordering::Acquire) }
        }

        /// Stores with release order. The conditions of the load hold, and the page must be
        /// writable.
        #[inline(always)]
        pub fn $store(self, offset: usize, value: $int) {
            assert!(
                offset & !(PAGE_SIZE - $width) == 0,
                "misaligned or outside the page"
            );
            debug_assert!(self.is_writable());
            // SAFETY: as for the load; writability is the caller's check of `is_writable`.
            unsafe {
                (*self.base.as_ptr().add(offset).cast::<$atomic>()).store(value, Ordering::Release)
            }
        }
    };
}

impl HostPage {
    /// # Safety
    /// `base` is page-aligned. Any thread may read a page there, and write it if stores are
    /// allowed, until the receiving vCPU passes its next quiescent point. All code that accesses
    /// the page meanwhile uses atomics.
    pub const unsafe fn new(base: NonNull<u8>, stores: Stores) -> Self {
        Self {
            base,
            stores,
            span: Span::Page,
        }
    }

    /// The same page, with the description extended to its whole block.
    ///
    /// # Safety
    /// The promises of [`HostPage::new`] hold for all 2 MiB of the block. The page is the frame
    /// `gfn`, and number `gfn % 512` of the block. None of its pages is write-tracked.
    #[must_use]
    pub const unsafe fn of_block(self) -> Self {
        Self {
            span: Span::Block,
            ..self
        }
    }

    /// The same page, for a guest's leaf that covers no more than `span`.
    #[inline(always)]
    #[must_use]
    pub const fn within(self, span: Span) -> Self {
        match span {
            Span::Page => Self { span, ..self },
            Span::Block => self,
        }
    }

    /// The described range.
    pub const fn span(self) -> Span {
        self.span
    }

    /// Whether stores are allowed.
    pub const fn is_writable(self) -> bool {
        self.stores.allowed
    }

    /// Whether decoded instructions of this page exist: a writer must call `Bus::code_written`, and
    /// no TLB may hold it as writable.
    pub const fn is_write_tracked(self) -> bool {
        self.stores.tracked
    }

    /// The first byte's address, for a TLB's addend.
    pub const fn base(self) -> NonNull<u8> {
        self.base
    }

    access!(load_u8, store_u8, AtomicU8, u8, 1);
    access!(load_u16, store_u16, AtomicU16, u16, 2);
    access!(load_u32, store_u32, AtomicU32, u32, 4);
    access!(load_u64, store_u64, AtomicU64, u64, 8);

    /// The aligned 8-byte word at `offset` as an atomic, for page-table entries and locked
    /// operations. Other threads may write this atomic: no plain reference to guest bytes is
    /// formed. It must not be kept past the next quiescent point.
    #[inline]
    pub fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(
            offset & !(PAGE_SIZE - 8) == 0,
            "misaligned or outside the page"
        );
        // SAFETY: as above; the lifetime is bounded by this short-lived handle.
        unsafe { &*self.base.as_ptr().add(offset).cast::<AtomicU64>() }
    }
}

/// Bytes at any alignment, by series of atomics, for misaligned and block accesses.
impl HostPage {
    /// Loads the aligned word at `offset`.
    #[inline(always)]
    pub fn load<T: Word>(self, offset: usize) -> T {
        assert!(
            offset & !(PAGE_SIZE - T::BYTES) == 0,
            "misaligned or outside the page"
        );
        // SAFETY: as for the loads above.
        unsafe { T::load(self.base.as_ptr().add(offset)) }
    }

    /// Stores the aligned word at `offset`. The page must be writable.
    #[inline(always)]
    pub fn store<T: Word>(self, offset: usize, value: T) {
        assert!(
            offset & !(PAGE_SIZE - T::BYTES) == 0,
            "misaligned or outside the page"
        );
        debug_assert!(self.is_writable());
        // SAFETY: as for the stores above.
        unsafe { T::store(self.base.as_ptr().add(offset), value) }
    }

    /// Replaces the aligned word at `offset` by `new(old)` atomically, sequentially consistent;
    /// returns the old value. The page must be writable; `new` may be called more than once.
    pub fn update_locked<T: Word>(self, offset: usize, new: impl FnMut(T) -> T) -> T {
        assert!(
            offset & !(PAGE_SIZE - T::BYTES) == 0,
            "misaligned or outside the page"
        );
        debug_assert!(self.is_writable());
        // SAFETY: as for the loads and stores above.
        unsafe { T::update_locked(self.base.as_ptr().add(offset), new) }
    }

    /// Replaces the two aligned words at `offset`, a multiple of 16, by `new` if they are `old`, as
    /// one atomic access, sequentially consistent. Returns the old words; `None` if the host has no
    /// such access. The page must be writable.
    pub fn compare_exchange_pair(
        self,
        offset: usize,
        old: [u64; 2],
        new: [u64; 2],
    ) -> Option<[u64; 2]> {
        assert!(
            offset & !(PAGE_SIZE - 16) == 0,
            "misaligned or outside the page"
        );
        debug_assert!(self.is_writable());
        // SAFETY: as for the loads and stores above.
        unsafe { pair::compare_exchange(self.base.as_ptr().add(offset), old, new) }
    }

    /// `bytes` (1 to 8) little-endian bytes from `offset` on, all inside the page.
    pub fn load_bytes(self, offset: usize, bytes: usize) -> u64 {
        (0..bytes).fold(0, |value, i| {
            value | u64::from(self.load_u8(offset + i)) << (8 * i)
        })
    }

    /// Stores the low `bytes` (1 to 8) bytes of `value` from `offset` on, all inside the page.
    pub fn store_bytes(self, offset: usize, bytes: usize, value: u64) {
        for i in 0..bytes {
            self.store_u8(offset + i, (value >> (8 * i)) as u8);
        }
    }

    /// Repeats the 8-byte `pattern` over `len` bytes from `offset` on, in ascending order. The
    /// first byte written is the pattern's lowest.
    pub fn fill(self, offset: usize, len: usize, pattern: u64) {
        let (mut at, end) = (offset, offset + len);
        let mut pattern = pattern;
        while at < end {
            if at.is_multiple_of(8) && end - at >= 8 {
                self.store_u64(at, pattern);
                at += 8;
            } else {
                self.store_u8(at, pattern as u8);
                pattern = pattern.rotate_right(8);
                at += 1;
            }
        }
    }

    /// Copies `len` bytes from `from` at `from_offset`, in ascending order. If the ranges overlap,
    /// the destination must not begin 1 to 7 bytes above the source.
    pub fn copy_from(self, offset: usize, from: Self, from_offset: usize, len: usize) {
        let (mut to, mut at, end) = (offset, from_offset, from_offset + len);
        while at < end {
            if (to | at).is_multiple_of(8) && end - at >= 8 {
                self.store_u64(to, from.load_u64(at));
                (to, at) = (to + 8, at + 8);
            } else {
                self.store_u8(to, from.load_u8(at));
                (to, at) = (to + 1, at + 1);
            }
        }
    }
}
