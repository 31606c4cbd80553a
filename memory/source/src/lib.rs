//! Page sources: where the pages of a guest come from that are elsewhere when the guest starts.
//!
//! A [`PageSource`] is a snapshot file, a peer process or an external handler. It numbers its pages
//! from 0, as the bytes of a memory file lie ([`SourcePage`]). A memory manager asks for a page by
//! a [`PageRequest`], which the source answers once, on any thread:
//!
//! ```
//! use lacuna_source::{PageRequest, PageSource};
//!
//! /// Provides pages of ones.
//! struct Ones;
//!
//! impl PageSource for Ones {
//!     fn describe(&self) -> String {
//!         "ones".into()
//!     }
//!
//!     fn fetch(&self, request: PageRequest) {
//!         // Late: the page was provided in another way, or its memory is gone.
//!         let _ = request.provide(&[1; 4096]);
//!     }
//! }
//! ```
//! | source | its pages come from |
//! |---|---|
//! | [`Zeros`] | nowhere |
//! | [`MemoryFile`] | a raw memory file, sparse or not, read by io_uring |
//! | [`Peer`] | another process, which calls [`serve`] |
//! | [`Injected`] | another source, behind a link with latency, loss and reordering |
//!
//! [`Measured`] counts what a source does. A [`Policy`] says how long a source tries, and what
//! becomes of its pages when it is gone.
//!
//! | file | job |
//! |---|---|
//! | `request` | what a source is asked, and what its answer comes to |
//! | `policy` | how long a source tries, and what happens then |
//! | `measured` | counters and fetch times |
//! | `zeros`, `file` | sources |
//! | `holes`, `readers` | parts of `file`: pages that need no read, threads that wait for a read |
//! | `peer` | the protocol between processes, and its two sides |
//! | `injected` | faults of a link, from a seed |
//! | `handler` | [`Handler`]: another process fills the memory, by Firecracker's handshake |
//!
//! It imports `base` alone, and has no `unsafe`.
#![forbid(unsafe_code)]

mod file;
mod handler;
mod holes;
mod injected;
mod measured;
mod peer;
mod policy;
mod readers;
mod request;
mod zeros;

pub use file::{FileError, MemoryFile};
pub use handler::{Handler, HandlerError, HandlerRegion, send_regions};
pub use injected::{Fate, Faults, Injected};
pub use measured::{Measured, SourceStats};
pub use peer::{Peer, PeerError, Server, serve};
pub use policy::{Policy, WhenGone};
pub use request::{Answer, Asker, PageRequest, PageSource, SourcePage};
pub use zeros::Zeros;

/// The messages between a [`Peer`] and its server, for tests that play one side.
pub mod wire {
    pub use crate::peer::{Decoder, HELLO, Hello, Message, encode};
}
