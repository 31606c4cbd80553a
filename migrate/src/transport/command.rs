//! A command of the shell as the other end of a connection.
//!
//! Its stdin and its stdout are one UNIX socket, so reads and writes wait as on a socket. The
//! command has a process group of its own: Ctrl-C on this process's terminal does not cut a
//! connection that this process still needs.

use super::link::LOOK;
use rustix::process::{Pid, Signal, kill_process_group};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command};
use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

/// How long a command may run after its connection has ended. Then it is killed.
const GRACE: Duration = Duration::from_secs(5);
/// How long the end of a connection waits for its command's exit status.
const STATUS: Duration = Duration::from_secs(1);

/// The exit status of a command, in words. Its owners are the connection, while that is open, and
/// the thread that waits for the command.
#[derive(Clone, Default)]
pub(super) struct CommandEnd(Arc<OnceLock<String>>);

impl CommandEnd {
    /// How the command has ended, if it has, or ends in a short time.
    pub fn in_words(&self) -> String {
        let began = Instant::now();
        loop {
            match self.0.get() {
                Some(status) => return format!("the command has ended with {status}"),
                None if began.elapsed() > STATUS => {
                    return "the command has closed its output, and still runs".into();
                }
                None => thread::sleep(Duration::from_millis(1)),
            }
        }
    }
}

/// Starts a shell with `command`. Its stdin and its stdout are the other end of the socket.
pub(super) fn execute(command: &str) -> io::Result<(UnixStream, CommandEnd)> {
    let (here, there) = UnixStream::pair()?;
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", command]).process_group(0);
    shell.stdin(OwnedFd::from(there.try_clone()?));
    shell.stdout(OwnedFd::from(there));
    let (sender, started) = channel();
    let end = CommandEnd::default();
    let ended = end.clone();
    let named = thread::Builder::new().name("lacuna-command".into());
    // Without a thread that waits for it, an ended command would stay a zombie.
    named.spawn(move || {
        let spawned = shell.spawn();
        // From here on only the command has its end of the socket.
        drop(shell);
        match spawned {
            Ok(child) => {
                let _ = sender.send(Ok(()));
                wait_for(child, &ended);
            }
            Err(error) => _ = sender.send(Err(error)),
        }
    })?;
    started.recv().map_err(io::Error::other)??;
    Ok((here, end))
}

/// Waits for the end of the command. Kills it if it does not end after its connection.
fn wait_for(mut child: Child, end: &CommandEnd) {
    let mut unused = None;
    loop {
        let ended = match child.try_wait() {
            Ok(status) => status.map(|status| status.to_string()),
            Err(error) => Some(format!("an unknown status: {error}")),
        };
        if let Some(ended) = ended {
            let _ = end.0.set(ended);
            return;
        }
        if Arc::strong_count(&end.0) == 1 {
            let since = unused.get_or_insert_with(Instant::now);
            if since.elapsed() > GRACE {
                let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
            }
        }
        thread::sleep(LOOK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read as _, Write as _};

    #[test]
    fn a_command_gets_and_sends_bytes() {
        let (mut socket, end) = execute("tr a-z A-Z; exit 3").unwrap();
        socket.write_all(b"abc").unwrap();
        socket.shutdown(std::net::Shutdown::Write).unwrap();
        let mut text = String::new();
        socket.read_to_string(&mut text).unwrap();
        assert_eq!(text, "ABC");
        assert!(
            end.in_words().ends_with("exit status: 3"),
            "{}",
            end.in_words()
        );
    }
}
