//! The process at the other end of a connection.

use crate::HandshakeError;
use lacuna_addr::HvaRange;
use lacuna_sys::{Errno, PeerCredentials, page_out};
use rustix::param::clock_ticks_per_second;
use rustix::process::{Signal, pidfd_send_signal};
use std::fmt;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

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

    /// Its effective user when it connected.
    pub fn user(&self) -> u32 {
        self.0.user
    }

    /// The process itself: readable when it has ended.
    pub fn pidfd(&self) -> Option<BorrowedFd<'_>> {
        self.0.pidfd.as_ref().map(|pidfd| pidfd.as_fd())
    }

    /// Its number, unless it is in another PID namespace.
    pub fn pid(&self) -> Option<i32> {
        self.0.pid
    }

    /// The processor time that it has used, with its vCPUs'. `None`: it cannot be read.
    pub fn processor_time(&self) -> Option<Duration> {
        let text = self.read("stat")?;
        // The name, in parentheses, may have spaces. The 12th and 13th field behind it are the
        // ticks in user mode, with those of guests, and in the kernel.
        let (_, fields) = text.rsplit_once(')')?;
        let ticks = fields.split_whitespace().skip(11).take(2);
        let ticks: Option<u64> = ticks.map(|ticks| ticks.parse::<u64>().ok()).sum();
        Some(Duration::from_millis(
            ticks? * 1000 / clock_ticks_per_second(),
        ))
    }

    /// The bytes that it has in swap. `None`: they cannot be read.
    pub fn swapped(&self) -> Option<u64> {
        let text = self.read("status")?;
        let line = text.lines().find_map(|line| line.strip_prefix("VmSwap:"))?;
        let number: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
        Some(number << 10)
    }

    fn read(&self, file: &str) -> Option<String> {
        std::fs::read_to_string(format!("/proc/{}/{file}", self.pid()?)).ok()
    }

    /// Moves pages of it to swap.
    ///
    /// # Errors
    /// As [`page_out`]; `NOSYS` as for [`PeerProcess::kill`].
    pub fn page_out(&self, range: HvaRange) -> Result<(), Errno> {
        page_out(self.0.pidfd.as_ref().ok_or(Errno::NOSYS)?.as_fd(), range)
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

impl From<PeerCredentials> for PeerProcess {
    fn from(credentials: PeerCredentials) -> Self {
        Self(credentials)
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
