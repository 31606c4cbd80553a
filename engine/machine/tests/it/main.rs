//! The integration tests of this crate, in one program.

mod boot;
mod boot_arm64;
mod device_life;
mod devices;
