//! A process that waits for a guest, and a relay that cuts the connection to it.

use crate::guest::{Client, LIMIT};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// `lacuna run --incoming`.
#[derive(Debug)]
pub struct Destination {
    pub child: Child,
    /// Where it waits.
    pub address: String,
    pub control: PathBuf,
    json: PathBuf,
    errors: Option<JoinHandle<String>>,
}

impl Destination {
    /// Starts one, and returns when it waits at `address`.
    pub fn start(folder: &Path, address: &str, options: &str) -> Self {
        Self::start_after("true", folder, address, options)
    }

    /// As [`Destination::start`], by a shell that first executes `first`, such as `ulimit`.
    pub fn start_after(first: &str, folder: &Path, address: &str, options: &str) -> Self {
        let (control, json) = (folder.join("there"), folder.join("there.json"));
        let mut command = Command::new("sh");
        command.args(["-c", &format!("{first}; exec \"$0\" \"$@\"")]);
        command.arg(env!("CARGO_BIN_EXE_lacuna"));
        command.args(["run", "--quiet", "--incoming", address]);
        command.args(options.split_whitespace());
        command.arg("--control").arg(&control);
        command.arg("--allow-save").arg(folder);
        command.arg("--json").arg(&json);
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap());
        let mut first = String::new();
        lines.read_line(&mut first).unwrap();
        let address = first.split_whitespace().last().unwrap_or_default();
        assert!(first.contains("waiting for a guest at"), "{first}");
        let address = address.to_owned();
        let errors = thread::spawn(move || {
            let mut text = String::new();
            // A guest may print anything.
            let _ = lines.read_to_string(&mut text);
            text
        });
        Self {
            child,
            address,
            control,
            json,
            errors: Some(errors),
        }
    }

    pub fn client(&self) -> Client {
        Client::to(&self.control)
    }

    /// A connection to its control socket, if it has one.
    pub fn try_client(&self) -> Option<Client> {
        Client::try_to(&self.control)
    }

    /// Asks it to end.
    pub fn terminate(&self) {
        // The process may have ended.
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
    }

    /// Its exit code, its JSON if it has written one, and its printed lines.
    pub fn end(mut self) -> (Option<i32>, Value, String) {
        let deadline = Instant::now() + LIMIT;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < deadline, "it does not end");
            thread::sleep(Duration::from_millis(10));
        };
        let json = std::fs::read_to_string(&self.json).unwrap_or_default();
        let json = serde_json::from_str(&json).unwrap_or(Value::Null);
        let errors = self.errors.take().map(JoinHandle::join);
        let errors = errors.unwrap().unwrap();
        (status.code(), json, errors)
    }
}

/// Kills the process when a test fails.
impl Drop for Destination {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// When a relay ends both connections.
#[derive(Clone, Copy)]
pub enum Until {
    /// The source has sent so many bytes.
    Bytes(usize),
    /// The destination has sent a frame of this kind on the first connection. The frame is passed
    /// on, and nothing from the source after it.
    Answer(u8),
}

/// Passes on the bytes of one migration with `connections`, from a socket of its own to `to`. Then
/// it stops, and `then` is called before the connections are closed.
pub fn relay(
    folder: &Path,
    to: &str,
    connections: usize,
    until: Until,
    then: impl FnOnce() + Send + 'static,
) -> (String, JoinHandle<()>) {
    let path = folder.join("relay");
    let listener = UnixListener::bind(&path).unwrap();
    let to = to.strip_prefix("unix:").unwrap().to_owned();
    let relay = thread::spawn(move || {
        let connect = || {
            let (source, _) = listener.accept().unwrap();
            (source, UnixStream::connect(&to).unwrap())
        };
        let (source, destination) = connect();
        let (limit, last) = match until {
            Until::Bytes(bytes) => (bytes, None),
            Until::Answer(kind) => (usize::MAX, Some(kind)),
        };
        let (ended, end) = mpsc::channel();
        let is_last = AtomicBool::new(false);
        let also_ended = ended.clone();
        let others = Mutex::new(Vec::new());
        thread::scope(|scope| {
            scope.spawn(|| {
                for (source, destination) in (1..connections).map(|_| connect()) {
                    let copy = |stream: &UnixStream| stream.try_clone().unwrap();
                    let ends = [(&source, &destination), (&destination, &source)];
                    for (from, to) in ends.map(|(from, to)| (copy(from), copy(to))) {
                        let is_last = AtomicBool::new(false);
                        scope.spawn(move || pass_on(&from, &to, usize::MAX, &is_last));
                    }
                    others.lock().unwrap().extend([source, destination]);
                }
            });
            scope.spawn(|| {
                let _ = pass_on(&source, &destination, limit, &is_last);
                let _ = also_ended.send(());
            });
            scope.spawn(|| {
                let _ = answers(&destination, &source, last, &is_last);
                let _ = ended.send(());
            });
            end.recv().unwrap();
            then();
            for stream in [&source, &destination]
                .into_iter()
                .chain(&*others.lock().unwrap())
            {
                let _ = stream.shutdown(Shutdown::Both);
            }
        });
    });
    (format!("unix:{}", path.display()), relay)
}

fn pass_on(
    mut from: &UnixStream,
    mut to: &UnixStream,
    limit: usize,
    is_last: &AtomicBool,
) -> io::Result<()> {
    let (mut left, mut buffer) = (limit, vec![0; 64 << 10]);
    while left > 0 {
        let most = buffer.len().min(left);
        let read = from.read(&mut buffer[..most])?;
        if read == 0 || is_last.load(Ordering::SeqCst) {
            break;
        }
        to.write_all(&buffer[..read])?;
        left -= read;
    }
    Ok(())
}

/// Passes on frames, up to one of kind `last`.
fn answers(
    mut from: &UnixStream,
    mut to: &UnixStream,
    last: Option<u8>,
    is_last: &AtomicBool,
) -> io::Result<()> {
    loop {
        let mut head = [0; 12];
        from.read_exact(&mut head)?;
        let bytes = u32::from_le_bytes([head[4], head[5], head[6], head[7]]);
        let mut payload = vec![0; bytes as usize];
        from.read_exact(&mut payload)?;
        // The source's answer to this frame is not passed on.
        is_last.store(last == Some(head[0]), Ordering::SeqCst);
        to.write_all(&[&head[..], &payload].concat())?;
        if last == Some(head[0]) {
            return Ok(());
        }
    }
}
