//! Each device against a plain map of its pages.

use lacuna_addr::{PAGE_SIZE, PageCount, Pfn};
use lacuna_swap::{FileStore, MemoryStore, Page, StoreFrames, SwapEntry, SwapError, SwapStore};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Entries that the test uses.
const ENTRIES: u32 = 500;
const BUDGET: usize = 400;

/// A budget with no other user. The taken frames have their bytes.
#[derive(Default)]
struct Frames {
    taken: Mutex<BTreeMap<usize, Box<[u8; PAGE_SIZE]>>>,
}

impl StoreFrames for Frames {
    fn budget(&self) -> usize {
        BUDGET
    }

    fn reserve(&self, frames: usize) {
        assert!(frames < BUDGET);
    }

    fn take(&self) -> Option<Pfn> {
        let mut taken = self.taken.lock().unwrap();
        let free = (0..BUDGET).find(|frame| !taken.contains_key(frame))?;
        taken.insert(free, Box::new([0xee; PAGE_SIZE]));
        Some(Pfn::new(free as u32))
    }

    fn give(&self, frame: Pfn) {
        let given = self.taken.lock().unwrap().remove(&frame.index());
        assert!(given.is_some(), "{frame:?} was not taken");
    }

    fn read(&self, frame: Pfn, offset: usize, into: &mut [u8]) {
        let taken = self.taken.lock().unwrap();
        into.copy_from_slice(&taken[&frame.index()][offset..offset + into.len()]);
    }

    fn write(&self, frame: Pfn, offset: usize, bytes: &[u8]) {
        let mut taken = self.taken.lock().unwrap();
        let frame = taken.get_mut(&frame.index()).expect("a taken frame");
        frame[offset..offset + bytes.len()].copy_from_slice(bytes);
    }
}

/// A page that compresses well, badly, or not at all.
fn page(rng: &mut fastrand::Rng) -> Page {
    let mut page = Page::ZERO;
    let noise = [0, 16, 300, 1200, PAGE_SIZE][rng.usize(..5)];
    rng.fill(&mut page.0[..noise]);
    page.0[PAGE_SIZE - 1] = rng.u8(..);
    page
}

/// Writes runs of pages, reads them, and discards them, in random order. A device may be full. Then
/// the pages before the failure are stored, and the others are not.
fn check(device: &dyn SwapStore, seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut model: BTreeMap<u32, Page> = BTreeMap::new();
    for _ in 0..3000 {
        let first = rng.u32(..ENTRIES);
        match rng.u8(..3) {
            0 => {
                let free = (first..ENTRIES).take_while(|entry| !model.contains_key(entry));
                let count = free.take(rng.usize(1..32)).count();
                let pages: Vec<Page> = (0..count).map(|_| page(&mut rng)).collect();
                let stored = match device.write(SwapEntry::new(first), &pages) {
                    Ok(()) => count,
                    Err(failed) => {
                        assert!(matches!(failed.error, SwapError::Full(_)), "{failed}");
                        assert!(failed.done < count);
                        failed.done
                    }
                };
                model.extend((first..).zip(pages).take(stored));
            }
            1 => {
                if model.remove(&first).is_some() {
                    device.discard(SwapEntry::new(first));
                }
            }
            _ => {
                if let Some(stored) = model.get(&first) {
                    let mut page = Page([0x77; PAGE_SIZE]);
                    device.read(SwapEntry::new(first), &mut page).unwrap();
                    assert!(page.0 == stored.0, "seed {seed}, entry {first}");
                    assert_eq!(page.checksum(), stored.checksum());
                }
            }
        }
    }
    for entry in model.into_keys() {
        device.discard(SwapEntry::new(entry));
    }
}

#[test]
fn a_file_has_what_was_written() {
    let dir = tempfile::tempdir().unwrap();
    let device = FileStore::create(dir.path(), PageCount::new(ENTRIES.into())).unwrap();
    for seed in 0..4 {
        check(&device, seed);
    }
}

/// All frames are given back in the end, and the device never takes the last part of the budget.
#[test]
fn compressed_memory_has_what_was_written() {
    let frames = Arc::new(Frames::default());
    let mut device = MemoryStore::new();
    device.attach(Arc::clone(&frames) as Arc<dyn StoreFrames>);
    for seed in 0..4 {
        check(&device, seed);
        assert!(frames.taken.lock().unwrap().is_empty(), "seed {seed}");
    }
    let pages: Vec<Page> = (0..BUDGET).map(|_| Page([0; PAGE_SIZE])).collect();
    let mut rng = fastrand::Rng::with_seed(7);
    let noise: Vec<Page> = pages
        .into_iter()
        .map(|mut page| {
            rng.fill(&mut page.0);
            page
        })
        .collect();
    let failed = device.write(SwapEntry::new(0), &noise).unwrap_err();
    assert!(matches!(failed.error, SwapError::Full(_)), "{failed}");
    assert_eq!(failed.done, BUDGET / 2);
    assert_eq!(frames.taken.lock().unwrap().len(), BUDGET / 2);
}

/// A device in memory needs frames before it stores anything.
#[test]
fn compressed_memory_without_frames_refuses() {
    let device = MemoryStore::new();
    let failed = device.write(SwapEntry::new(0), &[Page::ZERO]).unwrap_err();
    assert_eq!(failed.done, 0);
    assert!(matches!(failed.error, SwapError::Io(_)), "{failed}");
}
