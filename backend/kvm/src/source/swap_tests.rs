//! The way of pages to the swap device and back, without KVM.

use super::Page;
use super::swap::{Content, SwapSide};
use crate::memory::{Mapping, copy_in, copy_out};
use lacuna_addr::{PAGE_SIZE, PageCount};
use lacuna_swap::{Fault, FaultyStore, Swap, SwapError, SwapStore};

const PAGES: usize = 400;

struct Bench {
    swap: SwapSide,
    store: Mapping,
}

impl Bench {
    fn new(device: Box<dyn SwapStore>) -> Self {
        Self {
            swap: SwapSide::new(device, PAGES, PAGES).unwrap(),
            store: Mapping::new(PageCount::new(PAGES as u64)).unwrap(),
        }
    }

    fn put(&self, page: Page, bytes: &[u8; PAGE_SIZE]) {
        // SAFETY: 1. the page is in the mapping.
        unsafe { copy_in(self.store.page(page), bytes) };
    }

    /// The content of a page in the store.
    fn stored(&self, page: Page) -> [u8; PAGE_SIZE] {
        let mut bytes = [0; PAGE_SIZE];
        // SAFETY: 1. the page is in the mapping.
        unsafe { copy_out(self.store.page(page), &mut bytes) };
        bytes
    }

    fn is_back(&self, page: Page, bytes: &[u8; PAGE_SIZE]) -> bool {
        match self.swap.read(page).unwrap() {
            Content::Bytes(found) => found.0 == *bytes,
            Content::Zeros => *bytes == [0; PAGE_SIZE],
            Content::Untouched => false,
        }
    }
}

/// Every fifth page is zeros; the others do not compress.
fn content(page: Page) -> [u8; PAGE_SIZE] {
    let mut state = u64::from(page);
    let mut bytes = [0; PAGE_SIZE];
    if !page.is_multiple_of(5) {
        for word in bytes.as_chunks_mut::<8>().0 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
            *word = state.rotate_left(23).to_le_bytes();
        }
    }
    bytes
}

#[test]
fn pages_leave_the_store_and_come_back() {
    let folder = std::env::temp_dir();
    for kind in [Swap::File(folder), Swap::Memory] {
        let mut bench = Bench::new(kind.open(PageCount::new(PAGES as u64)).unwrap());
        let pages: Vec<Page> = (0..150).collect();
        pages
            .iter()
            .for_each(|page| bench.put(*page, &content(*page)));
        bench.swap.write(&pages, &bench.store).unwrap();
        for page in 0..150 {
            assert_eq!(bench.stored(page), [0; PAGE_SIZE], "{kind:?}, {page}");
            assert!(bench.is_back(page, &content(page)), "{kind:?}, {page}");
            bench.swap.arrived(page);
            assert!(matches!(bench.swap.read(page), Ok(Content::Untouched)));
        }
        assert_eq!(bench.swap.charged(), 0, "{kind:?}");
    }
}

/// What the device does not take stays in the store.
#[test]
fn a_device_without_room_takes_the_first_pages() {
    let device = FaultyStore::new(PageCount::new(1000));
    let mut bench = Bench::new(Box::new(device.clone()));
    let pages: Vec<Page> = (0..100).filter(|page| page % 5 != 0).collect();
    pages
        .iter()
        .for_each(|page| bench.put(*page, &content(*page)));
    device.set_fault(Some(Fault::EndsAt(50)));
    let failed = bench.swap.write(&pages, &bench.store).unwrap_err();
    assert!(matches!(failed.error, SwapError::Full(_)), "{failed:?}");
    assert_eq!(failed.done, 50);
    let (gone, left) = pages.split_at(failed.done);
    assert!(
        gone.iter()
            .all(|page| bench.is_back(*page, &content(*page)))
    );
    assert!(
        left.iter()
            .all(|page| bench.stored(*page) == content(*page))
    );
    // There is room again.
    device.set_fault(None);
    bench.swap.arrived(pages[3]);
    bench.swap.write(left, &bench.store).unwrap();
    assert!(
        left.iter()
            .all(|page| bench.is_back(*page, &content(*page)))
    );
}

#[test]
fn a_failed_write_loses_nothing() {
    let device = FaultyStore::new(PageCount::new(1000));
    let mut bench = Bench::new(Box::new(device.clone()));
    let pages: Vec<Page> = (1..5).collect();
    pages
        .iter()
        .for_each(|page| bench.put(*page, &content(*page)));
    for fault in [Fault::OneWrite, Fault::WriteAfter(2)] {
        device.set_fault(Some(fault));
        let failed = bench.swap.write(&pages, &bench.store);
        let done = failed.map_or_else(|failed| failed.done, |()| pages.len());
        let (gone, left) = pages.split_at(done);
        assert!(
            gone.iter()
                .all(|page| bench.is_back(*page, &content(*page)))
        );
        assert!(
            left.iter()
                .all(|page| bench.stored(*page) == content(*page))
        );
        device.set_fault(None);
        for page in gone {
            bench.swap.arrived(*page);
            bench.put(*page, &content(*page));
        }
    }
}

#[test]
fn bytes_that_were_not_written_are_refused() {
    let device = FaultyStore::new(PageCount::new(1000));
    let mut bench = Bench::new(Box::new(device.clone()));
    bench.put(7, &content(7));
    bench.swap.write(&[7], &bench.store).unwrap();
    device.tamper(|pages| {
        for page in pages.values_mut() {
            page.0[100] ^= 1;
        }
    });
    assert!(matches!(bench.swap.read(7), Err(SwapError::Damaged)));
}
