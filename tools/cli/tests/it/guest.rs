//! `lacuna run` with a control socket, and its clients.

use lacuna::migrate::transport::{Address, Dialer, TlsFiles};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Longer than any machine needs: a test that takes so long has failed.
pub const LIMIT: Duration = Duration::from_secs(120);

/// `lacuna run` with a control socket.
#[derive(Debug)]
pub struct Guest {
    pub child: Child,
    pub socket: PathBuf,
    json: PathBuf,
}

impl Guest {
    pub fn start(folder: &Path, words: &str) -> Self {
        Self::start_with(folder, words, None)
    }

    pub fn start_with(folder: &Path, words: &str, append: Option<&str>) -> Self {
        Self::command(folder, &format!("run {words}"), append)
    }

    /// As [`Guest::start`], with the subcommand in front of `words`.
    pub fn command(folder: &Path, words: &str, append: Option<&str>) -> Self {
        Self::with_settings(folder, words, append, &[])
    }

    /// As [`Guest::command`], with variables of the environment.
    pub fn with_settings(
        folder: &Path,
        words: &str,
        append: Option<&str>,
        settings: &[(&str, String)],
    ) -> Self {
        if let Some(reason) = lacuna_guest::unavailable() {
            lacuna_skip::skip_test(reason);
        }
        let (socket, json) = (folder.join("control"), folder.join("run.json"));
        let mut command = Command::new(env!("CARGO_BIN_EXE_lacuna"));
        command.args(words.split_whitespace());
        command.args(append.iter().flat_map(|words| ["--append", words]));
        command.arg("--quiet").arg("--control").arg(&socket);
        command.arg("--allow-save").arg(folder);
        command.arg("--json").arg(&json);
        command.envs(settings.iter().map(|(name, value)| (name, value)));
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().unwrap();
        let mut guest = Self {
            child,
            socket,
            json,
        };
        let deadline = Instant::now() + LIMIT;
        while UnixStream::connect(&guest.socket).is_err() {
            let ended = guest.child.try_wait().unwrap();
            assert_eq!(ended, None, "it ends before it listens");
            assert!(Instant::now() < deadline, "it does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        guest
    }

    pub fn client(&self) -> Client {
        Client::to(&self.socket)
    }

    /// Its exit code, and its JSON.
    pub fn end(mut self) -> (i32, Value) {
        let deadline = Instant::now() + LIMIT;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < deadline, "it does not end");
            std::thread::sleep(Duration::from_millis(10));
        };
        assert!(!self.socket.exists(), "the socket is removed");
        let json = std::fs::read_to_string(&self.json).unwrap();
        let json = serde_json::from_str(&json).unwrap();
        (status.code().unwrap(), json)
    }
}

/// For tests that kill it.
#[allow(dead_code, reason = "the tests of snapshots have this file too")]
impl Guest {
    /// A connection to its control socket, if it still has one.
    pub fn try_client(&self) -> Option<Client> {
        Client::try_to(&self.socket)
    }

    /// Its exit code and its JSON, after it has ended or was killed.
    pub fn end_anyhow(mut self) -> (Option<i32>, Value) {
        let status = self.child.wait().unwrap();
        let json = std::fs::read_to_string(&self.json).unwrap_or_default();
        let json = serde_json::from_str(&json).unwrap_or(Value::Null);
        (status.code(), json)
    }
}

/// Kills the process when a test fails.
impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A connection to a control socket.
pub struct Client(pub BufReader<UnixStream>);

impl Client {
    pub fn to(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        Self(BufReader::new(stream))
    }

    /// As [`Client::to`], if the socket exists. A side that does not answer yet has a null answer.
    #[allow(dead_code, reason = "the tests of snapshots have this file too")]
    pub fn try_to(socket: &Path) -> Option<Self> {
        let stream = UnixStream::connect(socket).ok()?;
        stream
            .set_read_timeout(Some(Duration::from_secs(1)))
            .unwrap();
        Some(Self(BufReader::new(stream)))
    }

    /// Waits for answers as one of [`Client::to`].
    #[allow(dead_code, reason = "the tests of snapshots have this file too")]
    pub fn be_patient(&self) {
        self.0.get_ref().set_read_timeout(Some(LIMIT)).unwrap();
    }

    /// Sends a line, and what `lacuna migrate` passes beside a request of it.
    pub fn send(&mut self, bytes: &[u8]) {
        let passed = passed(&serde_json::from_slice(bytes).unwrap_or_default());
        let passed: Vec<_> = passed.iter().map(|passed| passed.as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut rights = SendAncillaryBuffer::new(&mut space);
        if !passed.is_empty() {
            assert!(rights.push(SendAncillaryMessage::ScmRights(&passed)));
        }
        let stream = self.0.get_mut();
        let slices = &[IoSlice::new(bytes)];
        // The VM may have closed the connection after an answer.
        if let Ok(sent) = sendmsg(&*stream, slices, &mut rights, SendFlags::NOSIGNAL) {
            let _ = stream.write_all(&bytes[sent..]);
        }
    }

    /// An answer; null if the connection is closed.
    pub fn answer(&mut self) -> Value {
        let mut line = String::new();
        match self.0.read_line(&mut line) {
            Ok(0) | Err(_) => Value::Null,
            Ok(_) => serde_json::from_str(&line).unwrap(),
        }
    }

    /// The last answer to a request.
    pub fn ask(&mut self, request: Value) -> Value {
        self.send(format!("{request}\n").as_bytes());
        loop {
            let answer = self.answer();
            if answer["progress"].is_null() {
                return answer;
            }
        }
    }

    pub fn state(&mut self, command: &str) -> String {
        let answer = self.ask(json!({ "command": command }));
        let state = answer["status"]["state"].as_str();
        state.unwrap_or_else(|| panic!("{answer}")).to_owned()
    }

    pub fn snapshot(&mut self, path: &Path) -> Value {
        self.ask(json!({"command": "snapshot", "path": path}))
    }

    /// The text of an error.
    pub fn refused(&mut self, request: Value) -> String {
        let answer = self.ask(request);
        let text = answer["error"]["text"].as_str();
        text.unwrap_or_else(|| panic!("{answer}")).to_owned()
    }
}

/// The descriptors for a request.
fn passed(request: &Value) -> Vec<OwnedFd> {
    let to = request["to"].as_str().unwrap_or_default().parse();
    let to = match (request["command"].as_str(), to) {
        (Some("migrate"), Ok(to)) if !matches!(to, Address::Fd(_)) => to,
        _ => return Vec::new(),
    };
    let (_, asks) = Dialer::start(to).unwrap();
    let tls = serde_json::from_value::<TlsFiles>(request["tls"].clone());
    let files = tls.ok().and_then(|tls| tls.open().ok());
    let files = files.into_iter().flatten().map(OwnedFd::from);
    [asks].into_iter().chain(files).collect()
}

pub fn lacuna(words: &str) -> Output {
    lacuna_with(words, &[])
}

/// As [`lacuna`], with variables of the environment.
pub fn lacuna_with(words: &str, settings: &[(&str, String)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lacuna"));
    command.envs(settings.iter().map(|(name, value)| (name, value)));
    command.args(words.split_whitespace()).output().unwrap()
}

/// Exit code, and stderr.
pub fn failure(words: &str) -> (i32, String) {
    let output = lacuna(words);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code().unwrap(), errors)
}

/// Ends the test as skipped where there is no KVM.
pub fn has_kvm() {
    if let Err(error) = lacuna::kvm::available() {
        lacuna_skip::skip_test(error);
    }
}
