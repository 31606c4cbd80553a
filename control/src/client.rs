//! The client's side of a control socket.

use crate::lines::DESCRIPTORS_MAX;
use crate::message::{
    Answer, MoveRequest, Progress, Request, SaveRequest, Saved, Saving, Status, WatchRequest,
    Writes,
};
use crate::refused::Refused;
use crate::settings::{MapRequest, SetRequest, Settings};
use crate::store::url;
use lacuna::ErrorKind;
use lacuna::memory::PageMap;
use lacuna::migrate::NewFolder;
use lacuna::migrate::session::{Migrated, OutgoingProgress};
use lacuna::migrate::transport::{Address, Dialer, TlsFiles, is_socket};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::Number;
use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, IoSlice, Write};
use std::iter;
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// A connection to the control socket of a running guest. A drop disconnects, which cancels a
/// snapshot or a migration of this client.
pub struct Client {
    path: PathBuf,
    stream: BufReader<UnixStream>,
}

/// Ends the connection of a [`Client`] that waits for an answer, as after a signal. The request
/// fails with [`AskError::Gone`]. The VM cancels a save, or a migration that it can still cancel.
pub struct Closer(UnixStream);

impl Closer {
    /// Ends the connection.
    pub fn close(&self) {
        // It fails if the VM has ended the connection before.
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

/// Why a request has no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AskError {
    /// Nothing answers there.
    #[error(
        "{}: cannot connect to this control socket: {error}; {}",
        path.display(),
        advice(path, error)
    )]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The system's words.
        error: io::Error,
    },
    /// The VM has ended meanwhile.
    #[error(
        "{}: the VM has closed its control socket before it answered: {cause}; its own output says \
         why it ended",
        path.display()
    )]
    Gone {
        /// The socket.
        path: PathBuf,
        /// The cause of the lacking answer.
        cause: String,
    },
    /// The run has ended, and so have the periods of [`Client::watch`].
    #[error("the run has ended: {0}")]
    Ended(String),
    /// The VM has answered something else.
    #[error("{}: no answer to this request", .0.display())]
    Other(PathBuf),
    /// The VM has refused.
    #[error(transparent)]
    Refused(#[from] Refused),
}

fn advice(path: &Path, error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::ConnectionRefused if is_socket(path) => "its VM has ended: remove the file",
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            "name the one that was given to lacuna run --control"
        }
        _ => "use it as the user that runs the VM",
    }
}

impl AskError {
    /// Where the cause lies.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Connect { .. } => ErrorKind::Request,
            Self::Gone { .. } | Self::Other(_) => ErrorKind::Host,
            Self::Ended(_) => ErrorKind::Guest,
            Self::Refused(refused) => refused.kind,
        }
    }
}

/// Each request waits for its last answer.
impl Client {
    /// Connects to the socket at `path`.
    ///
    /// # Errors
    /// [`AskError::Connect`].
    pub fn connect(path: impl AsRef<Path>) -> Result<Self, AskError> {
        let path = path.as_ref();
        let failed = |error| AskError::Connect {
            path: path.to_owned(),
            error,
        };
        let stream = UnixStream::connect(path).map_err(failed)?;
        Ok(Self {
            path: path.to_owned(),
            stream: BufReader::new(stream),
        })
    }

    /// A client of a socket in this process.
    pub(crate) fn of(stream: UnixStream) -> Self {
        Self {
            path: "this process".into(),
            stream: BufReader::new(stream),
        }
    }

    /// Ends the connection from another thread.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn closer(&self) -> io::Result<Closer> {
        self.stream.get_ref().try_clone().map(Closer)
    }

    /// The state of the run.
    pub fn status(&mut self) -> Result<Status, AskError> {
        self.state_after(&Request::Status {})
    }

    /// Pauses the guest until [`Client::resume`].
    pub fn pause(&mut self) -> Result<Status, AskError> {
        self.state_after(&Request::Pause {})
    }

    /// Resumes the guest, or begins its run if it has started paused.
    pub fn resume(&mut self) -> Result<Status, AskError> {
        self.state_after(&Request::Resume {})
    }

    /// Ends the run.
    pub fn stop(&mut self) -> Result<Status, AskError> {
        self.state_after(&Request::Stop {})
    }

    /// Cancels the migration of another client's request, or ends the wait for the other side.
    pub fn cancel(&mut self) -> Result<Status, AskError> {
        self.state_after(&Request::Cancel {})
    }

    /// Hands a moving guest over before the rest of its memory.
    pub fn post_copy(&mut self) -> Result<Status, AskError> {
        self.state_after(&Request::PostCopy {})
    }

    /// Resumes the guest here. First end the other side of its migration: if that runs the guest,
    /// there are two running copies of it.
    pub fn keep(&mut self) -> Result<Status, AskError> {
        self.state_after(&Request::Keep {})
    }

    /// The values of the VM's counters, by their names and labels.
    pub fn counters(&mut self) -> Result<BTreeMap<String, Number>, AskError> {
        match self.ask(&Request::Stat {}, &mut |_| {})? {
            Answer::Stat(counters) => Ok(counters),
            _ => Err(self.other()),
        }
    }

    /// What may be changed while the guest runs, and the values at present.
    pub fn settings(&mut self) -> Result<Settings, AskError> {
        self.settings_after(&Request::Settings {})
    }

    /// Changes settings while the guest runs, all or none of them, and returns them.
    pub fn set(&mut self, request: SetRequest) -> Result<Settings, AskError> {
        self.settings_after(&Request::Set(request))
    }

    /// A map of the guest's memory in at most `cells` cells, 1 to 4096.
    pub fn map(&mut self, cells: u32) -> Result<PageMap, AskError> {
        match self.ask(&Request::Map(MapRequest { cells }), &mut |_| {})? {
            Answer::Map(map) => Ok(map),
            _ => Err(self.other()),
        }
    }

    /// Saves the guest. This process makes the files of a new folder, and passes them to the VM,
    /// which may be in a sandbox. `each` gets the progress, ten times a second.
    pub fn save(
        &mut self,
        request: SaveRequest,
        each: &mut dyn FnMut(Saving),
    ) -> Result<Saved, AskError> {
        let mut each = |now| match now {
            Progress::Saving(now) => each(now),
            Progress::Moving(_) | Progress::Writes(_) => {}
        };
        let made = match url(&request.path) {
            None => Some(NewFolder::make(&request.path, request.base.as_deref())),
            // The VM opens the store.
            Some(_) => None,
        };
        let (folder, open) = made.transpose().map_err(Refused::from)?.unzip();
        let files = open
            .iter()
            .flat_map(|open| open.files.iter().chain(&open.base));
        let files: Vec<_> = files.map(|file| file.as_fd()).collect();
        match self.ask_with(&Request::Snapshot(request), &files, &mut each)? {
            Answer::Snapshot(saved) => {
                folder
                    .map_or(Ok(()), NewFolder::finish)
                    .map_err(Refused::from)?;
                Ok(saved)
            }
            _ => Err(self.other()),
        }
    }

    /// Moves the guest. This process makes the connections and opens the files of TLS, and passes
    /// them to the VM, which may be in a sandbox. `each` gets the progress, ten times a second.
    pub fn migrate(
        &mut self,
        request: MoveRequest,
        each: &mut dyn FnMut(OutgoingProgress),
    ) -> Result<Migrated, AskError> {
        let mut each = |now| match now {
            Progress::Moving(now) => each(now),
            Progress::Saving(_) | Progress::Writes(_) => {}
        };
        let (dialer, asks) = match request.to.parse() {
            // The VM has inherited it, or refuses the address.
            Ok(Address::Fd(_)) | Err(_) => (None, None),
            Ok(to) => {
                let started = Dialer::start(to);
                Some(started.map_err(|error| Refused::of(ErrorKind::Host, error))?).unzip()
            }
        };
        let files = request.tls.iter().filter(|_| asks.is_some());
        let files = files.map(TlsFiles::open).collect::<Result<Vec<_>, _>>();
        let files = files.map_err(|error| Refused::request(error.to_string()))?;
        let passed = files.iter().flatten().map(|file| file.as_fd());
        let passed: Vec<_> = asks.iter().map(|asks| asks.as_fd()).chain(passed).collect();
        let answer = self.ask_with(&Request::Migrate(request), &passed, &mut each);
        let command = |text| match dialer.and_then(Dialer::command_end) {
            Some(end) => format!("{text}: {end}"),
            None => text,
        };
        match answer {
            Ok(Answer::Migrated(migrated)) => Ok(migrated),
            Ok(_) => Err(self.other()),
            Err(AskError::Refused(Refused { kind, text })) => {
                Err(Refused::of(kind, command(text)).into())
            }
            Err(error) => Err(error),
        }
    }

    /// The periods in which the guest's writes are counted. The iterator ends after the requested
    /// number of periods, or after an error.
    pub fn watch(
        mut self,
        request: WatchRequest,
    ) -> Result<impl Iterator<Item = Result<Writes, AskError>>, AskError> {
        self.send(&Request::Dirty(request), &[])?;
        let mut is_over = false;
        Ok(iter::from_fn(move || {
            if is_over {
                return None;
            }
            let answer = self.read();
            is_over = !matches!(answer, Ok(Answer::Progress(_)));
            Some(answer.and_then(|answer| match answer {
                Answer::Progress(Progress::Writes(writes)) | Answer::Dirty(writes) => Ok(writes),
                Answer::Status(status) => Err(AskError::Ended(status.ending.unwrap_or_default())),
                _ => Err(self.other()),
            }))
        }))
    }

    fn settings_after(&mut self, request: &Request) -> Result<Settings, AskError> {
        match self.ask(request, &mut |_| {})? {
            Answer::Settings(settings) => Ok(settings),
            _ => Err(self.other()),
        }
    }

    fn state_after(&mut self, request: &Request) -> Result<Status, AskError> {
        match self.ask(request, &mut |_| {})? {
            Answer::Status(status) => Ok(*status),
            _ => Err(self.other()),
        }
    }

    fn other(&self) -> AskError {
        AskError::Other(self.path.clone())
    }

    /// Sends a request, and waits for the last answer. `each` gets the progress until then.
    fn ask(
        &mut self,
        request: &Request,
        each: &mut dyn FnMut(Progress),
    ) -> Result<Answer, AskError> {
        self.ask_with(request, &[], each)
    }

    /// As [`Client::ask`], with descriptors for the VM.
    fn ask_with(
        &mut self,
        request: &Request,
        descriptors: &[BorrowedFd<'_>],
        each: &mut dyn FnMut(Progress),
    ) -> Result<Answer, AskError> {
        self.send(request, descriptors)?;
        loop {
            match self.read()? {
                Answer::Progress(progress) => each(progress),
                answer => return Ok(answer),
            }
        }
    }

    fn send(&mut self, request: &Request, descriptors: &[BorrowedFd<'_>]) -> Result<(), Refused> {
        let mut line = serde_json::to_vec(request).map_err(|error| {
            Refused::request(format!(
                "the request has no JSON form: {error}; give another path"
            ))
        })?;
        line.push(b'\n');
        // A VM without room for another client says so and closes the connection, perhaps before
        // this write.
        let stream = self.stream.get_mut();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut rights = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            let fits = rights.push(SendAncillaryMessage::ScmRights(descriptors));
            debug_assert!(fits, "no request has more");
        }
        let slices = &[IoSlice::new(&line)];
        let sent = sendmsg(&*stream, slices, &mut rights, SendFlags::NOSIGNAL);
        let _ = sent.map(|sent| stream.write_all(&line[sent..]));
        Ok(())
    }

    /// Waits for an answer.
    fn read(&mut self) -> Result<Answer, AskError> {
        let gone = |cause: &dyn ToString| AskError::Gone {
            path: self.path.clone(),
            cause: cause.to_string(),
        };
        let mut line = Vec::new();
        let read = self.stream.read_until(b'\n', &mut line);
        match read.map_err(|error| gone(&error))? {
            0 => Err(gone(&"no more answers")),
            _ => match serde_json::from_slice(&line).map_err(|error| gone(&error))? {
                Answer::Error(refused) => Err(AskError::Refused(refused)),
                answer => Ok(answer),
            },
        }
    }
}
