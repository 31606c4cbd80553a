//! The memory of a VM that has no vCPU.
//!
//! UNSAFETY: this file maps memory, registers it, and accesses it. A mapping stays until the
//! process ends, all bytes are accessed by atomics alone, and no reference to a byte leaves this
//! file.

use lacuna_addr::{Hva, HvaRange, Level, PAGE_SIZE};
use lacuna_source::{HandlerRegion, SourcePage};
use lacuna_sys::{Errno, Userfaultfd};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

/// Words of 8 bytes in a page.
pub const WORDS: usize = PAGE_SIZE / 8;
/// Pages of 4 KiB in a block of 2 MiB.
pub const BLOCK: u64 = Level::L2M.pages();

/// A part of the VM's memory, with the page of the memory file that it begins with. The mapping
/// stays until the process ends, because threads may wait in it for ever.
#[derive(Clone, Copy, Debug)]
pub struct Region {
    range: HvaRange,
    first: u64,
    level: Level,
}

impl Region {
    /// Maps `pages` private pages from an address that is a multiple of 2 MiB.
    ///
    /// # Errors
    /// As `mmap(2)`.
    pub fn map(pages: u64) -> Result<Self, Errno> {
        let start = map(pages + BLOCK, MapFlags::empty())?;
        let aligned = start.get().next_multiple_of(Level::L2M.bytes());
        Ok(Self::at(Hva::new(aligned), pages, Level::L4K))
    }

    /// Maps private huge pages of 2 MiB for `pages` pages of 4 KiB. It reserves none of them.
    ///
    /// # Errors
    /// As `mmap(2)`.
    pub fn map_huge(pages: u64) -> Result<Self, Errno> {
        let start = map(pages, MapFlags::HUGETLB | MapFlags::HUGE_2MB)?;
        Ok(Self::at(start, pages, Level::L2M))
    }

    fn at(start: Hva, pages: u64, level: Level) -> Self {
        Self {
            range: HvaRange::new(start, pages).expect("a mapping is not empty and does not wrap"),
            first: 0,
            level,
        }
    }

    /// `pages` pages of this region from its page `from` on. The first one has page `first` of the
    /// memory file.
    ///
    /// # Panics
    /// If the region has no such pages.
    #[must_use]
    pub fn part(self, from: u64, pages: u64, first: u64) -> Self {
        assert!(from + pages <= self.range.pages(), "a part of the region");
        let start = self.range.start().checked_add_pages(from);
        let start = start.expect("in the region");
        Self {
            first,
            ..Self::at(start, pages, self.level)
        }
    }

    /// As in the message to the handler.
    pub fn for_handler(self) -> HandlerRegion {
        HandlerRegion {
            memory: self.range,
            first: SourcePage(self.first),
            page: self.level,
        }
    }

    /// The address of the memory file's page `page`, if the region has it.
    pub fn address(self, page: u64) -> Option<Hva> {
        let index = page.checked_sub(self.first)?;
        let address = self.range.start().checked_add_pages(index)?;
        self.range.contains(address).then_some(address)
    }

    /// Registers the region's missing pages.
    ///
    /// # Errors
    /// As [`Userfaultfd::register`].
    pub fn register(self, uffd: &Userfaultfd) -> Result<(), Errno> {
        // SAFETY: 1. private anonymous memory of this process, which stays mapped. 2. `load` and
        // `store` access its bytes, by atomics.
        unsafe { uffd.register(self.range) }
    }

    /// Lets the kernel use transparent huge pages here.
    ///
    /// # Errors
    /// As `madvise(2)`: `INVAL` on a kernel without them.
    pub fn advise_huge(self) -> Result<(), Errno> {
        advise(self.range, Advice::LinuxHugepage)
    }
}

fn map(pages: u64, flags: MapFlags) -> Result<Hva, Errno> {
    let bytes = pages as usize * PAGE_SIZE;
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    let flags = flags | MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: 1. a new mapping at an address of the kernel's choice replaces none.
    let at = unsafe { mmap_anonymous(ptr::null_mut(), bytes, prot, flags) }?;
    Ok(Hva::new(at.expose_provenance() as u64))
}

fn pointer(at: Hva) -> *mut c_void {
    ptr::with_exposed_provenance_mut(at.get() as usize)
}

fn advise(range: HvaRange, advice: Advice) -> Result<(), Errno> {
    let bytes = range.pages() as usize * PAGE_SIZE;
    // SAFETY: 1. `Region` has mapped the range, and accesses its bytes by atomics alone.
    unsafe { madvise(pointer(range.start()), bytes, advice) }
}

/// Takes the pages of `range` away, by MADV_DONTNEED.
///
/// # Errors
/// As `madvise(2)`: `INVAL` for huge pages of hugetlbfs before Linux 5.18.
pub fn remove(range: HvaRange) -> Result<(), Errno> {
    advise(range, Advice::LinuxDontNeed)
}

/// Loads the words of the page at `at`, an address of a region.
pub fn load(at: Hva) -> [u64; WORDS] {
    std::array::from_fn(|index| word(at, index).load(Ordering::SeqCst))
}

/// Stores `value` to each word of the page at `at`, an address of a region.
pub fn store(at: Hva, value: u64) {
    for index in 0..WORDS {
        word(at, index).store(value, Ordering::SeqCst);
    }
}

/// Stores `value` to word `index` of the page at `at`, an address of a region.
pub fn store_word(at: Hva, index: usize, value: u64) {
    word(at, index).store(value, Ordering::SeqCst);
}

fn word(at: Hva, index: usize) -> &'static AtomicU64 {
    assert!(index < WORDS && at.is_page_aligned(), "in a page");
    // SAFETY: 1. callers have the address from a region, whose mapping stays until the process
    // ends, and which only this file accesses. 2. The word is aligned.
    unsafe { AtomicU64::from_ptr(pointer(at).cast::<u64>().add(index)) }
}

/// Huge pages of this process that no region has. Dropping it frees them.
#[derive(Debug)]
pub struct HeldHugePage(Hva);

impl HeldHugePage {
    /// Takes one free huge page of the pool.
    ///
    /// # Errors
    /// `FAULT`: none is free.
    pub fn take() -> Result<Self, Errno> {
        let held = Self(map(BLOCK, MapFlags::HUGETLB | MapFlags::HUGE_2MB)?);
        let bytes = BLOCK as usize * PAGE_SIZE;
        // SAFETY: 1. this value's own mapping. The call allocates its page, or fails; a store would
        // end the process instead.
        unsafe { madvise(pointer(held.0), bytes, Advice::LinuxPopulateWrite) }?;
        Ok(held)
    }
}

impl Drop for HeldHugePage {
    fn drop(&mut self) {
        // SAFETY: 1. this value's own mapping, which no code accesses.
        let unmapped = unsafe { munmap(pointer(self.0), BLOCK as usize * PAGE_SIZE) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}
