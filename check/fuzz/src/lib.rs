//! Fuzzing the whole house: generators and oracles, seeded, for plain `cargo run` and `cargo test`.
//!
//! ```no_run
//! use lacuna_fuzz::{Campaign, Kind};
//! let mut campaign = Campaign::new("target/release/lacuna".into());
//! campaign.run(Kind::Machine, 1..100, None, 1, |_, _| ());
//! for finding in &campaign.findings {
//!     println!("{}\nagain: {}", finding.what, finding.again());
//! }
//! ```
//!
//! | file | job |
//! |---|---|
//! | `run` | kinds, seeds, findings |
//! | `machine` | whole machines on one thread, verified after each slice |
//! | `threads` | whole machines on threads, verified while all vCPUs are stopped |
//! | `images` | mutated ELF files for the loader |
//! | `command` | command lines for `lacuna` |
//! | `plan` | what a seed makes: host, VMs, slots |
//! | `subject` | a VM under attack, and what must not be touched |
//! | `monitor` | what host and VMM do beside it |
//! | `shadow` | oracle of dirty tracking, and of pages that leak |
//! | `place`, `runtime` | the guest's memory, and the handler that survives every exception |
//! | `program`, `values`, `asm` | blocks of random instructions |
//! | `pulse`, `tally` | hangs and panics; what was reached |
//!
//! An oracle that fails panics; [`Campaign`] makes a [`Finding`] of it.
//!
//! Neighbours: imports `soft`, `machine` and `guest`; `mmu` and `host` for what they verify.
#![forbid(unsafe_code)]

mod asm;
mod command;
mod images;
mod machine;
mod monitor;
mod place;
mod plan;
mod program;
mod pulse;
mod run;
mod runtime;
mod shadow;
mod subject;
mod tally;
mod threads;
mod values;

pub use run::{Campaign, Finding, Kind};
pub use tally::Tally;
