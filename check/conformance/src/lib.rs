//! One test body per behaviour, for every backend and every architecture of guests.
//!
//! A body is a function over [`Backend`], which makes a VM of a description. A backend's tests are
//! one line, which makes a `#[test]` of each body. [`suites!`](crate::suites) does so for each
//! architecture, and [`suite!`](crate::suite) for one. A backend that differs from another one by
//! its memory alone has [`memory_suites!`](crate::memory_suites). A test's name begins with the
//! architecture: `arm64::exits::a_crash_says_where`.
//!
//! ```ignore
//! lacuna_conformance::suites!(lacuna_conformance::Soft::default());
//! ```
//! A body names no architecture. It runs a built-in guest, or it writes a small program once with
//! [`Assembler`](program::Assembler), in instructions that every architecture has. A body about
//! something that one architecture alone has, such as ports, says so.
//!
//! A backend that cannot do what a body needs says why ([`Lacks`]); the test is then listed as
//! skipped at the end of `cargo test`, with that reason.
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
