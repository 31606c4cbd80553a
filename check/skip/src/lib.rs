//! Records the tests that cannot run on this machine, and lists them at the end of `cargo test`.
//!
//! ```no_run
//! # fn kvm() -> Result<(), &'static str> { Err("no /dev/kvm") }
//! if let Err(why) = kvm() {
//!     lacuna_skip::skip(why);
//!     return;
//! }
//! ```
//! `println!` is not enough: the test harness shows what a test prints only if the test fails.
//! [`skip`] writes to stderr, past the harness, and appends a line to a file:
//!
//! ```text
//! target/debug/skipped/PARENT/PID      PARENT: the `cargo test` that started the test program PID
//! ```
//! The last test program of the workspace (`check/xtask/tests/skipped.rs`) calls [`report`]. It
//! prints what the programs of the same parent have recorded, sorted by reason, and removes the
//! files. Records of an earlier run have another parent, so they are not listed.
#![forbid(unsafe_code)]

mod record;
#[cfg(test)]
mod tests;

use std::fmt::Display;
use std::fs;
use std::io::{self, Write as _};
use std::panic::Location;
use std::thread;

use record::{List, Skipped, folder, remove_left_behind};

/// Records that the calling test does not run, or runs in part, and why.
#[track_caller]
pub fn skip(why: impl Display) {
    let location = Location::caller();
    let thread = thread::current();
    // The harness names a test's thread after the test. For another thread, the call's place in
    // the source is recorded.
    let test = match thread.name() {
        Some(name) if name != "main" => name.to_owned(),
        _ => format!("{}:{}", location.file(), location.line()),
    };
    let package = std::env::var("CARGO_PKG_NAME").unwrap_or_else(|_| "?".into());
    let skipped = Skipped {
        test: format!("{package} {test}"),
        why: why
            .to_string()
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" "),
    };
    // Not `eprintln`: the harness would keep it.
    let _ = writeln!(io::stderr(), "skipped: {}: {}", skipped.test, skipped.why);
    if let Some(folder) = folder() {
        skipped
            .record(&folder)
            .unwrap_or_else(|error| panic!("cannot record a skipped test: {error}"));
    }
}

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
