//! What a rule about a daemon gets: it starts the daemon, plays the VMM's side, and notes what
//! happens.

use crate::frame::{ERROR, OK, Peer, header, is_closed, name};
use crate::process::Running;
use crate::queue::LOOK;
use crate::saved::{SavedVm, Step};
use crate::verdict::{Stop, Target, Verdict, keep};
use std::cell::{OnceCell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The commands of daemons.
#[derive(Debug)]
pub(crate) struct Commands {
    commands: Vec<(Target, String)>,
    timeout: Duration,
    /// Whether one process of the save daemon serves several VMs, once it is known.
    serves_several: OnceCell<bool>,
}

impl Commands {
    pub(crate) fn new(commands: Vec<(Target, String)>, timeout: Duration) -> Self {
        Self {
            commands,
            timeout,
            serves_several: OnceCell::new(),
        }
    }

    pub(crate) fn targets(&self) -> impl Iterator<Item = Target> {
        self.commands.iter().map(|(target, _)| *target)
    }
}

/// A rule's check of a daemon.
#[derive(Debug)]
pub(crate) struct Trial<'a> {
    daemons: &'a Commands,
    folder: TempDir,
    events: RefCell<VecDeque<String>>,
    /// The process of the save daemon, with the number of sessions that it has begun.
    saving: RefCell<Option<(Running, usize)>>,
}

/// Where a session has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum End {
    Accepted,
    /// The daemon has refused the request with this index: an error, or a closed connection.
    Refused(usize),
}

impl<'a> Trial<'a> {
    pub(crate) fn new(daemons: &'a Commands, folder: TempDir) -> Self {
        Self {
            daemons,
            folder,
            events: RefCell::default(),
            saving: RefCell::default(),
        }
    }

    pub(crate) fn into_events(self) -> Vec<String> {
        self.events.into_inner().into()
    }

    /// Reports that something happened.
    pub(crate) fn event(&self, text: impl Into<String>) {
        keep(&mut self.events.borrow_mut(), text.into());
    }

    pub(crate) fn command(&self, target: Target) -> Option<&'a str> {
        let mut commands = self.daemons.commands.iter();
        let found = commands.find(|(command, _)| *command == target);
        found.map(|(_, text)| text.as_str())
    }

    /// As [`command`](Self::command), for a rule that cannot be checked without it.
    pub(crate) fn required(&self, target: Target) -> Result<&'a str, Stop> {
        self.command(target).ok_or_else(|| Stop::without(target))
    }

    /// The path of a socket.
    pub(crate) fn socket(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn start(&self, command: &str, socket: &str) -> Result<Running, Stop> {
        let started = Running::start(command, &self.socket(socket));
        self.event("the daemon was started");
        started.map_err(Stop::host("start a shell"))
    }

    pub(crate) fn peer(&self, socket: UnixStream) -> Result<Peer, Stop> {
        Peer::new(socket, self.daemons.timeout).map_err(Stop::host("set the limit of a socket"))
    }

    /// Waits until `look` finds something. It must do so within the limit.
    pub(crate) fn wait<T>(
        &self,
        expected: &str,
        mut look: impl FnMut() -> Result<Option<T>, Stop>,
    ) -> Result<T, Stop> {
        let begin = Instant::now();
        loop {
            match look()? {
                Some(found) => return Ok(found),
                None if begin.elapsed() < self.daemons.timeout => thread::sleep(LOOK),
                None => return Err(Stop::failed(expected, self.silence())),
            }
        }
    }

    fn silence(&self) -> String {
        format!("nothing within {:?}", self.daemons.timeout)
    }

    /// A read or a write that has failed.
    pub(crate) fn failed(&self, expected: impl Into<String>) -> impl FnOnce(io::Error) -> Stop {
        let (expected, silence) = (expected.into(), self.silence());
        move |error| match error.kind() {
            io::ErrorKind::WouldBlock => Stop::failed(expected, silence),
            _ if is_closed(&error) => Stop::failed(expected, "a closed connection"),
            _ => Stop::failed(expected, error.to_string()),
        }
    }

    /// Connects to the save daemon. It starts one if none runs.
    pub(crate) fn connect(&self) -> Result<Peer, Stop> {
        let command = self.required(Target::SaveDaemon)?;
        let socket = self.socket("save");
        let connected = self.wait("the daemon listens at its socket", || {
            let mut saving = self.saving.borrow_mut();
            match (ended(&mut saving), self.daemons.serves_several.get()) {
                (Some(status), Some(true)) => return Err(has_ended(status)),
                // A daemon that serves one VM may end a moment after it.
                (_, Some(false)) if matches!(*saving, Some((_, 1..))) => *saving = None,
                (Some(_), _) => *saving = None,
                (None, _) => {}
            }
            if saving.is_none() {
                // A daemon that was ended may leave it.
                let _ = std::fs::remove_file(&socket);
                *saving = Some((self.start(command, "save")?, 0));
            }
            Ok(UnixStream::connect(&socket).ok())
        })?;
        if let Some((_, sessions)) = &mut *self.saving.borrow_mut() {
            *sessions += 1;
        }
        self.event("the VMM connects");
        self.peer(connected)
    }

    /// Finds out whether one process of the save daemon serves several VMs: a second whole session
    /// is acknowledged, or the process has ended.
    pub(crate) fn find_out(&self) -> Verdict {
        if self.daemons.serves_several.get().is_some() {
            return Ok(());
        }
        self.event("finds out whether the daemon serves several VMs");
        let vm = SavedVm::new(0)?;
        self.expect_saved(&vm, self.play(&self.connect()?, vm.steps()?)?)?;
        let peer = self.connect()?;
        let is_restarted = matches!(*self.saving.borrow(), Some((_, 1)));
        let serves_several = match self.play(&peer, vm.steps()?)? {
            End::Refused(0) if !is_restarted => {
                // The daemon has ended, or ends, and has read nothing from this connection.
                let expected = "a daemon that refuses a second VM ends";
                self.wait(expected, || Ok(ended(&mut self.saving.borrow_mut())))?;
                false
            }
            end => {
                self.expect_saved(&vm, end)?;
                !is_restarted
            }
        };
        self.event(format!("the daemon serves several VMs: {serves_several}"));
        self.daemons.serves_several.get_or_init(|| serves_several);
        Ok(())
    }

    /// Saves a VM, which the daemon must acknowledge.
    pub(crate) fn save(&self, vm: &SavedVm) -> Verdict {
        self.save_with(vm, vm.steps()?)
    }

    /// As [`save`](Self::save), with these requests.
    pub(crate) fn save_with(&self, vm: &SavedVm, steps: Vec<Step>) -> Verdict {
        self.find_out()?;
        let end = self.play(&self.connect()?, steps)?;
        self.expect_saved(vm, end)
    }

    fn expect_saved(&self, vm: &SavedVm, end: End) -> Verdict {
        self.expect_accepted(end)?;
        self.event(format!("VM {} is saved", vm.number));
        Ok(())
    }

    pub(crate) fn expect_accepted(&self, end: End) -> Verdict {
        match end {
            End::Accepted => Ok(()),
            End::Refused(index) => Err(Stop::failed(
                "each request is acknowledged: status 1",
                format!("request {} is refused", index + 1),
            )),
        }
    }

    /// Sends requests, each after the last one's answer.
    pub(crate) fn play(&self, peer: &Peer, steps: Vec<Step>) -> Result<End, Stop> {
        for (index, step) in steps.iter().enumerate() {
            let is_sent = self.send(peer, step, Peer::send)?;
            if !is_sent || !self.is_acknowledged(peer, &name(step.kind))? {
                return Ok(End::Refused(index));
            }
        }
        Ok(End::Accepted)
    }

    /// Sends one request: false if the daemon has closed the connection.
    pub(crate) fn send(
        &self,
        peer: &Peer,
        step: &Step,
        write: impl Fn(&Peer, &[u8]) -> io::Result<()>,
    ) -> Result<bool, Stop> {
        let length = step.length.unwrap_or(step.payload.len() as u64);
        let fds: Vec<_> = step.files.iter().map(|file| file.as_fd()).collect();
        let mut sent = write(peer, &header(step.kind, step.middle, length));
        if sent.is_ok() && fds.is_empty() {
            sent = write(peer, &step.payload);
        } else if sent.is_ok() {
            sent = peer.send_with(&step.payload, &fds);
        }
        match sent {
            Ok(()) => Ok(true),
            Err(error) if is_closed(&error) => Ok(false),
            Err(error) => Err(self.failed(format!("the daemon reads {}", name(step.kind)))(error)),
        }
    }

    /// Reads an answer: false for an error, and for a closed connection.
    pub(crate) fn is_acknowledged(&self, peer: &Peer, what: &str) -> Result<bool, Stop> {
        let expected = || format!("an answer to {what}: status 1 or 2, and no payload");
        let is_done = match peer.read_header() {
            Ok((status @ (OK | ERROR), _, 0)) => {
                self.event(format!("{what}: {status}"));
                status == OK
            }
            Ok((status, _, length)) => {
                let seen = format!("status {status}, {length} bytes");
                return Err(Stop::failed(expected(), seen));
            }
            Err(error) if is_closed(&error) => {
                self.event(format!("{what}: a closed connection"));
                false
            }
            Err(error) => return Err(self.failed(expected())(error)),
        };
        Ok(is_done)
    }
}

fn has_ended(status: ExitStatus) -> Stop {
    Stop::failed(
        "the daemon, which has served several VMs, serves the next one",
        format!("it has ended: {status}"),
    )
}

/// The exit status of a save daemon that has ended.
fn ended(saving: &mut Option<(Running, usize)>) -> Option<ExitStatus> {
    saving.as_mut().and_then(|(running, _)| running.ended())
}
