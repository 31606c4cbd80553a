//! Memory whose pages are missing, and mapped files, for programs without `unsafe`.
//!
//! UNSAFETY: this file maps memory, registers it, reads it and writes to it. The mapping has one
//! owner, its bytes are accessed by atomics alone, and no reference to it leaves this file.

use crate::{Errno, Userfaultfd};
use lacuna_addr::{Hva, HvaRange, PAGE_SIZE};
use rustix::fd::{AsFd as _, BorrowedFd};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use std::ffi::c_void;
use std::fs::File;
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering};

/// Memory whose pages are missing until they are provided, with a userfaultfd of its own.
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
        Self::anonymous(pages, Userfaultfd::open()?)
    }

    /// `pages` missing pages of anonymous memory, at least one, whose faults `uffd` reports.
    ///
    /// # Errors
    /// As [`Userfaultfd::register`] and `mmap(2)`.
    pub fn anonymous(pages: u64, uffd: Userfaultfd) -> Result<Self, Errno> {
        Self::with(Mapping::new(pages, None)?, uffd)
    }

    /// The first `pages` pages of a memory file, at least one, in a private mapping without huge
    /// pages. `uffd` is a descriptor of [`Userfaultfd::open_for_pager`].
    ///
    /// # Errors
    /// As [`MissingArea::anonymous`].
    pub fn of_file(file: BorrowedFd<'_>, pages: u64, uffd: Userfaultfd) -> Result<Self, Errno> {
        let mapping = Mapping::new(pages, Some((file, MapFlags::PRIVATE)))?;
        // A huge page of the file would map pages without a fault: also pages that were
        // taken away.
        mapping.advise(Advice::LinuxNoHugepage)?;
        Self::with(mapping, uffd)
    }

    fn with(mapping: Mapping, uffd: Userfaultfd) -> Result<Self, Errno> {
        // SAFETY: 1. the mapping is private and this value's own, and lives longer than the
        // descriptor. 2. This file alone accesses its bytes, by atomics.
        unsafe { uffd.register(mapping.range) }?;
        Ok(Self { uffd, mapping })
    }

    /// Its addresses. They stay mapped as long as this value lives.
    pub fn range(&self) -> HvaRange {
        self.mapping.range
    }

    /// Copies the bytes from offset `at` on. The calling thread waits for missing pages.
    ///
    /// # Panics
    /// If the memory is smaller.
    pub fn read(&self, at: u64, to: &mut [u8]) {
        let bytes = self.mapping.bytes(at, to.len());
        for (to, byte) in to.iter_mut().zip(bytes) {
            *to = byte.load(Ordering::Relaxed);
        }
    }

    /// Writes the bytes from offset `at` on. As [`MissingArea::read`] otherwise.
    ///
    /// # Panics
    /// If the memory is smaller.
    pub fn write(&self, at: u64, from: &[u8]) {
        self.mapping.write(at, from);
    }

    /// Takes `pages` pages away, from page `index` on. Waits until the event is read, if the
    /// descriptor reports it.
    ///
    /// # Errors
    /// As `madvise(2)`.
    ///
    /// # Panics
    /// If the memory is smaller.
    pub fn discard(&self, index: u64, pages: u64) -> Result<(), Errno> {
        assert!(index + pages <= self.mapping.range.pages());
        let part = HvaRange::new(self.page(index), pages).ok_or(Errno::INVAL)?;
        let (at, bytes) = parts(part);
        // SAFETY: 1. the range is the mapping's. 2. Its bytes may change at any time.
        unsafe { madvise(at, bytes, Advice::LinuxDontNeed) }
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
        self.mapping.page(index)
    }

    /// The first byte of page `index`; as [`touch`](Self::touch) otherwise.
    ///
    /// # Panics
    /// If the memory is smaller.
    pub fn first_byte(&self, index: u64) -> u8 {
        self.mapping.first_byte(index)
    }

    /// Writes to page `index`. If it is missing, the calling thread sleeps until another thread
    /// provides it.
    ///
    /// # Panics
    /// If the memory is smaller.
    pub fn touch(&self, index: u64) {
        self.write(index * PAGE_SIZE as u64, &[1]);
    }

    /// Makes all pages missing again.
    ///
    /// # Errors
    /// As `madvise(2)`.
    pub fn empty(&self) -> Result<(), Errno> {
        self.discard(0, self.mapping.range.pages())
    }
}

/// A private mapping of a file's first pages, to be read.
#[derive(Debug)]
pub struct FileArea(Mapping);

impl FileArea {
    /// Maps `pages` pages of `file`, at least one. If the file becomes shorter, an access to a lost
    /// page ends the process.
    ///
    /// # Errors
    /// As `mmap(2)`.
    pub fn new(file: &File, pages: u64) -> Result<Self, Errno> {
        Ok(Self(Mapping::new(
            pages,
            Some((file.as_fd(), MapFlags::PRIVATE)),
        )?))
    }

    /// The first byte of page `index`.
    ///
    /// # Panics
    /// If the mapping is smaller.
    pub fn first_byte(&self, index: u64) -> u8 {
        self.0.first_byte(index)
    }

    /// Puts the content of page `index` at the missing page `to` of `uffd`, and wakes the threads
    /// that wait for it.
    ///
    /// # Errors
    /// As [`Userfaultfd::copy`].
    ///
    /// # Panics
    /// If the mapping is smaller.
    pub fn copy_page(&self, index: u64, uffd: &Userfaultfd, to: Hva) -> Result<(), Errno> {
        uffd.copy_at(self.0.page(index).get(), to)
    }
}

/// A mapping with one owner, whose bytes are accessed by atomics alone.
#[derive(Debug)]
pub(crate) struct Mapping {
    pub range: HvaRange,
}

impl Mapping {
    /// `pages` pages: anonymous, or of a file, with these flags.
    pub fn new(pages: u64, file: Option<(BorrowedFd<'_>, MapFlags)>) -> Result<Self, Errno> {
        let bytes = pages.checked_mul(PAGE_SIZE as u64).ok_or(Errno::NOMEM)?;
        let bytes = usize::try_from(bytes).map_err(|_| Errno::NOMEM)?;
        let (null, prot) = (ptr::null_mut(), ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: 1. a new mapping, at an address that the kernel chooses, replaces none.
        let at = unsafe {
            match file {
                None => mmap_anonymous(null, bytes, prot, MapFlags::PRIVATE),
                Some((file, flags)) => {
                    mmap(null, bytes, prot, flags | MapFlags::NORESERVE, file, 0)
                }
            }
        }?;
        let start = Hva::new(at.expose_provenance() as u64);
        let range = HvaRange::new(start, pages);
        Ok(Self {
            range: range.expect("a mapping is not empty and does not wrap"),
        })
    }

    /// Advice that changes no byte.
    pub fn advise(&self, advice: Advice) -> Result<(), Errno> {
        let (at, bytes) = parts(self.range);
        // SAFETY: 1. the range is this mapping's. 2. Its bytes may change at any time.
        unsafe { madvise(at, bytes, advice) }
    }

    fn first_byte(&self, index: u64) -> u8 {
        let mut byte = self.bytes(index * PAGE_SIZE as u64, 1);
        byte.next().expect("one byte").load(Ordering::Relaxed)
    }

    fn page(&self, index: u64) -> Hva {
        let page = self.range.start().checked_add_pages(index);
        let page = page.filter(|page| self.range.contains(*page));
        page.expect("a page of this memory")
    }

    /// Writes the bytes from offset `at` on.
    pub fn write(&self, at: u64, from: &[u8]) {
        for (byte, from) in self.bytes(at, from.len()).zip(from) {
            byte.store(*from, Ordering::Relaxed);
        }
    }

    fn bytes(&self, at: u64, len: usize) -> impl Iterator<Item = &AtomicU8> {
        let (start, bytes) = parts(self.range);
        let at = usize::try_from(at).unwrap_or(usize::MAX);
        let is_inside = at.checked_add(len).is_some_and(|end| end <= bytes);
        assert!(is_inside, "{len} bytes at {at} of {bytes}");
        // SAFETY: 1. the addresses lie in the mapping, which lives as long as `self`. 2. Its bytes
        // are accessed by atomics alone.
        (at..at + len).map(move |at| unsafe { AtomicU8::from_ptr(start.cast::<u8>().add(at)) })
    }
}

fn parts(range: HvaRange) -> (*mut c_void, usize) {
    let bytes = range.pages() * PAGE_SIZE as u64;
    let at = ptr::with_exposed_provenance_mut(range.start().get() as usize);
    (at, bytes as usize)
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let (at, bytes) = parts(self.range);
        // SAFETY: 1. the mapping is this value's own, and no thread accesses it any more.
        let unmapped = unsafe { munmap(at, bytes) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}
