//! Clients of the control socket, and what they do to a running guest.

use super::stopped::ENDLESS;
use crate::guest::{Guest, LIMIT, failure};
use lacuna_skip::test;
use serde_json::{Value, json};
use std::io::Write;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Clients that do not keep to the protocol get an error that says what to do, and harm nothing.
#[test]
fn hostile_clients() {
    let folder = TempDir::new().unwrap();
    let guest = Guest::start(folder.path(), ENDLESS);
    let mut client = guest.client();
    for (request, told) in [
        (
            json!({"command": "fly"}),
            "expected one of `status`, `pause`",
        ),
        (json!({"command": "stop", "now": 1}), "unknown field `now`"),
        (
            json!([]),
            "a request is one line, such as {\"command\":\"status\"}",
        ),
        (
            json!({"command": "snapshot", "path": "here"}),
            "give the path from / on",
        ),
        (
            json!({"command": "snapshot", "path": "/nowhere/here"}),
            "/nowhere/here: this VM is in a sandbox",
        ),
        (json!({"command": "snapshot", "path": "/"}), "--allow-save"),
        (
            json!({"command": "snapshot", "path": "/tmp/x", "downtime_ms": u64::MAX}),
            "at most 86400000",
        ),
    ] {
        let text = client.refused(request);
        assert!(text.contains(told), "{text}");
    }
    client.send(b"\xff\x00{{{\n");
    assert!(!client.answer()["error"].is_null());
    assert_eq!(client.state("status"), "running", "the connection lives");

    // A line without an end, in one piece and in many.
    let mut endless = guest.client();
    endless.send(&vec![b' '; 32 << 10]);
    let text = endless.answer()["error"]["text"].to_string();
    assert!(text.contains("at most 32768 bytes"), "{text}");
    assert_eq!(endless.answer(), Value::Null, "closed");
    let mut half = guest.client();
    half.send(b"{\"command\":\"st");
    drop(half);

    assert_eq!(client.state("stop"), "ended");
    assert_eq!(guest.end().0, 4);
}

/// Of many connections some are refused, and get the reason; later ones are served.
#[test]
fn many_clients() {
    let folder = TempDir::new().unwrap();
    let guest = Guest::start(folder.path(), ENDLESS);
    let mut all: Vec<_> = (0..40).map(|_| guest.client()).collect();
    let refused = all.iter_mut().filter_map(|client| {
        let answer = client.ask(json!({"command": "status"}));
        answer["error"]["text"].as_str().map(str::to_owned)
    });
    let refused: Vec<_> = refused.collect();
    assert!(refused.len() >= 24, "{}", refused.len());
    assert!(
        refused[0].contains("16 clients are connected"),
        "{refused:?}"
    );
    drop(all);
    let deadline = Instant::now() + LIMIT;
    let mut served = loop {
        let mut client = guest.client();
        if !client.ask(json!({"command": "status"}))["status"].is_null() {
            break client;
        }
        assert!(
            Instant::now() < deadline,
            "the connections are not given back"
        );
    };
    served.state("stop");
    assert_eq!(guest.end().0, 4);
}

/// Requests of a client that does not read fill both buffers. Then it is disconnected, and no other
/// client waits for it.
#[test]
fn a_client_that_does_not_read() {
    let folder = TempDir::new().unwrap();
    let guest = Guest::start(folder.path(), ENDLESS);
    let mut deaf = guest.client();
    deaf.0
        .get_mut()
        .set_write_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    let status = b"{\"command\":\"status\"}\n";
    while deaf.0.get_mut().write_all(status).is_ok() {}
    assert_eq!(guest.client().state("stop"), "ended");
    assert_eq!(guest.end().0, 4);
}

/// The socket's name is taken by a VM, by a socket without a process, or by a file.
#[test]
fn a_socket_that_is_there_already() {
    let folder = TempDir::new().unwrap();
    let guest = Guest::start(folder.path(), ENDLESS);
    let run = format!("run {ENDLESS} --control {}", guest.socket.display());
    let (code, errors) = failure(&run);
    assert_eq!(code, 2, "{errors}");
    assert!(
        errors.contains("another process serves there: choose another"),
        "{errors}"
    );
    guest.client().state("stop");
    let socket = guest.socket.clone();
    assert_eq!(guest.end().0, 4);

    let (code, errors) = failure(&format!(
        "snapshot save /tmp/none --control {}",
        socket.display()
    ));
    assert_eq!(code, 2, "{errors}");
    assert!(
        errors.contains("name the one that was given to lacuna run"),
        "{errors}"
    );
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let (code, errors) = failure(&run);
    assert_eq!(code, 2, "{errors}");
    assert!(
        errors.contains("no process serves there any more: remove the file"),
        "{errors}"
    );
    let (code, errors) = failure(&format!("{run} --seed 1"));
    assert_eq!(code, 2, "{errors}");
    assert!(errors.contains("cannot be used with"), "{errors}");
}

/// Pages of this guest are read slowly from swap, so a snapshot takes a while.
const SLOW: &str = "bm --memory 64M --resident 8M --swap mem,latency=1ms --append seconds=1000000";

/// A client that disconnects cancels its snapshot: nothing is left, and the guest keeps running.
#[test]
fn a_client_that_goes_away_cancels_its_snapshot() {
    let folder = TempDir::new().unwrap();
    let guest = Guest::start(folder.path(), SLOW);
    let path = folder.path().join("saved");
    let mut gone = guest.client();
    gone.send(format!("{}\n", json!({"command": "snapshot", "path": path})).as_bytes());
    // The request has been read when there is progress.
    let first = gone.answer();
    let mut client = guest.client();
    if !first["progress"].is_null() {
        let answer = client.ask(json!({"command": "pause"}));
        match answer["error"]["text"].as_str() {
            Some(text) => assert!(text.contains("the guest is being saved"), "{text}"),
            // The snapshot of a guest that started just now may be over.
            None => assert_eq!(client.state("resume"), "running"),
        }
    }
    drop(gone);
    let deadline = Instant::now() + LIMIT;
    loop {
        let status = client.ask(json!({"command": "status"}));
        if status["status"]["saving"].is_null() {
            break;
        }
        assert!(Instant::now() < deadline, "{status}");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(client.state("status"), "running");
    let names = std::fs::read_dir(folder.path()).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let partial: Vec<_> = names.filter(|name| name.contains("partial")).collect();
    assert_eq!(partial, [""; 0], "nothing is left");
    client.state("stop");
    assert_eq!(guest.end().0, 4);
}

/// A run that ends while its guest is saved: the answer says so.
#[test]
fn the_end_of_a_run_cancels_its_snapshot() {
    let deadline = Instant::now() + LIMIT;
    while Instant::now() < deadline {
        let folder = TempDir::new().unwrap();
        let guest = Guest::start(folder.path(), &SLOW.replace("1ms", "5ms"));
        let (mut saver, path) = (guest.client(), folder.path().join("saved"));
        // At first the guest has little in swap, and a snapshot may be whole before there is
        // progress.
        loop {
            saver.send(format!("{}\n", json!({"command": "snapshot", "path": path})).as_bytes());
            let answer = saver.answer();
            if !answer["progress"].is_null() {
                break;
            }
            assert!(!answer["snapshot"].is_null(), "{answer}");
            std::fs::remove_dir_all(&path).unwrap();
        }
        guest.client().state("stop");
        let answer = loop {
            let answer = saver.answer();
            if answer["progress"].is_null() {
                break answer;
            }
        };
        assert_eq!(guest.end().0, 4);
        // Otherwise it was whole before the run ended.
        if let Some(text) = answer["error"]["text"].as_str() {
            let told = "the run has ended before the snapshot was whole: ";
            assert!(text.starts_with(told), "{text}");
            assert_eq!(answer["error"]["kind"], "cancelled", "{answer}");
            return;
        }
    }
    panic!("each snapshot is whole before its run ends");
}
