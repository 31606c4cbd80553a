//! Connections between the two sides of a migration.
//!
//! | file | job |
//! |---|---|
//! | `link` | the shared state of one migration's connections: patience, counters |
//! | `stream` | one connection: waits in short steps, so that a silent peer is noticed |
//! | `connect` | the source's side: makes connections |
//! | `introduction` | how long a peer has to introduce itself |
//! | `candidates` | connections before the peers' introductions, all at the same time |
//! | `tls` | TLS above a connection |
//! | `listen` | the destination's side: accepts connections |
//!
//! A peer that is silent for 30 s counts as cut off. After a cancel it has one second in all. A
//! connected peer has 10 s to introduce itself to a destination: to end the handshake of TLS, and
//! to announce a machine, or, on a later connection, to say to which migration it belongs.

mod candidates;
mod connect;
mod introduction;
mod link;
mod listen;
mod stream;
mod tls;

pub use candidates::Candidate;
pub use connect::Connector;
pub use link::Link;
pub use listen::{Accepted, Listener};
pub use stream::Stream;
pub use tls::{Tls, TlsError};

use crate::args::Address;
use crate::exit::Exit;
use lacuna_machine::ErrorKind;
use std::io;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// Nothing answers there.
    #[error("cannot connect to {to}: {error}; {advice}")]
    Connect {
        /// The address.
        to: Address,
        /// The system's words.
        error: io::Error,
        /// What to do.
        advice: &'static str,
    },
    /// The address cannot be used here.
    #[error("cannot listen at {at}: {error}; {advice}")]
    Listen {
        /// The address.
        at: Address,
        /// The system's words.
        error: io::Error,
        /// What to do.
        advice: &'static str,
    },
    /// The files for TLS are unusable.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The socket's name is taken, or cannot be used.
    #[error("{1}")]
    Socket(Exit, String),
}

impl TransportError {
    /// Where the cause lies.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Socket(Exit::Host, _) => ErrorKind::Host,
            _ => ErrorKind::Request,
        }
    }
}
