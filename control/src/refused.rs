//! Why a request was refused, or has failed.

use lacuna::migrate::MigrateError;
use lacuna::migrate::transport::TransportError;
use lacuna::{Ending, ErrorKind};
use serde::{Deserialize, Serialize};
use std::fmt::Display;
use std::io;

/// Why a request, or an object store, was refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
#[error("{text}")]
pub struct Refused {
    /// Where the cause lies.
    #[serde(with = "Kind")]
    pub kind: ErrorKind,
    /// What happened, and what to do.
    pub text: String,
}

/// The names of [`ErrorKind`] in JSON.
#[derive(Serialize, Deserialize)]
#[serde(remote = "ErrorKind", rename_all = "lowercase")]
enum Kind {
    Request,
    Guest,
    Host,
    Peer,
    Cancelled,
}

impl Refused {
    /// A wrong request, or a request at a wrong time.
    pub(crate) fn request(text: impl Into<String>) -> Self {
        let (kind, text) = (ErrorKind::Request, text.into());
        Self { kind, text }
    }

    pub(crate) fn of(kind: ErrorKind, text: impl Display) -> Self {
        let text = text.to_string();
        Self { kind, text }
    }

    pub(crate) fn no_thread(error: io::Error) -> Self {
        Self::of(
            ErrorKind::Host,
            format_args!("cannot start a thread: {error}"),
        )
    }

    /// A path of the client's folder, which is not the VM's.
    pub(crate) fn relative(path: impl Display) -> Self {
        Self::request(format!(
            "{path} is relative, and the VM has a current folder of its own: give the path from / \
             on"
        ))
    }

    /// The run has ended meanwhile. `what` says so, and what was not done yet.
    pub(crate) fn ended(what: &str, ending: &Ending) -> Self {
        let kind = match ending {
            Ending::Stopped => ErrorKind::Cancelled,
            Ending::Exited(_) | Ending::PoweredOff | Ending::Reset => ErrorKind::Request,
            Ending::Failed(error) => error.kind(),
            Ending::Device(error) => error.kind(),
            _ => ErrorKind::Guest,
        };
        Self::of(kind, format_args!("{what}: {ending}"))
    }
}

impl From<MigrateError> for Refused {
    fn from(error: MigrateError) -> Self {
        Self::of(error.kind(), error)
    }
}

impl From<TransportError> for Refused {
    fn from(error: TransportError) -> Self {
        Self::of(error.kind(), error)
    }
}
