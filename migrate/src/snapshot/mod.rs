//! The files of a snapshot, in a folder. docs/formats.md describes them.
//!
//! ```text
//! NAME/snapshot.json   version, machine, state
//!      memory          the pages, one after the other: all, sparse, or those with content
//!      pages           four bytes for each page: what it is, or its checksum
//!      checksums       of snapshot.json and pages
//! ```
//! A snapshot is written beside its place, made durable, and renamed, so a folder with a snapshot's
//! name is whole. `target` does this, and puts a snapshot into an object store.

mod files;
mod in_place;
mod lazy;
mod places;
mod reader;
mod target;
mod writer;

pub use lazy::SnapshotPages;
pub use reader::Snapshot;
pub use target::{NewFolder, OpenFiles, Store, Target};
pub use writer::{Saved, Tracked, When, save, save_paused};
