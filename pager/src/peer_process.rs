//! The process at the other end of a connection.

use crate::HandshakeError;
use lacuna_sys::{Errno, PeerCredentials};
use rustix::process::{Signal, pidfd_send_signal};
use std::fmt;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;

/// The process that has connected.
pub struct PeerProcess(PeerCredentials);

impl PeerProcess {
    /// The process behind `socket`.
    ///
    /// # Errors
    /// As `getsockopt(2)`.
    pub fn of(socket: &UnixStream) -> Result<Self, Errno> {
        PeerCredentials::of(socket.as_fd()).map(Self)
    }

    /// Checks that its user is one of `users`.
    ///
    /// # Errors
    /// It has another user.
    pub fn check(&self, users: &[u32]) -> Result<(), HandshakeError> {
        match users.contains(&self.0.user) {
            true => Ok(()),
            false => Err(HandshakeError::User(self.0.user)),
        }
    }

    /// Its number, unless it is in another PID namespace.
    pub fn pid(&self) -> Option<i32> {
        self.0.pid
    }

    /// Ends it by SIGKILL. Its number would not do: the process may have ended since it connected,
    /// and another one may have the number now.
    ///
    /// # Errors
    /// As `pidfd_send_signal(2)`; `NOSYS` before Linux 6.5, whose sockets have no pidfd.
    pub fn kill(&self) -> Result<(), Errno> {
        pidfd_send_signal(self.0.pidfd.as_ref().ok_or(Errno::NOSYS)?, Signal::KILL)
    }
}

/// Its name in messages.
impl fmt::Display for PeerProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid() {
            Some(pid) => write!(f, "process {pid}"),
            None => f.write_str("a process of another PID namespace"),
        }
    }
}
