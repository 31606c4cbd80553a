//! Requests to move a guest that name unusable files or hosts. The run stays under control.

use super::destination::Destination;
use super::{ENDLESS, Guest, is_moving, migrate, until};
use crate::guest::failure;
use lacuna_control::MoveRequest;
use lacuna_skip::test;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::net::listen;
use serde_json::json;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A device without an end, a pipe without a writer, and a too large file.
#[test]
fn only_small_files_are_read_for_tls() {
    let folder = TempDir::new().unwrap();
    let guest = Guest::start(folder.path(), ENDLESS);
    let [pipe, large] = ["pipe", "large"].map(|name| folder.path().join(name));
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    std::fs::write(&large, vec![b'-'; (1 << 20) + 1]).unwrap();
    let mut client = guest.client();
    for (file, told) in [
        ("/dev/zero", "/dev/zero: no regular file; give"),
        (pipe.to_str().unwrap(), "pipe: no regular file; give"),
        (folder.path().to_str().unwrap(), ": no regular file; give"),
        (large.to_str().unwrap(), "large: larger than 1M; give"),
    ] {
        let text = client.refused(json!({
            "command": "migrate",
            "to": "tls:localhost:1",
            "tls": {"ca": file, "cert": file, "key": file},
        }));
        assert!(text.contains(told), "{text}");
    }
    assert_eq!(client.state("stop"), "ended");
    assert_eq!(guest.end().0, 4);
}

/// A socket whose peer accepts nothing blocks each connecting process. The run stays under control
/// meanwhile.
#[test]
fn a_peer_that_accepts_nothing_does_not_hold_the_run() {
    for command in ["cancel", "stop"] {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("full");
        let listener = UnixListener::bind(&path).unwrap();
        listen(&listener, 0).unwrap();
        // The only connection that there is room for.
        let _waits = UnixStream::connect(&path).unwrap();
        let guest = Guest::start(folder.path(), ENDLESS);
        let mut asking = guest.client();
        let request = migrate(&format!("unix:{}", path.display()));
        asking.send(format!("{request}\n").as_bytes());
        is_moving(&guest);
        let began = Instant::now();
        let mut client = guest.client();
        client.state(command);
        let mut answer = asking.answer();
        while !answer["progress"].is_null() {
            answer = asking.answer();
        }
        assert_eq!(answer["error"]["kind"], "cancelled", "{answer}");
        let text = answer["error"]["text"].as_str().unwrap();
        let told = match command {
            "cancel" => "was cancelled: the guest keeps running here",
            _ => "the run has ended before the guest moved",
        };
        assert!(text.contains(told), "{text}");
        if command == "cancel" {
            assert_eq!(client.state("stop"), "ended");
        }
        assert_eq!(guest.end().0, 4);
        let waited = began.elapsed();
        assert!(waited < Duration::from_secs(20), "{waited:?}");
    }
}

/// A limit under which a page takes an hour: the guest's memory is never sent.
#[test]
fn a_limited_migration_waits_and_can_be_cancelled() {
    let folder = TempDir::new().unwrap();
    let to = Destination::start(folder.path(), "tcp:127.0.0.1:0", "--resident 16M");
    let guest = Guest::start(folder.path(), ENDLESS);
    let control = guest.socket.display();
    let words = format!("migrate {} --control {control} --bandwidth 1/s", to.address);
    let moving = thread::spawn(move || failure(&words));
    is_moving(&guest);
    let mut client = guest.client();
    loop {
        let status = client.ask(json!({"command": "status"}))["status"].clone();
        let now = &status["migrating"];
        assert!(now["bytes"].as_u64() < Some(100_000), "{status}");
        // The first round has begun.
        if now["round"] == 1 {
            break;
        }
    }
    assert_eq!(client.state("cancel"), "running");
    let (code, errors) = moving.join().unwrap();
    assert!(errors.contains("the migration was cancelled"), "{errors}");
    assert_eq!(code, 4, "{errors}");
    assert_eq!(client.state("stop"), "ended");
    assert_eq!(guest.end().0, 4);
    assert_eq!(to.end().0, Some(5));
}

/// The first round of a hybrid never ends under this limit. A precopy cannot send the guest first.
#[test]
fn a_hybrid_becomes_a_post_copy_on_request() {
    let folder = TempDir::new().unwrap();
    let to = Destination::start(
        folder.path(),
        "tcp:127.0.0.1:0",
        "--resident 16M --wait-again",
    );
    let guest = Guest::start(folder.path(), ENDLESS);
    let control = guest.socket.display();
    let decide = format!("migrate --control {control} --post-copy");
    assert!(failure(&decide).1.contains("no migration is in progress"));
    for (mode, told) in [("precopy", "begins as `hybrid`"), ("hybrid", "")] {
        let words = format!(
            "migrate {} --control {control} --bandwidth 1/s --mode {mode}",
            to.address
        );
        let moving = thread::spawn(move || failure(&words));
        let mut client = guest.client();
        until(&mut client, |now| now["migrating"]["round"] == 1);
        let (code, errors) = failure(&decide);
        assert!(errors.contains(told), "{errors}");
        if mode == "precopy" {
            assert_eq!(code, 2, "{errors}");
            assert_eq!(client.state("cancel"), "running");
            assert_eq!(moving.join().unwrap().0, 4);
            continue;
        }
        assert_eq!(code, 0, "{errors}");
        until(&mut client, |now| now["migrating"]["stage"] == "there");
        // The source has this stage before the guest runs there. If the destination is stopped in
        // between, the source does not learn which side has the guest.
        until(&mut to.client(), |now| now["arriving"]["stage"] == "rest");
        assert_eq!(to.client().state("stop"), "ended");
        let (code, errors) = moving.join().unwrap();
        assert_eq!(code, 0, "{errors}");
    }
    let (code, json) = guest.end();
    assert_eq!((code, &json["migrated"]["mode"]), (0, &json!("hybrid")));
    assert!(json["migrated"]["late"].as_u64() > Some(0), "{json}");
}

/// Descriptors and commands are the VM's. The run stays under control.
#[test]
fn wrong_descriptors_and_commands_are_refused() {
    let folder = TempDir::new().unwrap();
    let guest = Guest::start(folder.path(), ENDLESS);
    let mut client = guest.client();
    let own = format!("/proc/{}/fd", guest.child.id());
    let socket = std::fs::read_dir(own).unwrap().flatten().find_map(|fd| {
        let target = std::fs::read_link(fd.path()).ok()?;
        let is_socket = target.to_str()?.starts_with("socket:");
        is_socket.then(|| fd.file_name().into_string().unwrap())
    });
    for (to, told) in [
        ("fd:1".into(), "no stream socket; give the number"),
        ("fd:999".into(), "no such descriptor is open; give"),
        (format!("fd:{}", socket.unwrap()), "not inherited; give"),
        ("fd:x".into(), "write for example fd:3"),
    ] {
        let text = client.refused(migrate(&to));
        assert!(text.contains(told), "{to}: {text}");
    }
    // The client starts a command, and knows its end.
    for (to, told) in [
        ("exec:exit 7", "ended with exit status: 7"),
        ("exec:/nowhere/program 2>/dev/null", "exit status: 127"),
    ] {
        let mut client = lacuna_control::Client::connect(&guest.socket).unwrap();
        let to = to.to_owned();
        let request = MoveRequest {
            to,
            ..MoveRequest::default()
        };
        let error = client.migrate(request, &mut |_| {}).unwrap_err();
        assert!(error.to_string().contains(told), "{error}");
    }
    assert_eq!(client.state("stop"), "ended");
    assert_eq!(guest.end().0, 4);
    let (code, errors) = failure("run --incoming exec:false");
    assert!(code == 2 && errors.contains("--no-sandbox"), "{errors}");
    let (code, errors) = failure("run --incoming exec:false --no-sandbox");
    assert!(errors.contains("exit status: 1"), "{errors}");
    assert_eq!(code, 3, "{errors}");
}
