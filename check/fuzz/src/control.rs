//! Clients of a guest's control socket (docs/control.md) that say anything: `lacuna run --control`
//! must answer every line, keep running, and end at `stop`.

use crate::migrated::json;
use crate::run::Run;
use crate::values::pick;
use fastrand::Rng;
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Acts of clients for each seed.
const ACTS: usize = 60;
/// No answer takes a second on an idle machine; a busy one is slower.
const LIMIT: Duration = Duration::from_secs(60);
/// The exit code of a guest stopped through its socket.
const STOPPED: i32 = 4;
/// The longest line that a VM reads.
const LINE_MAX: usize = 32 << 10;
/// Snapshots for each seed: each writes and syncs files.
const SNAPSHOTS: usize = 3;

/// Runs one seed: a guest, and its clients.
pub fn run(run: &mut Run<'_>) {
    if !run.binary.exists() {
        run.tally.note("control", "skipped: no lacuna to drive");
        return;
    }
    let mut rng = Rng::with_seed(run.seed);
    let folder = tempfile::tempdir().expect("a temporary folder");
    run.pulse.doing("lacuna run --control");
    let mut guest = Guest::start(run.binary, folder.path());
    let mut snapshots = 0;
    for _ in 0..ACTS {
        let act = draw(&mut rng, folder.path(), &mut snapshots);
        run.pulse.doing(&format!("{act:?}"));
        run.tally.operations += 1;
        guest.carry_out(&act, run);
        // Whatever one client does, the VM serves another.
        let status = guest.served("status");
        let state = status["status"]["state"].as_str();
        let is_known = matches!(state, Some("running" | "pausing" | "paused"));
        assert!(is_known, "after {act:?}: {status}");
    }
    run.pulse.doing("stop");
    guest.stop();
}

/// An act of a client.
#[derive(Debug)]
enum Act {
    /// Sends lines, and reads an answer to each.
    Ask(Vec<Vec<u8>>),
    /// Sends bytes without the end of a line, and leaves.
    Leave(Vec<u8>),
    /// Sends more bytes than a line may have.
    Flood(usize),
    /// Asks for the status this often, and reads nothing.
    Deaf(usize),
    /// This many clients connect at once.
    Crowd(usize),
}

fn draw(rng: &mut Rng, folder: &Path, snapshots: &mut usize) -> Act {
    match rng.u8(..16) {
        0 => Act::Flood(LINE_MAX + rng.usize(..3) * 1000),
        1 => Act::Deaf(rng.usize(1..4000)),
        2 => Act::Crowd(rng.usize(1..40)),
        3 | 4 => {
            let mut line = line(rng, folder, snapshots);
            line.truncate(rng.usize(..=line.len().saturating_sub(1)));
            line.retain(|byte| *byte != b'\n');
            Act::Leave(line)
        }
        _ => Act::Ask(
            (0..rng.usize(1..5))
                .map(|_| line(rng, folder, snapshots))
                .collect(),
        ),
    }
}

/// A line of at most [`LINE_MAX`] bytes, with its end. It harms nothing outside of `folder`.
fn line(rng: &mut Rng, folder: &Path, snapshots: &mut usize) -> Vec<u8> {
    let mut bytes = match rng.u8(..8) {
        0 => (0..rng.usize(..200)).map(|_| rng.u8(..)).collect(),
        1 => b"[".repeat(rng.usize(..LINE_MAX - 1)),
        _ => {
            let mut request = request(rng, folder);
            for _ in 0..rng.usize(..3) {
                json::mutate(&mut request, rng);
            }
            serde_json::to_vec(&request).expect("a document")
        }
    };
    if rng.u8(..8) == 0 && !bytes.is_empty() {
        let at = rng.usize(..bytes.len());
        bytes[at] = rng.u8(..);
    }
    bytes.retain(|byte| *byte != b'\n');
    let asked = serde_json::from_slice::<Value>(&bytes).unwrap_or_default();
    let saves = asked["path"].is_string();
    if bytes.len() >= LINE_MAX || !is_harmless(&asked, folder) || saves && *snapshots == SNAPSHOTS {
        bytes = b"{\"command\":\"status\"}".to_vec();
    } else if saves {
        *snapshots += 1;
    }
    bytes.push(b'\n');
    bytes
}

/// A request that the VM understands.
fn request(rng: &mut Rng, folder: &Path) -> Value {
    let command = pick(rng, &["status", "pause", "resume", "snapshot"]);
    if command != "snapshot" {
        return json!({ "command": command });
    }
    let name = pick(rng, &["a", "b", "a/b", "c\u{1b}[2J", "no/such"]);
    let mut request = json!({"command": command, "path": folder.join(name)});
    if rng.bool() {
        request["downtime_ms"] = json!(rng.u32(..100));
    }
    if rng.bool() {
        request["track"] = json!(true);
    }
    if rng.bool() {
        request["base"] = json!(folder.join(pick(rng, &["a", "b"])));
    }
    request
}

/// Whether all paths of a request are in `folder`, or none at all.
fn is_harmless(request: &Value, folder: &Path) -> bool {
    let inside = |field: &str| match request[field].as_str() {
        None => true,
        Some(path) => {
            Path::new(path).starts_with(folder) && Path::new(path) != folder && !path.contains("..")
        }
    };
    inside("path") && inside("base") && request["command"] != "stop"
}

/// `lacuna run` with a control socket.
struct Guest {
    child: Child,
    socket: PathBuf,
    errors: PathBuf,
}

impl Guest {
    fn start(binary: &Path, folder: &Path) -> Self {
        let socket = folder.join("control");
        let errors = folder.join("stderr");
        let file = File::create(&errors).expect("a file");
        let arch = match lacuna_guest::unavailable() {
            Some(_) => "arm64",
            None => "x86_64",
        };
        let child = Command::new(binary)
            .args([
                "run",
                "bm",
                "--memory",
                "6M",
                "--resident",
                "4M",
                "--backend",
                "soft",
            ])
            .args([
                "--vcpus",
                "1",
                "--append",
                "seconds=1000000",
                "--quiet",
                "--arch",
                arch,
            ])
            .arg("--control")
            .arg(&socket)
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(file)
            .spawn()
            .expect("lacuna can be started");
        let mut guest = Self {
            child,
            socket,
            errors,
        };
        let began = Instant::now();
        while UnixStream::connect(&guest.socket).is_err() {
            let ended = guest.child.try_wait().expect("a child can be waited for");
            assert!(ended.is_none(), "{}", guest.said());
            assert!(began.elapsed() < LIMIT, "it does not listen");
            sleep(Duration::from_millis(2));
        }
        guest
    }

    fn said(&self) -> String {
        fs::read_to_string(&self.errors).unwrap_or_default()
    }

    fn connect(&self) -> BufReader<UnixStream> {
        let connected = UnixStream::connect(&self.socket);
        let stream = connected.unwrap_or_else(|error| panic!("{error}: {}", self.said()));
        stream.set_read_timeout(Some(LIMIT)).expect("a socket");
        stream.set_write_timeout(Some(LIMIT)).expect("a socket");
        BufReader::new(stream)
    }

    fn carry_out(&self, act: &Act, run: &mut Run<'_>) {
        match act {
            Act::Ask(lines) => self.ask(lines, run),
            Act::Leave(bytes) => {
                // The VM may have closed the connection, if it has too many.
                let _ = self.connect().get_mut().write_all(bytes);
                run.tally.note("control", "left");
            }
            Act::Flood(bytes) => {
                let mut client = self.connect();
                let _ = client.get_mut().write_all(&vec![b' '; *bytes]);
                let answer = answer(&mut client);
                assert!(!answer["error"].is_null(), "{answer}");
                run.tally.note("control", "lines too long");
            }
            Act::Deaf(requests) => {
                let mut client = self.connect();
                let stream = client.get_mut();
                let timeout = Duration::from_millis(1);
                stream.set_write_timeout(Some(timeout)).expect("a socket");
                for _ in 0..*requests {
                    if stream.write_all(b"{\"command\":\"status\"}\n").is_err() {
                        break;
                    }
                }
                run.tally.note("control", "deaf");
            }
            Act::Crowd(clients) => {
                let all: Vec<_> = (0..*clients).map(|_| self.connect()).collect();
                run.tally
                    .add("control", "clients of a crowd", all.len() as u64);
            }
        }
    }

    /// Sends all lines at once. Each has one last answer, in their order.
    fn ask(&self, lines: &[Vec<u8>], run: &mut Run<'_>) {
        let mut client = self.connect();
        // The VM refuses a connection too many with a message, and closes it.
        let _ = client.get_mut().write_all(&lines.concat());
        for line in lines {
            let last = last_answer(&mut client);
            let name = last
                .as_object()
                .and_then(|fields| fields.keys().next().cloned());
            run.tally.note("answers of a VM", name.unwrap_or_default());
            let Some(text) = last["error"]["text"].as_str() else {
                continue;
            };
            let kind = last["error"]["kind"].as_str().unwrap_or_default();
            let is_known = ["request", "guest", "host"].contains(&kind);
            assert!(is_known && text.len() > 12, "{line:?}: {last}");
            if text.contains("clients are connected") {
                return;
            }
        }
    }

    /// The last answer to `command`. The client connects again for as long as there are too many.
    fn served(&self, command: &str) -> Value {
        let began = Instant::now();
        loop {
            let mut client = self.connect();
            let line = format!("{{\"command\":\"{command}\"}}\n");
            let _ = client.get_mut().write_all(line.as_bytes());
            let answer = last_answer(&mut client);
            let text = answer["error"]["text"].as_str().unwrap_or_default();
            let is_full = text.contains("clients are connected");
            if !is_full || began.elapsed() > LIMIT {
                return answer;
            }
            sleep(Duration::from_millis(2));
        }
    }

    /// Ends the run, and checks that the program reports it.
    fn stop(&mut self) {
        let began = Instant::now();
        let answer = self.served("stop");
        assert_eq!(answer["status"]["state"], "ended", "{answer}");
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("a child can be waited for") {
                break status;
            }
            assert!(began.elapsed() < LIMIT, "it does not end");
            sleep(Duration::from_millis(2));
        };
        let said = self.said();
        assert!(!said.contains("panicked at"), "{said}");
        assert_eq!(status.code(), Some(STOPPED), "{said}");
        assert!(!self.socket.exists(), "the socket is left");
    }
}

/// Kills the process when an oracle fails.
impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An answer: an object with one field.
fn answer(client: &mut BufReader<UnixStream>) -> Value {
    let mut line = String::new();
    let read = client.by_ref().take(1 << 20).read_line(&mut line);
    let bytes = read.unwrap_or_else(|error| panic!("no answer: {error}"));
    assert!(bytes > 0, "the connection is closed without an answer");
    let answer: Value = serde_json::from_str(&line).unwrap_or_else(|_| panic!("{line:?}"));
    let fields = answer.as_object().map_or(0, serde_json::Map::len);
    assert_eq!(fields, 1, "{answer}");
    answer
}

fn last_answer(client: &mut BufReader<UnixStream>) -> Value {
    loop {
        let answer = answer(client);
        if answer["progress"].is_null() {
            return answer;
        }
    }
}
