//! Swap compressed in memory: frames of the same budget, several pages in each.
//!
//! ```text
//! frame of class 1024: | page a | page b | (free) | page c |   a slab: one class, a bitmap
//! frame of class 4096: | a page that lz4 does not halve, as it is |
//! ```
//! All stored pages are charged to the budget, because they take its frames. Only 12 bytes an entry
//! and one small tree entry a frame lie outside. Reclaim always leaves a few frames that only this
//! device may take, so that one more page can be compressed when no other frame is free. The device
//! never takes the last part of the budget: pages must have somewhere to be used.

use crate::entry::SwapEntry;
use crate::error::{SwapError, WriteFailed};
use crate::page::Page;
use crate::store::StoreFrames;
use crate::store::{Reads, SwapStore};
use lacuna_addr::{PAGE_SIZE, PageCount, Pfn};
use lacuna_sync::{Mutex, MutexGuard, lock_order};
use lz4_flex::block::{
    CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};

/// The sizes of places in bytes: multiples of 8, chosen so that little of a frame is wasted. A page
/// that does not fit the last but one is stored uncompressed.
const CLASSES: [u16; 13] = [
    64,
    128,
    192,
    256,
    320,
    384,
    512,
    640,
    816,
    1024,
    1360,
    2048,
    PAGE_SIZE as u16,
];
const RAW: usize = CLASSES.len() - 1;
const _: () = assert!(
    PAGE_SIZE / CLASSES[0] as usize <= 64,
    "a slab's places fit its bitmap"
);

/// Compressed memory within the budget.
#[derive(Default)]
pub struct MemoryStore {
    frames: Option<Arc<dyn StoreFrames>>,
    inner: Mutex<Inner, lock_order::CompressedStore>,
}

#[derive(Default)]
struct Inner {
    /// The place of each entry, by its number.
    places: Vec<Option<SlabPlace>>,
    /// Every taken frame, with its used places.
    slabs: BTreeMap<u32, u64>,
    /// Frames with free places, by class.
    partial: [BTreeSet<u32>; CLASSES.len()],
}

#[derive(Clone, Copy)]
struct SlabPlace {
    frame: u32,
    len: u16,
    class: u8,
    index: u8,
}

const _: () = assert!(size_of::<Option<SlabPlace>>() <= 12);

impl SlabPlace {
    fn offset(self) -> usize {
        usize::from(self.index) * usize::from(CLASSES[usize::from(self.class)])
    }
}

impl MemoryStore {
    /// An empty device. Its capacity depends on the budget and on how well pages compress.
    pub fn new() -> Self {
        Self::default()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn frames(&self) -> Result<&dyn StoreFrames, SwapError> {
        let missing = || SwapError::Io("the device was not attached to a budget".into());
        self.frames.as_deref().ok_or_else(missing)
    }

    fn store(&self, entry: SwapEntry, bytes: &[u8]) -> Result<(), SwapError> {
        let frames = self.frames()?;
        let place = self.lock().take(frames, entry, bytes.len())?;
        // Outside the lock: no other thread has this place, and the frame stays while it is used.
        frames.write(Pfn::new(place.frame), place.offset(), bytes);
        Ok(())
    }
}

impl Inner {
    fn take(
        &mut self,
        frames: &dyn StoreFrames,
        entry: SwapEntry,
        len: usize,
    ) -> Result<SlabPlace, SwapError> {
        let class = CLASSES
            .iter()
            .position(|&size| usize::from(size) >= len)
            .unwrap_or(RAW);
        let frame = match self.partial[class].first() {
            Some(&frame) => frame,
            None => self.grow(frames, class)?,
        };
        let places = PAGE_SIZE / usize::from(CLASSES[class]);
        let used = self.slabs.entry(frame).or_default();
        let index = used.trailing_ones();
        *used |= 1 << index;
        if used.count_ones() as usize == places {
            self.partial[class].remove(&frame);
        }
        let place = SlabPlace {
            frame,
            len: len as u16,
            class: class as u8,
            index: index as u8,
        };
        let number = entry.get() as usize;
        if number >= self.places.len() {
            self.places.resize(number + 1, None);
        }
        self.places[number] = Some(place);
        Ok(place)
    }

    fn grow(&mut self, frames: &dyn StoreFrames, class: usize) -> Result<u32, SwapError> {
        let taken = self.slabs.len();
        let full = || {
            SwapError::Full(format!(
                "compressed pages fill {taken} frames of the budget"
            ))
        };
        // The budget may have changed since the last call.
        let budget = frames.budget();
        let kept = (budget / 8).max(1024).min(budget / 2);
        if taken >= budget - kept {
            return Err(full());
        }
        let frame = frames.take().ok_or_else(full)?.index() as u32;
        self.slabs.insert(frame, 0);
        self.partial[class].insert(frame);
        Ok(frame)
    }

    fn free(&mut self, frames: &dyn StoreFrames, place: SlabPlace) {
        let class = usize::from(place.class);
        let Some(used) = self.slabs.get_mut(&place.frame) else {
            return;
        };
        *used &= !(1 << place.index);
        if *used == 0 {
            self.slabs.remove(&place.frame);
            self.partial[class].remove(&place.frame);
            frames.give(Pfn::new(place.frame));
        } else {
            self.partial[class].insert(place.frame);
        }
    }
}

impl SwapStore for MemoryStore {
    fn describe(&self) -> String {
        "compressed memory".into()
    }

    /// The largest number of entries that can be named. How many fit is known only after the pages
    /// are compressed.
    fn capacity(&self) -> PageCount {
        PageCount::new(u64::from(u32::MAX))
    }

    fn attach(&mut self, frames: Arc<dyn StoreFrames>) {
        let budget = frames.budget();
        // Room for a cluster of compressible pages, and for a few others.
        frames.reserve((budget / 64).clamp(8, 64));
        self.frames = Some(frames);
    }

    fn read(&self, entry: SwapEntry, page: &mut Page) -> Result<(), SwapError> {
        let place = self
            .lock()
            .places
            .get(entry.get() as usize)
            .copied()
            .flatten();
        let place = place.ok_or_else(|| SwapError::Io("the swap entry is empty".into()))?;
        let (frames, frame) = (self.frames()?, Pfn::new(place.frame));
        if usize::from(place.class) == RAW {
            frames.read(frame, 0, &mut page.0);
            return Ok(());
        }
        let mut bytes = [0; CLASSES[RAW - 1] as usize];
        let bytes = &mut bytes[..usize::from(place.len)];
        frames.read(frame, place.offset(), bytes);
        match decompress_into(bytes, &mut page.0) {
            Ok(PAGE_SIZE) => Ok(()),
            Ok(len) => Err(SwapError::Io(format!("decompressed to {len} bytes"))),
            Err(error) => Err(SwapError::Io(error.to_string())),
        }
    }

    fn reads(&self) -> Reads<'_> {
        Reads::Immediate
    }

    fn write(&self, first: SwapEntry, pages: &[Page]) -> Result<(), WriteFailed> {
        let mut table = CompressTable::default();
        let mut out = [0; get_maximum_output_size(PAGE_SIZE)];
        for (done, page) in pages.iter().enumerate() {
            let bytes = match compress_into_with_table(&page.0, &mut out, &mut table) {
                Ok(len) if len <= usize::from(CLASSES[RAW - 1]) => &out[..len],
                _ => &page.0[..],
            };
            let stored = self.store(first.plus(done as u32), bytes);
            stored.map_err(|error| WriteFailed { done, error })?;
        }
        Ok(())
    }

    fn discard(&self, entry: SwapEntry) {
        let mut inner = self.lock();
        let place = inner
            .places
            .get_mut(entry.get() as usize)
            .and_then(Option::take);
        if let (Some(place), Some(frames)) = (place, self.frames.as_deref()) {
            inner.free(frames, place);
        }
    }
}
