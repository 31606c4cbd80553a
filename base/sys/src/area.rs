//! Memory whose pages are missing, for programs without `unsafe`.
//!
//! UNSAFETY: this file maps memory, registers it, and writes to it. The mapping has one owner, its
//! bytes are accessed by atomics alone, and no reference to it leaves this file.

use crate::{Errno, Userfaultfd};
use lacuna_addr::{Hva, HvaRange, PAGE_SIZE};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering};

/// Anonymous memory whose pages are missing until they are provided, with a userfaultfd of its own.
#[derive(Debug)]
pub struct MissingArea {
    // Dropped before the mapping, which must stay as long as it is registered.
    uffd: Userfaultfd,
    mapping: Mapping,
}

impl MissingArea {
    /// `pages` missing pages, at least one.
    ///
    /// # Errors
    /// As [`Userfaultfd::open`] and `mmap(2)`.
    pub fn new(pages: u64) -> Result<Self, Errno> {
        let uffd = Userfaultfd::open()?;
        let mapping = Mapping::new(pages)?;
        // SAFETY: 1. the mapping is private, anonymous and this value's own, and lives longer than
        // the descriptor. 2. `touch` alone accesses its bytes, by atomics.
        unsafe { uffd.register(mapping.range) }?;
        Ok(Self { uffd, mapping })
    }

    /// Where faults of this memory are read, and its pages provided.
    pub fn userfaultfd(&self) -> &Userfaultfd {
        &self.uffd
    }

    /// The address of page `index`.
    ///
    /// # Panics
    /// If the memory is smaller.
    pub fn page(&self, index: u64) -> Hva {
        let page = self.mapping.range.start().checked_add_pages(index);
        let page = page.filter(|page| self.mapping.range.contains(*page));
        page.expect("a page of this memory")
    }

    /// Writes to page `index`. If it is missing, the calling thread sleeps until another thread
    /// provides it.
    ///
    /// # Panics
    /// If the memory is smaller.
    pub fn touch(&self, index: u64) {
        let page = self.page(index).get() as *const AtomicU8;
        // SAFETY: 1. the address lies in the mapping, which lives as long as `self`. 2. Its bytes
        // are accessed by atomics alone.
        unsafe { &*page }.store(1, Ordering::Relaxed);
    }

    /// Makes all pages missing again.
    ///
    /// # Errors
    /// As `madvise(2)`.
    pub fn empty(&self) -> Result<(), Errno> {
        let (at, bytes) = self.mapping.parts();
        // SAFETY: 1. the range is the mapping's. 2. Its bytes may change at any time.
        unsafe { madvise(at, bytes, Advice::LinuxDontNeed) }
    }
}

#[derive(Debug)]
struct Mapping {
    range: HvaRange,
}

impl Mapping {
    fn new(pages: u64) -> Result<Self, Errno> {
        let bytes = pages.checked_mul(PAGE_SIZE as u64).ok_or(Errno::NOMEM)?;
        let bytes = usize::try_from(bytes).map_err(|_| Errno::NOMEM)?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: 1. a new mapping, at an address that the kernel chooses, replaces none.
        let at = unsafe { mmap_anonymous(ptr::null_mut(), bytes, prot, MapFlags::PRIVATE) }?;
        let range = HvaRange::new(Hva::new(at as u64), pages);
        Ok(Self {
            range: range.expect("a mapping is not empty and does not wrap"),
        })
    }

    fn parts(&self) -> (*mut c_void, usize) {
        let bytes = self.range.pages() * PAGE_SIZE as u64;
        (self.range.start().get() as *mut c_void, bytes as usize)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let (at, bytes) = self.parts();
        // SAFETY: 1. the mapping is this value's own, and no thread accesses it any more.
        let unmapped = unsafe { munmap(at, bytes) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}
