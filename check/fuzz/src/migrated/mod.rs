//! Readers of migrations and snapshots get input that another process may have made.
//!
//! | file | job |
//! |---|---|
//! | `resting` | a guest that has done its work and waits: it is always saved alike |
//! | `stream` | both sides of a migration, each with a hostile peer |
//! | `frames` | frames of a stream, taken apart and changed |
//! | `snapshot` | damaged and forged folders |
//! | `forged` | bases that form a loop, with checksums that fit |
//! | `json` | changes in the structure of a JSON document |

mod forged;
mod frames;
pub mod json;
mod resting;
pub mod snapshot;
pub mod stream;

use crate::run::Run;
use lacuna_migrate::MigrateError;
use std::fs;

/// More memory than any input here needs, beside guest memory, tables and its own bytes.
const GROWTH_MAX: u64 = 256 << 20;

/// Watches the peak of this process's memory.
struct Growth(u64);

impl Growth {
    /// From now on.
    fn watch() -> Self {
        // This resets the kernel's peak value. If it fails, the bound counts from the old peak.
        let _ = fs::write("/proc/self/clear_refs", "5");
        Self(kilobytes("VmHWM:"))
    }

    /// Panics if the peak has grown too much.
    fn check(&self, what: &str) {
        let grown = kilobytes("VmHWM:").saturating_sub(self.0) << 10;
        assert!(grown < GROWTH_MAX, "{what}: {grown} bytes more memory");
    }
}

/// A line of this process's status.
fn kilobytes(name: &str) -> u64 {
    let text = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let number = line.and_then(|line| line.split_whitespace().next());
    number.map_or(0, |number| number.parse().expect("a number"))
}

/// Counts an error. Its text must be readable: some words, and nothing that moves a terminal's
/// cursor.
fn note_error(group: &'static str, error: &MigrateError, run: &mut Run<'_>) {
    let text = error.to_string();
    assert!(text.len() > 12, "an error that says nothing: {text:?}");
    assert!(text.len() < 20_000, "an endless error");
    let is_printable = !text.contains(char::is_control);
    assert!(is_printable, "control characters in an error: {text:?}");
    let debug = format!("{error:?}");
    let variant = debug.split(|c: char| !c.is_alphanumeric()).next();
    run.tally.note(group, variant.unwrap_or_default());
}
