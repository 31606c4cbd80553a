//! The integration tests of this crate, in one program.

mod blocks;
mod exclusives;
mod hostile;
mod order;
mod programs;
mod shootdown;
mod support;
mod tables;
