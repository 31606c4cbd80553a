//! The integration tests of this crate, in one program.

mod busy_disk;
mod devices;
mod golden;
mod sessions;
mod snapshots;
mod streams;
