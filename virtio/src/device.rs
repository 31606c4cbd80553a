//! The interface between the transport and a device.

use crate::guest::{Fault, Guest};
use crate::queue::Chain;
use lacuna_machine::StateError;
use std::ops::Range;

/// What a device does with a chain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// It is done, and has written so many bytes.
    Used(u32),
    /// The device has nothing for it yet. The chain stays available until the queue is notified.
    Later,
}

/// A device behind [`Mmio`](crate::Mmio). The worker thread handles one request at a time. Other
/// threads may call the rest meanwhile.
pub trait VirtioDevice: Send + Sync + 'static {
    /// The device type (virtio 1.2, 5).
    fn id(&self) -> u32;

    /// The number of its queues, at most 31.
    fn queues(&self) -> usize;

    /// The offered features of the device type. The transport adds its own.
    fn features(&self) -> u64 {
        0
    }

    /// The configuration space, before the driver's writes.
    fn config(&self) -> Vec<u8> {
        Vec::new()
    }

    /// The bytes of the configuration space that the driver writes.
    fn driver_config(&self) -> Range<usize> {
        0..0
    }

    /// Whether the device discards guest memory. [`Mmio::new`](crate::Mmio::new) refuses such a
    /// device if the VM has no [`Vm::balloon`](lacuna_machine::Vm::balloon).
    fn discards(&self) -> bool {
        false
    }

    /// Handles one request.
    ///
    /// # Errors
    /// The request breaks the specification so that it has no answer: the device needs a reset.
    fn handle(&self, queue: usize, chain: &Chain, guest: &Guest<'_>) -> Result<Answer, Fault>;

    /// The device is paused: no request is in progress, and none begins until it is resumed. The
    /// state is saved afterwards.
    fn paused(&self) {}

    /// The device's own state, beyond registers and queues. No request is in progress.
    fn save(&self) -> Vec<u8> {
        Vec::new()
    }

    /// Takes over the state of another such device. No request is in progress.
    ///
    /// # Errors
    /// The state is not valid; nothing has changed then.
    fn restore(&self, state: &[u8]) -> Result<(), StateError> {
        match state.len() {
            0 => Ok(()),
            bytes => Err(StateError::Invalid {
                field: "virtio.own",
                value: bytes as u64,
            }),
        }
    }
}
