//! The command `lacuna`: what a person types, and what they see.
//!
//! Thin on purpose. The work is done by the crates below; here are only the command line and the
//! views of a result:
//!
//! ```text
//! args ─▶ a command ─▶ snapshot ─▶ live        stderr, while it runs
//!                         ├──────▶ summary     stdout, at the end
//!                         └──────▶ JSON        --json
//! ```
//!
//! * [`args`], [`size`]: the command line, and numbers as people write them.
//! * [`snapshot`], [`live`]: a run at one moment, and what it looks like.
//! * [`run`], [`image`], [`observe`]: `lacuna run`. [`lab`]: `lacuna lab`, and `lacuna` alone.
//! * [`doctor`]: what this host can do.
//! * [`exit`], [`output`], [`signals`]: exit codes; where text and JSON go; Ctrl-C.
//!
//! May import `lab`, `machine`, `soft`, `kvm`, `guest` and `addr`. No `unsafe`.
#![forbid(unsafe_code)]

pub mod args;
pub mod doctor;
pub mod exit;
pub mod image;
pub mod lab;
pub mod live;
pub mod observe;
pub mod output;
pub mod run;
pub mod signals;
pub mod size;
pub mod snapshot;
