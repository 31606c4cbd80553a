//! What is allowed, and the entry.

use crate::calls::{self, Calls, has_seccomp};
use crate::files::{self, Access, has_landlock};
use crate::trap;
use std::io;
use std::path::PathBuf;

/// What a process may do. A new value allows only what every command needs: its own entries in
/// `/proc`, this host's properties, and the devices `/dev/kvm`, `/dev/userfaultfd`, `/dev/null`
/// and `/dev/tty`.
#[derive(Clone, Debug, Default)]
pub struct Sandbox {
    files: Vec<(PathBuf, Access)>,
    /// Ports of TCP for outgoing connections.
    ports: Vec<u16>,
    calls: Calls,
}

/// What this kernel can confine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Confined {
    /// Files and ports, by Landlock.
    pub files: bool,
    /// System calls, by seccomp.
    pub calls: bool,
}

impl Confined {
    /// What this kernel does not confine, for a message.
    pub fn lacks(&self) -> Option<&'static str> {
        match (self.files, self.calls) {
            (true, true) => None,
            (false, true) => Some("this kernel has no Landlock, so files are not confined"),
            (true, false) => Some("this kernel has no seccomp, so system calls are not confined"),
            (false, false) => Some("this kernel has neither Landlock nor seccomp"),
        }
    }
}

/// A sandbox that cannot be entered.
#[derive(Debug, thiserror::Error)]
pub enum EnterError {
    /// Landlock refuses its rules.
    #[error("Landlock refuses its rules: {0}")]
    Files(#[from] landlock::RulesetError),
    /// The signal handler cannot be installed.
    #[error("cannot catch SIGSYS: {0}")]
    Signal(#[from] io::Error),
    /// The kernel refuses the filter.
    #[error("the kernel refuses the filter of system calls: {0}")]
    Calls(#[from] seccompiler::Error),
}

impl Sandbox {
    /// Allows what every command needs, and no more.
    pub fn new() -> Self {
        Self::default()
    }

    /// Allows `access` to the file or folder at `path`. A path without a file allows nothing.
    pub fn allow(&mut self, path: impl Into<PathBuf>, access: Access) {
        self.files.push((path.into(), access));
    }

    /// Allows new connections to sockets of UNIX. Their paths cannot be restricted before
    /// Linux 7.1.
    pub fn allow_unix(&mut self) {
        self.calls.unix = true;
    }

    /// Allows connections by TCP to `port` of any host, and the search for a host's address.
    pub fn allow_port(&mut self, port: u16) {
        self.calls.internet = true;
        self.ports.push(port);
    }

    /// Allows system calls on other processes' memory and descriptors, and signals to them.
    /// Landlock would forbid those, so it is left out.
    pub fn allow_processes(&mut self) {
        self.calls.processes = true;
    }

    /// Confines this thread, and each thread that it starts later. The system calls of running
    /// threads are confined too; their files are not, so enter before the first thread starts.
    /// A forbidden system call ends the process with the exit code `code`.
    ///
    /// # Errors
    /// [`EnterError`]. A kernel without one of the mechanisms is no error.
    pub fn enter(&self, code: u8) -> Result<Confined, EnterError> {
        let files = match self.calls.processes {
            true => has_landlock(),
            false => files::confine(&self.files, &self.ports)?,
        };
        let calls = has_seccomp();
        if calls {
            trap::install(code)?;
            calls::confine(self.calls)?;
        }
        Ok(Confined { files, calls })
    }
}
