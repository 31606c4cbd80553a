//! Drivers that break the rules.

use crate::driver::{Driver, INDIRECT, MEMORY, NEXT, SIZE, VERSION_1, WRITE, access};
use lacuna_machine::{Device, Width};
use lacuna_virtio::Rng;
use virtio_bindings::virtio_config::*;
use virtio_bindings::virtio_mmio::*;

const AT: u64 = 0x30_0000;

/// Rings that cannot be are refused; the rest fault at their first use.
#[test]
fn rings_are_checked() {
    let driver = Driver::of(Rng);
    assert!(driver.negotiate(VERSION_1));
    let good = Driver::<Rng>::rings(0);
    let [descriptors, available, used] = good;
    for (size, rings) in [
        (0, good),
        (3, good),
        (512, good),
        (0x10010, good),
        (16, [descriptors + 8, available, used]),
        (16, [descriptors, available + 1, used]),
        (16, [descriptors, available, used + 2]),
        (16, [descriptors, available, 1 << 48]),
        (16, [!15, available, used]),
    ] {
        driver.set_rings(0, size, rings);
        assert_eq!(driver.get(VIRTIO_MMIO_QUEUE_READY), 0, "{size} {rings:x?}");
    }
}

#[test]
fn rings_outside_of_memory_need_a_reset() {
    let good = Driver::<Rng>::rings(0);
    for ring in 0..3 {
        for at in [MEMORY, (1 << 48) - 16] {
            let driver = Driver::of(Rng);
            assert!(driver.negotiate(VERSION_1));
            let mut rings = good;
            rings[ring] = at;
            driver.chain(good[0], &[(AT, 16, WRITE)]);
            driver.publish(0, 0);
            driver.set_rings(0, 256, rings);
            driver.set_driver_ok();
            driver.broken();
        }
    }
}

/// The device does nothing until a reset, and works after it.
fn breaks(prepare: impl Fn(&Driver<Rng>)) {
    let driver = Driver::ready(Rng);
    prepare(&driver);
    driver.notify(0);
    driver.broken();
    let before = driver.used_index(0);
    driver.notify(0);
    driver.device.pause();
    driver.device.resume();
    assert_eq!(driver.used_index(0), before);
    driver.set(VIRTIO_MMIO_STATUS, 0);
    assert_eq!(driver.get(VIRTIO_MMIO_INTERRUPT_STATUS), 0);
    assert_eq!(driver.device.fault(), None);
    let [_, available, used] = Driver::<Rng>::rings(0);
    driver.put(available, &[0; 4]);
    driver.put(used, &[0; 4]);
    driver.start();
    assert_eq!(driver.request(0, &[(AT, 16, WRITE)]), 16);
}

#[test]
fn broken_chains_need_a_reset() {
    let [table, available, _] = Driver::<Rng>::rings(0);
    // A loop.
    breaks(|driver| {
        driver.descriptor(table, 0, (AT, 16, WRITE | NEXT), 1);
        driver.descriptor(table, 1, (AT, 16, WRITE | NEXT), 0);
        driver.publish(0, 0);
    });
    // A head, and a next descriptor, outside of the table.
    breaks(|driver| driver.publish(0, SIZE));
    breaks(|driver| {
        driver.descriptor(table, 0, (AT, 16, WRITE | NEXT), SIZE);
        driver.publish(0, 0);
    });
    // More chains than entries.
    breaks(|driver| driver.put(available + 2, &(SIZE + 1).to_le_bytes()));
    // Readable behind writable.
    breaks(|driver| {
        driver.chain(table, &[(AT, 16, WRITE), (AT, 16, 0)]);
        driver.publish(0, 0);
    });
    // More than 4 GiB.
    breaks(|driver| driver.submit(0, &[(AT, 1 << 31, WRITE), (AT, 1 << 31, WRITE)]));
    // No writable buffer, and empty ones.
    breaks(|driver| driver.submit(0, &[(AT, 16, 0)]));
    breaks(|driver| driver.submit(0, &[(AT, 0, WRITE), (AT, 0, WRITE)]));
}

#[test]
fn broken_indirect_tables_need_a_reset() {
    let [table, ..] = Driver::<Rng>::rings(0);
    breaks(|driver| {
        driver.chain(AT, &[(AT, 16, INDIRECT)]);
        driver.submit(0, &[(AT, 16, INDIRECT)]);
    });
    for bytes in [0, 8, 17] {
        breaks(|driver| driver.submit(0, &[(AT, bytes, INDIRECT)]));
    }
    breaks(|driver| {
        driver.descriptor(table, 0, (AT, 16, INDIRECT | NEXT), 1);
        driver.publish(0, 0);
    });
    breaks(|driver| driver.submit(0, &[(MEMORY, 16, INDIRECT)]));
    breaks(|driver| driver.submit(0, &[(u64::MAX - 8, 64, INDIRECT)]));
    // A long loop.
    breaks(|driver| {
        driver.descriptor(AT, 0, (AT, 16, WRITE | NEXT), 0);
        driver.submit(0, &[(AT, 1 << 20, INDIRECT)]);
    });
}

#[test]
fn buffers_outside_of_memory_need_a_reset() {
    for at in [MEMORY, MEMORY - 8, (1 << 48) - 8, u64::MAX - 8] {
        breaks(|driver| driver.submit(0, &[(at, 16, WRITE)]));
    }
}

/// Notifications before DRIVER_OK, and of queues that do not exist, do nothing.
#[test]
fn early_notifications_do_nothing() {
    let driver = Driver::of(Rng);
    for queue in [0, 1, 31, 32, u32::MAX] {
        driver.notify(queue);
    }
    assert!(driver.negotiate(VERSION_1));
    driver.set_rings(0, SIZE.into(), Driver::<Rng>::rings(0));
    driver.submit(0, &[(AT, 16, WRITE)]);
    driver.device.pause();
    driver.device.resume();
    assert_eq!(driver.used_index(0), 0);
    driver.set_driver_ok();
    assert_eq!(driver.used_after(0, 0), 16);
    for queue in [1, 31, 32, u32::MAX] {
        driver.notify(queue);
    }
    assert_eq!(driver.request(0, &[(AT, 16, WRITE)]), 16);
}

/// A driver that never stops: each register of each width, rings of random bytes, and random
/// descriptors. The device survives, and answers a good driver afterwards.
#[test]
fn random_drivers_break_nothing() {
    for seed in 0..300 {
        let mut random = fastrand::Rng::with_seed(seed);
        let driver = Driver::ready(Rng);
        let [table, available, used] = Driver::<Rng>::rings(0);
        for _ in 0..100 {
            match random.u32(..8) {
                0 => {
                    let at = random.u64(..0x204);
                    let width = random.choice([Width::Byte, Width::Word, Width::Long, Width::Quad]);
                    let width = width.expect("one of four");
                    driver.device.read(access(at, width));
                    driver.device.write(access(at, width), random.u64(..));
                }
                1 => driver.set(random.u32(..0x80) * 4, random.u32(..4)),
                2 => driver.put(available + 2, &random.u16(..).to_le_bytes()),
                3 => driver.put(available + 4, &random.u128(..).to_le_bytes()),
                4 => driver.put(used, &random.u128(..).to_le_bytes()),
                _ => {
                    let at = random.u64(..MEMORY + 0x1000) & !0xff;
                    let bytes = random.u32(..0x2000);
                    let buffer = (at | 0x80_0000, bytes, random.u16(..8));
                    driver.descriptor(table, random.u16(..SIZE), buffer, random.u16(..SIZE + 1));
                    driver.publish(0, random.u16(..SIZE));
                    driver.notify(0);
                }
            }
        }
        driver.set(VIRTIO_MMIO_STATUS, 0);
        assert_eq!(driver.get(VIRTIO_MMIO_STATUS), 0);
        driver.put(available, &[0; 4]);
        driver.put(used, &[0; 4]);
        driver.start();
        assert_eq!(driver.request(0, &[(AT, 16, WRITE)]), 16);
        assert!(!driver.status(VIRTIO_CONFIG_S_NEEDS_RESET));
    }
}
