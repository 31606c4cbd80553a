//! A process of a daemon.

use rustix::process::{Pid, Signal, kill_process_group};
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

/// The text of a command that stands for the socket's path.
pub(crate) const SOCKET: &str = "{socket}";

/// A process of a daemon, with the processes that it has started. Dropping it kills them.
#[derive(Debug)]
pub(crate) struct Running(Child);

impl Running {
    pub(crate) fn start(command: &str, socket: &Path) -> io::Result<Self> {
        let text = command.replace(SOCKET, &socket.to_string_lossy());
        let mut shell = Command::new("/bin/sh");
        // The report has stdout for itself.
        shell
            .args(["-c", &text])
            .stdin(Stdio::null())
            .stdout(io::stderr())
            .process_group(0);
        shell.spawn().map(Self)
    }

    /// Its exit status, if it has ended.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        // The only error is a process that is no child: it was waited for here alone.
        self.0.try_wait().ok().flatten()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // A group that has ended is no error.
        let _ = kill_process_group(Pid::from_child(&self.0), Signal::KILL);
        let _ = self.0.wait();
    }
}
