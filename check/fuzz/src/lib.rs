//! Fuzzes whole machines, the image loader, migrations, snapshots and the command. Every input
//! follows from a seed. It runs under plain `cargo run` and `cargo test`, without a coverage-guided
//! fuzzer.
//!
//! ```no_run
//! use lacuna_fuzz::{Campaign, Kind};
//! let mut campaign = Campaign::new("target/release/lacuna".into());
//! // 99 seeds, no time limit; stop at the first finding; no report after each seed.
//! campaign.run(Kind::Machine, 1..100, None, 1, |_, _| ());
//! for finding in &campaign.findings {
//!     println!("{}\nagain: {}", finding.what, finding.again());
//! }
//! ```
//!
//! | file | job |
//! |---|---|
//! | `run` | runs the seeds of a kind, and keeps the findings |
//! | `machine` | whole machines on one thread, verified after each slice |
//! | `threads` | whole machines, one thread for each vCPU, verified while all vCPUs are stopped |
//! | `images` | mutated ELF files for the loader |
//! | `command` | command lines for `lacuna` |
//! | `control` | clients of a control socket |
//! | `pager`, `offload` | messages of VMMs to a pager, and its files; those to `lacuna offload` |
//! | `migrated` | hostile peers of a migration, and forged snapshots |
//! | `plan` | draws the host's and the VMs' configuration from the seed |
//! | `subject` | a VM, and the guard pages around its slots |
//! | `monitor` | random operations of the host and the VMM while the VM runs |
//! | `shadow` | oracles of dirty tracking, and of data that leaks between VMs |
//! | `place`, `runtime` | the guest's memory map, and its handler of every exception |
//! | `program`, `values`, `encode` | sequences of random instructions |
//! | `arm64` | memory map, runtime and sequences of AArch64 guests |
//! | `pulse`, `tally` | detects hangs and collects panics; counts what was reached |
//!
//! An oracle panics when it fails. [`Campaign`] catches the panic and records a [`Finding`].
//!
//! Neighbours: imports `soft`, `machine`, `migrate`, `guest`, `pager`, `offload` and the command,
//! and calls `verify` of `mmu` and `host`.
#![forbid(unsafe_code)]

mod arm64;
mod command;
mod control;
mod encode;
mod images;
mod machine;
mod migrated;
mod monitor;
mod offload;
mod pager;
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
