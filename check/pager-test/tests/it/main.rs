//! The suite against a right handler, and against handlers that each break one thing.

mod faults;
mod handler;
