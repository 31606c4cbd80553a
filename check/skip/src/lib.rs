//! Records the tests that cannot run on this machine, and lists them at the end of `cargo test`.
//!
//! ```no_run
//! # fn kvm() -> Result<(), &'static str> { Err("no /dev/kvm") }
//! if let Err(why) = kvm() {
//!     lacuna_skip::skip(why);
//!     return;
//! }
//! ```
//! `println!` is not enough: the test harness shows a test's output only if the test fails.
//! [`skip`] writes to stderr, past the harness, and appends a line to a file:
//!
//! ```text
//! target/debug/skipped/PARENT/PID      PARENT: the `cargo test` that started the test program PID
//! ```
//! [`HugePages`] reserves huge pages for a test, and [`SwapFile`] adds a swap device. They end the
//! test as skipped where that is not possible.
//!
//! A function deep inside of a test may end it by [`skip_test`], if the test has the attribute
//! [`test`] of this crate. [`alone`] gives a test its own process.
//!
//! The last test program of the workspace (`check/xtask/tests/skipped.rs`) calls [`report`]. It
//! prints the records of all programs with the same parent, sorted by reason, and removes the
//! files. Records of an earlier run have another parent, so they are not listed.
#![forbid(unsafe_code)]

mod alone;
mod huge;
mod record;
mod skip;
mod swap;
#[cfg(test)]
mod tests;

use record::{List, folder, remove_left_behind};
use std::fs;

pub use alone::alone;
pub use huge::HugePages;
pub use lacuna_skip_attribute::test;
pub use skip::{run, skip, skip_test};
pub use swap::SwapFile;

/// Prints the tests that this run of `cargo test` has skipped; call it from the last test program.
pub fn report() {
    let Some(folder) = folder() else { return };
    let list = List::read(&folder);
    print!("\n{list}");
    if let Some(all) = folder.parent() {
        let _ = fs::remove_dir_all(&folder);
        remove_left_behind(all);
    }
}
