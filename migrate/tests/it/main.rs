//! The integration tests of this crate, in one program.

mod sessions;
mod snapshots;
mod streams;
