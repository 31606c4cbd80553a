//! The integration tests of this crate, in one program.

mod bad_handlers;
mod blocked_signal;
mod common;
mod damage;
mod holes;
mod huge;
mod kept;
mod limits;
mod linux;
mod locked;
mod losses;
mod model;
mod outside;
mod overhead;
mod private;
mod refusals;
mod refused;
mod ring;
mod shared;
mod slow;
mod source;
mod sparse;
mod thousand;
mod threads;
mod units;
mod units_missing;
