//! The command `lacuna`: its command line, and how it shows results.
//!
//! It is thin on purpose, because the crates below do the work:
//!
//! ```text
//! args ─▶ a command ─┬▶ control socket ─▶ view   terminal, while it runs
//!                    └▶ sample ─┬▶ summary        stdout, at the end
//!                               └▶ JSON           --json
//! ```
//!
//! * [`args`], [`size`]: the command line, and numbers as people write them.
//! * [`sample`]: the counters of a run at one moment. [`view`]: the view of a running guest.
//! * [`demo`]: `lacuna demo`.
//! * [`snapshot`], [`migrate`], [`ctl`], [`monitor`]: `lacuna snapshot`, `lacuna migrate`, `lacuna
//!   ctl`, which are clients of a control socket.
//! * [`run`], [`image`], [`pages`], [`observe`]: `lacuna run`.
//! * [`serve`], [`mod@pager`], [`mod@park`], [`mod@offload`]: `lacuna serve`, `lacuna pager`, its
//!   `--park`, `lacuna offload`. [`source`]: page sources.
//! * [`lab`]: `lacuna lab`, and `lacuna` alone. [`mod@test`]: `lacuna test`.
//! * [`pager_test`]: `lacuna pager-test`.
//! * [`doctor`]: what this host can do. [`manual`]: man pages and completions.
//! * [`exit`], [`output`], [`pipe`], [`signals`]: exit codes; where text and JSON go; Ctrl-C.
//! * [`log`], [`trace`]: events of the engine on stderr, and in a file for Perfetto.
//! * [`metrics`]: the engine's counters by HTTP. [`sandbox`]: what a process may do.
//!
//! It imports `lacuna`, `lacuna-control`, `lacuna-offload`, `lacuna-pager`, `lacuna-pager-test`,
//! `lacuna-sandbox`, `lacuna-lab` and `lacuna-guest`, and nothing else of the workspace. No
//! `unsafe`.
#![forbid(unsafe_code)]

pub mod args;
mod client;
mod counters;
pub mod ctl;
pub mod demo;
pub mod doctor;
pub mod exit;
pub mod image;
pub mod lab;
pub mod log;
pub mod manual;
pub mod metrics;
pub mod migrate;
pub mod monitor;
pub mod observe;
pub mod offload;
pub mod output;
pub mod pager;
pub mod pager_test;
pub mod pages;
pub mod park;
pub mod pipe;
mod progress;
pub mod run;
pub mod sample;
pub mod sandbox;
pub mod serve;
pub mod signals;
pub use lacuna_lab::size;
pub mod snapshot;
pub mod source;
pub mod test;
pub mod trace;
pub mod view;
