//! Requests and answers of a control socket: each is a JSON object on a line of its own.

use crate::args::{Compress, Dirty};
use crate::exit::Exit;
use crate::sample::Pages;
use lacuna::migrate::session::{IncomingProgress, Migrated, OutgoingProgress};
use lacuna::migrate::stream::Mode;
use lacuna::migrate::transport::TlsFiles;
use lacuna::{Ending, ErrorKind};
use serde::{Deserialize, Serialize};
use serde_json::Number;
use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::path::PathBuf;

/// The version of these messages. Fields and commands may be added to it.
pub const PROTOCOL: u32 = 1;

/// The longest request in bytes, the end of the line included. A path has at most 4096 bytes, and
/// each is at most 6 in JSON.
pub const LINE_MAX: usize = 32 << 10;

/// A client's request. An unknown field is an error: it could matter.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "lowercase", deny_unknown_fields)]
pub enum Request {
    /// Nothing changes.
    Status {},
    /// Pauses the guest until `resume`.
    Pause {},
    /// Resumes the guest.
    Resume {},
    /// The run ends.
    Stop {},
    /// The guest is saved.
    Snapshot {
        /// The folder to make, absolute; or the URL of a place in an object store.
        path: PathBuf,
        /// The limit of the guest's downtime for it, in milliseconds.
        #[serde(default)]
        downtime_ms: Option<u64>,
        /// Whether a later snapshot may have this one as its base.
        #[serde(default)]
        track: bool,
        /// Save only the changes since this snapshot, the last one.
        #[serde(default)]
        base: Option<PathBuf>,
    },
    /// The guest moves.
    Migrate {
        /// Where to, as the command line takes it. A path is absolute.
        to: String,
        /// The order in which the guest and its memory are sent.
        #[serde(default)]
        mode: Option<Mode>,
        /// The limit of the guest's downtime for it, in milliseconds.
        #[serde(default)]
        downtime_ms: Option<u64>,
        /// Connections for the memory that moves before the guest.
        #[serde(default)]
        streams: Option<u32>,
        /// How pages are compressed.
        #[serde(default)]
        compress: Option<Compress>,
        /// The most bytes a second for the guest's memory while the guest runs.
        #[serde(default)]
        bandwidth: Option<NonZeroU64>,
        /// Files with certificates; absolute.
        #[serde(default)]
        tls: Option<TlsFiles>,
    },
    /// Cancels the migration of another client's request, or ends the wait for the other side.
    Cancel {},
    /// Hands the guest over before the rest of its memory.
    PostCopy {},
    /// Resumes the guest here: the other side of a migration does not run it, and never will.
    Keep {},
    /// Reads the counters.
    Stat {},
    /// Watches which pages the guest writes.
    Dirty {
        /// A period, in milliseconds: the time between two answers.
        #[serde(default)]
        every_ms: Option<u64>,
        /// The time of the working set, in milliseconds.
        #[serde(default)]
        window_ms: Option<u64>,
        /// How many periods; without an end if it is missing.
        #[serde(default)]
        count: Option<NonZeroU64>,
        /// How writes are detected meanwhile.
        #[serde(default)]
        detect: Option<Dirty>,
    },
}

/// The VM's answer: an object with one field, the answer's name.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    /// The last answer to each command without an answer of its own. Also to `dirty` if the run
    /// ends meanwhile.
    Status(Box<Status>),
    /// Any number of them before the last answer to `snapshot`, `migrate` or `dirty`.
    Progress(Progress),
    /// The last answer to `snapshot`.
    Snapshot(Saved),
    /// The last answer to `migrate`.
    Migrated(Migrated),
    /// The last answer to `stat`: each value by the name and the labels that `--metrics` gives it.
    Stat(BTreeMap<String, Number>),
    /// The last answer to `dirty`: the last period.
    Dirty(Writes),
    /// The last answer to a refused or failed request.
    Error(Refused),
}

/// The state of a run.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Status {
    /// [`PROTOCOL`].
    pub protocol: u32,
    /// What the guest does.
    pub state: State,
    /// The hypervisor: soft or kvm.
    pub backend: String,
    /// The processors, as `--arch` takes them.
    pub arch: String,
    /// How many.
    pub vcpus: usize,
    /// Guest memory in bytes.
    pub memory_bytes: u64,
    /// Time since the guest has started.
    pub seconds: f64,
    /// The pages of a guest with a page source; its rate is the mean since the start.
    #[serde(default)]
    pub pages: Option<Pages>,
    /// Why the source provides no pages at present.
    #[serde(default)]
    pub outage: Option<String>,
    /// The snapshot in progress.
    pub saving: Option<Saving>,
    /// The migration in progress.
    pub migrating: Option<OutgoingProgress>,
    /// The incoming or arrived guest.
    #[serde(default)]
    pub arriving: Option<IncomingProgress>,
    /// The address at which the run waits for a guest; null as soon as one is announced.
    #[serde(default)]
    pub waiting: Option<String>,
    /// Why it is undecided which side runs the guest, or why the guest lacks memory there, and what
    /// to do. The guest stays paused here meanwhile.
    pub undecided: Option<String>,
    /// How the run has ended.
    pub ending: Option<String>,
}

/// What a guest does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// No guest was announced. The backend and the machine are unknown.
    Waiting,
    /// It has not arrived yet.
    Arriving,
    /// It runs.
    Running,
    /// Its vCPUs are about to leave it.
    Pausing,
    /// It is paused.
    Paused,
    /// The run is over.
    Ended,
}

/// The progress of a request.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Progress {
    /// A snapshot.
    Saving(Saving),
    /// A migration.
    Moving(OutgoingProgress),
    /// A period of `dirty`.
    Writes(Writes),
}

/// The pages that the guest has written in a period.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Writes {
    /// How long the writes were logged.
    pub seconds: f64,
    /// How many pages, each once.
    pub pages: u64,
    /// Pages a second.
    pub rate: f64,
    /// Pages written in the time of the working set, each once.
    pub working_set: u64,
    /// What has detected the writes.
    pub detected_by: String,
    /// Why the writes were not logged at the period's end.
    pub in_use: Option<String>,
}

/// The progress of a snapshot.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Saving {
    /// Its folder.
    pub path: PathBuf,
    /// Which round, from 1; 0 before the first.
    pub round: u32,
    /// Copied pages of this round.
    pub done: u64,
    /// Pages of this round.
    pub pages: u64,
}

/// A whole snapshot.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Saved {
    /// Its folder.
    pub path: PathBuf,
    /// Pages with content.
    pub pages: u64,
    /// Pages that each round has copied.
    pub rounds: Vec<u64>,
    /// What has detected the guest's writes between the rounds; null for a paused guest.
    #[serde(default)]
    pub detected_by: Option<String>,
    /// The guest's downtime in microseconds; 0 if it was paused before.
    pub downtime_us: u64,
}

/// Why a request was not fulfilled.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Refused {
    /// Where the cause lies.
    pub kind: Kind,
    /// What happened, and what to do.
    pub text: String,
}

/// Where the cause of a refusal lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The request.
    Request,
    /// The guest.
    Guest,
    /// The host.
    Host,
    /// The other side of a migration.
    Peer,
    /// A client has cancelled the request, or has ended the run.
    Cancelled,
}

impl Refused {
    /// A wrong request, or a request at a wrong time.
    pub fn request(text: impl Into<String>) -> Self {
        let (kind, text) = (Kind::Request, text.into());
        Self { kind, text }
    }

    /// The error `text` of that kind.
    pub fn of(kind: ErrorKind, text: &dyn ToString) -> Self {
        let kind = match kind {
            ErrorKind::Request => Kind::Request,
            ErrorKind::Guest => Kind::Guest,
            ErrorKind::Host => Kind::Host,
            ErrorKind::Peer => Kind::Peer,
            ErrorKind::Cancelled => Kind::Cancelled,
        };
        let text = text.to_string();
        Self { kind, text }
    }

    /// The run has ended meanwhile. `what` says so, and what was not done yet.
    pub fn ended(what: &str, ending: &Ending) -> Self {
        let kind = match ending {
            Ending::Stopped => ErrorKind::Cancelled,
            Ending::Exited(_) | Ending::PoweredOff | Ending::Reset => ErrorKind::Request,
            Ending::Failed(error) => error.kind(),
            Ending::Device(error) => error.kind(),
            _ => ErrorKind::Guest,
        };
        Self::of(kind, &format!("{what}: {ending}"))
    }

    /// The exit code of the requesting command.
    pub const fn exit(&self) -> Exit {
        match self.kind {
            Kind::Request => Exit::Usage,
            Kind::Guest => Exit::GuestFailed,
            Kind::Host => Exit::Host,
            Kind::Peer => Exit::Peer,
            Kind::Cancelled => Exit::Stopped,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_what_the_documentation_says() {
        let parse = |line: &str| serde_json::from_str::<Request>(line);
        for (line, request) in [
            (r#"{"command":"status"}"#, Request::Status {}),
            (r#"{ "command" : "pause" }"#, Request::Pause {}),
            (r#"{"command":"keep"}"#, Request::Keep {}),
            (
                r#"{"command":"migrate","to":"tcp:h:1"}"#,
                Request::Migrate {
                    to: "tcp:h:1".into(),
                    mode: None,
                    streams: None,
                    compress: None,
                    bandwidth: None,
                    downtime_ms: None,
                    tls: None,
                },
            ),
            (
                r#"{"path":"/a b","command":"snapshot","downtime_ms":5}"#,
                Request::Snapshot {
                    path: "/a b".into(),
                    downtime_ms: Some(5),
                    track: false,
                    base: None,
                },
            ),
        ] {
            assert_eq!(parse(line).unwrap(), request);
        }
        for (line, reason) in [
            ("", "EOF"),
            ("{", "EOF"),
            ("[]", "missing field `command`"),
            (
                r#"{"command":"fly"}"#,
                "unknown variant `fly`, expected one of `status`",
            ),
            (r#"{"command":"stop","now":true}"#, "unknown field `now`"),
            (
                r#"{"command":"migrate","to":"tcp:h:1","mode":"fast"}"#,
                "unknown variant `fast`, expected one of `precopy`",
            ),
            (
                r#"{"command":"migrate","to":"tcp:h:1","bandwidth":0}"#,
                "expected a nonzero u64",
            ),
            (r#"{"command":"snapshot"}"#, "missing field `path`"),
            (r#"{"command":"status"} {"command":"stop"}"#, "trailing"),
        ] {
            let error = parse(line).unwrap_err().to_string();
            assert!(error.contains(reason), "{line}: {error}");
        }
    }

    #[test]
    fn an_answer_is_an_object_with_its_name() {
        let answer = Answer::Error(Refused::request("no"));
        let line = serde_json::to_string(&answer).unwrap();
        assert_eq!(line, r#"{"error":{"kind":"request","text":"no"}}"#);
    }
}
