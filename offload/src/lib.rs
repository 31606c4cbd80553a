//! Saves and restores VMs of Cloud Hypervisor from outside of the VMM.
//!
//! Cloud Hypervisor hands a VM to another process by its live-migration protocol, version 0. A
//! snapshot daemon is the receiver of such a migration, and writes the VM to a folder. A restore
//! daemon is the sender, and takes the pages from any [`PageSource`](lacuna_source::PageSource):
//!
//! ```no_run
//! use lacuna_offload::{Settings, Snapshot, Sources, When, restore, save};
//! use std::os::unix::net::UnixListener;
//!
//! let (settings, folder) = (Settings::default(), "/snapshots/vm".as_ref());
//! // ch-remote send-migration destination_url=unix:/run/save.socket,local=on
//! let listener = UnixListener::bind("/run/save.socket")?;
//! println!("{} bytes", save(&listener, folder, &settings)?.bytes);
//!
//! // ch-remote receive-migration unix:/run/restore.socket
//! let snapshot = Snapshot::open(folder)?;
//! let sources = Sources { faults: &snapshot.pages()?, fill: &snapshot.pages()? };
//! let when = When::OnDemand { fill: Some(64 << 20) };
//! restore(&snapshot, "/run/restore.socket".as_ref(), sources, when, &settings)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//! The memory is on the disk before the VMM may end. A failed save leaves no snapshot. A page that
//! the source has lost never becomes zeros. Nothing in a message is believed: lengths have limits,
//! descriptors are examined, and only processes of the same user are served. `docs/offload.md` has
//! the protocol and the limits.
//!
//! | file | job |
//! |---|---|
//! | `save`, `restore`, `settings`, `error` | the two daemons, their settings, their failures |
//! | `frame` | the protocol's bytes and order, as pure functions |
//! | `connection` | frames and descriptors over a socket |
//! | `slots`, `snapshot`, `sparse` | the VM's memory slots; the folder; copies without zeros |
//! | `memory`, `faults`, `fetch` | memory files, the pages that arrive late, requests to a source |
#![forbid(unsafe_code)]

mod connection;
mod error;
mod faults;
mod fetch;
mod frame;
mod memory;
mod restore;
mod save;
mod settings;
mod slots;
mod snapshot;
mod sparse;

pub use error::OffloadError;
pub use frame::FrameError;
pub use restore::{Restored, Sources, When, restore};
pub use save::{Saved, save};
pub use settings::{Progress, Report, Settings};
pub use slots::{Slot, Slots};
pub use snapshot::{Manifest, Snapshot};

/// The messages of the protocol, for tests that play one side.
pub mod wire {
    pub use crate::frame::{
        Command, FRAME_BYTES, MemoryRange, Phase, RANGE_BYTES, ROLE_FAULT, Request, Response,
    };
}
