//! Snapshots in a store that speaks S3: `moto_server`, on the loopback interface.

use crate::guest::{Guest, LIMIT, lacuna_with};
use crate::migrate::tls::CERTIFICATES;
use crate::signals::Running;
use lacuna_skip::test;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A guest that checks its memory for some seconds, and ends.
const VERIFY: &str = "run verify --memory 6M --resident 3M --append rounds=60";

/// The server, with an empty bucket called `bucket`.
struct Server {
    child: Child,
    port: u16,
    scheme: &'static str,
}

impl Server {
    fn start() -> Self {
        let server = Self::with(&[], "http");
        let mut stream = TcpStream::connect(("127.0.0.1", server.port)).unwrap();
        let request = "PUT /bucket HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\
                       Connection: close\r\n\r\n";
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.contains(" 200 OK"), "{answer}");
        server
    }

    fn over_tls() -> Self {
        let [cert, key] = ["pem", "key"].map(|end| format!("{CERTIFICATES}/host.{end}"));
        Self::with(&["-c", &cert, "-k", &key], "https")
    }

    fn with(options: &[&str], scheme: &'static str) -> Self {
        let mut command = Command::new("moto_server");
        command.args(["-H", "127.0.0.1", "-p", "0"]).args(options);
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(error) => lacuna_skip::skip_test(format!(
                "moto_server cannot be started: {error} (pip install 'moto[server]')"
            )),
        };
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let address = format!("Running on {scheme}://127.0.0.1:");
        let port = loop {
            let line = lines.next().expect("it says where it listens").unwrap();
            if let Some((_, port)) = line.split_once(&address) {
                break port.trim().parse().unwrap();
            }
        };
        // The server writes a line a request, and waits when the pipe is full.
        std::thread::spawn(move || lines.count());
        Self {
            child,
            port,
            scheme,
        }
    }

    /// The settings of a process that uses the bucket.
    fn settings(&self) -> Vec<(&'static str, String)> {
        let endpoint = format!("{}://localhost:{}", self.scheme, self.port);
        vec![
            ("AWS_ENDPOINT_URL", endpoint),
            ("AWS_ALLOW_HTTP", "true".into()),
            ("NO_PROXY", "localhost".into()),
            ("AWS_ACCESS_KEY_ID", "id".into()),
            ("AWS_SECRET_ACCESS_KEY", "key".into()),
        ]
    }

    fn send(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// A guest that was saved to `s3://bucket/first` while it ran, and its changes since then to
    /// `s3://bucket/second`.
    fn with_two_snapshots(&self, folder: &TempDir) {
        let guest = Guest::with_settings(folder.path(), VERIFY, None, &self.settings());
        let control = guest.socket.display();
        let save = |words: &str| {
            let words = format!("snapshot save {words} --control {control} --json -");
            succeeds(&words, &[])
        };
        let first = save("s3://bucket/first --track");
        let second = save("s3://bucket/second --base s3://bucket/first");
        assert!(first["saved"]["pages"].as_u64() > Some(0), "{first}");
        assert!(second["saved"]["pages"].as_u64() > Some(0), "{second}");
        assert_eq!(guest.end().0, 0);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn succeeds(words: &str, settings: &[(&str, String)]) -> Value {
    let output = lacuna_with(words, settings);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{words}: {errors}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Restores what is not there. The exit code, and stderr.
fn fails(bucket: &str, settings: &[(&str, String)]) -> (Option<i32>, String) {
    let words = format!("snapshot restore s3://{bucket}/none --quiet");
    let output = lacuna_with(&words, settings);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code(), errors)
}

#[test]
fn a_guest_and_its_changes_are_saved_and_restored() {
    let server = Server::start();
    let folder = TempDir::new().unwrap();
    server.with_two_snapshots(&folder);
    for name in ["first", "second"] {
        for lazily in ["", "--lazy"] {
            let words = format!("snapshot restore s3://bucket/{name} {lazily} --json - --quiet");
            let json = succeeds(&words, &server.settings());
            assert_eq!(json["outcome"], "done", "{json}");
        }
    }
    // The memory of a snapshot, and a file in a store, as the memory of another guest.
    for from in [
        "snapshot:s3://bucket/second --memory 6M",
        "objects:s3://bucket/first/memory --memory 4M",
    ] {
        let words = format!("run hello --pages-from {from} --json - --quiet");
        let json = succeeds(&words, &server.settings());
        assert_eq!(json["outcome"], "done", "{json}");
    }
}

/// A store that does not answer for a while delays a guest that is restored lazily.
#[test]
fn a_store_is_away_for_a_while() {
    let server = Server::start();
    let folder = TempDir::new().unwrap();
    server.with_two_snapshots(&folder);
    let words = "snapshot restore s3://bucket/second --lazy --patience forever";
    let guest = Guest::with_settings(folder.path(), words, None, &server.settings());
    server.send(Signal::STOP);
    let deadline = Instant::now() + LIMIT;
    loop {
        let status = guest.client().ask(json!({"command": "status"}));
        if status["status"]["outage"].is_string() {
            break;
        }
        assert_eq!(status["status"]["state"], "running", "{status}");
        assert!(Instant::now() < deadline, "no outage is reported: {status}");
        std::thread::sleep(Duration::from_millis(100));
    }
    server.send(Signal::CONT);
    let (code, json) = guest.end();
    assert_eq!((code, &json["outcome"]), (0, &json!("done")));
}

/// The first signal ends a restore that waits until it can open its snapshot.
#[test]
fn a_signal_ends_a_restore_whose_store_is_away() {
    let server = Server::start();
    server.send(Signal::STOP);
    for lazily in ["", "--lazy"] {
        let words = format!("snapshot restore s3://bucket/saved --patience forever {lazily}");
        let mut command = Command::new(env!("CARGO_BIN_EXE_lacuna"));
        command
            .args(words.split_whitespace())
            .envs(server.settings());
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut restore = Running(command.spawn().unwrap());
        restore.wait_for_handlers();
        restore.send(Signal::TERM);
        assert_eq!(restore.wait().code(), Some(143), "{lazily}");
        let mut errors = String::new();
        let mut pipe = restore.0.stderr.take().unwrap();
        pipe.read_to_string(&mut errors).unwrap();
        assert!(
            errors.contains("interrupted by SIGTERM"),
            "{lazily}: {errors}"
        );
    }
}

#[test]
fn what_is_wrong_is_said() {
    let server = Server::start();
    for bucket in ["bucket", "pail"] {
        let (code, errors) = fails(bucket, &server.settings());
        assert_eq!(code, Some(2), "{errors}");
        let object = format!("s3://{bucket}/none/checksums");
        assert!(errors.contains(&object), "{errors}");
    }
    let mut settings = server.settings();
    settings.retain(|(name, _)| *name != "AWS_ALLOW_HTTP");
    let (code, errors) = fails("bucket", &settings);
    assert_eq!(code, Some(3), "{errors}");
    assert!(errors.contains("URL scheme is not allowed"), "{errors}");
}

/// The certificate of the server is checked against the authorities of the host, which
/// `SSL_CERT_FILE` names.
#[test]
fn over_tls() {
    let server = Server::over_tls();
    let mut settings = server.settings();
    let (code, errors) = fails("bucket", &settings);
    assert_eq!(code, Some(3), "{errors}");
    assert!(errors.contains("certificate"), "{errors}");
    settings.push(("SSL_CERT_FILE", format!("{CERTIFICATES}/authority.pem")));
    let (code, errors) = fails("bucket", &settings);
    assert_eq!(code, Some(2), "{errors}");
}
