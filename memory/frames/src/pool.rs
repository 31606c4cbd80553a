//! The memory of the budget: one private anonymous mapping, and the only raw pointers to it.
//!
//! ```text
//! mapped ....[base, 2 MiB aligned ..................)[2 MiB aligned ................)....
//!            | frame 0 | frame 1 | ...    the budget | Linux memory, if any is wanted |
//! ```
//! The mapping is made 2 MiB longer than needed, so that frame 0 can begin on a huge page. With
//! 1 GiB of Linux memory or more, it is aligned to 1 GiB instead: then a frame number that is a
//! multiple of 1 GiB has such an address.
//!
//! Linux memory has the frame numbers after the budget's, in the same range of addresses (`linux`).
//! So any frame number becomes an address with one comparison. Every address of the range is always
//! readable and writable: a wrong frame number reads wrong bytes, and is never undefined behaviour.
//!
//! # Unsafe
//! A frame is shared between vCPU threads, reclaim and I/O. All racing accesses go through
//! [`FramePtr`]: relaxed atomics of 1 to 8 bytes, never a `&` to the bytes. Plain stores write only
//! a frame that no page word, block word or table names yet ([`Pool::zero`], [`Pool::zero_block`],
//! [`Pool::exclusive`]).

mod linux;

use crate::block_word::BlockNo;
use crate::error::MapFailed;
use crate::page_no::BLOCK;
use lacuna_addr::{Hva, HvaRange, Level, PAGE_SIZE, PageCount, Pfn, aligned_piece};
use lacuna_swap::Page;
use lacuna_sys::TakenPages;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::marker::PhantomData;
use std::ops::{ControlFlow, Range};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

const HUGE: usize = BLOCK * PAGE_SIZE;
/// Bytes that one system call backs: 0.16 s where the hypervisor below backs 100 MB a second.
const PREFAULT: usize = 8 * HUGE;
const WORDS: usize = PAGE_SIZE / 8;
const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

fn bytes_of(range: HvaRange) -> usize {
    range.pages() as usize * PAGE_SIZE
}

/// `len` values for a table with about one entry for each frame, which is read at random. It is on
/// the host's large pages if possible: then a lookup does not miss the host's TLB as well.
pub(crate) fn table_of<T>(len: usize, make: impl FnMut() -> T) -> Box<[T]> {
    let mut table = Vec::with_capacity(len);
    let room: &mut [_] = table.spare_capacity_mut();
    let (start, bytes) = (room.as_mut_ptr().cast::<u8>(), size_of_val(room));
    let skipped = start.align_offset(HUGE);
    let whole = bytes.saturating_sub(skipped) / HUGE * HUGE;
    if whole > 0 {
        // A host without transparent huge pages refuses the advice: the table then has 4 KiB pages.
        // SAFETY: the range lies inside of the table's memory; this advice keeps its contents.
        let _ = unsafe { madvise(start.add(skipped).cast(), whole, Advice::LinuxHugepage) };
    }
    table.extend(std::iter::repeat_with(make).take(len));
    table.into_boxed_slice()
}

/// Prefetches the cache line of `value`, to be read and perhaps written. The hint is for reading
/// (T0): most descriptors are already dirty and are not written again, and a prefetch for writing
/// would take the line from other cores. `tables` prefetches entries for writing, because it
/// changes each of them. If the target has no such instruction in stable Rust, nothing happens.
#[inline]
pub(crate) fn prefetch<T>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads and writes nothing that a program can see, and never faults.
    unsafe {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>((&raw const *value).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = value;
}

/// A frame's bytes, shared: every access is a relaxed atomic.
#[derive(Clone, Copy)]
pub struct FramePtr<'a> {
    base: NonNull<u8>,
    pool: PhantomData<&'a Pool>,
}

/// The memory of the budget, and the addresses for Linux memory.
pub struct Pool {
    map: *mut u8,
    map_len: usize,
    base: NonNull<u8>,
    /// Frames of the budget.
    frames: usize,
    /// One past the last frame number, Linux memory included.
    end: usize,
    /// Pages of Linux memory that the kernel takes away; `None`: there is no Linux memory.
    taken: Option<TakenPages>,
}

// SAFETY: the mapping belongs to the pool until drop. Its bytes are accessed only through
// FramePtr's atomics, or by the exclusive owner of a frame (the contracts of `zero` and
// `exclusive`).
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    /// Memory of `frames` frames, and addresses for `linux` pages of Linux memory.
    pub fn new(frames: usize, linux: usize) -> Result<Self, MapFailed> {
        let len = frames * PAGE_SIZE;
        let (end, flags) = match linux {
            0 => (frames, MapFlags::PRIVATE),
            _ => (
                frames.next_multiple_of(BLOCK) + linux.next_multiple_of(BLOCK),
                // Linux memory is allocated page by page, and perhaps never as a whole.
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            ),
        };
        let align = match linux >= Level::L1G.pages() as usize {
            true => Level::L1G.bytes() as usize,
            false => HUGE,
        };
        let map_len = end * PAGE_SIZE + align;
        let failed = |e: Errno| MapFailed {
            bytes: (end * PAGE_SIZE) as u64,
            reason: e.to_string(),
        };
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice touches nothing.
        let map = unsafe { mmap_anonymous(null_mut(), map_len, READ_WRITE, flags) }
            .map_err(failed)?
            .cast::<u8>();
        let base = map.wrapping_add(map.align_offset(align));
        let base = NonNull::new(base).expect("a mapping does not begin at zero");
        let mut pool = Self {
            map,
            map_len,
            base,
            frames,
            end,
            taken: None,
        };
        // A host without transparent huge pages refuses the advice: the pool then has 4 KiB pages.
        // SAFETY: the range lies inside the mapping. The contents of the mapping are not used yet.
        let _ = unsafe { madvise(base.as_ptr().cast(), len, Advice::LinuxHugepage) };
        let linux = pool.linux();
        if !linux.is_empty() {
            let range = pool.range(Pfn::new(linux.start as u32), linux.len());
            // SAFETY: the range is the pool's, readable and writable, and mapped until drop. All
            // code accesses it through `FramePtr`, because no frame of it is ever free.
            pool.taken = Some(unsafe { TakenPages::watch(range) }.map_err(failed)?);
        }
        Ok(pool)
    }

    /// Lets the kernel back all memory of the budget now. Calls `each` before each step, and stops
    /// unless it says `Continue`. The bytes do not change.
    pub fn prefault(&self, each: &mut dyn FnMut() -> ControlFlow<()>) -> Result<(), MapFailed> {
        let len = self.frames * PAGE_SIZE;
        for start in (0..len).step_by(PREFAULT) {
            if each().is_break() {
                return Ok(());
            }
            let step = PREFAULT.min(len - start);
            let at = self.base.as_ptr().wrapping_add(start).cast();
            // SAFETY: the range lies inside the mapping; the kernel changes no bytes.
            let touched = unsafe { madvise(at, step, Advice::LinuxPopulateWrite) };
            touched.map_err(|errno| MapFailed {
                bytes: len as u64,
                reason: errno.to_string(),
            })?;
        }
        Ok(())
    }

    /// From now on no child of this process shares the budget, and the kernel backs it page by
    /// page, unless pages are moved in `whole_blocks` too: the caller moves pages away and back.
    /// Returns the addresses of all frames.
    pub fn to_be_moved(&self, whole_blocks: bool) -> Result<HvaRange, MapFailed> {
        let range = self.range(Pfn::new(0), self.frames);
        let single = (!whole_blocks).then_some(Advice::LinuxNoHugepage);
        for advice in single.into_iter().chain([Advice::LinuxDontFork]) {
            // SAFETY: the range lies inside the mapping; both advices keep the bytes.
            match unsafe { madvise(self.base.as_ptr().cast(), bytes_of(range), advice) } {
                // A kernel without transparent huge pages makes none.
                Ok(()) | Err(Errno::INVAL) => {}
                Err(errno) => {
                    return Err(MapFailed {
                        bytes: bytes_of(range) as u64,
                        reason: errno.to_string(),
                    });
                }
            }
        }
        Ok(range)
    }

    /// The number of frames in the budget.
    pub fn frames(&self) -> usize {
        self.frames
    }

    /// The frame numbers of Linux memory.
    pub fn linux(&self) -> Range<usize> {
        self.frames.next_multiple_of(BLOCK).min(self.end)..self.end
    }

    /// The addresses of `pages` frames from `first` on.
    pub fn range(&self, first: Pfn, pages: usize) -> HvaRange {
        assert!(pages <= self.end - first.index(), "frames outside the pool");
        let start = self.at(first).as_ptr().expose_provenance();
        HvaRange::new(Hva::new(start as u64), pages as u64).expect("frames are aligned")
    }

    /// The bytes of frame `pfn`.
    #[inline]
    pub fn frame(&self, pfn: Pfn) -> FramePtr<'_> {
        FramePtr {
            base: self.at(pfn),
            pool: PhantomData,
        }
    }

    #[inline]
    fn at(&self, pfn: Pfn) -> NonNull<u8> {
        assert!(pfn.index() < self.end, "frame number outside the pool");
        // SAFETY: the offset is inside the mapping: pfn < end.
        unsafe { self.base.add(pfn.index() * PAGE_SIZE) }
    }

    /// Fills a frame with zeros.
    ///
    /// # Safety
    /// The caller owns the frame: it was taken from the free list, and no page word names it.
    #[inline]
    pub unsafe fn zero(&self, pfn: Pfn) {
        // SAFETY: in bounds by `at`; by the contract no other thread touches the bytes.
        unsafe { self.at(pfn).write_bytes(0, PAGE_SIZE) }
    }

    /// Fills a block of frames with zeros.
    ///
    /// # Safety
    /// The caller owns the block: it was taken from the free map, and no block word names it.
    pub unsafe fn zero_block(&self, block: BlockNo) {
        let _ = self.at(block.frame(BLOCK - 1));
        // SAFETY: in bounds, because its last frame is; by the contract no other thread touches the
        // bytes; a frame is aligned to its size.
        unsafe { zero_past_caches(self.at(block.frame(0)), HUGE) }
    }

    /// Bytes of the pool in the kernel's huge pages; `None` if the kernel does not say.
    pub fn huge_bytes(&self) -> Option<u64> {
        let maps = std::fs::read_to_string("/proc/self/smaps").ok()?;
        let base = self.base.as_ptr() as usize;
        let pool = base..base + self.frames * PAGE_SIZE;
        let (mut inside, mut kib) = (false, None);
        for line in maps.lines() {
            let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
            if let Some((start, end)) = word.split_once('-') {
                let address = |text| usize::from_str_radix(text, 16).ok();
                let (start, end) = (address(start)?, address(end)?);
                inside = start < pool.end && pool.start < end;
            } else if inside && word == "AnonHugePages:" {
                let huge: u64 = rest.trim().strip_suffix(" kB")?.parse().ok()?;
                kib = Some(kib.unwrap_or(0) + huge);
            }
        }
        kib.map(|kib| kib << 10)
    }

    /// A frame's bytes, for overwriting.
    ///
    /// # Safety
    /// The caller owns the frame for the life of the reference, and nothing maps it. Either its
    /// page word says Reading and only the caller carries out that read; or the frame was taken
    /// from the free map and no page word or block word names it yet.
    #[allow(
        clippy::mut_from_ref,
        reason = "the exclusivity is the caller's, by frame"
    )]
    #[inline]
    pub unsafe fn exclusive(&self, pfn: Pfn) -> &mut Page {
        // SAFETY: in bounds and page-aligned by `at`; exclusive by the contract; any bytes are a
        // Page.
        unsafe { self.at(pfn).cast::<Page>().as_mut() }
    }
}

/// Fills `len` bytes with zeros by non-temporal stores. The range is larger than the caches and
/// little of it is used soon. Such stores are at least twice as fast, and do not evict other data
/// from the caches.
///
/// # Safety
/// The bytes are inside one allocation and used by no other thread; both numbers are multiples of
/// 64.
#[cfg(target_arch = "x86_64")]
unsafe fn zero_past_caches(at: NonNull<u8>, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_setzero_si128, _mm_sfence, _mm_stream_si128};
    // SAFETY: every x86-64 processor has SSE2.
    let zero = unsafe { _mm_setzero_si128() };
    for line in (0..len).step_by(64) {
        for part in (line..line + 64).step_by(size_of::<__m128i>()) {
            // SAFETY: in bounds, aligned and exclusive by the contract.
            unsafe { _mm_stream_si128(at.add(part).as_ptr().cast(), zero) };
        }
    }
    // Non-temporal stores are not ordered with later stores, such as the store of the block word
    // that names this block.
    // SAFETY: as above.
    unsafe { _mm_sfence() };
}

/// As above, for processors without such stores in stable Rust.
///
/// # Safety
/// As above.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn zero_past_caches(at: NonNull<u8>, len: usize) {
    // SAFETY: in bounds and exclusive by the contract.
    unsafe { at.write_bytes(0, len) }
}

impl Drop for Pool {
    fn drop(&mut self) {
        drop(self.taken.take());
        // SAFETY: this is the mapping made by `new`; no FramePtr outlives the pool.
        let unmapped = unsafe { munmap(self.map.cast(), self.map_len) };
        debug_assert!(unmapped.is_ok());
    }
}

impl FramePtr<'_> {
    /// The first byte's address: page-aligned, valid for reads and writes of a page until the host
    /// is dropped. It names the *frame*, which another page may get once the listener's
    /// `invalidate` has returned. A user that keeps the address (a TLB) must drop it before then.
    #[inline]
    pub const fn as_non_null(self) -> NonNull<u8> {
        self.base
    }

    #[inline]
    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < WORDS);
        // SAFETY: inside the frame, aligned to 8; every racing access is atomic (module contract).
        unsafe { &*self.base.as_ptr().cast::<AtomicU64>().add(index) }
    }

    /// The atomic integer at `offset`.
    ///
    /// # Panics
    /// If it is not inside the page, or not at a multiple of its size.
    #[inline]
    fn atomic<A: Atomic>(&self, offset: usize) -> &A {
        assert!(offset.is_multiple_of(size_of::<A>()) && offset < PAGE_SIZE);
        // SAFETY: 1. The offset is in the page and a multiple of a size that divides the page
        // (`Atomic`), so the integer lies inside the frame and is aligned. 2. Every racing access
        // is atomic (module contract).
        unsafe { &*self.base.as_ptr().add(offset).cast::<A>() }
    }

    /// Copies bytes from `offset` on out of the frame. An aligned access of 2, 4 or 8 bytes is one
    /// atomic load. Panics outside the page.
    pub fn read(self, mut offset: usize, mut out: &mut [u8]) {
        if offset == 0
            && let Ok(page) = (&mut *out).try_into()
        {
            return self.load(page);
        }
        while !out.is_empty() {
            let size = aligned_piece(offset, out.len());
            let (now, rest) = out.split_at_mut(size);
            match size {
                8 => self.atomic::<AtomicU64>(offset).copy_out(now),
                4 => self.atomic::<AtomicU32>(offset).copy_out(now),
                2 => self.atomic::<AtomicU16>(offset).copy_out(now),
                _ => self.atomic::<AtomicU8>(offset).copy_out(now),
            }
            (offset, out) = (offset + size, rest);
        }
    }

    /// Copies bytes into the frame from `offset` on. An aligned access of 2, 4 or 8 bytes is one
    /// atomic store. Panics outside the page.
    pub fn write(self, mut offset: usize, mut bytes: &[u8]) {
        if offset == 0
            && let Ok(page) = bytes.try_into()
        {
            return self.store(page);
        }
        while !bytes.is_empty() {
            let size = aligned_piece(offset, bytes.len());
            let (now, rest) = bytes.split_at(size);
            match size {
                8 => self.atomic::<AtomicU64>(offset).copy_in(now),
                4 => self.atomic::<AtomicU32>(offset).copy_in(now),
                2 => self.atomic::<AtomicU16>(offset).copy_in(now),
                _ => self.atomic::<AtomicU8>(offset).copy_in(now),
            }
            (offset, bytes) = (offset + size, rest);
        }
    }

    /// Copies the page, unless it contains only zeros. Returns which case it was.
    pub fn snapshot(self, page: &mut Page) -> Content {
        let first = (0..WORDS).find(|&i| self.word(i).load(Ordering::Relaxed) != 0);
        if first.is_none() {
            return Content::Zero;
        }
        self.load(&mut page.0);
        Content::Data
    }

    /// Copies the whole page out of the frame, without choosing a size for each piece.
    fn load(self, page: &mut [u8; PAGE_SIZE]) {
        let (words, _) = page.as_chunks_mut::<8>();
        for (i, word) in words.iter_mut().enumerate() {
            *word = self.word(i).load(Ordering::Relaxed).to_ne_bytes();
        }
    }

    /// Copies a whole page into the frame.
    fn store(self, page: &[u8; PAGE_SIZE]) {
        let (words, _) = page.as_chunks::<8>();
        for (i, word) in words.iter().enumerate() {
            self.word(i)
                .store(u64::from_ne_bytes(*word), Ordering::Relaxed);
        }
    }
}

/// An atomic integer. Its size divides the size of a page.
trait Atomic {
    /// Stores the integer whose memory form is `bytes`.
    fn copy_in(&self, bytes: &[u8]);

    /// Loads the integer into `bytes`.
    fn copy_out(&self, bytes: &mut [u8]);
}

macro_rules! atomics {
    ($($atomic:ty, $integer:ty);*) => {$(
        impl Atomic for $atomic {
            #[inline]
            fn copy_in(&self, bytes: &[u8]) {
                let bytes = bytes.try_into().expect("as many bytes as the integer has");
                self.store(<$integer>::from_ne_bytes(bytes), Ordering::Relaxed);
            }

            #[inline]
            fn copy_out(&self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&self.load(Ordering::Relaxed).to_ne_bytes());
            }
        }
    )*};
}
atomics!(AtomicU8, u8; AtomicU16, u16; AtomicU32, u32; AtomicU64, u64);

/// The content of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Content {
    /// Only zeros. It need not be written to swap.
    Zero,
    /// Other content, copied.
    Data,
}

/// The largest budget that a page word can name.
pub const MAX_FRAMES: PageCount = PageCount::new(1 << crate::residency::FRAME_BITS);
