//! Requests and answers of a control socket: each is a JSON object on a line of its own.

use crate::detection;
use crate::refused::Refused;
use crate::settings::{MapRequest, SetRequest, Settings, page_map};
use lacuna::dirty::Detection;
use lacuna::memory::PageMap;
use lacuna::migrate::session::{IncomingProgress, Migrated, OutgoingProgress};
use lacuna::migrate::stream::{Compression, Mode};
use lacuna::migrate::transport::TlsFiles;
use serde::{Deserialize, Serialize};
use serde_json::Number;
use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::path::PathBuf;

/// The version of these messages. Fields and commands may be added to it.
pub const PROTOCOL: u32 = 1;

/// The longest request in bytes, the end of the line included. A path has at most 4096 bytes, and
/// each is at most 6 in JSON.
pub(crate) const LINE_MAX: usize = 32 << 10;

/// A client's request. An unknown field is an error: it could matter.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "lowercase", deny_unknown_fields)]
pub(crate) enum Request {
    Status {},
    Pause {},
    Resume {},
    Stop {},
    Snapshot(SaveRequest),
    Migrate(MoveRequest),
    Cancel {},
    PostCopy {},
    Keep {},
    Stat {},
    Dirty(WatchRequest),
    Settings {},
    Set(SetRequest),
    Map(MapRequest),
}

/// Which snapshot a client asks for.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SaveRequest {
    /// The folder to make, absolute; or the URL of a place in an object store.
    pub path: PathBuf,
    /// The limit of the guest's downtime for it, in milliseconds.
    pub downtime_ms: Option<u64>,
    /// Whether a later snapshot may have this one as its base.
    #[serde(default)]
    pub track: bool,
    /// Save only the changes since this snapshot, the last one.
    pub base: Option<PathBuf>,
}

impl SaveRequest {
    /// A whole snapshot at `path`, with the default limit of the downtime.
    pub fn to(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        Self {
            path,
            ..Self::default()
        }
    }
}

/// How a client wants the guest to move.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoveRequest {
    /// The text of an [`Address`](lacuna::migrate::transport::Address). A path is absolute.
    pub to: String,
    /// The order in which the guest and its memory are sent.
    pub mode: Option<Mode>,
    /// The limit of the guest's downtime for it, in milliseconds.
    pub downtime_ms: Option<u64>,
    /// Connections for the memory that moves before the guest.
    pub streams: Option<u32>,
    /// How pages are compressed.
    pub compress: Option<Compression>,
    /// The most bytes a second for the guest's memory while the guest runs.
    pub bandwidth: Option<NonZeroU64>,
    /// Files with certificates; absolute.
    pub tls: Option<TlsFiles>,
}

/// How a client watches which pages the guest writes.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WatchRequest {
    /// A period, in milliseconds: the time between two answers.
    pub every_ms: Option<u64>,
    /// The time of the working set, in milliseconds.
    pub window_ms: Option<u64>,
    /// How many periods; without an end if it is missing.
    pub count: Option<NonZeroU64>,
    /// How writes are detected meanwhile.
    #[serde(default, with = "detection")]
    pub detect: Option<Detection>,
}

/// The VM's answer: an object with one field, the answer's name.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Answer {
    /// The last answer to each command without an answer of its own. Also to `dirty` if the run
    /// ends meanwhile.
    Status(Box<Status>),
    /// Any number of them before the last answer to `snapshot`, `migrate` or `dirty`.
    Progress(Progress),
    /// The last answer to `snapshot`.
    Snapshot(Saved),
    /// The last answer to `migrate`.
    Migrated(Migrated),
    /// The last answer to `stat`: each value by the name and the labels that its metric has.
    Stat(BTreeMap<String, Number>),
    /// The last answer to `dirty`: the last period.
    Dirty(Writes),
    /// The last answer to `settings` and `set`.
    Settings(Settings),
    /// The last answer to `map`.
    Map(#[serde(with = "page_map")] PageMap),
    /// The last answer to a refused or failed request.
    Error(Refused),
}

/// The state of a run.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
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
    pub pages: Option<Pages>,
    /// Why the source provides no pages at present.
    pub outage: Option<String>,
    /// The snapshot in progress.
    pub saving: Option<Saving>,
    /// The migration in progress.
    pub migrating: Option<OutgoingProgress>,
    /// The incoming or arrived guest.
    pub arriving: Option<IncomingProgress>,
    /// The address at which the run waits for a guest; null as soon as one is announced.
    pub waiting: Option<String>,
    /// Why it is undecided which side runs the guest, or why the guest lacks memory there, and what
    /// to do. The guest stays paused here meanwhile.
    pub undecided: Option<String>,
    /// How the run has ended.
    pub ending: Option<String>,
}

/// The pages of a guest with a page source.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Pages {
    /// Pages of the guest.
    pub total: u64,
    /// Present pages: the source has provided them, or they are zeros in a snapshot.
    pub present: u64,
    /// Pages that only the source has.
    pub missing: u64,
    /// Pages that the source has failed to provide.
    pub lost: u64,
    /// Whether all pages are here, so that the guest needs its source no more.
    pub whole: bool,
    /// Requested pages that the source has not answered.
    pub in_flight: u64,
    /// Pages a second since the sample before; at the end of the run, since its start.
    pub rate: f64,
    /// Half of the pages arrived within this time, in nanoseconds.
    pub p50_ns: u64,
    /// 99 of 100 pages arrived within this time.
    pub p99_ns: u64,
}

/// What a guest does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// No guest was announced. The backend and the machine are unknown.
    #[default]
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
pub(crate) enum Progress {
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
    pub detected_by: Option<String>,
    /// The guest's downtime in microseconds; 0 if it was paused before.
    pub downtime_us: u64,
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
                Request::Migrate(MoveRequest {
                    to: "tcp:h:1".into(),
                    ..MoveRequest::default()
                }),
            ),
            (
                r#"{"path":"/a b","command":"snapshot","downtime_ms":5}"#,
                Request::Snapshot(SaveRequest {
                    downtime_ms: Some(5),
                    ..SaveRequest::to("/a b")
                }),
            ),
            (
                r#"{"command":"set","huge_pages":false,"resident_bytes":8192}"#,
                Request::Set(SetRequest {
                    huge_pages: Some(false),
                    resident_bytes: Some(8192),
                    ..SetRequest::default()
                }),
            ),
            (
                r#"{"command":"map","cells":7}"#,
                Request::Map(MapRequest { cells: 7 }),
            ),
            (
                r#"{"command":"dirty","detect":"wp","count":null}"#,
                Request::Dirty(WatchRequest {
                    detect: Some(Detection::WriteProtect),
                    ..WatchRequest::default()
                }),
            ),
        ] {
            assert_eq!(parse(line).unwrap(), request);
            let line = serde_json::to_string(&request).unwrap();
            assert_eq!(parse(&line).unwrap(), request, "{line}");
        }
    }

    #[test]
    fn other_lines_are_no_requests() {
        let parse = |line: &str| serde_json::from_str::<Request>(line);
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
            (
                r#"{"command":"snapshot","path":"/a","way":1}"#,
                "unknown field `way`",
            ),
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
