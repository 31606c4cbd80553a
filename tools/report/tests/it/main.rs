//! The report as a whole: its structure, and how a browser shows it.

mod browser;
mod page;

use lacuna_report::Run;

/// A run with figures of each kind.
fn example() -> Run {
    Run::parse(include_str!("../example.json")).unwrap()
}
