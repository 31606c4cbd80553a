//! The address of the other side of a migration, and the files that TLS needs.

use super::{TlsError, TransportError};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::str::FromStr;

/// Where a guest goes to, or comes from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Address {
    /// A UNIX socket of this host.
    Unix(PathBuf),
    /// A TCP port, without authentication.
    Tcp(HostPort),
    /// A TCP port with TLS, at which each side checks the other's certificate.
    Tls(HostPort),
    /// A connected stream socket that this process has inherited, by its number: one connection.
    Fd(i32),
    /// A command of the shell, whose stdin and stdout are a connection. A source starts it for each
    /// connection; a destination has one.
    Exec(String),
}

/// A host and a TCP port of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostPort {
    /// A name, an IPv4 address, or an IPv6 address without brackets.
    pub host: String,
    /// The port.
    pub port: u16,
}

/// The files that TLS needs.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsFiles {
    /// The authorities whose certificates the other side may have.
    pub ca: PathBuf,
    /// This side's certificate, and those between it and the authority. A destination's has the
    /// name or the address by which its sources connect, as `subjectAltName`.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

impl TlsFiles {
    /// Opens the authorities', the certificate's and the key's. The open of a pipe does not wait
    /// for its other end.
    ///
    /// # Errors
    /// A file cannot be opened.
    pub fn open(&self) -> Result<[File; 3], TlsError> {
        let mut options = OpenOptions::new();
        options
            .read(true)
            .custom_flags(OFlags::NONBLOCK.bits() as i32);
        let open = |(path, advice): (&PathBuf, &str)| {
            let file = options.open(path);
            file.map_err(|error| TlsError::of(path, &error, advice))
        };
        let [ca, cert, key] = [
            (&self.ca, CERTIFICATES),
            (&self.cert, CERTIFICATES),
            (&self.key, KEY),
        ]
        .map(open);
        Ok([ca?, cert?, key?])
    }
}

/// The advices about a file with a private key, and with certificates.
pub(super) const KEY: &str = "give the private key of the certificate as a PEM file";
pub(super) const CERTIFICATES: &str = "give certificates as a PEM file";

/// Why a text is no address, with an example of one.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct AddressError(String);

impl Address {
    /// Refuses files if the address takes none, and their absence if it needs them.
    ///
    /// # Errors
    /// [`TransportError::NoFiles`], [`TransportError::NeedlessFiles`].
    pub fn check_tls(&self, files: Option<&TlsFiles>) -> Result<(), TransportError> {
        match (self, files) {
            (Self::Tls(_), None) => Err(TransportError::NoFiles(self.clone())),
            (Self::Tls(_), Some(_)) | (_, None) => Ok(()),
            (_, Some(_)) => Err(TransportError::NeedlessFiles(self.clone())),
        }
    }
}

impl Address {
    /// What to do if it cannot be used, where no host or path is to blame.
    pub(super) const fn advice(&self) -> Option<&'static str> {
        match self {
            Self::Unix(_) | Self::Tcp(_) | Self::Tls(_) => None,
            Self::Fd(_) => Some(
                "give the number of a connected UNIX or TCP socket that the process which runs the \
                 guest got when it was started",
            ),
            Self::Exec(_) => Some("see whether /bin/sh can be started"),
        }
    }
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        match text.split_once(':') {
            Some(("unix", path)) if !path.is_empty() => Ok(Self::Unix(path.into())),
            Some(("tcp", place)) => place.parse().map(Self::Tcp),
            Some(("tls", place)) => place.parse().map(Self::Tls),
            Some(("fd", number)) => match number.parse() {
                Ok(number @ 0..) => Ok(Self::Fd(number)),
                _ => Err(AddressError(format!(
                    "{number:?} is no number of a descriptor; write for example fd:3"
                ))),
            },
            Some(("exec", command)) if !command.trim().is_empty() => Ok(Self::Exec(command.into())),
            _ => Err(AddressError(format!(
                "{text:?} is no address; use unix:PATH, tcp:HOST:PORT, tls:HOST:PORT, fd:N or \
                 exec:COMMAND"
            ))),
        }
    }
}

impl FromStr for HostPort {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let wrong = |what: &str| {
            AddressError(format!(
                "{text:?} {what}; write for example host.example:7000 or [::1]:7000"
            ))
        };
        let (host, port) = text.rsplit_once(':').ok_or_else(|| wrong("has no port"))?;
        let port = port.parse();
        let port = port.map_err(|_| wrong("does not end with a port from 0 to 65535"))?;
        let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
        let host = match bare {
            Some(host) => host,
            None if host.contains(':') => {
                return Err(wrong("has an IPv6 address without brackets"));
            }
            None => host,
        };
        match host {
            "" => Err(wrong("has no host")),
            host => Ok(Self {
                host: host.to_owned(),
                port,
            }),
        }
    }
}

/// As it is parsed.
impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        match host.contains(':') {
            true => write!(f, "[{host}]:{port}"),
            false => write!(f, "{host}:{port}"),
        }
    }
}

/// As the command line takes it.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(place) => write!(f, "tcp:{place}"),
            Self::Tls(place) => write!(f, "tls:{place}"),
            Self::Fd(number) => write!(f, "fd:{number}"),
            Self::Exec(command) => write!(f, "exec:{command}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        let place = |host: &str, port| HostPort {
            host: host.into(),
            port,
        };
        for (text, address) in [
            ("unix:/run/a:b", Address::Unix("/run/a:b".into())),
            ("unix:here", Address::Unix("here".into())),
            ("tcp:0.0.0.0:7000", Address::Tcp(place("0.0.0.0", 7000))),
            ("tls:host:7000", Address::Tls(place("host", 7000))),
            ("tcp:[::1]:0", Address::Tcp(place("::1", 0))),
            ("tcp:host.example:1", Address::Tcp(place("host.example", 1))),
            ("fd:3", Address::Fd(3)),
            (
                "exec:ssh h nc -U :s",
                Address::Exec("ssh h nc -U :s".into()),
            ),
        ] {
            assert_eq!(text.parse(), Ok(address.clone()));
            assert_eq!(address.to_string(), text);
        }
        for (text, expected) in [
            ("", "is no address"),
            ("host:7000", "is no address; use unix:PATH"),
            ("unix:", "is no address"),
            ("tcp:", "has no port"),
            ("fd:", "write for example fd:3"),
            ("fd:-1", "write for example fd:3"),
            ("exec: ", "is no address"),
            ("tcp:host", "has no port"),
            ("tcp::7000", "has no host"),
            ("tcp:[]:7000", "has no host"),
            ("tcp:host:70000", "a port from 0 to 65535"),
            ("tcp:host:", "a port from 0 to 65535"),
            ("tcp:::1:7000", "without brackets"),
        ] {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
