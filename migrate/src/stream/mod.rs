//! Live migration over connections: the guest keeps running while its memory is copied, and then
//! resumes on the other side.
//!
//! ```text
//! source                                     destination
//! send:  Hello { machine, devices } ───────► Incoming::accept; its caller makes such a VM
//!                          ◄──────────────── Welcome
//!        rounds: Data, Zeros, Sync ────────► Incoming::receive: takes them
//!                          ◄──────────────── Synced
//!        pause; last round, State ─────────► restores
//!                          ◄──────────────── Prepared
//!        Go ───────────────────────────────► Prepared::start: from here on its guest runs
//!                          ◄──────────────── Running
//!        pages that are left, End ─────────► Arriving::finish
//!                          ◄──────────────── Complete
//! ```
//! | [`Mode`] | memory that moves before the guest | after it |
//! |---|---|---|
//! | `PreCopy` | all | none |
//! | `PostCopy` | none | all |
//! | `Hybrid` | what the guest does not write again | the rest, unless it fits into the budget |
//!
//! Pages that arrive after the guest are *awaited*. The destination's VM has a page source
//! ([`Incoming::page_source`]), which requests an awaited page that the guest needs (`Want`) on a
//! connection of its own. The source answers on a third one, ahead of the pages that it pushes.
//!
//! *Before `Go`* the source keeps the guest running after every failure. The destination has never
//! run it then. *After `Go`* the source never runs it by itself:
//!
//! | the connection is cut | source | destination |
//! |---|---|---|
//! | before `Go` | the error; the guest keeps running | [`Waiting`]: it does not run |
//! | between `Go` and `Running` | [`Sent::Unknown`]: it stays paused | runs, or is [`Waiting`] |
//! | before `Complete` | [`Sent::Cut`]: it stays paused | runs, and waits for pages it lacks |
//! | the same, after a pre-copy | [`Sent::Moved`] | runs, and lacks nothing |
//!
//! After `Unknown` and `Cut` [`OutgoingGuest::resume`] connects again, and the destination's
//! [`Waiting::resume`] or [`Arriving::resume`] accepts it. The destination sends the list of its
//! missing pages, so no arrived page is sent twice. If the guest has ended meanwhile,
//! [`Arriving::end`] reports it, and the source ends too. If the other side never answers again, a
//! person decides: [`OutgoingGuest::take_back`] and [`Waiting::decide_to_run`] carry the decision
//! out. Without one of them, the two sides never run the guest at once: the drop of an
//! [`OutgoingGuest`] ends the run at the source.
//!
//! Timeouts are the caller's: see [`Connection`].

mod arrive;
mod connection;
mod early;
mod frame;
mod frames;
mod give;
mod install;
mod lanes;
mod left;
#[cfg(not(feature = "zstd"))]
mod no_zstd;
mod packing;
mod receive;
mod remote;
mod send;
mod take;

pub use arrive::{Arrived, Arriving};
pub use connection::{Connection, Connections, HangUp};
pub use frame::first_message;
pub use give::{OutgoingGuest, Sent};
pub use packing::Compression;
pub use receive::{Incoming, Prepared, Waiting};
pub use send::{Mode, Plan, send};

use crate::MachineConfig;
use lacuna_machine::ProcessorFeatures;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The version of the stream. The sides refuse each other if theirs differ.
const VERSION: u32 = 10;

/// The most connections that take pages before the guest goes.
pub const STREAMS_MAX: u32 = 64;

/// Names one migration, so that a connection of another one is refused. The name is random, but no
/// secret.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct MigrationId(String);

/// The first message of the source.
#[derive(Serialize, Deserialize)]
struct Hello {
    version: u32,
    id: MigrationId,
    mode: Mode,
    /// How many connections take pages before the guest goes: this one, and others with
    /// [`Role::Pages`].
    streams: u32,
    machine: MachineConfig,
    /// The VMM's devices by their names, and the versions of their states.
    devices: BTreeMap<String, u32>,
    /// What the guest sees of its processor.
    processor: ProcessorFeatures,
    compression: Compression,
}

/// The first message of the source on every further connection.
#[derive(Serialize, Deserialize)]
struct Join {
    version: u32,
    id: MigrationId,
    role: Role,
}

/// The purpose of a further connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Role {
    /// It replaces the first connection, after a cut during or after the pause.
    Main,
    /// It takes pages before the guest goes.
    Pages,
    /// The destination's `Want`s.
    Wants,
    /// The source's answers to them.
    Answers,
}

/// The part of a first message that a reader needs before it knows the version.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

/// The first message of the destination on a connection.
#[derive(Serialize, Deserialize)]
struct Welcome {
    version: u32,
    /// In answer to [`Role::Main`]: how far the destination is.
    #[serde(default)]
    stage: Option<Stage>,
    /// In answer to [`Hello`]: how many pages are missing together there, if pages arrive after the
    /// guest. A power of two.
    #[serde(default)]
    unit: Option<u64>,
    /// How the guest has ended there. Nothing follows.
    #[serde(default)]
    ended: Option<String>,
}

/// How a guest has left its source: sent with its state.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Departure {
    /// Microseconds of its downtime so far.
    paused_us: u64,
    /// Pages sent in each round.
    rounds: Vec<u64>,
}

/// How far the destination is when the first connection is replaced.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Stage {
    /// It waits for `Go`.
    Prepared,
    /// It runs the guest. Frames `Awaited`, and then `Synced`, say which pages it lacks.
    Running,
}
