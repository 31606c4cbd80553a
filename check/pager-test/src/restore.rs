//! The VMM that receives a VM from a restore daemon.

use crate::frame::{
    COMPLETE, CONFIG, FAULT_ROLE, Frame, MEMORY_FD, OK, PAGE_FAULT, Peer, STATE, completes, header,
    name,
};
use crate::process::Running;
use crate::saved::{SLOTS, SavedVm, describe, page, place};
use crate::trial::Trial;
use crate::verdict::{Stop, Target, Verdict};
use lacuna_addr::PAGE_SIZE;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixListener;
use std::process::ExitStatus;

/// A session with a restore daemon, and what it has sent.
#[derive(Debug)]
pub(crate) struct Restore<'a> {
    trial: &'a Trial<'a>,
    running: Running,
    listener: UnixListener,
    pub(crate) main: Peer,
    pub(crate) config: Vec<u8>,
    pub(crate) state: Vec<u8>,
    /// The first descriptor of each MemoryFd, with its slot.
    memory: Vec<(u32, File)>,
}

impl<'a> Restore<'a> {
    /// Starts the daemon of `target`, and waits for its connection. Before, the VM with content 0
    /// is saved, if there is a save daemon.
    pub(crate) fn start(trial: &'a Trial<'a>, target: Target) -> Result<Self, Stop> {
        if trial.command(Target::SaveDaemon).is_some() {
            trial.save(&SavedVm::new(0)?)?;
        }
        Self::of_saved(trial, target)
    }

    /// As [`start`](Self::start), of the VM that was saved last.
    pub(crate) fn of_saved(trial: &'a Trial<'a>, target: Target) -> Result<Self, Stop> {
        let command = trial.required(target)?;
        // A path of a former session in this rule.
        let _ = std::fs::remove_file(trial.socket("restore"));
        let bound = UnixListener::bind(trial.socket("restore"));
        let listener = bound.map_err(Stop::host("bind a socket"))?;
        listener
            .set_nonblocking(true)
            .map_err(Stop::host("set a socket"))?;
        let mut running = trial.start(command, "restore")?;
        let expected = "the daemon connects to the VMM's socket";
        let socket = trial.wait(expected, || match listener.accept() {
            Ok((socket, _)) => Ok(Some(socket)),
            Err(_) => match running.ended() {
                Some(status) => Err(Stop::failed(expected, format!("it has ended: {status}"))),
                None => Ok(None),
            },
        })?;
        trial.event("the daemon has connected");
        Ok(Self {
            trial,
            running,
            listener,
            main: trial.peer(socket)?,
            config: Vec::new(),
            state: Vec::new(),
            memory: Vec::new(),
        })
    }

    /// Reads the next request, and keeps what it carries.
    pub(crate) fn next(&mut self) -> Result<Frame, Stop> {
        let read = self.main.read_frame();
        let mut frame = read.map_err(self.trial.failed("the daemon sends a request"))?;
        self.trial
            .event(format!("the daemon sends {}", name(frame.kind)));
        match frame.kind {
            CONFIG => self.config.clone_from(&frame.payload),
            STATE => self.state.clone_from(&frame.payload),
            MEMORY_FD => {
                let slot = frame
                    .payload
                    .first_chunk()
                    .map(|bytes| u32::from_le_bytes(*bytes));
                let first = frame.fds.first().map(|fd| fd.try_clone());
                if let (Some(slot), Some(Ok(fd))) = (slot, first) {
                    self.memory.push((slot, fd.into()));
                }
            }
            _ => {}
        }
        frame.payload.truncate(4);
        Ok(frame)
    }

    /// Answers the last request.
    pub(crate) fn answer(&self, status: u16) -> Verdict {
        let sent = self.main.send(&header(status, [0; 6], 0));
        sent.map_err(self.trial.failed("the daemon waits for the answer"))
    }

    /// Acknowledges requests until it reads one of this kind, which it does not answer.
    /// [`COMPLETE`] stands for both requests that complete a session.
    pub(crate) fn until(&mut self, kind: u16) -> Verdict {
        loop {
            let got = self.next()?.kind;
            if got == kind || (kind == COMPLETE && completes(got)) {
                return Ok(());
            }
            if completes(got) {
                return Err(Stop::failed(
                    format!("the daemon sends {}", name(kind)),
                    name(got),
                ));
            }
            self.answer(OK)?;
        }
    }

    /// Acknowledges all requests.
    pub(crate) fn receive(&mut self) -> Verdict {
        self.until(COMPLETE)?;
        self.answer(OK)
    }

    /// The connection for page faults, which the daemon has made already.
    pub(crate) fn fault_connection(&self) -> Result<Peer, Stop> {
        let expected = "a second connection, with role 2, before State is sent";
        let accepted = self.listener.accept();
        let (socket, _) = accepted.map_err(|_| Stop::failed(expected, "no connection"))?;
        let peer = self.trial.peer(socket)?;
        let role = peer.read().map_err(self.trial.failed(expected))?;
        match u16::from_le_bytes(role) {
            FAULT_ROLE => Ok(peer),
            role => Err(Stop::failed(expected, format!("role {role}"))),
        }
    }

    /// Acknowledges all requests, and accepts the connection for page faults.
    pub(crate) fn receive_on_demand(&mut self) -> Result<Peer, Stop> {
        self.until(STATE)?;
        let faults = self.fault_connection()?;
        self.answer(OK)?;
        self.receive()?;
        Ok(faults)
    }

    /// Waits until the daemon ends.
    pub(crate) fn wait_until_ended(&mut self) -> Result<ExitStatus, Stop> {
        let status = self
            .trial
            .wait("the daemon ends", || Ok(self.running.ended()))?;
        self.trial.event(format!("the daemon has ended: {status}"));
        Ok(status)
    }

    /// Closes the VMM's connections, and waits until the daemon ends.
    pub(crate) fn die(mut self, faults: Option<Peer>) -> Result<ExitStatus, Stop> {
        self.trial.event("the VMM closes its connections");
        self.main.close();
        drop(faults);
        self.wait_until_ended()
    }

    fn memory(&self, number: u32) -> Result<&File, Stop> {
        let mut memory = self.memory.iter();
        let found = memory.find(|(slot, _)| *slot == number);
        let expected = format!("slot {number} has a MemoryFd with a descriptor");
        let missing = || Stop::failed(expected, "no descriptor");
        found.map(|(_, file)| file).ok_or_else(missing)
    }

    /// The bytes of the page at a guest-physical address.
    pub(crate) fn load(&self, gpa: u64) -> Result<[u8; PAGE_SIZE], Stop> {
        let (slot, offset) = place(gpa);
        let mut bytes = [0; PAGE_SIZE];
        let read = self.memory(slot.number)?.read_exact_at(&mut bytes, offset);
        let expected = format!("slot {} has {} bytes", slot.number, slot.bytes());
        read.map_err(self.trial.failed(expected))?;
        Ok(bytes)
    }

    /// Writes the page at a guest-physical address, as the guest does.
    pub(crate) fn store(&self, gpa: u64, bytes: &[u8; PAGE_SIZE]) -> Verdict {
        let (slot, offset) = place(gpa);
        let written = self.memory(slot.number)?.write_all_at(bytes, offset);
        let expected = format!("the memory of slot {} is writable", slot.number);
        written.map_err(self.trial.failed(expected))
    }

    /// Checks the page at a guest-physical address: it has this content.
    pub(crate) fn check_bytes(&self, gpa: u64, wanted: &[u8; PAGE_SIZE], why: &str) -> Verdict {
        let found = self.load(gpa)?;
        match found == *wanted {
            true => Ok(()),
            false => Err(Stop::failed(
                format!("address {gpa:#x} {why}"),
                describe(&found),
            )),
        }
    }

    /// Checks the page at a guest-physical address: a VM of this content has saved it.
    pub(crate) fn check_page(&self, number: u64, gpa: u64) -> Verdict {
        self.check_bytes(gpa, &page(number, gpa), "has the content that was saved")
    }

    /// Checks all of the memory.
    pub(crate) fn check_memory(&self, number: u64) -> Verdict {
        for slot in &SLOTS {
            slot.addresses()
                .try_for_each(|gpa| self.check_page(number, gpa))?;
        }
        self.trial
            .event("the memory has the content that was saved");
        Ok(())
    }

    /// Checks that the configuration is the saved one. The daemon chooses `memory_mode`.
    pub(crate) fn check_config(&self, vm: &SavedVm) -> Verdict {
        let mut wanted = vm.config();
        let mut found = serde_json::from_slice(&self.config).unwrap_or(serde_json::Value::Null);
        for config in [&mut wanted, &mut found] {
            if let Some(config) = config.as_object_mut() {
                config.remove("memory_mode");
            }
        }
        match found == wanted {
            true => Ok(()),
            false => Err(Stop::failed(
                format!("Config carries {wanted}"),
                found.to_string(),
            )),
        }
    }

    /// Checks that the state is the saved one, byte by byte.
    pub(crate) fn check_state(&self, vm: &SavedVm) -> Verdict {
        let wanted = vm.state();
        let differs = |(found, wanted): (&u8, &u8)| found != wanted;
        let at = self.state.iter().zip(&wanted).position(differs);
        match (at, self.state.len() == wanted.len()) {
            (None, true) => Ok(()),
            (at, _) => Err(Stop::failed(
                format!("State carries the {} bytes that were saved", wanted.len()),
                match at {
                    Some(at) => format!("another byte {at}"),
                    None => format!("{} bytes", self.state.len()),
                },
            )),
        }
    }

    /// Sends requests on the connection for page faults.
    pub(crate) fn ask(&self, faults: &Peer, requests: &[u8]) -> Verdict {
        let sent = faults.send(requests);
        sent.map_err(self.trial.failed("the daemon reads requests for pages"))
    }

    /// Reads the answer to a request for this range, which has then its content.
    pub(crate) fn check_answer(&self, faults: &Peer, gpa: u64, length: u64) -> Verdict {
        let what = format!("PageFault at {gpa:#x}, {length:#x} bytes");
        if !self.trial.is_acknowledged(faults, &what)? {
            return Err(Stop::failed(format!("{what}: status 1"), "it is refused"));
        }
        let mut addresses = (gpa..gpa + length).step_by(PAGE_SIZE);
        addresses.try_for_each(|gpa| self.check_page(0, gpa))
    }

    /// Requests a range, and checks it.
    pub(crate) fn fault(&self, faults: &Peer, gpa: u64, length: u64) -> Verdict {
        self.ask(faults, &fault(gpa, length))?;
        self.check_answer(faults, gpa, length)
    }
}

/// A PageFault request.
pub(crate) fn fault(gpa: u64, length: u64) -> Vec<u8> {
    let range = [gpa.to_le_bytes(), length.to_le_bytes()].concat();
    [&header(PAGE_FAULT, [0; 6], 16)[..], &range].concat()
}

/// Checks the exit status of a daemon, after a session that was completed or not.
pub(crate) fn check_status(status: ExitStatus, is_complete: bool) -> Verdict {
    let expected = match is_complete {
        true => "exit status 0 after a complete session",
        false => "an exit status other than 0, because the session is not complete",
    };
    match status.success() == is_complete && status.code().is_some() {
        true => Ok(()),
        false => Err(Stop::failed(expected, status.to_string())),
    }
}
