//! The memory of translation tables: an arena of 4 KiB pages of 512 atomic entries.
//!
//! Tables are named by [`TableId`], never by a pointer, and an entry is lent as `&AtomicU64`. This
//! is all the unsafe code that stage-2 translation needs, so the crates above it are safe Rust. A
//! stale or forged id reads the wrong table, which `verify()` finds, but never memory outside the
//! tables.
//!
//! ```text
//!          alloc                detach                 retire(grace)          reap(passed)
//!  free ----------> in use -----------> detached ---------------------> limbo ------------> free
//!         zeroed           unlinked: no      waits for the shoot-down         no walk can be
//!                          new walk enters   in this grace period             inside any more
//! ```
//!
//! Imports `addr` and `sync`. An *unsafe room*: one mapping, and references into it.

mod arena;
mod backing;
mod id;

pub use arena::{Arena, ArenaError, Detached, Exhausted, Usage};
pub use id::{ENTRIES, Index, TableId};
