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
    /// Opened while the connection exists, so that a later process with the same number is safe.
    /// `None`: it cannot be signalled.
    pidfd: Option<OwnedFd>,
}

impl PeerProcess {
    /// The process behind `socket`, if its user is one of `users`.
    ///
    /// # Errors
    /// It has another user.
    pub fn of(socket: &UnixStream, users: &[u32]) -> Result<Self, HandshakeError> {
        let peer = socket_peercred(socket)?;
        let user = peer.uid.as_raw();
        if !users.contains(&user) {
            return Err(HandshakeError::User(user));
        }
        let pidfd = pidfd_open(peer.pid, PidfdFlags::empty()).ok();
        Ok(Self {
            pid: peer.pid,
            pidfd,
        })
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
