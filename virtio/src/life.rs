//! The state of a device, saved and restored, once for all devices.

use crate::device::VirtioDevice;
use crate::mmio::Mmio;
use crate::queue::QueueState;
use crate::registers::Registers;
use lacuna_machine::StateError;
use serde::{Deserialize, Serialize};

/// The state of a device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MmioState {
    /// The device type.
    pub device: u32,
    /// Its registers and queues.
    pub registers: Registers,
    /// The device's own state.
    pub own: Vec<u8>,
}

fn invalid(field: &'static str, value: impl Into<u64>) -> StateError {
    StateError::Invalid {
        field,
        value: value.into(),
    }
}

impl<D: VirtioDevice> Mmio<D> {
    /// The present state. A request in progress ends first; pause the device, or guest memory may
    /// change after this.
    pub fn state(&self) -> MmioState {
        let control = self.shared.quiet();
        MmioState {
            device: self.device().id(),
            registers: control.registers.clone(),
            own: self.device().save(),
        }
    }

    /// Takes over the state of another device of this kind. The device is paused then, until the
    /// VM has its state too.
    ///
    /// # Errors
    /// [`StateError`], with the name of the field; no register has changed then.
    pub fn set_state(&self, state: &MmioState) -> Result<(), StateError> {
        let new = &state.registers;
        if state.device != self.device().id() {
            return Err(invalid("virtio.device", state.device));
        }
        let not_offered = new.driver_features & !self.features();
        if not_offered != 0 {
            return Err(invalid("virtio.driver_features", not_offered));
        }
        let wrong = |queue: &&QueueState| queue.ready && !queue.is_valid();
        if let Some(queue) = new.queues.iter().find(wrong) {
            return Err(invalid("virtio.queues.size", queue.size));
        }
        if new.queues.len() != self.device().queues() {
            return Err(invalid("virtio.queues", new.queues.len() as u64));
        }
        let mut control = self.shared.quiet();
        self.device().restore(&state.own)?;
        // The rest is as large as the guest believes: a disk, for example.
        let driver = self.device().driver_config();
        let mut config = self.device().config();
        if config.len() == new.config.len() {
            config[driver.clone()].copy_from_slice(&new.config[driver]);
        }
        if config != new.config {
            return Err(invalid("virtio.config", new.config.len() as u64));
        }
        control.registers = new.clone();
        control.fault = None;
        control.paused = true;
        Ok(())
    }
}
