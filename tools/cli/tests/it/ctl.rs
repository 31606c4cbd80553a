//! `lacuna ctl`, and guests that start paused.

use crate::guest::{Guest, failure, lacuna};
use lacuna_skip::test;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

/// A guest that runs until it is stopped.
const ENDLESS: &str = "bm --memory 16M --resident 8M --append=seconds=1000000";

/// The guest's state after this request.
fn ctl(guest: &Guest, request: &str) -> String {
    let words = format!("ctl {} {request} --json -", guest.socket.display());
    let output = lacuna(&words);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{errors}");
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["outcome"], "done", "{json}");
    json["status"]["state"].as_str().unwrap().to_owned()
}

/// A pause stays when its client has ended.
#[test]
fn a_guest_is_paused_resumed_and_stopped() {
    let folder = TempDir::new().unwrap();
    let guest = Guest::start(folder.path(), ENDLESS);
    for (request, state) in [
        ("status", "running"),
        ("pause", "paused"),
        ("status", "paused"),
        ("pause", "paused"),
        ("resume", "running"),
        ("status", "running"),
    ] {
        assert_eq!(ctl(&guest, request), state, "{request}");
    }
    let output = lacuna(&format!("ctl {} status", guest.socket.display()));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("state     running\n"), "{text}");
    assert!(text.contains("soft x86_64, 2 vCPUs, 16M\n"), "{text}");
    assert_eq!(ctl(&guest, "stop"), "ended");
    assert_eq!(guest.end().0, 4);
}

#[test]
fn settings_are_shown_and_changed() {
    let folder = TempDir::new().unwrap();
    let guest = Guest::start(folder.path(), ENDLESS);
    let set = |options: &str| {
        let output = lacuna(&format!("ctl {} set {options}", guest.socket.display()));
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (
            output.status.code(),
            text(output.stdout),
            text(output.stderr),
        )
    };
    let (code, text, _) = set("");
    let before = "\
async-faults  on
huge-pages    off
dirty         pml
resident      8M
source-delay  0us
";
    assert_eq!((code, &*text), (Some(0), before));
    let (code, text, _) = set("--async-faults off --dirty wp --resident 6M --source-delay 250us");
    let after = "\
async-faults  off
huge-pages    off
dirty         wp
resident      6M
source-delay  250us
";
    assert_eq!((code, &*text), (Some(0), after));
    let (code, _, errors) = set("--async-faults on --resident 9M");
    assert_eq!(code, Some(2), "{errors}");
    assert!(
        errors.contains("resident_bytes: memory budget too large"),
        "{errors}"
    );
    assert_eq!(set("").1, after);
    assert_eq!(ctl(&guest, "stop"), "ended");
}

#[test]
fn a_socket_without_a_guest_is_a_wrong_argument() {
    let folder = TempDir::new().unwrap();
    let (code, errors) = failure(&format!("ctl {}/none status", folder.path().display()));
    assert_eq!(code, 2, "{errors}");
    assert!(errors.contains("given to lacuna run --control"), "{errors}");
    let (code, errors) = failure("run hello --paused");
    assert_eq!(code, 2, "{errors}");
    assert!(errors.contains("--control <SOCKET>"), "{errors}");
}

/// The guest ends by itself as soon as it runs.
#[test]
fn a_paused_start_begins_by_a_resume() {
    let folder = TempDir::new().unwrap();
    let guest = Guest::start(folder.path(), "hello --memory 16M --paused");
    assert_eq!(ctl(&guest, "status"), "paused");
    assert_eq!(ctl(&guest, "pause"), "paused");
    let saved = folder.path().join("saved");
    let answer = guest.client().snapshot(&saved);
    let text = answer["error"]["text"].as_str().unwrap();
    assert!(text.contains("has not begun: resume it first"), "{text}");
    assert_eq!(ctl(&guest, "status"), "paused");
    // The guest may be at its end already.
    lacuna(&format!("ctl {} resume", guest.socket.display()));
    let (code, json) = guest.end();
    assert_eq!((code, &json["outcome"]), (0, &"done".into()), "{json}");
}

#[test]
fn a_paused_start_is_stopped() {
    let folder = TempDir::new().unwrap();
    let guest = Guest::start(folder.path(), "hello --memory 16M --paused");
    assert_eq!(ctl(&guest, "stop"), "ended");
    assert_eq!(guest.end().0, 4);
    let guest = Guest::start(folder.path(), "hello --memory 16M --paused");
    assert_eq!(ctl(&guest, "status"), "paused");
    kill_process(Pid::from_child(&guest.child), Signal::TERM).unwrap();
    assert_eq!(guest.end().0, 128 + 15);
}
