//! The integration tests of this crate, in one program.

mod dirty_bitmap;
mod dirty_ring;
mod model;
