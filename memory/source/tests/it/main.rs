//! The integration tests of this crate, in one program.

mod clients;
mod common;
mod file;
mod handler;
mod layers;
mod peer;
