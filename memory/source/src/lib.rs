//! Page sources: they provide a guest's pages that are not in memory when the guest starts.
//!
//! A [`PageSource`] numbers its pages from 0, as the bytes of a memory file lie ([`SourcePage`]). A
//! memory manager asks for a page by a [`PageRequest`], which it answers once, on any thread:
//!
//! ```
//! use lacuna_source::{PageRequest, PageSource};
//! /// Provides pages of ones.
//! struct Ones;
//! impl PageSource for Ones {
//!     fn describe(&self) -> String { "ones".into() }
//!     fn fetch(&self, request: PageRequest) {
//!         // Late: the page was provided in another way, or its memory is gone.
//!         let _ = request.provide(&[1; 4096]);
//!     }
//! }
//! ```
//! | source | its pages come from |
//! |---|---|
//! | [`Zeros`] | nowhere |
//! | [`MemoryFile`], [`LayeredFile`] | a raw memory file, by io_uring; one below its diffs |
//! | [`Peer`] | another process, which calls [`serve`] |
//! | [`Injected`] | another source, behind a link with latency, loss and reordering |
//! | [`External`] | a handler that fills the memory by userfaultfd |
//!
//! [`Measured`] counts what a source does. A [`Policy`] says how long a source tries. It imports
//! `base` alone.
//!
//! | file | job |
//! |---|---|
//! | `request`, `policy`, `gathering` | requests, answers; how long a source tries; huge pages |
//! | `measured`, `memory_id` | counters and fetch times; which memory a source provides |
//! | `zeros`, `file`, `layers`, `folder` | sources; files of pages |
//! | `holes`, `readers` | holes of files; the reading threads of `file` |
//! | `touches`, `durable` | a guest's working set, and its file |
//! | `peer`, `injected` | the protocol between processes, its two sides; faults of a link |
//! | `external`, `handler` | a handler's memory; Firecracker's handshake with its process |
#![forbid(unsafe_code)]

mod durable;
mod external;
mod file;
mod folder;
mod gathering;
mod handler;
mod holes;
mod injected;
mod layers;
mod measured;
mod memory_id;
mod peer;
mod policy;
mod readers;
mod request;
mod touches;
mod zeros;

pub use durable::{PathError, create_file, rename_durably};
pub use external::{AskedOutside, External};
pub use file::{FileError, MemoryFile};
pub use folder::{Folder, LocalFolder, StoredFile};
pub use gathering::{Gathered, Gathering, Pages, UnitContent};
pub use handler::{Handler, HandlerError, HandlerRegion, send_regions, send_text};
pub use holes::Holes;
pub use injected::{Fate, Faults, Injected};
pub use layers::LayeredFile;
pub use measured::{Measured, SourceStats};
pub use memory_id::MemoryId;
pub use peer::{Peer, PeerError, Server, serve};
pub use policy::{Outage, Policy, WhenGone};
pub use request::{
    Answer, Failure, FailureKind, PageRequest, PageRequester, PageSource, SourcePage,
};
pub use touches::{Recorder, TouchedMemory, Touches, TouchesError};
pub use zeros::Zeros;

/// The messages between a [`Peer`] and its server, for tests that play one side.
pub mod wire {
    pub use crate::peer::{Decoder, HELLO, Hello, Message, encode};
}
