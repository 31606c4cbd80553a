//! A processor's translation cache: guest-virtual page to host pointer.
//!
//! Two direct-mapped arrays, of 4 KiB pages and of 2 MiB blocks. One entry is half a cache line:
//!
//! ```text
//!   read  : page address, if loads may use the entry          \ one compare decides page, right
//!   write : page address, if stores may (D set, not write-tracked)  / and alignment (`Tlb::load`)
//!   host  : host page - page address, so that host + va is the byte
//!   frame : gfn << 1 | executable                              of a block: gfn >> 9 instead
//! ```
//!
//! Loads and stores read only the first array. After a miss there the processor tries
//! [`Tlb::refill`] before it walks: this copies the page out of its block, if the block is cached
//! with the right. A block comes from a [`HostPage`] with [`Span::Block`], and only from a guest's
//! leaf that covers the block. The arrays need not agree. An entry is valid as long as its own
//! page, whatever the other array has.
//!
//! A translation is the same for every privilege level that may use it. The processor keeps one
//! `Tlb` for supervisor and one for user accesses, so an entry needs no bit for the privilege.
//!
//! An entry is a copy of a [`HostPage`], and is valid as long as the original: until the vCPU's
//! next quiescent point. A thread that removes a page sends the vCPU a request (`VcpuSlot::FLUSH`).
//! The vCPU's owner then flushes its TLBs before it enters the processor again. The contract of the
//! `unsafe trait Bus` demands this.

use crate::{HostPage, Span, Stores, Word};
use lacuna_addr::{Access, Gfn, Level, PAGE_SHIFT, PAGE_SIZE};
use std::ptr::NonNull;

/// Pages: 128 KiB of table, which covers 16 MiB. A flush and [`Tlb::protect`] read the bitmap of
/// used entries, 512 bytes, and those entries. docs/speed-x86.md has measurements of the size.
const PAGES: usize = 4096;
/// Blocks: 16 KiB of table, which covers 1 GiB.
const BLOCKS: usize = 512;
const PAGE_MASK: u64 = !(PAGE_SIZE as u64 - 1);
const BLOCK_SHIFT: u32 = Level::L2M.byte_shift();
/// Frames of a block.
const BLOCK_FRAMES: u64 = Level::L2M.pages();
/// Never equal to a masked address: its low bits are all ones.
const INVALID: u64 = u64::MAX;

/// The rights of a translation beyond reading.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rights {
    /// Stores: stage 1 writable with D set, stage 2 writable with D set, page not write-tracked.
    pub write: bool,
    /// Instruction fetches.
    pub exec: bool,
}

#[derive(Clone, Copy)]
struct Entry {
    read: u64,
    write: u64,
    host: *mut u8,
    frame: u64,
}

const EMPTY: Entry = Entry {
    read: INVALID,
    write: INVALID,
    host: std::ptr::null_mut(),
    frame: INVALID,
};

/// The stores of a writable entry's page.
const UNTRACKED: Stores = Stores {
    allowed: true,
    tracked: false,
};
/// The assumed stores of any other entry's page.
const TRACKED: Stores = Stores {
    allowed: false,
    tracked: true,
};

impl Entry {
    fn stores(&self) -> Stores {
        if self.write == self.read {
            UNTRACKED
        } else {
            TRACKED
        }
    }

    fn allows(&self, access: Access, tag: u64) -> bool {
        match access {
            Access::Read => self.read == tag,
            Access::Write => self.write == tag,
            Access::Fetch => self.read == tag && self.frame & 1 != 0,
        }
    }
}

/// A direct-mapped array of `SIZE` entries, each for `1 << SHIFT` bytes. `WORDS` is `SIZE / 64`.
struct Array<const SIZE: usize, const WORDS: usize, const SHIFT: u32> {
    entries: Box<[Entry; SIZE]>,
    /// A bit for each used entry, so that the cost of a flush depends on the used entries, not on
    /// the size of the array.
    used: Box<[u64; WORDS]>,
}

impl<const SIZE: usize, const WORDS: usize, const SHIFT: u32> Default
    for Array<SIZE, WORDS, SHIFT>
{
    fn default() -> Self {
        const { assert!(SIZE.is_power_of_two() && WORDS * 64 == SIZE) }
        let entries = vec![EMPTY; SIZE].into_boxed_slice();
        let Ok(entries) = entries.try_into() else {
            unreachable!("the length is SIZE")
        };
        Self {
            entries,
            used: Box::new([0; WORDS]),
        }
    }
}

impl<const SIZE: usize, const WORDS: usize, const SHIFT: u32> Array<SIZE, WORDS, SHIFT> {
    #[inline(always)]
    fn index(va: u64) -> usize {
        (va >> SHIFT) as usize & (SIZE - 1)
    }

    #[inline(always)]
    fn entry(&self, va: u64) -> &Entry {
        &self.entries[Self::index(va)]
    }

    #[inline(always)]
    fn insert(&mut self, va: u64, entry: Entry) {
        let index = Self::index(va);
        self.used[index / 64] |= 1 << (index % 64);
        self.entries[index] = entry;
    }

    fn flush(&mut self) {
        for (word, used) in self.used.iter_mut().enumerate() {
            while *used != 0 {
                self.entries[word * 64 + used.trailing_zeros() as usize] = EMPTY;
                *used &= *used - 1;
            }
        }
    }

    /// Forgets the entries of the aligned `1 << shift` bytes around `va`.
    fn forget(&mut self, va: u64, shift: u32) {
        let entries = 1_usize << shift.saturating_sub(SHIFT);
        let first = if entries < SIZE {
            Self::index(va) & !(entries - 1)
        } else {
            0
        };
        let words = first / 64..(first + entries.min(SIZE)).div_ceil(64);
        for (word, used) in self
            .used
            .iter_mut()
            .enumerate()
            .take(words.end)
            .skip(words.start)
        {
            let mut left = *used;
            while left != 0 {
                let bit = left.trailing_zeros();
                let entry = &mut self.entries[word * 64 + bit as usize];
                if entry.read >> shift == va >> shift {
                    *entry = EMPTY;
                    *used &= !(1 << bit);
                }
                left &= left - 1;
            }
        }
    }

    /// Clears the write right in every entry of `frame`, a number of `1 << SHIFT` bytes.
    fn protect(&mut self, frame: u64) {
        for (word, &used) in self.used.iter().enumerate() {
            let mut used = used;
            while used != 0 {
                let entry = &mut self.entries[word * 64 + used.trailing_zeros() as usize];
                if entry.frame >> 1 == frame {
                    entry.write = INVALID;
                }
                used &= used - 1;
            }
        }
    }
}

/// A direct-mapped cache of translations for one privilege.
#[derive(Default)]
pub struct Tlb {
    pages: Array<PAGES, { PAGES / 64 }, PAGE_SHIFT>,
    blocks: Array<BLOCKS, { BLOCKS / 64 }, BLOCK_SHIFT>,
}

// SAFETY: the raw pointers are copies of HostPages. These belong to a vCPU, not to a thread: they
// stay valid until that vCPU's next quiescent point, on whatever thread it runs. Accesses through
// them are atomic.
unsafe impl Send for Tlb {}

impl Tlb {
    /// Loads an aligned word; `None` on a miss or when `va` is not aligned to it.
    #[inline(always)]
    pub fn load<T: Word>(&self, va: u64) -> Option<T> {
        let entry = self.pages.entry(va);
        if entry.read != va & (PAGE_MASK | (T::BYTES as u64 - 1)) {
            return None;
        }
        // SAFETY: the tag matched, so `host + va` is `va`'s byte in a page inserted for reading and
        // still valid (module header); the compare covered the low bits, so it is aligned.
        Some(unsafe { T::load(entry.host.wrapping_add(va as usize)) })
    }

    /// Stores an aligned word; false on a miss or when `va` is not aligned to it.
    #[inline(always)]
    pub fn store<T: Word>(&self, va: u64, value: T) -> bool {
        let Some(at) = self.writable::<T>(va) else {
            return false;
        };
        // SAFETY: `writable` returned a valid, aligned, writable pointer.
        unsafe { T::store(at, value) };
        true
    }

    /// Stores two adjacent aligned words, each atomically. On a miss, or when `va` is not aligned
    /// to a word, stores nothing and returns false.
    #[inline(always)]
    pub fn store_pair<T: Word>(&self, va: u64, [first, second]: [T; 2]) -> bool {
        let next = va.wrapping_add(T::BYTES as u64);
        let (Some(at), Some(after)) = (self.writable::<T>(va), self.writable::<T>(next)) else {
            return false;
        };
        // SAFETY: `writable` returned valid, aligned, writable pointers.
        unsafe {
            T::store(at, first);
            T::store(after, second);
        }
        true
    }

    /// Replaces an aligned word by `new(old)` without atomicity, as an unlocked read-modify-write
    /// does. Returns the old value.
    #[inline(always)]
    pub fn update<T: Word>(&self, va: u64, new: impl FnOnce(T) -> T) -> Option<T> {
        let at = self.writable::<T>(va)?;
        // SAFETY: as in `store`; a writable page is readable.
        unsafe {
            let old = T::load(at);
            T::store(at, new(old));
            Some(old)
        }
    }

    /// Replaces an aligned word by `new(old)` atomically and sequentially consistent. Returns the
    /// old value.
    #[inline]
    pub fn update_locked<T: Word>(&self, va: u64, new: impl FnMut(T) -> T) -> Option<T> {
        let at = self.writable::<T>(va)?;
        // SAFETY: as in `store`.
        Some(unsafe { T::update_locked(at, new) })
    }

    #[inline(always)]
    fn writable<T: Word>(&self, va: u64) -> Option<*mut u8> {
        let entry = self.pages.entry(va);
        (entry.write == va & (PAGE_MASK | (T::BYTES as u64 - 1)))
            .then(|| entry.host.wrapping_add(va as usize))
    }

    /// The page of `va`, if loads may use it.
    #[inline]
    pub fn readable_page(&self, va: u64) -> Option<HostPage> {
        let entry = self.pages.entry(va);
        (entry.read == va & PAGE_MASK).then(|| Self::page(entry, va, entry.stores()))
    }

    /// The page of `va`, if stores may use it.
    #[inline]
    pub fn writable_page(&self, va: u64) -> Option<HostPage> {
        let entry = self.pages.entry(va);
        (entry.write == va & PAGE_MASK).then(|| Self::page(entry, va, UNTRACKED))
    }

    /// The page of `va` and its frame, if instruction fetches may use it.
    #[inline]
    pub fn executable_page(&self, va: u64) -> Option<(Gfn, HostPage)> {
        let entry = self.pages.entry(va);
        if entry.read != va & PAGE_MASK || entry.frame & 1 == 0 {
            return None;
        }
        Some((
            Gfn::new(entry.frame >> 1)?,
            Self::page(entry, va, entry.stores()),
        ))
    }

    /// The page of `va` and its frame, if `access` may use it.
    #[inline]
    pub fn cached_page(&self, va: u64, access: Access) -> Option<(Gfn, HostPage)> {
        let entry = self.pages.entry(va);
        if !entry.allows(access, va & PAGE_MASK) {
            return None;
        }
        let page = Self::page(entry, va, entry.stores());
        Some((Gfn::new(entry.frame >> 1)?, page))
    }

    fn page(entry: &Entry, va: u64, stores: Stores) -> HostPage {
        let base = entry.host.wrapping_add((va & PAGE_MASK) as usize);
        let base = NonNull::new(base).expect("a valid entry points to a page");
        // SAFETY: a copy of the HostPage that the entry was made of, with no more rights than it
        // had.
        unsafe { HostPage::new(base, stores) }
    }

    /// Caches `page`, with frame `gfn`, as the page of `va`. If `page` describes its whole block,
    /// caches the block too. A write right is ignored for a read-only or write-tracked page.
    pub fn insert(&mut self, va: u64, gfn: Gfn, page: HostPage, rights: Rights) {
        let tag = va & PAGE_MASK;
        let write = rights.write && page.is_writable() && !page.is_write_tracked();
        let entry = Entry {
            read: tag,
            write: if write { tag } else { INVALID },
            host: page.base().as_ptr().wrapping_sub(tag as usize),
            frame: gfn.get() << 1 | u64::from(rights.exec),
        };
        self.pages.insert(va, entry);
        if page.span() == Span::Block && !page.is_write_tracked() {
            assert!(
                (va >> PAGE_SHIFT ^ gfn.get()) & (BLOCK_FRAMES - 1) == 0,
                "a block lies in guest-virtual space as in guest-physical"
            );
            let tag = va >> BLOCK_SHIFT << BLOCK_SHIFT;
            self.blocks.insert(
                va,
                Entry {
                    read: tag,
                    write: if write { tag } else { INVALID },
                    host: entry.host,
                    frame: (gfn.get() / BLOCK_FRAMES) << 1 | u64::from(rights.exec),
                },
            );
        }
    }

    /// After a miss in the page array: looks for a cached block with the right for `access`. If
    /// there is one, returns the page of `va` and its frame, and adds an entry for the page.
    #[inline(always)]
    pub fn refill(&mut self, va: u64, access: Access) -> Option<(Gfn, HostPage)> {
        let block = *self.blocks.entry(va);
        if !block.allows(access, va >> BLOCK_SHIFT << BLOCK_SHIFT) {
            return None;
        }
        let (tag, writable) = (va & PAGE_MASK, block.write == block.read);
        let within = va >> PAGE_SHIFT & (BLOCK_FRAMES - 1);
        let gfn = Gfn::new((block.frame >> 1) * BLOCK_FRAMES + within)?;
        let entry = Entry {
            read: tag,
            write: if writable { tag } else { INVALID },
            host: block.host,
            frame: gfn.get() << 1 | block.frame & 1,
        };
        self.pages.insert(va, entry);
        Some((gfn, Self::page(&entry, va, entry.stores())))
    }

    /// Forgets everything.
    pub fn flush(&mut self) {
        self.pages.flush();
        self.blocks.flush();
    }

    /// Drops every entry of the guest's leaf around `va`. No inserted leaf was larger than
    /// `max_level`, so the entries lie in the aligned range of that size around `va`.
    pub fn forget(&mut self, va: u64, max_level: Level) {
        let shift = max_level.byte_shift();
        self.pages.forget(va, shift);
        if max_level > Level::L4K {
            self.blocks.forget(va, shift);
        }
    }

    /// Clears the write right in every entry of `gfn` and of its block, because the page is
    /// write-tracked from now on.
    pub fn protect(&mut self, gfn: Gfn) {
        self.pages.protect(gfn.get());
        self.blocks.protect(gfn.get() / BLOCK_FRAMES);
    }
}

#[cfg(test)]
mod tests;
