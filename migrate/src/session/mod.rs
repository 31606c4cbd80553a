//! The sessions of a migration: a whole migration on each side, with its connections, its reports,
//! and the decisions that end it.
//!
//! ```text
//! source                                       destination
//! Outgoing::send: connects, sends,    ──────►  Destination::wait: an Arrival, whose caller makes
//!   connects again until it is settled           a VM; receive, start, take_rest
//! OutgoingHandle: progress, cancel, keep       IncomingHandle: progress, cancel, keep, end
//! ```
//! The calls block. Other threads use the handles meanwhile, and event loops poll their
//! descriptors.
//!
//! | file | job |
//! |---|---|
//! | `report` | how far a migration is, and how it has ended |
//! | `outgoing` | the source: sends the guest, and connects again when the connection is cut |
//! | `outgoing_handle` | its stage, and what other threads want of it |
//! | `destination` | the destination: waits for a guest, and takes it |
//! | `incoming_handle` | its stage, and what other threads want of it |
//! | `watches` | descriptors for event loops that wait for the next stage |

mod destination;
mod incoming_handle;
mod outgoing;
mod outgoing_handle;
mod report;
mod watches;

pub use destination::{Arrival, Destination};
pub use incoming_handle::{IncomingEvent, IncomingHandle};
pub use outgoing::{Moved, Outcome, Outgoing, Stayed, Undecided};
pub use outgoing_handle::{NoPostCopy, OutgoingHandle};
pub use report::{
    IncomingProgress, IncomingStage, Migrated, MissingRange, OutgoingProgress, OutgoingStage,
};
