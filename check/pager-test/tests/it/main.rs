//! The suite against a right handler, and against handlers that each break one thing.

mod daemon;
mod faults;
mod handler;
mod mistakes;
