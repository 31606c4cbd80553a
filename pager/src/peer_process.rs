//! The process at the other end of a connection.

use crate::HandshakeError;
use lacuna_sys::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

/// The process that has connected.
pub struct PeerProcess {
    pid: Pid,
    user: u32,
    /// Opened while the connection exists, so that a later process with the same number is safe.
    /// `None`: it cannot be signalled.
    pidfd: Option<OwnedFd>,
}

impl PeerProcess {
    /// The process behind `socket`.
    ///
    /// # Errors
    /// As `getsockopt(2)`.
    pub fn of(socket: &UnixStream) -> Result<Self, Errno> {
        let peer = socket_peercred(socket)?;
        Ok(Self {
            pid: peer.pid,
            user: peer.uid.as_raw(),
            pidfd: pidfd_open(peer.pid, PidfdFlags::empty()).ok(),
        })
    }

    /// Checks that its user is one of `users`.
    ///
    /// # Errors
    /// It has another user.
    pub fn check(&self, users: &[u32]) -> Result<(), HandshakeError> {
        match users.contains(&self.user) {
            true => Ok(()),
            false => Err(HandshakeError::User(self.user)),
        }
    }

    /// Its number.
    pub fn pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// Ends it by SIGKILL.
    ///
    /// # Errors
    /// As `pidfd_send_signal(2)`.
    pub fn kill(&self) -> Result<(), Errno> {
        pidfd_send_signal(self.pidfd.as_ref().ok_or(Errno::NOSYS)?, Signal::KILL)
    }
}
