//! Pause, resume, save, restore and reset.

use crate::driver::{Driver, WRITE, line};
use lacuna_machine::{Device, StateError};
use lacuna_virtio::{Mmio, MmioState, Rng};
use virtio_bindings::virtio_mmio::*;

const AT: u64 = 0x30_0000;

/// Requests made during a pause are handled by the device that takes over the state.
#[test]
fn a_device_moves_with_requests_in_its_ring() {
    let mut driver = Driver::ready(Rng);
    assert_eq!(driver.request(0, &[(AT, 16, WRITE)]), 16);
    driver.device.pause();
    driver.submit(0, &[(AT, 32, WRITE)]);
    let state = driver.device.state();
    assert_eq!(driver.used_index(0), 1);
    driver.device = Mmio::new(&driver.vm, line(&driver.vm), Rng).expect("a thread");
    driver.device.set_state(&state).expect("a good state");
    assert_eq!(driver.device.state(), state);
    assert_eq!(driver.get(VIRTIO_MMIO_INTERRUPT_STATUS), 1);
    assert_eq!(driver.used_index(0), 1, "it is paused");
    driver.device.resume();
    assert_eq!(driver.used_after(0, 1), 32);
}

#[test]
fn a_paused_device_is_reset() {
    let driver = Driver::ready(Rng);
    driver.device.pause();
    driver.submit(0, &[(AT, 16, WRITE)]);
    driver.device.reset();
    driver.device.resume();
    assert_eq!(driver.get(VIRTIO_MMIO_STATUS), 0);
    assert_eq!(driver.used_index(0), 0);
}

#[test]
fn a_damaged_state_is_refused_by_name() {
    let driver = Driver::ready(Rng);
    let good = driver.device.state();
    let refused = |damage: &dyn Fn(&mut MmioState)| {
        let mut state = good.clone();
        damage(&mut state);
        match driver.device.set_state(&state) {
            Err(StateError::Invalid { field, .. }) => field,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(refused(&|state| state.device = 2), "virtio.device");
    let field = refused(&|state| state.registers.driver_features |= 1 << 40);
    assert_eq!(field, "virtio.driver_features");
    assert_eq!(
        refused(&|state| state.registers.queues.clear()),
        "virtio.queues"
    );
    let field = refused(&|state| state.registers.queues[0].size = 3);
    assert_eq!(field, "virtio.queues.size");
    assert_eq!(
        refused(&|state| state.registers.config.push(0)),
        "virtio.config"
    );
    assert_eq!(refused(&|state| state.own.push(0)), "virtio.own");
    assert_eq!(driver.device.state(), good);
    assert_eq!(driver.request(0, &[(AT, 16, WRITE)]), 16);
}
