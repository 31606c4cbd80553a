//! Moves a VM to a file and back, or to another process, over the interface of every backend.
//!
//! ```text
//!              pages (rounds: all, then those written meanwhile)
//! running VM ──────────────────────────────────────────────────► snapshot ──► another VM
//!              pause ─► the last pages, the machine's state
//! ```
//! [`save`] writes a snapshot while the guest runs, and pauses it for the last pages only.
//! [`save_paused`] saves a guest that [`PausedGuest::pause`] has paused. [`Snapshot::open`] checks
//! a snapshot, and [`Snapshot::restore`] puts it into a VM made for it.
//! [`Snapshot::restore_in_place`] leaves the pages in the snapshot's file, and VMs share them;
//! [`Snapshot::restore_lazily`] reads pages when the guest needs them. [`stream`] moves the guest
//! to another process instead, while it runs.
//!
//! | file | job |
//! |---|---|
//! | `layout` | the memory slots of a VM, and the numbers of their pages |
//! | `page_set` | a set of pages |
//! | `copy` | reads pages of a VM for a sink: runs of data, runs of zeros |
//! | `changes` | the log of a guest's writes, as a copy uses it |
//! | `guest` | a paused guest |
//! | `bandwidth` | a limit of the bytes that a migration sends in a second |
//! | `rounds` | copies a running VM until few pages are left |
//! | `state` | a machine: what it is, and its state without memory |
//! | `snapshot` | the files of a snapshot (docs/formats.md), written and read |
//! | `stream` | a live migration over connections (docs/formats.md) |
//! | `session` | a whole migration on each side, with its connections and decisions |
//! | `transport` | the connections: UNIX sockets, TCP, TLS, inherited sockets, commands |
//!
//! It sees `machine` and page sources, and no backend, so it is the same code for all of them.
#![forbid(unsafe_code)]

mod bandwidth;
mod changes;
mod copy;
mod error;
mod guest;
mod layout;
mod page_set;
mod rounds;
pub mod session;
mod snapshot;
mod state;
pub mod stream;
pub mod transport;

pub use copy::{OnPages, PageSink, Stop};
pub use error::MigrateError;
pub use guest::PausedGuest;
pub use lacuna_source::{
    Folder, LocalFolder, Recorder, StoredFile, TouchedMemory, Touches, TouchesError,
};
pub use layout::{MemoryLayout, SlotLayout};
pub use page_set::PageSet;
pub use rounds::{Budget, OnProgress, Progress, Round};
pub use snapshot::{
    NewFolder, OpenFiles, Saved, Snapshot, SnapshotPages, Store, Target, Tracked, When, save,
    save_paused,
};
pub use state::{MachineConfig, MachineState};
