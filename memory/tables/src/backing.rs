//! The memory of the entries: one reserved mapping; under loom an array of loom's atomics.
//!
//! UNSAFETY: `entry` turns an id into a reference by arithmetic on the mapping's base. The mapping
//! is made once with its final size, readable and writable throughout (`MAP_NORESERVE`: pages cost
//! nothing until touched), never moved, and unmapped only by `Drop`, after every borrow of the
//! backing.
//!
//! A `TableId` is a plain number. So safe code may still hold a reference into a freed and
//! reallocated table. That is allowed here, because entries are accessed only as atomics, zeroing
//! included.

#[cfg(not(loom))]
pub(crate) use mapped::Backing;
#[cfg(loom)]
pub(crate) use modelled::Backing;

#[cfg(not(loom))]
mod mapped {
    use crate::{ENTRIES, Index, TableId};
    use core::ptr::NonNull;
    use lacuna_addr::PAGE_SIZE;
    use lacuna_sync::shim::AtomicU64;
    use rustix::io::Errno;
    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

    /// Table pages 0 to `cap`; page 0 is never used.
    pub(crate) struct Backing {
        base: NonNull<AtomicU64>,
        cap: u32,
    }

    // SAFETY: the pointer is to a mapping that any thread may use; it is only read, and everything
    // behind it is atomic.
    unsafe impl Send for Backing {}
    // SAFETY: as above.
    unsafe impl Sync for Backing {}

    impl Backing {
        /// Zeroed pages. An error has the size that the kernel refused.
        pub(crate) fn new(cap: u32) -> Result<Self, (usize, Errno)> {
            let bytes = Self::bytes(cap);
            // SAFETY: a fresh anonymous mapping at an address of the kernel's choice replaces
            // nothing.
            let base = unsafe {
                mmap_anonymous(
                    core::ptr::null_mut(),
                    bytes,
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::PRIVATE | MapFlags::NORESERVE,
                )
            }
            .map_err(|errno| (bytes, errno))?;
            // Walks touch tables at random; with large pages all tables share a few host TLB
            // entries. If the host has no large pages this changes nothing, so a refusal is not an
            // error.
            // SAFETY: the range is the mapping just made; this advice keeps its contents.
            let _ = unsafe { madvise(base, bytes, Advice::LinuxHugepage) };
            let base = NonNull::new(base.cast()).expect("mmap succeeded");
            Ok(Self { base, cap })
        }

        /// An entry.
        ///
        /// # Panics
        /// If `id` is past the cap.
        #[inline]
        pub(crate) fn entry(&self, id: TableId, index: Index) -> &AtomicU64 {
            assert!(id.get() <= self.cap, "table id of another arena");
            let offset = id.get() as usize * ENTRIES + index.get() as usize;
            // SAFETY: 1. the id is at most `cap` (just checked) and the index below 512 (its type),
            // so the offset is inside the mapping of `(cap + 1)` tables. 2. The mapping is
            // page-aligned, so the entry is aligned. 3. It lives until `Drop`, which cannot run
            // during this borrow. 4. Only atomic accesses are ever made behind `base`, and zero
            // bytes are a valid `AtomicU64`.
            unsafe { self.base.add(offset).as_ref() }
        }

        /// Prefetches the entry's cache line for writing. This is a hint: if the target has no such
        /// instruction in stable Rust, nothing happens.
        ///
        /// # Panics
        /// As [`Backing::entry`].
        #[inline]
        pub(crate) fn prefetch(&self, id: TableId, index: Index) {
            let entry: *const AtomicU64 = self.entry(id, index);
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a prefetch has no effect that a program can see, and never faults.
            unsafe {
                use core::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
                _mm_prefetch::<_MM_HINT_ET0>(entry.cast());
            }
            #[cfg(not(target_arch = "x86_64"))]
            let _ = entry;
        }

        const fn bytes(cap: u32) -> usize {
            (cap as usize + 1) * PAGE_SIZE
        }
    }

    impl Drop for Backing {
        fn drop(&mut self) {
            // SAFETY: the mapping made in `new`, with its size; no reference into it outlives the
            // backing.
            let unmapped = unsafe { munmap(self.base.as_ptr().cast(), Self::bytes(self.cap)) };
            debug_assert!(unmapped.is_ok(), "unmapping our own mapping");
        }
    }
}

#[cfg(loom)]
mod modelled {
    use crate::{ENTRIES, Index, TableId};
    use lacuna_sync::shim::AtomicU64;
    use rustix::io::Errno;

    /// Memory for loom's atomics cannot be mapped, so this is an array of a few tables, in safe
    /// code.
    pub(crate) struct Backing(Box<[AtomicU64]>);

    impl Backing {
        /// Zeroed tables; never refused.
        pub(crate) fn new(cap: u32) -> Result<Self, (usize, Errno)> {
            let entries = cap as usize * ENTRIES;
            Ok(Self((0..entries).map(|_| AtomicU64::new(0)).collect()))
        }

        /// An entry; table 1 is the first.
        pub(crate) fn entry(&self, id: TableId, index: Index) -> &AtomicU64 {
            &self.0[(id.get() as usize - 1) * ENTRIES + index.get() as usize]
        }

        /// Does nothing: a model needs no prefetch.
        pub(crate) fn prefetch(&self, _: TableId, _: Index) {}
    }
}
