//! The client's side of a control socket.

use super::message::{Answer, Progress, Refused, Request};
use crate::exit::Exit;
use lacuna::migrate::transport::is_socket;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// A connection to the control socket of a running guest.
pub struct Client {
    path: PathBuf,
    stream: BufReader<UnixStream>,
}

/// Why a request has no answer.
#[derive(Debug, thiserror::Error)]
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
    /// The VM has refused.
    #[error("{}", .0.text)]
    Refused(Refused),
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
    /// How the command ends.
    pub const fn exit(&self) -> Exit {
        match self {
            Self::Connect { .. } => Exit::Usage,
            Self::Gone { .. } => Exit::Host,
            Self::Refused(refused) => refused.exit(),
        }
    }
}

impl Client {
    /// Connects to the socket at `path`.
    ///
    /// # Errors
    /// [`AskError::Connect`].
    pub fn connect(path: &Path) -> Result<Self, AskError> {
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

    /// Sends a request, and waits for the last answer. `each` gets the progress until then.
    ///
    /// # Errors
    /// [`AskError`].
    pub fn ask(
        &mut self,
        request: &Request,
        each: &mut dyn FnMut(Progress),
    ) -> Result<Answer, AskError> {
        self.send(request);
        loop {
            match self.read()? {
                Answer::Progress(progress) => each(progress),
                answer => return Ok(answer),
            }
        }
    }

    /// Sends a request, whose answers [`Client::read`] returns.
    pub fn send(&mut self, request: &Request) {
        let mut line = serde_json::to_vec(request).expect("a path is checked to be text");
        line.push(b'\n');
        // A VM without room for another client says so and closes the connection, perhaps before
        // this write.
        let _ = self.stream.get_mut().write_all(&line);
    }

    /// Waits for an answer.
    ///
    /// # Errors
    /// [`AskError::Gone`], [`AskError::Refused`].
    pub fn read(&mut self) -> Result<Answer, AskError> {
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
