//! The integration tests of this crate, in one program.

mod arm64;
mod cancel;
mod common;
mod faults;
mod model;
mod msr;
mod ready;
