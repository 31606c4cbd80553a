//! A processor's translation cache: guest-virtual page to host pointer.
//!
//! Direct-mapped. One entry is half a cache line:
//!
//! ```text
//!   read  : page address, if loads may use the entry          \ one compare decides page, right
//!   write : page address, if stores may (D set, not watched)  / and alignment (`Tlb::load`)
//!   host  : host page - page address, so that host + va is the byte
//!   frame : gfn << 1 | executable
//! ```
//!
//! A translation is the same for every privilege level that may use it at all; the processor keeps
//! one `Tlb` for supervisor and one for user accesses, so the privilege needs no bit here.
//!
//! An entry is a copy of a [`HostPage`], and lives no longer: until the vCPU's next quiescent
//! point. Who takes pages back pokes the vCPU (`VcpuSlot::FLUSH`), and the vCPU's owner flushes its
//! TLBs before it enters the processor again. That is part of the contract of the `unsafe trait
//! Bus`.

use crate::{HostPage, Word};
use lacuna_addr::{Gfn, PAGE_SHIFT, PAGE_SIZE};
use std::ptr::NonNull;

/// Entries: 512 KiB of table, which covers 64 MiB. A flush and [`Tlb::protect`] look at the bitmap
/// of used entries, 2 KiB, and at those. docs/speed-x86.md has what the size is worth.
const ENTRIES: usize = 4096;
const PAGE_MASK: u64 = !(PAGE_SIZE as u64 - 1);
/// Never equal to a masked address: its low bits are all ones.
const INVALID: u64 = u64::MAX;

/// What a translation allows beyond reading.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rights {
    /// Stores: stage 1 writable with D set, stage 2 writable with D set, page not watched.
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

/// A direct-mapped cache of translations for one privilege.
pub struct Tlb {
    entries: Box<[Entry; ENTRIES]>,
    /// A bit for each entry that is not empty, so that a flush costs what was used.
    used: [u64; ENTRIES / 64],
}

// SAFETY: the raw pointers are copies of HostPages, which belong to a vCPU, not to a thread: they
// stay valid until that vCPU's next quiescent point wherever it runs. Access through them is
// atomic.
unsafe impl Send for Tlb {}

impl Default for Tlb {
    fn default() -> Self {
        let entries = vec![EMPTY; ENTRIES].into_boxed_slice();
        let Ok(entries) = entries.try_into() else {
            unreachable!("the length is ENTRIES")
        };
        Self {
            entries,
            used: [0; ENTRIES / 64],
        }
    }
}

impl Tlb {
    #[inline(always)]
    fn index(va: u64) -> usize {
        (va >> PAGE_SHIFT) as usize & (ENTRIES - 1)
    }

    #[inline(always)]
    fn entry(&self, va: u64) -> &Entry {
        &self.entries[Self::index(va)]
    }

    /// Loads an aligned word; `None` on a miss or when `va` is not aligned to it.
    #[inline(always)]
    pub fn load<T: Word>(&self, va: u64) -> Option<T> {
        let entry = self.entry(va);
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
        let entry = self.entry(va);
        (entry.write == va & (PAGE_MASK | (T::BYTES as u64 - 1)))
            .then(|| entry.host.wrapping_add(va as usize))
    }

    /// The page that holds `va`, if loads may use it.
    #[inline]
    pub fn readable_page(&self, va: u64) -> Option<HostPage> {
        let entry = self.entry(va);
        (entry.read == va & PAGE_MASK).then(|| Self::page(entry, va, entry.write == entry.read))
    }

    /// The page that holds `va`, if stores may use it.
    #[inline]
    pub fn writable_page(&self, va: u64) -> Option<HostPage> {
        let entry = self.entry(va);
        (entry.write == va & PAGE_MASK).then(|| Self::page(entry, va, true))
    }

    /// The page that holds `va` and its frame, if instructions may be fetched from it.
    #[inline]
    pub fn executable_page(&self, va: u64) -> Option<(Gfn, HostPage)> {
        let entry = self.entry(va);
        if entry.read != va & PAGE_MASK || entry.frame & 1 == 0 {
            return None;
        }
        Some((
            Gfn::new(entry.frame >> 1)?,
            Self::page(entry, va, entry.write == entry.read),
        ))
    }

    fn page(entry: &Entry, va: u64, writable: bool) -> HostPage {
        let base = entry.host.wrapping_add((va & PAGE_MASK) as usize);
        let base = NonNull::new(base).expect("a valid entry points to a page");
        // SAFETY: a copy of the HostPage that the entry was made of, with no more rights than it
        // had.
        unsafe { HostPage::new(base, writable, !writable) }
    }

    /// Remembers that `va`'s page is `page`, frame `gfn`. A write right is ignored when the page
    /// itself is read-only or watched.
    pub fn insert(&mut self, va: u64, gfn: Gfn, page: HostPage, rights: Rights) {
        let tag = va & PAGE_MASK;
        let write = rights.write && page.is_writable() && !page.is_watched();
        let index = Self::index(va);
        self.used[index / 64] |= 1 << (index % 64);
        self.entries[index] = Entry {
            read: tag,
            write: if write { tag } else { INVALID },
            host: page.base().as_ptr().wrapping_sub(tag as usize),
            frame: gfn.get() << 1 | u64::from(rights.exec),
        };
    }

    /// Forgets everything.
    pub fn flush(&mut self) {
        for (word, used) in self.used.iter_mut().enumerate() {
            while *used != 0 {
                self.entries[word * 64 + used.trailing_zeros() as usize] = EMPTY;
                *used &= *used - 1;
            }
        }
    }

    /// Takes the write right from every translation to `gfn`: it is watched from now on.
    pub fn protect(&mut self, gfn: Gfn) {
        for (word, mut used) in self.used.into_iter().enumerate() {
            while used != 0 {
                let entry = &mut self.entries[word * 64 + used.trailing_zeros() as usize];
                if entry.frame >> 1 == gfn.get() {
                    entry.write = INVALID;
                }
                used &= used - 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(align(4096))]
    struct Frame([u8; PAGE_SIZE]);

    fn frame(writable: bool, watched: bool) -> (Box<Frame>, HostPage) {
        let mut memory = Box::new(Frame([0; PAGE_SIZE]));
        let base = NonNull::from(&mut memory.0).cast();
        // SAFETY: page-aligned, and the box outlives the test's use of the page.
        let page = unsafe { HostPage::new(base, writable, watched) };
        (memory, page)
    }

    fn gfn(n: u64) -> Gfn {
        Gfn::new(n).expect("small")
    }

    const ALL: Rights = Rights {
        write: true,
        exec: true,
    };

    #[test]
    fn hits_only_the_page_right_and_alignment_it_holds() {
        let (_memory, page) = frame(true, false);
        let mut tlb = Tlb::default();
        let va = 0xffff_8000_1234_5000;
        assert_eq!(tlb.load::<u8>(va), None);
        tlb.insert(va, gfn(7), page, ALL);
        assert!(tlb.store(va + 8, 0x1122_3344_5566_7788_u64));
        assert_eq!(tlb.load::<u32>(va + 12), Some(0x1122_3344));
        assert_eq!(tlb.load::<u32>(va + 13), None, "misaligned");
        assert_eq!(tlb.load::<u8>(va + 13), Some(0x33));
        assert_eq!(tlb.load::<u64>(va + 4096), None, "another page");
        assert_eq!(
            tlb.load::<u64>(va + 4096 * ENTRIES as u64),
            None,
            "another page, same entry"
        );
        assert_eq!(
            tlb.update(va + 8, |v: u64| v + 1),
            Some(0x1122_3344_5566_7788)
        );
        assert_eq!(
            tlb.update_locked(va + 8, |v: u64| v + 1),
            Some(0x1122_3344_5566_7789)
        );
        assert_eq!(tlb.executable_page(va).map(|(gfn, _)| gfn), Some(gfn(7)));
    }

    #[test]
    fn an_empty_entry_matches_no_address() {
        let tlb = Tlb::default();
        for va in [0, 1, 7, 0xfff, u64::MAX, u64::MAX - 7] {
            assert_eq!(tlb.load::<u8>(va), None);
            assert_eq!(tlb.load::<u64>(va), None);
            assert!(!tlb.store(va, 0_u16));
            assert!(tlb.executable_page(va).is_none());
        }
    }

    #[test]
    fn read_only_and_watched_pages_take_no_stores() {
        for (writable, watched) in [(false, false), (true, true)] {
            let (_memory, page) = frame(writable, watched);
            let mut tlb = Tlb::default();
            tlb.insert(0x1000, gfn(1), page, ALL);
            assert!(!tlb.store(0x1000, 1_u8));
            assert!(tlb.writable_page(0x1000).is_none());
            assert_eq!(tlb.load::<u8>(0x1000), Some(0));
        }
    }

    #[test]
    fn protect_and_flush() {
        let (_memory, page) = frame(true, false);
        let mut tlb = Tlb::default();
        tlb.insert(0x1000, gfn(1), page, ALL);
        tlb.insert(0x5000, gfn(1), page, ALL);
        tlb.insert(0x6000, gfn(2), page, Rights { exec: false, ..ALL });
        tlb.protect(gfn(1));
        assert!(!tlb.store(0x1000, 1_u8) && !tlb.store(0x5000, 1_u8) && tlb.store(0x6000, 1_u8));
        assert!(tlb.executable_page(0x6000).is_none());
        tlb.flush();
        assert_eq!(tlb.load::<u8>(0x1000), None);
        assert_eq!(tlb.load::<u8>(0x6000), None);
    }
}
