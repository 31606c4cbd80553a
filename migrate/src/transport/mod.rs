//! Connections between the two sides of a migration: UNIX sockets, TCP, TLS above TCP, an inherited
//! socket, or a command.
//!
//! A source has a [`Connector`] to an [`Address`], and a destination a [`Listener`] at one. The
//! [sessions](crate::session) use them.
//!
//! | file | job |
//! |---|---|
//! | `address` | addresses, and the files that TLS needs |
//! | `error` | why there is no connection |
//! | `link` | the shared state of one migration's connections: patience, counters |
//! | `stream` | one connection: waits in short steps, so that a silent peer is noticed |
//! | `connect` | the source's side: makes connections |
//! | `dial` | connects to an address |
//! | `dialer` | connections that another process makes for the source |
//! | `introduction` | how long a peer has to introduce itself |
//! | `candidates` | connections before the peers' introductions, all at the same time |
//! | `tls` | TLS above a connection; without the feature `tls`: `no_tls`, which refuses it |
//! | `inherited` | a connected socket that this process has inherited |
//! | `command` | a command of the shell as the other end |
//! | `socket` | a UNIX socket with a name, for this user alone |
//! | `listen` | the destination's side: accepts connections |
//!
//! A peer that is silent for 30 s counts as cut off. After a cancel it has one second in all. A
//! connected peer has 10 s to introduce itself to a destination: to end the handshake of TLS, and
//! to announce a machine, or, on a later connection, to say to which migration it belongs.

mod address;
mod candidates;
mod command;
mod connect;
mod dial;
mod dialer;
mod error;
mod inherited;
mod introduction;
mod link;
mod listen;
#[cfg(not(feature = "tls"))]
mod no_tls;
mod socket;
mod stream;
#[cfg(feature = "tls")]
mod tls;

#[cfg(not(feature = "tls"))]
use no_tls as tls;

pub use address::{Address, AddressError, HostPort, TlsFiles};
pub(crate) use candidates::Candidate;
pub use connect::Connector;
pub use dialer::Dialer;
pub use error::{TlsError, TransportError};
pub(crate) use link::Link;
pub(crate) use listen::Accepted;
pub use listen::Listener;
pub use socket::{PrivateSocket, is_socket};
