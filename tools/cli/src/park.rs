//! `lacuna pager --park`: a service manager for one pager, where systemd is not. It speaks
//! systemd's protocol (`sd_notify(3)`, `sd_listen_fds(3)`):
//!
//! ```text
//! pager     sends each VM's userfaultfd and connection, and its own socket ─► kept here
//! pager     dies, or SIGHUP kills it
//! park      starts the program that is installed now, with what is kept as descriptors 3, 4, ...
//! ```

use crate::exit::Exit;
use crate::output::complain;
use crate::run::{Refusal, exit_of};
use crate::signals::{Signal, is_caught_by};
use lacuna_pager::pass_descriptors;
use nix::sys::signal::kill;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use std::ffi::OsString;
use std::fs::Permissions;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// How often signals are checked.
const LOOK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};
/// The pause before the next start, at first and at most. It doubles while the child dies early.
const PAUSE: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// A child that has lived for so long does not die early.
const LIFE: Duration = Duration::from_secs(10);
/// `LISTEN_PID` is the number of the process that this shell becomes.
const SHELL: &str = r#"export LISTEN_PID=$$; exec "$0" "$@""#;

/// Starts the pager of this command line, without `--park`, until a signal ends it.
pub fn park() -> Exit {
    exit_of(Parked::new().and_then(|mut parked| parked.run()))
}

struct Parked {
    /// What the pagers have asked to keep, by name.
    kept: Vec<(String, OwnedFd)>,
    notify: UnixDatagram,
    folder: TempDir,
    program: PathBuf,
    arguments: Vec<OsString>,
    hang_up: Arc<AtomicBool>,
    /// Signals for the pager that it has not got yet.
    ends: [(Signal, Arc<AtomicBool>); 2],
    /// The first signal that the pager has got.
    ended_by: Option<Signal>,
}

fn host(error: impl ToString) -> Refusal {
    (Exit::Host, format!("--park: {}", error.to_string()))
}

impl Parked {
    fn new() -> Result<Self, Refusal> {
        let caught = |number| -> io::Result<Arc<AtomicBool>> {
            let set = Arc::default();
            flag::register(number, Arc::clone(&set)).map(|_| set)
        };
        // No other user can send to a socket in it.
        let mut folder = tempfile::Builder::new();
        folder.permissions(Permissions::from_mode(0o700));
        let folder = folder.prefix("lacuna-park-").tempdir().map_err(host)?;
        let notify = UnixDatagram::bind(folder.path().join("notify")).map_err(host)?;
        notify.set_nonblocking(true).map_err(host)?;
        let arguments = std::env::args_os().skip(1);
        Ok(Self {
            kept: Vec::new(),
            notify,
            folder,
            program: std::env::current_exe().map_err(host)?,
            arguments: arguments.filter(|argument| argument != "--park").collect(),
            hang_up: caught(SIGHUP).map_err(host)?,
            ends: [
                (Signal::Terminate, caught(SIGTERM).map_err(host)?),
                (Signal::Interrupt, caught(SIGINT).map_err(host)?),
            ],
            ended_by: None,
        })
    }

    fn run(&mut self) -> Result<Exit, Refusal> {
        let mut pause = PAUSE;
        loop {
            let began = Instant::now();
            // The last pager has got it, and this one ends by it too.
            if let Some(signal) = self.ended_by.take() {
                let ends = self.ends.iter().filter(|(of, _)| *of == signal);
                ends.for_each(|(_, set)| set.store(true, Ordering::Relaxed));
            }
            let reason = match self.run_once() {
                Ok((_, true)) => continue,
                Ok((status, _)) => match (status.code(), self.ended_by) {
                    (Some(_), Some(signal)) => return Ok(Exit::Interrupted(signal)),
                    // No VM loses its descriptor by the end of this process.
                    (Some(2), None) if !self.has_vms() => return Ok(Exit::Usage),
                    (Some(_), None) if !self.has_vms() => return Ok(Exit::Host),
                    _ => status.to_string(),
                },
                Err(error) if !self.has_vms() => return Err(host(error)),
                Err(error) => error.to_string(),
            };
            if let Some(signal) = self.end() {
                return Ok(Exit::Interrupted(signal));
            }
            pause = match began.elapsed() > LIFE {
                true => PAUSE,
                false => PAUSE_MAX.min(pause * 2),
            };
            complain(&format!(
                "the pager has died ({reason}), and is started again"
            ));
            self.wait(pause);
            if let Some(signal) = self.end() {
                return Ok(Exit::Interrupted(signal));
            }
        }
    }

    /// The signal that ends this process between two pagers. A VM needs another pager first.
    fn end(&self) -> Option<Signal> {
        let mut ends = self.ends.iter();
        let pending = ends.find(|(_, set)| set.load(Ordering::Relaxed));
        let signal = self.ended_by.or(pending.map(|(signal, _)| *signal));
        signal.filter(|_| !self.has_vms())
    }

    fn has_vms(&self) -> bool {
        self.kept.iter().any(|(name, _)| name.starts_with("vm-"))
    }

    fn start(&self) -> io::Result<Child> {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", SHELL]).arg(&self.program);
        command.args(&self.arguments);
        let names: Vec<_> = self.kept.iter().map(|(name, _)| name.as_str()).collect();
        command.env("NOTIFY_SOCKET", self.folder.path().join("notify"));
        command.env("LISTEN_FDS", names.len().to_string());
        command.env("LISTEN_FDNAMES", names.join(":"));
        // A terminal's Ctrl-C reaches it through this process alone.
        command.process_group(0);
        let fds: Vec<_> = self.kept.iter().map(|(_, fd)| fd.as_fd()).collect();
        pass_descriptors(&mut command, &fds)?;
        command.spawn()
    }

    /// Starts a child, and keeps what it sends until it ends. Returns whether SIGHUP has ended it.
    fn run_once(&mut self) -> io::Result<(ExitStatus, bool)> {
        let mut child = self.start()?;
        let pid = Pid::from_child(&child);
        // Without it, the end of the child is found a moment later.
        let pidfd = pidfd_open(pid, PidfdFlags::empty());
        let mut is_upgrade = false;
        loop {
            let ended = pidfd
                .as_ref()
                .map_or(self.notify.as_fd(), |pidfd| pidfd.as_fd());
            let mut fds = [
                PollFd::new(&self.notify, PollFlags::IN),
                PollFd::from_borrowed_fd(ended, PollFlags::IN),
            ];
            // After an interruption there may be a signal.
            let _ = poll(&mut fds, Some(&LOOK));
            if self.hang_up.swap(false, Ordering::Relaxed) {
                is_upgrade = true;
                child.kill()?;
            }
            for (signal, set) in &self.ends {
                // Before, it would kill the child, and the next one would not end.
                if set.load(Ordering::Relaxed) && is_caught_by(child.id(), *signal) {
                    set.store(false, Ordering::Relaxed);
                    self.ended_by = self.ended_by.or(Some(*signal));
                    // It may have ended.
                    let _ = kill(
                        nix::unistd::Pid::from_raw(pid.as_raw_pid()),
                        signal.of_kernel(),
                    );
                }
            }
            let status = child.try_wait()?;
            // Behind the check of its end: all that it has sent is in the queue.
            while self.receive() {}
            if let Some(status) = status {
                return Ok((status, is_upgrade));
            }
        }
    }

    /// Waits for `pause`, for SIGHUP, or for the end.
    fn wait(&self, pause: Duration) {
        let until = Instant::now() + pause;
        let is_over = || self.hang_up.load(Ordering::Relaxed) || self.end().is_some();
        while Instant::now() < until && !is_over() {
            std::thread::sleep(PAUSE);
        }
    }

    /// Takes one message of the child. Returns whether there was one.
    fn receive(&mut self) -> bool {
        let mut bytes = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut rights = RecvAncillaryBuffer::new(&mut space);
        let buffers = &mut [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let Ok(received) = recvmsg(&self.notify, buffers, &mut rights, flags) else {
            return false;
        };
        let fds = rights.drain().flat_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => fds.collect(),
            _ => Vec::new(),
        });
        let fds: Vec<OwnedFd> = fds.collect();
        let text = String::from_utf8_lossy(&bytes[..received.bytes]).into_owned();
        let value = |key| text.lines().find_map(|line: &str| line.strip_prefix(key));
        let name = value("FDNAME=").unwrap_or("stored").replace(':', "_");
        if value("FDSTOREREMOVE=") == Some("1") {
            self.kept.retain(|(other, _)| *other != name);
        } else if value("FDSTORE=") == Some("1") {
            self.kept
                .extend(fds.into_iter().map(|fd| (name.clone(), fd)));
        }
        true
    }
}
