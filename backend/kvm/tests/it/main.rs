//! The integration tests of this crate, in one program.

mod common;
mod dirty;
mod guests;
mod handlers;
mod kinds;
mod slots;
