//! Memory of this process that guests use, and copies from and to it.
//!
//! UNSAFETY: mappings are made and unmapped, and bytes of guests are read and written. All
//! references to guest memory are to atomics, because vCPUs write it at the same time. A mapping
//! lives as long as its owner: the VM's window, or a slot.

use lacuna_addr::{Hva, HvaRange, Level, PAGE_SIZE, PageCount, aligned_piece};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::io;
use std::ptr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64};

/// Anonymous memory of the process, in 4 KiB pages, from a multiple of 2 MiB on.
pub struct Mapping {
    mapped: HvaRange,
    range: HvaRange,
}

impl Mapping {
    pub fn new(pages: PageCount) -> Result<Self, Errno> {
        let mapped = PageCount::new(pages.get() + Level::L2M.pages());
        let bytes = usize::try_from(mapped.bytes()).map_err(|_| Errno::NOMEM)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: 1. a new mapping at an address of the kernel's choice touches no memory of ours.
        let base = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                flags,
            )
        }?;
        let start = base.expose_provenance() as u64;
        let first = start.next_multiple_of(Level::L2M.bytes());
        let this = Self {
            mapped: HvaRange::new(Hva::new(start), mapped.get()).ok_or(Errno::INVAL)?,
            range: HvaRange::new(Hva::new(first), pages.get()).ok_or(Errno::INVAL)?,
        };
        // Linux makes no huge page here by itself: moves and faults are of small pages, and a huge
        // page arrives by a move. Linux does not move pages shared with a child process.
        for advice in [Advice::LinuxNoHugepage, Advice::LinuxDontFork] {
            // SAFETY: 1. the range is the mapping just made; 2. the advice keeps its content.
            match unsafe { madvise(base, bytes, advice) } {
                // A kernel without transparent huge pages makes none.
                Ok(()) | Err(Errno::INVAL) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(this)
    }

    /// Its addresses.
    pub fn range(&self) -> HvaRange {
        self.range
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let bytes = self.mapped.pages() as usize * PAGE_SIZE;
        let base = ptr::with_exposed_provenance_mut(self.mapped.start().get() as usize);
        // SAFETY: 1. the range is this whole mapping, and is unmapped only here. 2. All users of
        // its addresses (KVM's slots, the readers of faults) end before: see `Vm`'s field order.
        let unmapped = unsafe { munmap(base, bytes) };
        debug_assert!(unmapped.is_ok(), "the range is a mapping");
    }
}

/// Copies `bytes` to address `at`. Guest words that are aligned to their size are never torn.
///
/// # Safety
/// The range lies in a mapping of guest memory.
pub unsafe fn copy_in(at: Hva, bytes: &[u8]) {
    let mut address = at.get() as usize;
    let mut rest = bytes;
    while !rest.is_empty() {
        let size = aligned_piece(address, rest.len());
        let (now, later) = rest.split_at(size);
        // SAFETY: 1. the contract. 2. A piece lies on a multiple of its size.
        unsafe {
            match size {
                8 => atomic::<AtomicU64>(address).store(u64::from_ne_bytes(chunk(now)), Relaxed),
                4 => atomic::<AtomicU32>(address).store(u32::from_ne_bytes(chunk(now)), Relaxed),
                2 => atomic::<AtomicU16>(address).store(u16::from_ne_bytes(chunk(now)), Relaxed),
                _ => atomic::<AtomicU8>(address).store(now[0], Relaxed),
            }
        }
        address += size;
        rest = later;
    }
}

/// Copies from address `at`. Guest words that are aligned to their size are never torn.
///
/// # Safety
/// The range lies in a mapping of guest memory.
pub unsafe fn copy_out(at: Hva, into: &mut [u8]) {
    let mut address = at.get() as usize;
    let mut rest = into;
    while !rest.is_empty() {
        let size = aligned_piece(address, rest.len());
        let (now, later) = rest.split_at_mut(size);
        // SAFETY: 1. the contract. 2. A piece lies on a multiple of its size.
        unsafe {
            match size {
                8 => now.copy_from_slice(&atomic::<AtomicU64>(address).load(Relaxed).to_ne_bytes()),
                4 => now.copy_from_slice(&atomic::<AtomicU32>(address).load(Relaxed).to_ne_bytes()),
                2 => now.copy_from_slice(&atomic::<AtomicU16>(address).load(Relaxed).to_ne_bytes()),
                _ => now[0] = atomic::<AtomicU8>(address).load(Relaxed),
            }
        }
        address += size;
        rest = later;
    }
}

/// The bytes of an integer.
fn chunk<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.try_into().expect("a piece has its size")
}

/// # Safety
/// `A` is an atomic integer. Its bytes at `address`, a multiple of its size, lie in a mapping of
/// guest memory that outlives `'a`.
unsafe fn atomic<'a, A>(address: usize) -> &'a A {
    // SAFETY: 1. and 2. the contract. 3. All of this process touches guest memory by atomics.
    unsafe { &*ptr::with_exposed_provenance::<A>(address) }
}

/// From now on Linux may back `range` with huge pages.
pub fn advise_huge(range: HvaRange) -> Result<(), Errno> {
    let base = ptr::with_exposed_provenance_mut(range.start().get() as usize);
    let bytes = range.pages() as usize * PAGE_SIZE;
    // SAFETY: 1. the advice changes no byte. 2. The kernel checks the range.
    unsafe { madvise(base, bytes, Advice::LinuxHugepage) }
}

/// Makes `range`, an aligned 2 MiB of pages that are all there, one huge page (Linux 6.1).
pub fn collapse(range: HvaRange) -> Result<(), Errno> {
    let base = ptr::with_exposed_provenance_mut(range.start().get() as usize);
    let bytes = range.pages() as usize * PAGE_SIZE;
    // SAFETY: 1. the advice changes no byte. 2. The kernel checks the range.
    match unsafe { libc::madvise(base, bytes, libc::MADV_COLLAPSE) } {
        0 => Ok(()),
        _ => Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}

/// Brings in `pages` pages from `at` on, as writes would, but changes none (`MADV_POPULATE_WRITE`,
/// Linux 5.14). Waits for missing pages.
pub fn populate(at: Hva, pages: u64) -> Result<(), Errno> {
    let base = ptr::with_exposed_provenance_mut(at.get() as usize);
    let bytes = pages as usize * PAGE_SIZE;
    loop {
        // SAFETY: 1. the advice changes no byte. 2. The kernel checks the range.
        match unsafe { madvise(base, bytes, Advice::LinuxPopulateWrite) } {
            Err(Errno::INTR | Errno::AGAIN) => {}
            result => return result,
        }
    }
}

/// Whether Linux has every page of these bytes in memory (`mincore(2)`).
pub fn is_mapped(at: Hva, bytes: usize) -> bool {
    let address = at.get() as usize;
    let first = address / PAGE_SIZE * PAGE_SIZE;
    let pages = (address + bytes).div_ceil(PAGE_SIZE) - first / PAGE_SIZE;
    let mut present = vec![0; pages];
    // SAFETY: 1. it writes one byte for each page, for which `present` has room. 2. It reads no
    // memory at `first`.
    let result = unsafe {
        libc::mincore(
            ptr::without_provenance_mut(first),
            pages * PAGE_SIZE,
            present.as_mut_ptr(),
        )
    };
    result == 0 && present.iter().all(|page| page & 1 != 0)
}

/// Gives the pages of `range` back to Linux: they are zeros then, or missing. Also where this
/// process has locked its memory (`mlockall(2)`).
///
/// # Safety
/// No thread needs their bytes. All code accesses them by atomics.
pub unsafe fn drop_bytes(range: HvaRange) -> Result<(), Errno> {
    let base = ptr::with_exposed_provenance_mut(range.start().get() as usize);
    let bytes = range.pages() as usize * PAGE_SIZE;
    // SAFETY: the contract.
    match unsafe { madvise(base, bytes, Advice::LinuxDontneedLocked) } {
        // Linux before 5.18.
        // SAFETY: the contract.
        Err(Errno::INVAL) => unsafe { madvise(base, bytes, Advice::LinuxDontNeed) },
        dropped => dropped,
    }
}

/// As [`drop_bytes`] for each page of `pages`. A recent Linux flushes the TLBs of other processors
/// once for all of them.
///
/// # Safety
/// As [`drop_bytes`].
pub unsafe fn drop_pages(pages: &[Hva]) -> Result<(), Errno> {
    let iovec = |page: &Hva| libc::iovec {
        iov_base: ptr::with_exposed_provenance_mut(page.get() as usize),
        iov_len: PAGE_SIZE,
    };
    let ranges: Vec<_> = pages.iter().map(iovec).collect();
    // SAFETY: the contract. The kernel reads `ranges`.
    let dropped = unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            PIDFD_SELF,
            ranges.as_ptr(),
            ranges.len(),
            libc::MADV_DONTNEED_LOCKED,
            0,
        )
    };
    if usize::try_from(dropped) == Ok(pages.len() * PAGE_SIZE) {
        return Ok(());
    }
    // Linux before 6.14 refuses the descriptor, and any Linux may stop early.
    let one = |page: &Hva| HvaRange::new(*page, 1).expect("a page is a range");
    // SAFETY: the contract.
    let mut each = pages.iter().map(|page| unsafe { drop_bytes(one(page)) });
    each.try_for_each(|dropped| dropped)
}

/// `PIDFD_SELF` of linux/pidfd.h: this process, since Linux 6.14.
const PIDFD_SELF: libc::c_int = -10_000;
