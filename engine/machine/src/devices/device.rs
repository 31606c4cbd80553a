//! A device of a VMM: its interface.

use crate::{Ending, Width};
use serde::{Deserialize, Serialize};
use std::fmt;

/// An access of a vCPU to a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Access {
    /// Bytes from the beginning of the device's range.
    pub offset: u64,
    /// How many bytes.
    pub width: Width,
    /// The number of the vCPU.
    pub vcpu: usize,
}

/// A device of a VMM's own. A device without a state and without threads has
/// [`Device::read`] and [`Device::write`] alone.
///
/// ```text
/// PlatformDevices::add_mmio ─► read, write (vCPUs) ─► PlatformDevices::remove
///
/// save      vCPUs stop ─► pause ─► save; the last pages ─► resume ─► vCPUs run
/// restore   accepts ─► the memory ─► pause ─► restore ─► resume ─► vCPUs run
/// ```
/// Several vCPUs may access the device at once. The other functions are called by one thread at a
/// time, and no vCPU accesses the device meanwhile.
///
/// If a function panics, the run ends with [`Ending::Device`], which names the device. The vCPUs'
/// threads survive the panic, and end with the run.
pub trait Device: Send + Sync {
    /// A read. Bits beyond its width are dropped.
    fn read(&self, access: Access) -> u64;

    /// A write of `value`, which is zero-extended. To end the run, the device returns the ending.
    fn write(&self, access: Access, value: u64) -> Option<Ending>;

    /// The device's own threads stop touching guest memory and interrupt lines. Returns when they
    /// have stopped. The device may still write guest memory and interrupt before the return, to
    /// complete requests: both are saved afterwards.
    fn pause(&self) {}

    /// The device's threads continue. If the run ends during a pause, or the guest has moved away,
    /// this is not called.
    fn resume(&self) {}

    /// The version of the states that [`Device::save`] returns. It never changes while the device
    /// exists.
    fn version(&self) -> u32 {
        0
    }

    /// The state of the paused device. All devices of a VM may have
    /// [`DevicesState::BYTES_MAX`](crate::DevicesState::BYTES_MAX) together.
    fn save(&self) -> Vec<u8> {
        Vec::new()
    }

    /// Whether [`Device::restore`] reads states of this version. It is asked before the guest's
    /// memory is sent or loaded.
    fn accepts(&self, version: u32) -> bool {
        version == self.version()
    }

    /// Puts the paused device into `state`, of an accepted version. The memory, the vCPUs and the
    /// interrupt controller are as they were saved. The bytes may come from a hostile peer.
    ///
    /// A device with a [`Line`](crate::Line) calls [`Line::raise`](crate::Line::raise) or
    /// [`Line::lower`](crate::Line::lower) here.
    ///
    /// # Errors
    /// What is wrong with the bytes, in a few words.
    fn restore(&self, state: &DeviceState) -> Result<(), String> {
        match state.bytes.len() {
            0 => Ok(()),
            bytes => Err(format!("{bytes} bytes, and the device has no state")),
        }
    }

    /// Puts the device into its state after power-on.
    fn reset(&self) {}
}

/// A saved [`Device`].
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceState {
    /// [`Device::version`].
    pub version: u32,
    /// [`Device::save`].
    #[serde(with = "hex")]
    pub bytes: Vec<u8>,
}

impl fmt::Debug for DeviceState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceState")
            .field("version", &self.version)
            .field("bytes", &self.bytes.len())
            .finish()
    }
}

/// Bytes as hexadecimal digits, which take half of the room of an array of numbers.
mod hex {
    use serde::de::Error;
    use serde::{Deserialize as _, Deserializer, Serializer};
    use std::borrow::Cow;

    const DIGITS: &[u8; 16] = b"0123456789abcdef";

    pub fn serialize<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
        let digits = |byte: &u8| [byte >> 4, byte & 15].map(|d| DIGITS[d as usize] as char);
        to.serialize_str(&bytes.iter().flat_map(digits).collect::<String>())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
        let text = Cow::<str>::deserialize(from)?;
        let digit = |c: u8| DIGITS.iter().position(|digit| *digit == c).map(|d| d as u8);
        let (pairs, rest) = text.as_bytes().as_chunks::<2>();
        let byte = |[high, low]: &[u8; 2]| Some(digit(*high)? << 4 | digit(*low)?);
        let bytes = pairs.iter().map(byte).collect::<Option<Vec<u8>>>();
        let bytes = bytes.filter(|_| rest.is_empty());
        bytes.ok_or_else(|| D::Error::custom("bytes are pairs of the digits 0-9 and a-f"))
    }
}
