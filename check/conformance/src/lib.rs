//! One test body per behaviour, for every backend and every architecture of guests.
//!
//! A body is a function over [`Backend`], which makes a VM from a description.
//! [`suite!`](crate::suite) makes a `#[test]` for each body on each backend. A test's name has the
//! body, the backend and the architecture: `exits::a_crash_says_where::soft_arm64`.
//!
//! ```ignore
//! lacuna_conformance::suite! { { soft_x86_64: lacuna_conformance::Soft::default(); } {} }
//! ```
//! A body names no architecture. It runs a built-in guest, or writes a small program once with
//! [`Assembler`](program::Assembler), in instructions that every architecture has. Only a body
//! about one architecture's own features, such as ports, names it.
//!
//! A backend that cannot run a body returns the reason ([`Lacks`]). `cargo test` then lists the
//! test at its end as skipped, with the reason.
//!
//! | module | contents |
//! |---|---|
//! | [`backend`] | the description of a VM, and what a body may ask of a backend |
//! | [`soft`], [`kvm`] | the two backends |
//! | [`program`] | guests of a few instructions, and an assembler for each architecture |
//! | [`running`] | running a guest to its end, beside a monitor if wanted |
//! | [`moving`] | a guest resumes in another VM |
//! | [`bodies`] | the behaviours |
#![forbid(unsafe_code)]

pub mod backend;
pub mod bodies;
pub mod kvm;
pub mod moving;
mod outside;
pub mod program;
pub mod running;
pub mod soft;
mod suite;

pub use backend::{Backend, Lacks, Made, Request, Tracking};
pub use kvm::Kvm;
pub use soft::{Filled, Soft};
