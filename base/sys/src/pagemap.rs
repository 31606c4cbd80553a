//! The page table of this process, by `/proc/self/pagemap`.
//!
//! `PAGEMAP_SCAN` (`linux/fs.h`, since Linux 6.7): finds the pages of this process that were
//! written since they were last protected, by its page table, and protects them again in the same
//! step.
//!
//! It works on ranges of a [`Userfaultfd`](crate::Userfaultfd) that tracks writes. A page is clean
//! while its entry has userfaultfd's write-protect mark. At the first write to the page, the kernel
//! clears that mark, without an event.
//!
//! UNSAFETY: an ioctl that writes an array by its address. Its effect on the scanned pages is
//! invisible to threads that read or write them.

use crate::counted::Counted;
use lacuna_addr::{Hva, HvaRange, PAGE_SIZE};
use rustix::io::{self, Errno};
use rustix::ioctl::{Opcode, ioctl, opcode};
use std::fs::File;
use std::os::unix::fs::FileExt;

const SCAN: Opcode = opcode::read_write::<PmScanArg>(b'f', 16);
/// `PAGE_IS_WRITTEN`: the entry has no write-protect mark. Absent pages count as written too.
const WRITTEN: u64 = 1 << 1;
/// `PAGE_IS_PRESENT`.
const PRESENT: u64 = 1 << 3;
/// `PAGE_IS_SWAPPED`.
const SWAPPED: u64 = 1 << 4;
/// `PM_SCAN_WP_MATCHING`.
const WP_MATCHING: u64 = 1;
/// `PM_SCAN_CHECK_WPASYNC`: refuse untracked ranges instead of skipping them.
const CHECK_WPASYNC: u64 = 1 << 1;
/// Bit 63 of an entry of the file (`Documentation/admin-guide/mm/pagemap.rst`).
const IN_MEMORY: u64 = 1 << 63;
/// Bit 62 of such an entry.
const SWAPPED_OUT: u64 = 1 << 62;
/// Ranges in one answer.
const RANGES: usize = 512;

/// `struct pm_scan_arg`.
#[repr(C)]
struct PmScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

// The first size is part of the ioctl's number; both are the kernel's (linux/fs.h).
const _: () = assert!(size_of::<PmScanArg>() == 96 && size_of::<PageRegion>() == 24);

impl PmScanArg {
    /// A scan of `range` for nothing.
    fn of(range: HvaRange) -> Self {
        Self {
            size: size_of::<Self>() as u64,
            flags: 0,
            start: range.start().get(),
            end: range.end().get(),
            walk_end: 0,
            vec: 0,
            vec_len: RANGES as u64,
            max_pages: 0,
            category_inverted: 0,
            category_mask: 0,
            category_anyof_mask: 0,
            return_mask: 0,
        }
    }
}

/// The treatment of the pages that a scan finds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Written {
    /// The pages still count as written.
    Keep,
    /// The scan protects each page in the same step. The page counts as clean from then on.
    Protect,
}

/// The page table of this process, read through `/proc`.
#[derive(Debug)]
pub struct Pagemap(File);

impl Pagemap {
    /// Opens it.
    ///
    /// # Errors
    /// As `open(2)`: no `/proc`, or no permission.
    pub fn open() -> io::Result<Self> {
        let file = File::open("/proc/self/pagemap");
        let errno = |e: std::io::Error| Errno::from_io_error(&e).unwrap_or(Errno::IO);
        file.map(Self).map_err(errno)
    }

    /// Calls `each` with the runs of written pages of `range`, ascending. Pages that are neither in
    /// memory nor in swap count as clean, and get no mark.
    ///
    /// # Errors
    /// `NOTTY`: Linux before 6.7; `PERM`: not a range that tracks writes.
    pub fn written(
        &self,
        range: HvaRange,
        then: Written,
        mut each: impl FnMut(HvaRange),
    ) -> io::Result<()> {
        let scan = PmScanArg {
            flags: match then {
                Written::Keep => CHECK_WPASYNC,
                Written::Protect => CHECK_WPASYNC | WP_MATCHING,
            },
            category_mask: WRITTEN,
            category_anyof_mask: PRESENT | SWAPPED,
            return_mask: WRITTEN,
            ..PmScanArg::of(range)
        };
        self.scan(scan, |region| {
            pages(region).into_iter().for_each(&mut each);
        })
    }

    /// The number of pages of `range` that are in memory.
    ///
    /// # Errors
    /// `NOTTY`: Linux before 6.7.
    pub fn present(&self, range: HvaRange) -> io::Result<u64> {
        let scan = PmScanArg {
            category_mask: PRESENT,
            return_mask: PRESENT,
            ..PmScanArg::of(range)
        };
        let mut present = 0;
        self.scan(scan, |region| {
            present += pages(region).map_or(0, HvaRange::pages);
        })?;
        Ok(present)
    }

    /// Whether a page is at `page`: in memory, in swap, or the kernel's page of zeros.
    ///
    /// # Errors
    /// `NOTTY`: Linux before 6.7.
    pub fn has_page(&self, page: Hva) -> io::Result<bool> {
        let page = HvaRange::new(page.page(), 1).ok_or(Errno::INVAL)?;
        let scan = PmScanArg {
            category_anyof_mask: PRESENT | SWAPPED,
            return_mask: PRESENT | SWAPPED,
            ..PmScanArg::of(page)
        };
        let mut found = false;
        self.scan(scan, |_| found = true)?;
        Ok(found)
    }

    fn scan(&self, mut scan: PmScanArg, mut each: impl FnMut(&PageRegion)) -> io::Result<()> {
        let mut found = [PageRegion::default(); RANGES];
        while scan.start < scan.end {
            // Each call needs a new pointer: a read of `found` between two calls ends an older
            // pointer's right to write it.
            scan.vec = found.as_mut_ptr().expose_provenance() as u64;
            // SAFETY: 1. PAGEMAP_SCAN takes a `struct pm_scan_arg`. 2. It writes at most `vec_len`
            // regions at `vec`, which `found` has. 3. Protecting pages changes no byte of them.
            let filled = unsafe { ioctl(&self.0, Counted::<SCAN, _>::new(&mut scan)) }?;
            found[..filled].iter().for_each(&mut each);
            scan.start = scan.walk_end;
        }
        Ok(())
    }

    /// Whether each page of `range` has been touched: it is in memory, or Linux has swapped it out.
    /// The call takes about 10 ns a page.
    ///
    /// # Errors
    /// As `read(2)`.
    pub fn touched(&self, range: HvaRange) -> io::Result<Vec<bool>> {
        self.entries_with(IN_MEMORY | SWAPPED_OUT, range)
    }

    /// Whether the page table maps each page of `range`: an access faults on no other page.
    ///
    /// # Errors
    /// As `read(2)`.
    pub fn mapped(&self, range: HvaRange) -> io::Result<Vec<bool>> {
        self.entries_with(IN_MEMORY, range)
    }

    fn entries_with(&self, bits: u64, range: HvaRange) -> io::Result<Vec<bool>> {
        let mut entries = vec![0; range.pages() as usize * size_of::<u64>()];
        let first = range.start().get() / PAGE_SIZE as u64;
        let read = self
            .0
            .read_exact_at(&mut entries, first * size_of::<u64>() as u64);
        read.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        let (entries, _) = entries.as_chunks();
        let has_any = |entry: &[u8; 8]| u64::from_ne_bytes(*entry) & bits != 0;
        Ok(entries.iter().map(has_any).collect())
    }
}

fn pages(region: &PageRegion) -> Option<HvaRange> {
    let pages = (region.end - region.start) / PAGE_SIZE as u64;
    HvaRange::new(Hva::new(region.start), pages)
}
