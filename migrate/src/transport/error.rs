//! Why there is no connection.

use super::Address;
use lacuna_machine::ErrorKind;
use std::fmt::Display;
use std::io;
use std::path::Path;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
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
    /// The address or the path cannot be used here.
    #[error("cannot listen at {at}: {error}; {advice}")]
    Listen {
        /// The address or the path.
        at: String,
        /// The system's words.
        error: io::Error,
        /// What to do.
        advice: &'static str,
    },
    /// No connection can be accepted.
    #[error("{at}: no connection can be accepted: {error}")]
    Accept {
        /// The address.
        at: Address,
        /// The system's words.
        error: io::Error,
    },
    /// The address is one connection, which has ended, or the migration needs several.
    #[error(
        "{0} is one connection: it takes one pre-copy over 1 stream; give a socket's address for \
         more"
    )]
    Single(Address),
    /// The address needs files for TLS.
    #[error("{0}: both sides need certificates: give an authority, a certificate and its key")]
    NoFiles(Address),
    /// The address takes no files for TLS.
    #[error("{0} takes no certificates: give an address tls:HOST:PORT, or leave them out")]
    NeedlessFiles(Address),
    /// The files for TLS are unusable.
    #[error(transparent)]
    Tls(#[from] TlsError),
}

impl TransportError {
    /// Where the cause lies.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Accept { .. } => ErrorKind::Host,
            _ => ErrorKind::Request,
        }
    }
}

/// Files unusable for TLS: what is wrong, and what to do.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct TlsError(String);

impl TlsError {
    pub(super) fn of(path: &Path, error: &dyn Display, advice: &str) -> Self {
        Self(format!("{}: {error}; {advice}", path.display()))
    }
}
