//! `lacuna ctl SOCKET stat` and `dirty`.

use crate::guest::{Client, Guest, LIMIT, failure, has_kvm, lacuna};
use crate::migrate::destination::Destination;
use lacuna_skip::test;
use rustix::net::listen;
use serde_json::{Value, json};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Instant;
use tempfile::TempDir;

/// A guest that writes some pages again and again until it is stopped.
const WRITER: &str = "paced --memory 16M --append=seconds=1000000";

/// A guest whose writes a client watches.
fn watched(folder: &TempDir, options: &str) -> (Guest, Client) {
    let guest = Guest::start(folder.path(), &format!("{WRITER} {options}"));
    let mut monitor = guest.client();
    monitor.send(b"{\"command\":\"dirty\",\"every_ms\":100}\n");
    until(&mut monitor, |now| now["pages"].as_u64() > Some(0));
    (guest, monitor)
}

/// The first period for which `holds` is true.
fn until(monitor: &mut Client, holds: impl Fn(&Value) -> bool) -> Value {
    let deadline = Instant::now() + LIMIT;
    loop {
        let answer = monitor.answer();
        let now = &answer["progress"];
        assert!(now.is_object() && Instant::now() < deadline, "{answer}");
        if holds(now) {
            return now.clone();
        }
    }
}

/// The sum of the counters whose names begin with `name`.
fn counted(client: &mut Client, name: &str) -> u64 {
    let answer = client.ask(json!({"command": "stat"}));
    let counters = answer["stat"].as_object().unwrap();
    let named = counters.iter().filter(|(of, _)| of.starts_with(name));
    named.map(|(_, value)| value.as_u64().unwrap()).sum()
}

fn stops(guest: Guest) {
    assert_eq!(guest.client().state("stop"), "ended");
    assert_eq!(guest.end().0, 4);
}

/// A period of a monitor of its own, as soon as there is no other one.
fn period(client: &mut Client, detect: Value) -> Value {
    let request = json!({"command": "dirty", "every_ms": 100, "count": 1, "detect": detect});
    let deadline = Instant::now() + LIMIT;
    loop {
        let answer = client.ask(request.clone());
        if answer["error"].is_null() {
            return answer["dirty"].clone();
        }
        let text = answer["error"]["text"].as_str().unwrap();
        assert!(text.contains("another client watches"), "{text}");
        assert!(Instant::now() < deadline, "the monitor does not end");
    }
}

fn writes_are_counted(options: &str) {
    let folder = TempDir::new().unwrap();
    let (guest, monitor) = watched(&folder, options);
    let mut client = guest.client();
    let text = client.refused(json!({"command": "dirty"}));
    assert!(text.contains("another client watches"), "{text}");
    assert_eq!(client.state("pause"), "paused");
    drop(monitor);
    let paused = period(&mut client, Value::Null);
    assert_eq!(
        (&paused["pages"], &paused["rate"]),
        (&json!(0), &json!(0.0))
    );
    assert_eq!(
        (&paused["working_set"], &paused["in_use"]),
        (&json!(0), &Value::Null)
    );
    assert_eq!(client.state("resume"), "running");
    let mut monitor = guest.client();
    monitor.send(b"{\"command\":\"dirty\",\"every_ms\":100}\n");
    let now = until(&mut monitor, |now| now["pages"].as_u64() > Some(0));
    let [pages, rate, seconds] = ["pages", "rate", "seconds"].map(|of| now[of].as_f64().unwrap());
    assert!((rate * seconds - pages).abs() < 0.1, "{now}");
    assert!(
        now["working_set"].as_u64() >= now["pages"].as_u64(),
        "{now}"
    );
    stops(guest);
    let last = std::iter::repeat_with(|| monitor.answer()).find(|last| last["progress"].is_null());
    // Or the connection is closed already.
    let last = last.unwrap();
    assert!(
        last.is_null() || last["status"]["state"] == "ended",
        "{last}"
    );
}

#[test]
fn writes_are_counted_on_soft() {
    writes_are_counted("");
}

#[test]
fn writes_are_counted_in_rings() {
    writes_are_counted("--delivery ring");
}

#[test]
fn writes_are_counted_on_kvm() {
    has_kvm();
    writes_are_counted("--backend kvm");
}

/// Snapshots and migrations get the log, also one with a log that is older than the monitor's.
#[test]
fn a_copy_interrupts_the_monitor() {
    let folder = TempDir::new().unwrap();
    let (guest, mut monitor) = watched(&folder, "");
    let mut client = guest.client();
    let [whole, changes] = ["whole", "changes"].map(|name| folder.path().join(name));
    let saved = client.ask(json!({"command": "snapshot", "path": whole, "track": true}));
    assert!(saved["snapshot"]["pages"].as_u64() > Some(0), "{saved}");
    until(&mut monitor, |now| now["pages"].as_u64() > Some(0));
    let saved = client.ask(json!({"command": "snapshot", "path": changes, "base": whole}));
    assert!(!saved["snapshot"].is_null(), "{saved}");

    // A peer that accepts nothing: the migration lasts until it is cancelled.
    let path = folder.path().join("full");
    let listener = UnixListener::bind(&path).unwrap();
    listen(&listener, 0).unwrap();
    let _waits = UnixStream::connect(&path).unwrap();
    let request = json!({"command": "migrate", "to": format!("unix:{}", path.display())});
    let mut asking = guest.client();
    asking.send(format!("{request}\n").as_bytes());
    let moves = |why: &str| why.contains("the guest is being moved to unix:");
    let now = until(&mut monitor, |now| {
        now["in_use"].as_str().is_some_and(moves)
    });
    assert_eq!(now["pages"], 0, "{now}");
    client.state("cancel");
    until(&mut monitor, |now| now["pages"].as_u64() > Some(0));
    stops(guest);
}

/// The other detection is for the monitor's time alone, and so is the log.
#[test]
fn the_log_ends_with_the_monitor() {
    let folder = TempDir::new().unwrap();
    let guest = Guest::start(folder.path(), WRITER);
    let mut client = guest.client();
    for (detect, detected_by) in [
        (json!("wp"), "write protection"),
        (Value::Null, "page-modification logging"),
    ] {
        let deadline = Instant::now() + LIMIT;
        loop {
            let now = period(&mut client, detect.clone());
            assert_eq!(now["detected_by"], detected_by, "{now}");
            if now["pages"].as_u64() > Some(0) {
                break;
            }
            assert!(Instant::now() < deadline, "{now}");
        }
        let tracked = counted(&mut client, "lacuna_dirty_");
        assert!(tracked > 0);
        let exits = counted(&mut client, "lacuna_vcpu_exits_total");
        while counted(&mut client, "lacuna_vcpu_exits_total") < exits + 100 {
            assert!(Instant::now() < deadline, "the guest does not run");
        }
        assert_eq!(counted(&mut client, "lacuna_dirty_"), tracked);
    }
    stops(guest);
}

#[test]
fn a_guest_that_has_arrived_is_watched() {
    let folder = TempDir::new().unwrap();
    let address = format!("unix:{}/in", folder.path().display());
    let to = Destination::start(folder.path(), &address, "");
    let (guest, _monitor) = watched(&folder, "");
    let mut there = to.client();
    for command in ["stat", "dirty"] {
        let text = there.refused(json!({"command": command}));
        assert!(text.contains("no guest is here"), "{text}");
    }
    let moved = guest
        .client()
        .ask(json!({"command": "migrate", "to": to.address}));
    assert!(!moved["migrated"].is_null(), "{moved}");
    let mut monitor = to.client();
    monitor.send(b"{\"command\":\"dirty\",\"every_ms\":100}\n");
    until(&mut monitor, |now| now["pages"].as_u64() > Some(0));
    assert!(counted(&mut there, "lacuna_vcpu_exits_total") > 0);
    assert_eq!(there.state("stop"), "ended");
    to.end();
}

#[test]
fn the_command_shows_periods() {
    let folder = TempDir::new().unwrap();
    let guest = Guest::start(folder.path(), WRITER);
    let ctl = |words: &str| {
        let output = lacuna(&format!("ctl {} {words}", guest.socket.display()));
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(0), "{errors}");
        String::from_utf8(output.stdout).unwrap()
    };
    for (words, field) in [("stat", "rates"), ("dirty", "working_set")] {
        let lines = ctl(&format!("{words} --every 100ms --count 2 --json -"));
        assert_eq!(lines.lines().count(), 2, "{lines}");
        for line in lines.lines() {
            let period: Value = serde_json::from_str(line).unwrap();
            assert!(!period[field].is_null(), "{line}");
            assert!(period["seconds"].as_f64() > Some(0.0), "{line}");
        }
    }
    let text = ctl("dirty --every 100ms --count 1 --dirty wp");
    assert!(text.contains(" in 10s   by write protection\n"), "{text}");
    let deadline = Instant::now() + LIMIT;
    while !ctl("stat --every 100ms --count 1").contains("/s  vcpu_exits vcpu=") {
        assert!(Instant::now() < deadline, "the guest does not run");
    }
    for (words, told) in [
        ("dirty --every 1ms", "every_ms 1: give 100 to 60000"),
        (
            "dirty --window 2000min",
            "window_ms 120000000: give 100 to 3600000",
        ),
    ] {
        let (code, errors) = failure(&format!("ctl {} {words}", guest.socket.display()));
        assert_eq!(code, 2, "{errors}");
        assert!(errors.contains(told), "{errors}");
    }
    stops(guest);
}

#[test]
fn kvm_has_its_own_detection() {
    has_kvm();
    let folder = TempDir::new().unwrap();
    let guest = Guest::start(folder.path(), &format!("{WRITER} --backend kvm"));
    let request = json!({"command": "dirty", "detect": "pml"});
    let text = guest.client().refused(request);
    assert!(text.contains("leave out detect"), "{text}");
    stops(guest);
}
