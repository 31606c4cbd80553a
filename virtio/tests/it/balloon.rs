//! The balloon device.

use crate::driver::{Driver, MEMORY, WRITE, access, line};
use lacuna_addr::PageCount;
use lacuna_machine::{Device, Vm as _, Width};
use lacuna_virtio::{Balloon, Mmio};
use virtio_bindings::virtio_mmio::*;

const LIST: u64 = 0x30_0000;
const PAGES: u64 = 0x80_0000;

/// Writes the numbers of pages, and returns the buffer.
fn list(driver: &Driver<Balloon>, numbers: &[u64]) -> (u64, u32, u16) {
    let raw: Vec<u8> = numbers
        .iter()
        .flat_map(|n| (*n as u32).to_le_bytes())
        .collect();
    driver.put(LIST, &raw);
    (LIST, raw.len() as u32, 0)
}

#[test]
fn inflated_pages_are_discarded() {
    let driver = Driver::ready(Balloon::new());
    driver.put(PAGES, &[1; 64 << 10]);
    let first = PAGES / 4096;
    // Not ascending, twice, and outside of memory.
    let numbers = [
        first + 3,
        first + 1,
        first + 2,
        first + 8,
        first + 8,
        MEMORY / 4096,
        0xffff_ffff,
    ];
    let buffer = list(&driver, &numbers);
    assert_eq!(driver.request(0, &[buffer]), 0);
    for page in 0..16 {
        let is_gone = [1, 2, 3, 8].contains(&page);
        let expected = if is_gone { 0 } else { 1 };
        assert_eq!(
            driver.take(PAGES + page * 4096, 4096),
            [expected; 4096],
            "{page}"
        );
    }
    driver.put(PAGES, &[1; 64 << 10]);
    let buffer = list(&driver, &[first, first + 1]);
    let before = driver.vm.stats().resident;
    assert_eq!(driver.request(0, &[buffer]), 0);
    assert!(driver.vm.stats().resident < before);
    assert_eq!(driver.request(1, &[buffer]), 0);
}

/// Queue 4 is the specification's, and queue 2 is Linux's. Parts of pages are kept.
#[test]
fn reported_pages_are_discarded() {
    for queue in [2, 4] {
        let driver = Driver::ready(Balloon::new());
        driver.put(PAGES, &[1; 64 << 10]);
        let reported = [
            (PAGES, 8192, WRITE),
            (PAGES + 0x4100, 0x2000, WRITE),
            (MEMORY, 4096, WRITE),
            (u64::MAX - 10, 4096, WRITE),
            (PAGES + 0x8010, 16, WRITE),
        ];
        assert_eq!(driver.request(queue, &reported), 0);
        for page in 0..16 {
            let expected = if [0, 1, 5].contains(&page) { 0 } else { 1 };
            assert_eq!(
                driver.take(PAGES + page * 4096, 4096),
                [expected; 4096],
                "{page}"
            );
        }
    }
}

#[test]
fn the_target_is_configuration() {
    let mut driver = Driver::ready(Balloon::new());
    let generation = driver.get(VIRTIO_MMIO_CONFIG_GENERATION);
    driver.device.set_target(PageCount::new(100));
    assert_ne!(driver.get(VIRTIO_MMIO_CONFIG_GENERATION), generation);
    assert_eq!(
        driver.get(VIRTIO_MMIO_INTERRUPT_STATUS),
        VIRTIO_MMIO_INT_CONFIG
    );
    assert_eq!(driver.get(VIRTIO_MMIO_CONFIG), 100);
    driver.set(VIRTIO_MMIO_CONFIG, 7);
    driver.set(VIRTIO_MMIO_CONFIG + 4, 0x1234);
    driver.device.write(access(0x105, Width::Byte), 0x56);
    assert_eq!(driver.device.actual(), PageCount::new(0x5634));
    assert_eq!(driver.get(VIRTIO_MMIO_CONFIG), 100);
    let state = driver.device.state();
    driver.device = Mmio::new(&driver.vm, line(&driver.vm), Balloon::new()).expect("a thread");
    driver.device.set_state(&state).expect("a good state");
    assert_eq!(driver.device.state(), state);
    assert_eq!(driver.device.actual(), PageCount::new(0x5634));
    driver.device.reset();
    assert_eq!(driver.device.actual(), PageCount::new(0));
    assert_eq!(driver.get(VIRTIO_MMIO_CONFIG), 100);
}

#[test]
fn an_endless_list_needs_a_reset() {
    let driver = Driver::ready(Balloon::new());
    driver.submit(0, &[(LIST, 1 << 20, 0)]);
    driver.broken();
}
