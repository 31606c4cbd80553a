//! Snapshots of a running guest, and its move to another process.
//!
//! [`save`] writes a snapshot of a [`Running`](crate::Running) guest. [`Tracked`] writes only the
//! changes since the last snapshot. [`Snapshot::restore`] puts a snapshot into a new VM of either
//! backend, and [`Snapshot::restore_lazily`] reads pages when the guest needs them. The format is
//! described in `docs/formats.md`. The example `snapshot` saves and restores. [`session`] moves a
//! guest to another process instead: a [`session::Outgoing`] sends it, and a
//! [`session::Destination`] takes it. [`transport`] makes the connections: UNIX sockets, TCP, TLS
//! with this crate's feature `tls`, an inherited socket, or a command. [`stream`] is the migration
//! itself, for a VMM with connections of its own. The example `migrate` moves a guest.
#![cfg(feature = "migrate")]

pub use lacuna_migrate::*;
