//! `lacuna migrate` and `lacuna run --incoming`: guests that move between two processes, and
//! connections and processes that end meanwhile.

mod codes;
pub mod destination;
mod disk;
mod ended;
mod proxy;
mod random;
mod requests;
mod strangers;
pub mod tls;
mod waiting;
mod whole;

use crate::guest::{Client, Guest, LIMIT, failure, has_kvm, lacuna};
use destination::{Destination, Until, relay};
use lacuna_skip::test;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::os::unix::net::UnixListener;
use std::time::Instant;
use tempfile::TempDir;

/// A guest that runs until it is stopped.
const ENDLESS: &str = "bm --memory 16M --resident 8M --append=seconds=1000000";
/// A guest that checks its memory and ends. It runs longer than a request for its migration takes.
const VERIFY: &str = "verify --memory 6M --resident 6M";
/// Bytes of a migration that has begun: it sends more, even if its guest has only booted.
const SOME: usize = 60_000;
/// A frame of the destination: it has memory and state.
const PREPARED: u8 = 8;

fn migrate(to: &str) -> Value {
    json!({"command": "migrate", "to": to})
}

/// Whether this answer to `migrate` says that the guest has ended before it could move.
fn is_too_late(answer: &Value) -> bool {
    let error = answer["error"]["text"].as_str().unwrap_or_default();
    let too_late = ["the run has ended before", "the run is over"];
    answer.is_null() || too_late.iter().any(|told| error.contains(told))
}

/// Checks the reports of both sides about a guest that has moved from `guest` to `to`, and has
/// ended there.
fn has_moved(guest: Guest, to: Destination, answer: &Value) {
    let moved = &answer["migrated"];
    let sent = moved["pages"].as_u64().unwrap();
    assert!(sent > 0, "{answer}");
    let address = to.address.clone();
    let (code, json, errors) = to.end();
    assert_eq!(
        (code, &json["outcome"]),
        (Some(0), &json!("done")),
        "{errors}"
    );
    let received = &json["received"];
    assert_eq!(received["at"], address, "{json}");
    assert_eq!(received["mode"], moved["mode"], "{json}");
    assert_eq!(received["late"], moved["late"], "{json}");
    assert_eq!(received["again"], moved["again"], "{json}");
    assert!(received["downtime_us"].as_u64() > Some(0), "{json}");
    assert_eq!(
        (&received["missing"], &received["cuts"]),
        (&json!(0), &json!(0))
    );
    if moved["late"] == 0 {
        assert_eq!(received["pages"], moved["pages"], "{json}");
    }
    assert_eq!(json["options"]["image"], address, "{json}");
    let (code, json) = guest.end();
    assert_eq!(code, 0, "{json}");
    assert_eq!(json["outcome"], format!("moved to {address}"));
    assert_eq!(&json["migrated"], moved);
}

/// How a guest moves.
struct Way<'a> {
    /// Options of its source.
    from: &'a str,
    /// Words of its command line.
    append: &'a str,
    address: &'a str,
    /// Options of its destination.
    onto: &'a str,
    mode: &'a str,
    streams: u32,
    compression: &'a str,
}

/// A guest checks its memory here, and there. On a busy machine the guest may end before it can
/// move. Then the test tries a guest with more checks.
fn moves(way: &Way<'_>) -> Value {
    for rounds in [8, 80, 800] {
        let folder = TempDir::new().unwrap();
        let address = way
            .address
            .replace("FOLDER", folder.path().to_str().unwrap());
        let to = Destination::start(folder.path(), &address, way.onto);
        let (words, append) = (
            format!("{VERIFY} {}", way.from),
            format!("{} rounds={rounds}", way.append),
        );
        let guest = Guest::start_with(folder.path(), &words, Some(&append));
        let request = json!({
            "command": "migrate",
            "to": to.address,
            "mode": way.mode,
            "streams": way.streams,
            "compress": way.compression,
        });
        let Some(mut client) = guest.try_client() else {
            continue;
        };
        client.be_patient();
        let answer = client.ask(request);
        if !is_too_late(&answer) {
            has_moved(guest, to, &answer);
            return answer["migrated"].clone();
        }
    }
    panic!("it always ends before it could move");
}

#[test]
fn over_a_unix_socket() {
    let moved = moves(&Way {
        from: "",
        append: "",
        address: "unix:FOLDER/in",
        onto: "--resident 4M",
        mode: "precopy",
        streams: 3,
        compression: "none",
    });
    let rounds = moved["rounds"].as_array().unwrap();
    assert!(rounds.len() > 1 && moved["late"] == 0, "{moved}");
}

#[test]
fn over_tcp_on_arm64() {
    let moved = moves(&Way {
        from: "--arch arm64",
        append: "",
        address: "tcp:127.0.0.1:0",
        onto: "",
        mode: "postcopy",
        streams: 1,
        compression: "lz4",
    });
    assert_eq!((&moved["rounds"], &moved["again"]), (&json!([]), &json!(0)));
    assert!(moved["late"].as_u64().unwrap() > 0, "{moved}");
}

#[test]
fn into_linux_memory() {
    let moved = moves(&Way {
        from: "",
        append: "",
        address: "unix:FOLDER/in",
        onto: "--memory-kind memfd",
        mode: "hybrid",
        streams: 2,
        compression: "zstd",
    });
    let [again, late] = [&moved["again"], &moved["late"]].map(|count| count.as_u64().unwrap());
    assert!(again >= late, "{moved}");
}

#[test]
fn from_soft_to_kvm() {
    has_kvm();
    for mode in ["precopy", "postcopy"] {
        moves(&Way {
            from: "--cpu common --apf off",
            append: "syscall=ud2",
            address: "tcp:[::1]:0",
            onto: "--backend kvm",
            mode,
            streams: 1,
            compression: "lz4",
        });
    }
}

/// `lacuna migrate` moves a guest, and the next one of the same VM finds none.
#[test]
fn the_command_moves_a_guest() {
    let folder = TempDir::new().unwrap();
    let to = Destination::start(folder.path(), "tcp:127.0.0.1:0", "--resident 16M");
    let guest = Guest::start(folder.path(), ENDLESS);
    let control = guest.socket.display().to_string();
    let words = format!(
        "migrate {} --control {control} --downtime 1s --streams 2 --compress lz4 --json -",
        to.address
    );
    let output = lacuna(&words);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{errors}");
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["outcome"], format!("moved to {}", to.address));
    assert!(json["migrated"]["bytes"].as_u64().unwrap() > 4096, "{json}");
    let (code, there) = guest.end();
    assert_eq!((code, &there["migrated"]), (0, &json["migrated"]));
    let (code, errors) = failure(&words);
    assert_eq!(code, 2, "{errors}");
    let status = &to.client().ask(json!({"command": "status"}))["status"];
    assert_eq!(status["state"], "running", "{status}");
    assert_eq!(to.client().state("stop"), "ended");
    let (code, json, _) = to.end();
    assert_eq!(code, Some(4), "{json}");
}

/// A move and a snapshot of changes say what has detected the guest's writes: the vCPUs' logs, or
/// the chosen write protection.
#[test]
fn writes_are_detected_as_chosen() {
    for (options, by, logs) in [
        ("", "page-modification logging", true),
        ("--dirty wp --delivery ring", "write protection", false),
    ] {
        let folder = TempDir::new().unwrap();
        let to = Destination::start(folder.path(), "tcp:127.0.0.1:0", "");
        let guest = Guest::start(folder.path(), &format!("{ENDLESS} {options}"));
        let mut client = guest.client();
        let [first, second] = ["first", "second"].map(|name| folder.path().join(name));
        let whole = |track| json!({"command": "snapshot", "path": first, "track": track});
        let changes = json!({"command": "snapshot", "path": second, "base": first});
        let mut requests = vec![
            (whole(logs), "snapshot"),
            (migrate(&to.address), "migrated"),
        ];
        match logs {
            true => requests.insert(1, (changes, "snapshot")),
            false => {
                let text = client.refused(whole(true));
                assert!(text.contains("save without track"), "{text}");
            }
        }
        for (request, name) in requests {
            let answer = client.ask(request);
            assert_eq!(answer[name]["detected_by"], by, "{answer}");
        }
        let (code, json) = guest.end();
        let dirty = &json["last"]["dirty"];
        assert_eq!((code, &dirty["detected_by"]), (0, &json!(by)), "{json}");
        assert_eq!(dirty["vcpus"]["logged"].as_u64() > Some(0), logs, "{dirty}");
        // Reclaim also makes pages read-only, so the vCPUs' logs do not rule out write faults.
        assert!(
            logs || dirty["vcpus"]["faults"].as_u64() > Some(0),
            "{dirty}"
        );
        assert_eq!(dirty["delivery"], if logs { "bitmap" } else { "ring" });
        assert_eq!(to.client().state("stop"), "ended");
        assert_eq!(to.end().0, Some(4));
    }
}

/// Waits until the guest of `guest` is on its way.
fn is_moving(guest: &Guest) {
    let deadline = Instant::now() + LIMIT;
    let mut client = guest.client();
    while client.ask(json!({"command": "status"}))["status"]["migrating"].is_null() {
        assert!(Instant::now() < deadline, "no migration");
    }
}

/// A cancel, or a client that disconnects, ends the wait for a silent destination. The guest keeps
/// running, and can be stopped.
#[test]
fn a_migration_is_cancelled() {
    let folder = TempDir::new().unwrap();
    let guest = Guest::start(folder.path(), ENDLESS);
    let path = folder.path().join("silent");
    let _silent = UnixListener::bind(&path).unwrap();
    let request = migrate(&format!("unix:{}", path.display()));
    let mut client = guest.client();
    client.send(format!("{request}\n").as_bytes());
    is_moving(&guest);
    let mut other = guest.client();
    for refused in [json!({"command": "pause"}), request.clone()] {
        let text = other.refused(refused);
        assert!(text.contains("is being moved to unix:"), "{text}");
    }
    let saved = other.snapshot(&folder.path().join("saved"));
    assert!(!saved["error"].is_null(), "{saved}");
    assert_eq!(other.state("cancel"), "running");
    let mut answer = client.answer();
    while !answer["progress"].is_null() {
        assert!(answer["progress"]["bytes"].as_u64().is_some(), "{answer}");
        answer = client.answer();
    }
    assert_eq!(answer["error"]["kind"], "cancelled", "{answer}");
    let text = answer["error"]["text"].as_str().unwrap();
    assert!(
        text.contains("was cancelled: the guest keeps running here"),
        "{text}"
    );
    let text = other.refused(json!({"command": "cancel"}));
    assert!(text.contains("no migration is in progress"), "{text}");

    client.send(format!("{request}\n").as_bytes());
    is_moving(&guest);
    drop(client);
    let deadline = Instant::now() + LIMIT;
    while !other.ask(json!({"command": "status"}))["status"]["migrating"].is_null() {
        assert!(Instant::now() < deadline, "it continues without its client");
    }

    // The run ends during a migration.
    let mut client = guest.client();
    client.send(format!("{request}\n").as_bytes());
    is_moving(&guest);
    assert_eq!(other.state("stop"), "ended");
    let (code, json) = guest.end();
    assert_eq!((code, &json["migrated"]), (4, &Value::Null));
}

/// The destination is killed while memory is sent: the guest keeps running here.
#[test]
fn the_destination_is_killed() {
    let folder = TempDir::new().unwrap();
    let address = format!("unix:{}/in", folder.path().display());
    let to = Destination::start(folder.path(), &address, "--resident 16M");
    let pid = Pid::from_child(&to.child);
    let (middle, relay) = relay(folder.path(), &address, 1, Until::Bytes(SOME), move || {
        kill_process(pid, Signal::KILL).unwrap();
    });
    let guest = Guest::start(folder.path(), ENDLESS);
    let text = guest.client().refused(migrate(&middle));
    let told = "the guest has not moved, and keeps running here: the connection was cut";
    assert!(text.contains(told), "{text}");
    relay.join().unwrap();
    assert_eq!(guest.client().state("status"), "running");
    assert_eq!(to.end().0, None, "killed");
    guest.client().state("stop");
    assert_eq!(guest.end().0, 4);
}

/// The source is killed while memory arrives: the destination ends, and says why.
#[test]
fn the_source_is_killed() {
    let folder = TempDir::new().unwrap();
    let address = format!("unix:{}/in", folder.path().display());
    let to = Destination::start(folder.path(), &address, "--resident 16M");
    let guest = Guest::start(folder.path(), ENDLESS);
    let pid = Pid::from_child(&guest.child);
    let (middle, relay) = relay(folder.path(), &address, 1, Until::Bytes(SOME), move || {
        kill_process(pid, Signal::KILL).unwrap();
    });
    let answer = guest.client().ask(migrate(&middle));
    assert_eq!(answer, Value::Null, "the source is gone");
    relay.join().unwrap();
    let (code, _, errors) = to.end();
    assert_eq!(code, Some(5), "{errors}");
    let told = "the guest has not come: the connection was cut: the other side has closed it; it \
                is with its source";
    assert!(errors.contains(told), "{errors}");
}

/// The connection is cut when the source hands the guest over, and is not restored: the guest is
/// paused on both sides until a person decides, for either side.
#[test]
fn a_person_decides() {
    for keeps_here in [true, false] {
        let folder = TempDir::new().unwrap();
        let address = format!("unix:{}/in", folder.path().display());
        let to = Destination::start(folder.path(), &address, "");
        let connections = if keeps_here { 3 } else { 1 };
        let until_prepared = Until::Answer(PREPARED);
        let (middle, relay) = relay(folder.path(), &address, connections, until_prepared, || {});
        let guest = Guest::start(folder.path(), ENDLESS);
        let mut asking = guest.client();
        let mut request = migrate(&middle);
        if keeps_here {
            // Until a hybrid's guest is kept, it may need pages of this process.
            request["mode"] = "hybrid".into();
            request["downtime_ms"] = 10_000.into();
        }
        asking.send(format!("{request}\n").as_bytes());
        let stage = |of: &str, status: &Value| status[of]["stage"] == "unknown";
        let status = until(&mut guest.client(), |status| stage("migrating", status));
        relay.join().unwrap();
        let told = "it is not known whether it runs at unix:";
        assert!(status["undecided"].as_str().unwrap().contains(told));
        assert_eq!(status["state"], "paused", "{status}");
        let status = until(&mut to.client(), |status| stage("arriving", status));
        let told = "it is not known whether its source has handed it over";
        assert!(status["undecided"].as_str().unwrap().contains(told));
        assert_eq!(status["state"], "arriving", "{status}");
        let mut client = guest.client();
        for command in ["pause", "resume", "snapshot"] {
            client.refused(json!({ "command": command, "path": "/" }));
        }
        let (ends, expected) = if keeps_here {
            (keeps_at_source(guest, to, &middle), [Some(143), Some(4)])
        } else {
            (keeps_at_destination(guest, to), [Some(4), Some(4)])
        };
        assert_eq!(ends, expected, "both were ended");
    }
}

/// The status of a guest, once it is as wanted.
fn until(client: &mut Client, wanted: impl Fn(&Value) -> bool) -> Value {
    let deadline = Instant::now() + LIMIT;
    loop {
        let status = client.ask(json!({"command": "status"}))["status"].clone();
        if wanted(&status) {
            return status;
        }
        assert!(Instant::now() < deadline, "{status}");
    }
}

fn keeps_at_source(guest: Guest, to: Destination, middle: &str) -> [Option<i32>; 2] {
    assert_eq!(to.client().state("stop"), "ended");
    let (there, _, errors) = to.end();
    assert!(errors.contains("before the guest had come"), "{errors}");
    // The source stops connecting, and later connects again.
    let mut client = guest.client();
    let control = guest.socket.display().to_string();
    let output = lacuna(&format!("migrate --cancel --control {control}"));
    assert_eq!(output.stdout, b"cancelled\n", "{output:?}");
    let status = until(&mut client, |status| status["migrating"].is_null());
    let text = status["undecided"].as_str().unwrap();
    assert!(text.contains("ask it again to move the guest to"), "{text}");
    let mut asking = guest.client();
    asking.send(format!("{}\n", migrate(middle)).as_bytes());
    until(&mut client, |status| !status["migrating"].is_null());
    let output = lacuna(&format!("migrate --keep --control {control} --json -"));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["outcome"], "the guest is resumed here", "{output:?}");
    assert_eq!(client.state("status"), "running");
    let (code, errors) = failure(&format!("migrate --keep --control {control}"));
    assert!(
        code == 2 && errors.contains("ask for the status"),
        "{errors}"
    );
    // Its pages are not needed elsewhere any more, so one signal ends it.
    kill_process(Pid::from_child(&guest.child), Signal::TERM).unwrap();
    [Some(guest.end().0), there]
}

fn keeps_at_destination(guest: Guest, to: Destination) -> [Option<i32>; 2] {
    assert_eq!(guest.client().state("stop"), "ended");
    let here = guest.end().0;
    let control = to.control.display().to_string();
    let output = lacuna(&format!("migrate --keep --control {control}"));
    assert!(output.status.success(), "{output:?}");
    let mut client = to.client();
    assert_eq!(client.state("status"), "running");
    let text = client.refused(json!({"command": "keep"}));
    assert!(text.contains("ask for the status"), "{text}");
    assert_eq!(client.state("stop"), "ended");
    [Some(here), to.end().0]
}

/// A guest that cannot run there ends the waiting, and both sides get the reason.
#[test]
fn a_guest_that_cannot_run_there() {
    let folder = TempDir::new().unwrap();
    let to = Destination::start(
        folder.path(),
        "tcp:127.0.0.1:0",
        "--backend kvm --resident 16M",
    );
    let guest = Guest::start(folder.path(), &format!("{ENDLESS} --arch arm64"));
    let mut client = guest.client();
    let told = "--backend kvm runs x86-64 guests";
    let text = client.refused(migrate(&to.address));
    assert!(
        text.contains("the other side refused") && text.contains(told),
        "{text}"
    );
    let (code, _, errors) = to.end();
    assert!(
        code == Some(2) && errors.contains(told),
        "{code:?} {errors}"
    );

    for (address, told) in [
        ("unix:/nowhere/socket", "start the destination first"),
        ("unix:socket", "give the path from / on"),
        ("tcp:127.0.0.1:1", "start the destination first"),
        ("somewhere", "is no address; use unix:PATH"),
    ] {
        let text = client.refused(migrate(address));
        assert!(text.contains(told), "{address}: {text}");
    }
    assert_eq!(client.state("pause"), "paused");
    let text = client.refused(migrate("tcp:127.0.0.1:1"));
    assert!(text.contains("resume it first"), "{text}");
    client.state("stop");
    assert_eq!(guest.end().0, 4);
}

/// A signal ends the waiting, and the socket is removed.
#[test]
fn a_signal_ends_the_waiting() {
    let folder = TempDir::new().unwrap();
    let address = format!("unix:{}/in", folder.path().display());
    let to = Destination::start(folder.path(), &address, "--resident 16M");
    assert!(folder.path().join("in").exists());
    kill_process(Pid::from_child(&to.child), Signal::TERM).unwrap();
    let (code, _, errors) = to.end();
    assert_eq!(code, Some(143), "{errors}");
    let told = "interrupted by SIGTERM before a guest came";
    assert!(errors.contains(told), "{errors}");
    assert!(!folder.path().join("in").exists(), "the socket is removed");
}
