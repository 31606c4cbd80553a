//! Why a device is not added, saved or restored.

use super::state::DevicesState;
use crate::{Arch, ErrorKind};
use std::any::Any;

/// Why a device is not added, saved or restored.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceError {
    /// Another device has a part of the range.
    #[error("{from:#x}..={to:#x} overlaps a device that is there already: choose another range")]
    Overlap {
        /// First port or address.
        from: u64,
        /// Last port or address.
        to: u64,
    },
    /// An interrupt controller of the VM has a part of the range, on one backend at least.
    #[error(
        "{from:#x}..={to:#x} overlaps an interrupt controller, which gets the accesses: choose \
         another range"
    )]
    InterruptController {
        /// First port or address.
        from: u64,
        /// Last port or address.
        to: u64,
    },
    /// The devices are for guests of another architecture.
    #[error(
        "the devices are for {devices} guests, and the guest is for {guest}: make them with \
             `PlatformDevices::of` for {guest}"
    )]
    Arch {
        /// The architecture of the devices.
        devices: Arch,
        /// The architecture of the guest: of its image or its saved state.
        guest: Arch,
    },
    /// A memory slot of the VM has a part of the range.
    #[error(
        "the device at {from:#x}..={to:#x} overlaps the guest's memory, which gets the accesses: \
         put the device where the VM has no memory slot, such as 0xc000_0000 to 0xfebf_ffff for \
         x86-64, and 0x0a00_0000 to 0x3dff_ffff for AArch64"
    )]
    Memory {
        /// First address.
        from: u64,
        /// Last address.
        to: u64,
    },
    /// The range is empty, or exceeds the address space.
    #[error("a device of {bytes} bytes at {from:#x}: give it at least one byte, below 2^48")]
    Range {
        /// First address.
        from: u64,
        /// Its size.
        bytes: u64,
    },
    /// Another device has the name, or no device can have it.
    #[error(
        "the name {0:?} is taken, or is not 1 to 64 printable ASCII characters without spaces: \
         choose another one"
    )]
    Name(String),
    /// No device has the name.
    #[error("there is no device {0:?}")]
    NoDevice(String),
    /// The saved guest has a device that this VMM has not added.
    #[error("the guest has the device {0:?}, and this VMM does not: add it before the restore")]
    Missing(String),
    /// The saved guest lacks a device that this VMM has added.
    #[error("the guest has no device {0:?}, and this VMM does: add it after the restore")]
    Extra(String),
    /// The device does not read states of this version.
    #[error("the device {name:?} does not take over a state of version {version}")]
    Version {
        /// The device.
        name: String,
        /// The version of the saved state.
        version: u32,
    },
    /// The device refuses its state.
    #[error("the device {name:?} does not take over its state of version {version}: {wrong}")]
    Refused {
        /// The device.
        name: String,
        /// The version of the saved state.
        version: u32,
        /// What is wrong, in the words of the device.
        wrong: String,
    },
    /// No saved devices have that value.
    #[error("{field}: {value:#x} is no valid value")]
    Invalid {
        /// Which field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// The states of the devices are too long.
    #[error(
        "with the state of the device {name:?}, the devices have more than {max} bytes",
        max = DevicesState::BYTES_MAX
    )]
    TooLong {
        /// The first device that exceeds the limit.
        name: String,
    },
    /// The device's code has panicked.
    #[error("the device {name:?} has panicked: {cause}; this is an error in the device")]
    Panicked {
        /// The device.
        name: String,
        /// The message of the panic.
        cause: String,
    },
}

impl DeviceError {
    /// The kind of the cause.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Panicked { .. } => ErrorKind::Host,
            _ => ErrorKind::Request,
        }
    }

    pub(super) fn panicked(name: &str, panic: &(dyn Any + Send)) -> Self {
        let text = panic.downcast_ref::<&str>().copied();
        let text = text.or_else(|| panic.downcast_ref::<String>().map(|text| &**text));
        Self::Panicked {
            name: name.to_owned(),
            cause: text.unwrap_or("it gives no reason").to_owned(),
        }
    }
}
