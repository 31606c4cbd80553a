//! Snapshots of running guests, on every backend and architecture.

pub mod common;
mod diff;
mod hostile;
mod in_place;
mod lazy;
mod objects;
mod touches;
mod whole;
