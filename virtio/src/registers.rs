//! The registers of a device.

use crate::device::VirtioDevice;
use crate::queue::QueueState;
use serde::{Deserialize, Serialize};

/// The registers of virtio-mmio, as they are saved.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Registers {
    /// DeviceFeaturesSel.
    pub device_features_select: u32,
    /// DriverFeaturesSel.
    pub driver_features_select: u32,
    /// The features that the driver accepted.
    pub driver_features: u64,
    /// QueueSel.
    pub queue_select: u32,
    /// Status.
    pub status: u32,
    /// InterruptStatus. The line is high while it is not 0.
    pub interrupt: u32,
    /// ConfigGeneration.
    pub config_generation: u32,
    /// The configuration space.
    pub config: Vec<u8>,
    /// The queues.
    pub queues: Vec<QueueState>,
}

impl Registers {
    /// The registers of `device` after a reset.
    pub(crate) fn of(device: &impl VirtioDevice) -> Self {
        Self {
            config: device.config(),
            queues: vec![QueueState::default(); device.queues()],
            ..Self::default()
        }
    }

    /// Whether Status has all of these bits.
    pub(crate) fn has(&self, bits: u32) -> bool {
        self.status & bits == bits
    }

    /// The selected queue.
    pub(crate) fn queue(&mut self) -> Option<&mut QueueState> {
        self.queues.get_mut(self.queue_select as usize)
    }
}
