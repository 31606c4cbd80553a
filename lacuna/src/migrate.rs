//! Snapshots of a running guest, and its move to another process.
//!
//! [`save`] writes a snapshot while [`run_pausable`](crate::run_pausable) runs the guest.
//! [`Tracked`] writes only the changes since the last snapshot. [`Snapshot::restore`] puts a
//! snapshot into a new VM of either backend, and [`Snapshot::restore_lazily`] reads pages when the
//! guest needs them. The format is described in `docs/formats.md`. The example `snapshot` saves and
//! restores. [`stream`] moves a guest over connections instead, which
//! [`transport`] makes: UNIX sockets, TCP, and TLS with this crate's feature `tls`. The example
//! `migrate` moves one.

pub use lacuna_migrate::*;
