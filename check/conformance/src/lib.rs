//! One test body per behaviour, for every backend.
//!
//! A body is a function over [`Backend`], which makes a VM of a description. A backend's tests are
//! one line, [`suite!`](crate::suite), which makes a `#[test]` of each body:
//!
//! ```ignore
//! lacuna_conformance::suite!(lacuna_conformance::Soft::default());
//! ```
//! A backend that cannot do what a body needs says why ([`Lacks`]); the test is then listed as
//! skipped at the end of `cargo test`, with that reason.
//!
//! | module | contents |
//! |---|---|
//! | [`backend`] | the description of a VM, and what a body may ask of a backend |
//! | [`soft`], [`kvm`] | the two backends |
//! | [`program`] | guests of a few instructions |
//! | [`running`] | running a guest to its end, beside a monitor if wanted |
//! | [`moving`] | a guest goes on in another VM |
//! | [`bodies`] | the behaviours |
#![forbid(unsafe_code)]

pub mod backend;
pub mod bodies;
pub mod kvm;
pub mod moving;
pub mod program;
pub mod running;
pub mod soft;
mod suite;

pub use backend::{Backend, Lacks, Made, Request, Tracking};
pub use kvm::Kvm;
pub use soft::Soft;
