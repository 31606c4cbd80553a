//! Page sources: where the pages of a guest come from that are elsewhere when the guest starts.
//!
//! A [`PageSource`] is a snapshot file, a peer process or an external handler. It numbers its pages
//! from 0, as the bytes of a memory file lie ([`SourcePage`]). A memory manager asks for a page by
//! a [`PageRequest`], which the source answers once, on any thread:
//!
//! ```
//! use lacuna_source::{PageRequest, PageSource};
//!
//! /// Provides zeros.
//! struct Zeros;
//!
//! impl PageSource for Zeros {
//!     fn describe(&self) -> String {
//!         "zeros".into()
//!     }
//!
//!     fn fetch(&self, request: PageRequest) {
//!         // Late: the page was provided in another way, or its memory is gone.
//!         let _ = request.provide(&[0; 4096]);
//!     }
//! }
//! ```
//! | file | job |
//! |---|---|
//! | `request` | what a source is asked, and what its answer comes to |
#![forbid(unsafe_code)]

mod request;

pub use request::{Answer, Asker, PageRequest, PageSource, SourcePage};
