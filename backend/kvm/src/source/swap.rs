//! Swapped-out pages: their way to the swap device, and back.
//!
//! ```text
//! on probation, in the store ──► copied, checksum ──► write to free entries ──► MADV_DONTNEED
//! touched ──► read of the entry, checksum compared ──► UFFDIO_COPY into the guest's mapping
//! ```
//! Only the page source's thread uses it. The thread moves a page to the store first, so no access
//! by address reaches it, and no write is lost between the copy and `MADV_DONTNEED`. Linux refuses
//! to move a page that is pinned for a device.
//!
//! A page of zeros is not written. An entry is free again as soon as its page has arrived: KVM does
//! not say whether the guest writes to the page.

use super::Page;
use crate::memory::{Mapping, copy_in, copy_out};
use lacuna_addr::{PAGE_SIZE, PageCount, Pfn};
use lacuna_swap::{Run, StoreFrames, SwapEntry, SwapError, SwapMap, SwapSpace, SwapStore};
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// The most pages of one write: 128 KiB.
pub const CLUSTER: usize = 32;

/// Where a page is that is neither in the guest's mapping nor in the store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    /// Nowhere: it was never touched.
    Untouched,
    /// It was all zeros.
    Zeros,
    /// On the device.
    Entry(SwapEntry),
}

/// The content of a page that comes back.
pub enum Content {
    /// Zeros of a page that was never touched.
    Untouched,
    /// Zeros of a page that was swapped out.
    Zeros,
    /// Bytes from the device.
    Bytes(Box<lacuna_swap::Page>),
}

/// Why not all pages were written. The first `done` of them are swapped out.
#[derive(Debug)]
pub struct NotWritten {
    pub done: usize,
    pub error: SwapError,
}

/// The swap device of one guest.
pub struct SwapSide {
    device: Box<dyn SwapStore>,
    frames: Arc<Frames>,
    map: SwapMap,
    places: Box<[Place]>,
}

impl SwapSide {
    /// For a guest with `pages` pages and a budget of `budget` resident pages.
    ///
    /// # Errors
    /// The kernel has no addresses for compressed pages.
    pub fn new(mut device: Box<dyn SwapStore>, pages: usize, budget: usize) -> Result<Self, Errno> {
        let frames = Arc::new(Frames::new(budget)?);
        device.attach(Arc::clone(&frames) as Arc<dyn StoreFrames>);
        Ok(Self {
            map: SwapMap::new(device.capacity().get()),
            device,
            frames,
            places: vec![Place::Untouched; pages].into(),
        })
    }

    /// The device's name in messages.
    pub fn describe(&self) -> String {
        self.device.describe()
    }

    /// Pages of the budget that the device has.
    pub fn charged(&self) -> usize {
        self.frames.taken.load(Ordering::Relaxed)
    }

    /// Writes `pages`, whose content is in `store`, and takes it out of there.
    ///
    /// # Errors
    /// The device has no room, or fails.
    pub fn write(&mut self, pages: &[Page], store: &Mapping) -> Result<(), NotWritten> {
        let mut done = 0;
        for cluster in pages.chunks(CLUSTER) {
            let copies: Vec<_> = cluster.iter().map(|page| copy_of(store, *page)).collect();
            let is_zero = |copy: &lacuna_swap::Page| copy.0.iter().all(|byte| *byte == 0);
            let mut written = 0;
            while written < cluster.len() {
                let rest = &copies[written..];
                let run = rest.iter().take_while(|copy| !is_zero(copy)).count();
                let step = match run {
                    0 => {
                        self.places[cluster[written] as usize] = Place::Zeros;
                        Ok(1)
                    }
                    run => self.write_run(&cluster[written..written + run], &rest[..run]),
                };
                match step {
                    Ok(count) => {
                        store.discard(&cluster[written..written + count]);
                        written += count;
                    }
                    Err(error) => {
                        let done = done + written;
                        return Err(NotWritten { done, error });
                    }
                }
            }
            done += cluster.len();
        }
        Ok(())
    }

    /// Writes the first of `pages` to adjacent entries; returns their number, which is not 0.
    fn write_run(
        &mut self,
        pages: &[Page],
        copies: &[lacuna_swap::Page],
    ) -> Result<usize, SwapError> {
        loop {
            let Some(run) = self.map.take(pages.len() as u32) else {
                return Err(SwapError::Full(self.map.why_full().to_owned()));
            };
            let Run { first, count } = run;
            let copies = &copies[..count as usize];
            let checksums: Vec<u32> = copies.iter().map(lacuna_swap::Page::checksum).collect();
            self.map.seal(first, &checksums);
            let (done, error) = match self.device.write(first, copies) {
                Ok(()) => (count as usize, None),
                Err(failed) => (failed.done, Some(failed.error)),
            };
            for (at, page) in (0..).zip(&pages[..done]) {
                self.places[*page as usize] = Place::Entry(first.plus(at));
            }
            (done as u32..count).for_each(|at| self.map.free(first.plus(at)));
            match error {
                Some(SwapError::Ends(reason)) => {
                    let space = self.map.ends_at(first.plus(done as u32), &reason);
                    if done == 0 && space == SwapSpace::Full {
                        return Err(SwapError::Full(reason));
                    }
                }
                Some(error) if done == 0 => return Err(error),
                Some(_) => {}
                None => self.map.has_room_at(first),
            }
            if done > 0 {
                return Ok(done);
            }
        }
    }

    /// The content of `page`, which is neither in the guest's mapping nor in the store.
    ///
    /// # Errors
    /// The device fails, or has other bytes than were written.
    pub fn read(&self, page: Page) -> Result<Content, SwapError> {
        match self.places[page as usize] {
            Place::Untouched => Ok(Content::Untouched),
            Place::Zeros => Ok(Content::Zeros),
            Place::Entry(entry) => {
                let mut bytes = Box::<lacuna_swap::Page>::default();
                self.device.read(entry, &mut bytes)?;
                match bytes.checksum() == self.map.checksum(entry) {
                    true => Ok(Content::Bytes(bytes)),
                    false => Err(SwapError::Damaged),
                }
            }
        }
    }

    /// `page` is in the guest's mapping.
    pub fn arrived(&mut self, page: Page) {
        let place = std::mem::replace(&mut self.places[page as usize], Place::Untouched);
        if let Place::Entry(entry) = place {
            self.device.discard(entry);
            self.map.free(entry);
        }
    }
}

/// A copy of a page in the store.
fn copy_of(store: &Mapping, page: Page) -> lacuna_swap::Page {
    let mut copy = lacuna_swap::Page::ZERO;
    // SAFETY: 1. the page is in the store's mapping.
    unsafe { copy_out(store.page(page), &mut copy.0) };
    copy
}

/// Memory for compressed pages. The page source charges it to the guest's budget.
struct Frames {
    memory: Mapping,
    used: Box<[AtomicU64]>,
    taken: AtomicUsize,
}

impl Frames {
    fn new(budget: usize) -> Result<Self, Errno> {
        Ok(Self {
            memory: Mapping::new(PageCount::new(budget as u64))?,
            used: (0..budget.div_ceil(64))
                .map(|_| AtomicU64::new(0))
                .collect(),
            taken: AtomicUsize::new(0),
        })
    }
}

impl StoreFrames for Frames {
    fn budget(&self) -> usize {
        self.memory.range().pages() as usize
    }

    /// Guest pages never take these frames, so all of them are the device's.
    fn reserve(&self, _: usize) {}

    fn take(&self) -> Option<Pfn> {
        for (at, word) in self.used.iter().enumerate() {
            let free = word.load(Ordering::Relaxed).trailing_ones();
            let frame = at * 64 + free as usize;
            if free < 64 && frame < self.budget() {
                let before = word.fetch_or(1 << free, Ordering::Relaxed);
                debug_assert_eq!(before >> free & 1, 0, "one thread takes frames");
                self.taken.fetch_add(1, Ordering::Relaxed);
                return Some(Pfn::new(frame as u32));
            }
        }
        None
    }

    fn give(&self, frame: Pfn) {
        let index = frame.index();
        let bit = 1 << (index % 64);
        // First, because another thread may take the frame once it is free.
        self.memory.discard(&[index as u32]);
        let before = self.used[index / 64].fetch_and(!bit, Ordering::Relaxed);
        assert!(before & bit != 0, "{frame:?} was not taken");
        self.taken.fetch_sub(1, Ordering::Relaxed);
    }

    fn read(&self, frame: Pfn, offset: usize, into: &mut [u8]) {
        assert!(offset + into.len() <= PAGE_SIZE);
        let at = self.memory.byte(frame.index() as u32, offset);
        // SAFETY: 1. the range is in one page of the mapping.
        unsafe { copy_out(at, into) };
    }

    fn write(&self, frame: Pfn, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= PAGE_SIZE);
        let at = self.memory.byte(frame.index() as u32, offset);
        // SAFETY: 1. the range is in one page of the mapping.
        unsafe { copy_in(at, bytes) };
    }
}
