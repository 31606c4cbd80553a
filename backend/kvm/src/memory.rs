//! The guest's memory: one anonymous mapping, and a second one of the same size, the store, for
//! evicted pages on probation.
//!
//! UNSAFETY: mappings are made and unmapped, and bytes of the guest are read and written. All
//! references to guest memory are to atomics, because vCPUs write it at the same time. A mapping
//! lives as long as its [`Memory`] or its slot.

use lacuna_addr::{Gpa, Hva, HvaRange, PAGE_SIZE, PageCount, aligned_piece};
use lacuna_machine::{BootError, Layout};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::ptr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64};

/// Anonymous memory of the process, in 4 KiB pages.
pub struct Mapping {
    range: HvaRange,
}

impl Mapping {
    pub fn new(pages: PageCount) -> Result<Self, Errno> {
        let bytes = usize::try_from(pages.bytes()).map_err(|_| Errno::NOMEM)?;
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
        let start = Hva::new(base.expose_provenance() as u64);
        let range = HvaRange::new(start, pages.get()).ok_or(Errno::INVAL)?;
        let this = Self { range };
        // The small pages of a huge page cannot be evicted or fault one by one. Linux does not move
        // pages shared with a child process.
        for advice in [Advice::LinuxNoHugepage, Advice::LinuxDontFork] {
            // SAFETY: 1. the range is the mapping just made; 2. the advice keeps its content.
            unsafe { madvise(base, bytes, advice) }?;
        }
        Ok(this)
    }

    /// Its addresses.
    pub fn range(&self) -> HvaRange {
        self.range
    }

    /// Address of the page at `index`.
    pub fn page(&self, index: u32) -> Hva {
        Hva::new(self.range.start().get() + u64::from(index) * PAGE_SIZE as u64)
    }

    /// Address of the byte at `offset` of the page at `index`.
    pub fn byte(&self, index: u32, offset: usize) -> Hva {
        Hva::new(self.page(index).get() + offset as u64)
    }

    /// Takes the content of `pages` away. Their memory goes back to Linux. Neighbours that follow
    /// each other take one system call.
    pub fn discard(&self, pages: &[u32]) {
        for run in pages.chunk_by(|page, next| page + 1 == *next) {
            let at = self.page(run[0]).get() as usize;
            let bytes = run.len() * PAGE_SIZE;
            // SAFETY: 1. the range is in this mapping. 2. Accesses to it are atomic, and may find
            // zeros instead of bytes.
            let given = unsafe {
                madvise(
                    ptr::with_exposed_provenance_mut(at),
                    bytes,
                    Advice::LinuxDontNeed,
                )
            };
            // Linux refuses locked memory: the pages stay, which costs memory and nothing else.
            debug_assert!(given.is_ok(), "{given:?}");
        }
    }

    /// Index of the page at `hva`, if the mapping contains it.
    pub fn index(&self, hva: Hva) -> Option<u32> {
        let offset = hva.get().checked_sub(self.range.start().get())?;
        let index = offset / PAGE_SIZE as u64;
        (index < self.range.pages()).then_some(index as u32)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let bytes = self.range.pages() as usize * PAGE_SIZE;
        let base = ptr::with_exposed_provenance_mut(self.range.start().get() as usize);
        // SAFETY: 1. the range is this whole mapping, and is unmapped only here. 2. All users of
        // its addresses (KVM's slots, the page source) end before: see `Vm`'s field order.
        let unmapped = unsafe { munmap(base, bytes) };
        debug_assert!(unmapped.is_ok(), "the range is a mapping");
    }
}

/// A guest's memory.
pub struct Memory {
    /// The memory that the guest sees: its slots one after the other.
    pub guest: Mapping,
    /// The content of pages on probation, each at its offset in `guest`.
    pub store: Mapping,
    /// The slots' places in the guest's address space.
    pub layout: Layout,
}

impl Memory {
    /// Zero-filled memory of `size`.
    pub fn new(size: PageCount) -> Result<Self, MapError> {
        let layout = Layout::new(size)?;
        if u32::try_from(size.get()).is_err() {
            return Err(MapError::TooLarge(size.bytes()));
        }
        let map = || {
            Mapping::new(size).map_err(|errno| MapError::Map {
                bytes: size.bytes(),
                errno,
            })
        };
        Ok(Self {
            guest: map()?,
            store: map()?,
            layout,
        })
    }

    /// Each slot: its guest address, its host address, its size in bytes.
    pub fn slots(&self) -> impl Iterator<Item = (Gpa, Hva, u64)> {
        let mut at = self.guest.range().start().get();
        self.layout.ranges().iter().map(move |range| {
            let bytes = range.pages() * PAGE_SIZE as u64;
            let hva = Hva::new(at);
            at += bytes;
            (range.start().gpa(), hva, bytes)
        })
    }

    /// The guest address of `page`.
    pub fn gpa(&self, page: u32) -> Option<Gpa> {
        let hva = self.guest.page(page).get();
        self.slots().find_map(|(gpa, start, bytes)| {
            let offset = hva.checked_sub(start.get())?;
            (offset < bytes).then(|| Gpa::truncate(gpa.get() + offset))
        })
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

/// Why there is no memory for a guest.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// The size is not possible for a guest.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// Page numbers of this backend have 32 bits.
    #[error(
        "guest memory of {0} bytes: this backend takes less than 16T; give less, or use the soft \
         backend"
    )]
    TooLarge(u64),
    /// The kernel refused the mapping.
    #[error("cannot map {bytes} bytes for the guest's memory: {errno}")]
    Map {
        /// The size of the mapping.
        bytes: u64,
        /// The kernel's error.
        errno: Errno,
    },
}
