//! `lacuna pager --park`: pagers that are killed and upgraded under a running guest.

use crate::pager::guest;
use crate::signals::Running;
use lacuna_skip::test;
use lacuna_sys::Userfaultfd;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::path::Path;
use std::process::Stdio;
use std::thread::{sleep, yield_now};
use std::time::Duration;
use tempfile::TempDir;

/// How often the pager is killed, and how often it is upgraded.
const ROUNDS: &str = "LACUNA_PARK_ROUNDS";

/// The number of the pager, by the folder's lock, if it is not `last`.
fn pager(folder: &Path, last: Option<Pid>) -> Pid {
    loop {
        let text = std::fs::read_to_string(folder.join("lock")).unwrap_or_default();
        let pid = text.trim().parse().ok().and_then(Pid::from_raw);
        if let Some(pid) = pid.filter(|pid| Some(*pid) != last) {
            return pid;
        }
        yield_now();
    }
}

fn has_vm(folder: &Path) -> bool {
    let mut all = std::fs::read_dir(folder).unwrap();
    all.any(|entry| {
        entry
            .unwrap()
            .file_name()
            .to_string_lossy()
            .starts_with("vm-")
    })
}

/// A parked pager in a folder of its own.
fn start(options: &str) -> (TempDir, Running) {
    if let Err(errno) = Userfaultfd::open_user() {
        lacuna_skip::skip_test(errno);
    }
    let folder = TempDir::new_in("/dev/shm");
    let folder = folder.unwrap_or_else(|error| lacuna_skip::skip_test(error));
    File::create(folder.path().join("memory"))
        .unwrap()
        .set_len(16 << 20)
        .unwrap();
    let at = folder.path().display();
    let line = format!(
        "pager --park --state {at} --socket {at}/socket --from file:{at}/memory --quiet {options}"
    );
    let park = Running::with_errors_to(&line, Stdio::piped(), Stdio::inherit());
    (folder, park)
}

/// The guest checks its memory. Its VMM ends it if it loses the connection to the pager.
#[test]
fn a_guest_survives_its_parked_pagers() {
    let rounds = std::env::var(ROUNDS).map_or(2, |rounds| rounds.parse().unwrap());
    let (folder, mut park) = start("");
    let folder = folder.path();
    let socket = folder.join("socket");
    let mut last = pager(folder, None);
    while !socket.exists() {
        yield_now();
    }
    for round in 0..rounds {
        let vm = guest(&socket, "verify --append rounds=1").spawn().unwrap();
        while !has_vm(folder) {
            yield_now();
        }
        sleep(Duration::from_millis(round % 7));
        kill_process(last, Signal::KILL).unwrap();
        last = pager(folder, Some(last));
        sleep(Duration::from_millis(round % 5));
        park.send(Signal::HUP);
        last = pager(folder, Some(last));
        let ran = vm.wait_with_output().unwrap();
        let errors = String::from_utf8_lossy(&ran.stderr);
        assert_eq!(ran.status.code(), Some(0), "{errors}");
    }
    while has_vm(folder) {
        yield_now();
    }
    park.send(Signal::TERM);
    assert_eq!(park.wait().code(), Some(143));
    assert!(!socket.exists());
}

/// A pager that dies after SIGTERM: the next one serves its VM, accepts no other, and ends with it.
#[test]
fn sigterm_outlives_a_parked_pager() {
    let (folder, mut park) = start("--json -");
    let folder = folder.path();
    let socket = folder.join("socket");
    let first = pager(folder, None);
    while !socket.exists() {
        yield_now();
    }
    let vm = guest(&socket, "verify --append rounds=1").spawn().unwrap();
    while !has_vm(folder) {
        yield_now();
    }
    park.send(Signal::TERM);
    while socket.exists() {
        yield_now();
    }
    kill_process(first, Signal::KILL).unwrap();
    let ran = vm.wait_with_output().unwrap();
    assert_eq!(ran.status.code(), Some(0), "{ran:?}");
    assert_eq!(park.wait().code(), Some(143));
    let json = serde_json::from_reader(park.0.stdout.take().unwrap());
    let json: serde_json::Value = json.unwrap();
    let counts = ["vms", "taken_back", "paged_out"].map(|name| &json[name]);
    assert_eq!(counts, [1, 1, 0], "{json}");
}

/// A pager that cannot start is not started for ever.
#[test]
fn wrong_options_end_a_parked_pager() {
    let (_folder, mut park) = start("--memory 5000");
    assert_eq!(park.wait().code(), Some(2));
}
