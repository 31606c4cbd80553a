//! Pages from an object store: a folder of a file system, memory, or a store that speaks S3.
//!
//! [`Objects`] is a [`Folder`](lacuna_source::Folder), so everything that reads pages from files
//! reads them from objects too, snapshots among them:
//!
//! ```
//! use lacuna_objects::{Objects, Options, object_store::memory::InMemory};
//! use lacuna_source::Folder as _;
//! use std::sync::Arc;
//!
//! let store = Arc::new(InMemory::new());
//! let folder = Objects::new(store, "snapshots/web", Options::default())?;
//! // There is no such object yet.
//! assert!(folder.open("memory").is_err());
//! # Ok::<(), lacuna_objects::ObjectsError>(())
//! ```
//! A URL names a store: [`Objects::open`] takes `file:///folder`, and `s3://bucket/prefix` with the
//! feature `s3`. The store's settings come from the environment (`AWS_ENDPOINT`,
//! `AWS_ACCESS_KEY_ID` and so on).
//!
//! ```text
//! a page is asked for ─┬─ its chunk is in the cache ──────────────────────────► provided
//!                      └─ wait for the chunk ─► GET of a range, 16 at a time ─► provided
//! read of a range ─────── wait for its chunks, and ask for those that follow
//! ```
//! **A failing or silent store** is tried again. A try ends after 10 s, or after
//! [`Options::patience`] if that is shorter. The pauses between tries are 10 ms, 20, 40 and so on
//! up to a second. Tries end when nothing waits any more:
//!
//! | waiter | waits until |
//! |---|---|
//! | a vCPU's request for a page | its source's [`Policy`](lacuna_source::Policy) gives it up |
//! | a thread that opens or prefetches an object | [`Options::patience`] is over: an error |
//! | none: the chunk was read ahead | the first try has failed |
//!
//! The flag of [`Objects::interrupted_by`] ends a thread's wait earlier.
//!
//! With [`WhenGone::Hold`](lacuna_source::WhenGone::Hold) a vCPU's request is never given up: the
//! guest sees a slow page, and no error.
//!
//! A failure that no further try can mend is reported at once: a missing, replaced or shortened
//! object, or refused access. Each error names the object and its bytes.
//!
//! | file | job |
//! |---|---|
//! | `folder` | [`Objects`]: the URL of a store, and its objects |
//! | `options` | sizes, and how long to wait |
//! | `write` | makes objects of files, and removes them |
//! | `place` | the store, its threads, and tries |
//! | `chunks` | the chunks of one object: cache, requests, retries |
//! | `cache` | chunks by their number, and which one was used last |
//!
//! The crate has its own threads, in a tokio runtime that no caller sees. If a task of another
//! runtime calls it, the task keeps its thread until the store has answered. It has no `unsafe`.
#![forbid(unsafe_code)]

mod cache;
mod chunks;
mod folder;
mod options;
mod place;
mod write;

pub use folder::{Objects, ObjectsError};
pub use object_store;
pub use options::Options;
