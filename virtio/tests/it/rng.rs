//! The entropy device, and the transport by its example.

use crate::driver::{Driver, INDIRECT, SIZE, USED_BUFFER, VERSION_1, WRITE, access, wait};
use lacuna_machine::{Device, Logging, Width, harvest, set_logging_everywhere};
use lacuna_virtio::Rng;
use virtio_bindings::virtio_config::*;
use virtio_bindings::virtio_mmio::*;

const AT: u64 = 0x30_0000;

#[test]
fn registers_say_what_the_device_is() {
    let driver = Driver::of(Rng);
    assert_eq!(driver.get(VIRTIO_MMIO_MAGIC_VALUE).to_le_bytes(), *b"virt");
    assert_eq!(driver.get(VIRTIO_MMIO_VERSION), 2);
    assert_eq!(driver.get(VIRTIO_MMIO_DEVICE_ID), 4);
    assert_eq!(driver.get(VIRTIO_MMIO_QUEUE_NUM_MAX), 256);
    driver.set(VIRTIO_MMIO_QUEUE_SEL, 1);
    assert_eq!(driver.get(VIRTIO_MMIO_QUEUE_NUM_MAX), 0);
    assert_eq!(driver.get(VIRTIO_MMIO_SHM_LEN_LOW), u32::MAX);
    assert_ne!(driver.offered() & VERSION_1, 0);
}

#[test]
fn features_are_negotiated() {
    let driver = Driver::of(Rng);
    assert!(!driver.negotiate(0), "without VERSION_1");
    driver.set_driver_ok();
    assert!(!driver.status(VIRTIO_CONFIG_S_DRIVER_OK));
    driver.set(VIRTIO_MMIO_STATUS, 0);
    assert!(!driver.negotiate(VERSION_1 | 1 << 50), "not offered");
    driver.set(VIRTIO_MMIO_STATUS, 0);
    assert_eq!(driver.get(VIRTIO_MMIO_STATUS), 0);
    assert!(driver.negotiate(VERSION_1));
}

#[test]
fn a_request_gets_entropy_and_an_interrupt() {
    let driver = Driver::ready(Rng);
    assert_eq!(driver.get(VIRTIO_MMIO_INTERRUPT_STATUS), 0);
    assert_eq!(
        driver.request(0, &[(AT, 100, WRITE), (AT + 0x1000, 28, WRITE)]),
        128
    );
    assert_ne!(driver.take(AT, 100), [0; 100]);
    assert_eq!(driver.take(AT + 100, 28), [0; 28]);
    assert_ne!(driver.take(AT + 0x1000, 28), [0; 28]);
    wait(|| driver.get(VIRTIO_MMIO_INTERRUPT_STATUS) == USED_BUFFER);
    driver.set(VIRTIO_MMIO_INTERRUPT_ACK, USED_BUFFER);
    assert_eq!(driver.get(VIRTIO_MMIO_INTERRUPT_STATUS), 0);
}

#[test]
fn the_ring_wraps_around() {
    let driver = Driver::ready(Rng);
    for _ in 0..3 * SIZE {
        assert_eq!(driver.request(0, &[(AT, 16, WRITE)]), 16);
    }
}

#[test]
fn a_chain_may_be_an_indirect_table() {
    let driver = Driver::ready(Rng);
    driver.chain(AT, &[(AT + 0x1000, 8, WRITE), (AT + 0x2000, 8, WRITE)]);
    assert_eq!(driver.request(0, &[(AT, 32, INDIRECT)]), 16);
    assert_ne!(driver.take(AT + 0x2000, 8), [0; 8]);
}

#[test]
fn the_driver_may_suppress_interrupts() {
    let driver = Driver::ready(Rng);
    driver.put(Driver::<Rng>::rings(0)[1], &1u16.to_le_bytes());
    assert_eq!(driver.request(0, &[(AT, 16, WRITE)]), 16);
    driver.device.pause();
    assert_eq!(driver.get(VIRTIO_MMIO_INTERRUPT_STATUS), 0);
}

#[test]
fn registers_have_32_bits() {
    let driver = Driver::of(Rng);
    for width in [Width::Byte, Width::Word, Width::Quad] {
        assert_eq!(driver.device.read(access(0, width)), 0);
        driver
            .device
            .write(access(VIRTIO_MMIO_STATUS.into(), width), 1);
    }
    driver
        .device
        .write(access(u64::from(VIRTIO_MMIO_STATUS) + 1, Width::Long), 1);
    assert_eq!(driver.get(VIRTIO_MMIO_STATUS), 0);
}

#[test]
fn dirty_tracking_reports_what_the_device_writes() {
    let driver = Driver::ready(Rng);
    set_logging_everywhere(&*driver.vm, Logging::LAZY).expect("a log");
    assert_eq!(driver.request(0, &[(AT, 16, WRITE)]), 16);
    driver.device.pause();
    let mut pages = Vec::new();
    harvest(&*driver.vm, |_, page| pages.push(page as u64)).expect("a log");
    for at in [AT, Driver::<Rng>::rings(0)[2]] {
        assert!(pages.contains(&(at / 4096)), "{at:#x}: {pages:x?}");
    }
}
