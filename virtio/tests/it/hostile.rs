//! Drivers that break the rules.

use crate::driver::{Driver, INDIRECT, MEMORY, NEXT, SIZE, VERSION_1, WRITE, access};
use lacuna_machine::{Device, Width};
use lacuna_virtio::{Balloon, Block, Console, Rng, VirtioDevice};
use std::io::Write;
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

/// Where random buffers begin. Nothing names the memory between the rings and here.
const BUFFERS: u64 = 0x80_0000;

/// One act of a driver that may do anything but write registers.
fn scribble<D: VirtioDevice>(random: &mut fastrand::Rng, driver: &Driver<D>) {
    let queue = random.u32(..driver.device.device().queues() as u32);
    let [table, available, used] = Driver::<D>::rings(queue);
    match random.u32(..6) {
        0 => driver.put(available + 2, &random.u16(..).to_le_bytes()),
        1 => driver.put(available + 4, &random.u128(..).to_le_bytes()),
        2 => driver.put(used, &random.u128(..).to_le_bytes()),
        _ => {
            let at = BUFFERS + random.u64(..MEMORY - BUFFERS + 0x1000) / 256 * 256;
            let buffer = (at, random.u32(..0x2000), random.u16(..8));
            let next = random.u16(..SIZE + 1);
            driver.descriptor(table, random.u16(..SIZE), buffer, next);
            driver.publish(queue, random.u16(..SIZE));
            driver.notify(queue);
        }
    }
}

/// Each register and each width, with any value.
fn write_registers<D: VirtioDevice>(random: &mut fastrand::Rng, driver: &Driver<D>) {
    let at = random.u64(..0x204);
    let widths = [Width::Byte, Width::Word, Width::Long, Width::Quad];
    let width = random.choice(widths).expect("one of four");
    driver.device.read(access(at, width));
    driver.device.write(access(at, width), random.u64(..));
    driver.set(random.u32(..0x80) * 4, random.u32(..4));
}

/// Random drivers neither hang a device nor make it write where they have not said. It works again
/// after a reset.
fn survives<D: VirtioDevice>(make: impl Fn() -> D) {
    for seed in 0..100 {
        let mut random = fastrand::Rng::with_seed(seed);
        let driver = Driver::ready(make());
        for _ in 0..50 {
            scribble(&mut random, &driver);
            if random.u32(..8) == 0 {
                driver.device.reset();
                driver.start();
            }
        }
        driver.device.pause();
        let untouched = driver.take(0x20_0000, (BUFFERS - 0x20_0000) as usize);
        assert!(untouched.iter().all(|byte| *byte == 0), "seed {seed}");
        driver.device.resume();
        for _ in 0..100 {
            scribble(&mut random, &driver);
            write_registers(&mut random, &driver);
        }
        driver.set(VIRTIO_MMIO_STATUS, 0);
        assert_eq!(driver.get(VIRTIO_MMIO_STATUS), 0);
        for queue in 0..driver.device.device().queues() as u32 {
            let [_, available, used] = Driver::<D>::rings(queue);
            driver.put(available, &[0; 4]);
            driver.put(used, &[0; 4]);
        }
        driver.start();
        driver.device.pause();
        assert!(!driver.status(VIRTIO_CONFIG_S_NEEDS_RESET), "seed {seed}");
    }
}

#[test]
fn rng_survives_random_drivers() {
    survives(|| Rng);
}

#[test]
fn block_survives_random_drivers() {
    survives(|| {
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(&[0xaa; 64 << 10]).expect("room");
        Block::new(file).expect("its size")
    });
}

#[test]
fn console_survives_random_drivers() {
    survives(|| Console::new(std::io::sink()));
}

#[test]
fn balloon_survives_random_drivers() {
    survives(Balloon::new);
}
