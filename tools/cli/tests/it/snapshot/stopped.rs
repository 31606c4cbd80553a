//! Guests that are stopped through the socket, and by a signal.

use crate::guest::{Guest, has_kvm};
use lacuna_skip::test;
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt;
use tempfile::TempDir;

/// A guest that runs until it is stopped.
pub const ENDLESS: &str = "bm --memory 16M --resident 8M --append=seconds=1000000";

/// A guest that is stopped through the socket, paused or not, ends with a code of its own.
fn is_stopped(options: &str) {
    let folder = TempDir::new().unwrap();
    for pause in [true, false] {
        let guest = Guest::start(folder.path(), &format!("{ENDLESS} {options}"));
        let mode = guest.socket.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "no other user connects");
        let mut client = guest.client();
        let status = &client.ask(json!({"command": "status"}))["status"];
        assert_eq!(status["protocol"], 1);
        assert_eq!(status["vcpus"], 2);
        assert_eq!(status["memory_bytes"], 16 << 20);
        if pause {
            assert_eq!(client.state("pause"), "paused");
        }
        assert_eq!(client.state("stop"), "ended");
        let (code, json) = guest.end();
        assert_eq!(code, 4, "{json}");
        let outcome = json["outcome"].as_str().unwrap();
        assert!(outcome.contains("stopped through its control socket"));
        assert_eq!(client.answer(), Value::Null, "the connection is closed");
    }
}

#[test]
fn stopped_on_soft() {
    is_stopped("");
    is_stopped("--arch arm64");
}

#[test]
fn stopped_on_kvm() {
    has_kvm();
    is_stopped("--backend kvm");
}

/// A signal ends a paused guest too.
#[test]
fn a_signal_ends_a_paused_guest() {
    let folder = TempDir::new().unwrap();
    let guest = Guest::start(folder.path(), ENDLESS);
    assert_eq!(guest.client().state("pause"), "paused");
    let pid = rustix::process::Pid::from_child(&guest.child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let (code, json) = guest.end();
    assert_eq!(code, 143, "{json}");
}
