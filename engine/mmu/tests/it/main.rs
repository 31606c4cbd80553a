//! The integration tests of this crate, in one program.

mod dirty;
#[cfg(not(loom))]
mod gib;
mod model;
