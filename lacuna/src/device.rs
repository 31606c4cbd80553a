//! Devices and the guest's accesses to them.
//!
//! A [`Device`](crate::Device) answers each [`Access`] at its addresses. A VMM with its own loop
//! gives each [`Exit`](crate::Exit) to [`dispatch`].

pub use lacuna_machine::{
    Access, Console, DeviceError, DeviceState, DevicesState, Next, PausedDevices, SerialRegisters,
    Width, check_reserved, dispatch, mmio, port,
};
