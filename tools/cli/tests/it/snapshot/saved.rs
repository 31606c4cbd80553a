//! Snapshots that are saved and restored, and refused ones.

use super::stopped::ENDLESS;
use crate::guest::{Guest, failure, has_kvm, lacuna};
use crate::signals::Running;
use lacuna::PageCount;
use lacuna::source::{
    Answer, Failure, PageRequest, PageRequester, PageSource as _, Peer, Policy, SourcePage,
};
use lacuna_skip::test;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::Read;
use std::path::Path;
use std::process::Stdio;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

/// A guest that checks its memory, and ends.
const VERIFY: &str = "verify --memory 6M --resident 3M";
/// All of its pages.
const PAGES: u64 = (6 << 20) / 4096;

/// Starts a guest, has it saved while it runs, and pauses it. On a busy machine the guest may end
/// before that. Then the test tries a guest with more checks.
pub fn saved_and_paused(folder: &Path, options: &str, append: &str, request: &Value) -> Guest {
    for rounds in [10, 100, 1000] {
        let words = format!("{VERIFY} {options}");
        let append = format!("rounds={rounds} {append}");
        let guest = Guest::start_with(folder, &words, Some(&append));
        let mut client = guest.client();
        let [saved, paused] = [request.clone(), json!({"command": "pause"})].map(|r| client.ask(r));
        if paused["status"]["state"] == "paused" {
            assert!(saved["snapshot"]["pages"].is_u64(), "{saved}");
            return guest;
        }
        let why = paused["error"]["text"].as_str().unwrap_or_default();
        assert!(
            paused.is_null() || why.contains("the run is over"),
            "{paused}"
        );
        let path = request["path"].as_str().unwrap();
        // The guest may have ended before it could be saved.
        let _ = std::fs::remove_dir_all(path);
    }
    panic!("it always ends before it is saved");
}

/// Restores a snapshot; the guest ends well.
fn restores(path: &Path, options: &str) {
    let path = path.display();
    let output = lacuna(&format!(
        "snapshot restore {path} {options} --json - --quiet"
    ));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{path} {options}: {errors}");
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["outcome"], "done", "{json}");
    assert_eq!(json["restored"]["from"], path.to_string(), "{json}");
    let has_linux_memory = ["anonymous", "kvm"]
        .iter()
        .any(|word| options.contains(word));
    let in_place = has_linux_memory && !options.contains("--lazy");
    assert_eq!(json["restored"]["in_place"], in_place, "{options}: {json}");
    let read = json["restored"]["pages"].as_u64().unwrap();
    let present = json["last"]["pages"]["present"].as_u64();
    match options.contains("--lazy") {
        true => assert!(present.unwrap() > 0 && read == 0, "{json}"),
        false => assert!(read > 0, "{json}"),
    }
}

/// A guest is saved while it is paused and while it runs, by both ways. It resumes, and so does
/// each snapshot.
fn is_saved(options: &str, append: &str, onto: &[&str]) {
    let folder = TempDir::new().unwrap();
    let [paused, running] = ["paused", "running"].map(|name| folder.path().join(name));
    let request = json!({"command": "snapshot", "path": running});
    let guest = saved_and_paused(folder.path(), options, append, &request);
    let mut client = guest.client();
    assert_eq!(client.state("pause"), "paused", "again");
    let words = format!(
        "snapshot save {} --control {} --json -",
        paused.display(),
        guest.socket.display()
    );
    let output = lacuna(&words);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rounds = json["saved"]["rounds"].as_array().unwrap();
    assert_eq!(rounds, &[json!(PAGES)], "one round of all pages: {json}");
    assert_eq!(client.state("status"), "paused");
    assert_eq!(client.state("resume"), "running");
    let (code, json) = guest.end();
    assert_eq!((code, &json["outcome"]), (0, &json!("done")));
    for options in onto {
        restores(&paused, options);
        restores(&running, options);
    }
}

#[test]
fn on_soft() {
    is_saved(
        "",
        "",
        &[
            "",
            "--memory-kind anonymous --resident 3M",
            "--lazy --resident 4M --swap mem",
            "--lazy --memory-kind anonymous",
        ],
    );
    is_saved("--arch arm64 --vcpus 3", "", &["--lazy", "--resident 16M"]);
}

#[test]
fn on_kvm() {
    has_kvm();
    is_saved(
        "--backend kvm --cpu common --apf off",
        "",
        &[
            "--backend kvm",
            "--backend soft",
            "--backend kvm --lazy",
            "--backend soft --lazy",
        ],
    );
}

/// A guest moves from soft to this host's KVM.
#[test]
fn from_soft_to_kvm() {
    has_kvm();
    is_saved("--cpu common --apf off", "syscall=ud2", &["--backend kvm"]);
}

/// Requests a snapshot of the changes since `base`.
/// `lacuna serve` gives other processes the memory of the snapshot at `path`, page by
/// page, and refuses to give more than it has.
fn serves(path: &Path, folder: &Path) {
    let (from, socket) = (format!("snapshot:{}", path.display()), folder.join("pages"));
    let line = format!("serve {from} {} --memory", socket.display());
    let (code, errors) = failure(&format!("{line} 7M"));
    let reason = "has 6291456 bytes, and 7340032 bytes were asked for";
    assert!(code == 2 && errors.contains(reason), "{code} {errors}");
    let line = format!("{line} 6M --quiet");
    let _server = Running::with_errors_to(&line, Stdio::null(), Stdio::null());
    while !socket.exists() {
        std::thread::yield_now();
    }
    let peer = Peer::connect(&socket, PageCount::new(PAGES), Policy::default()).unwrap();
    let (sender, pages) = channel();
    let requester = Arc::new(Arrived(Mutex::new(sender)));
    for page in 0..PAGES {
        let requester = Arc::clone(&requester) as Arc<dyn PageRequester>;
        peer.fetch(PageRequest::new(requester, page, SourcePage(page)));
    }
    drop(requester);
    let pages: BTreeSet<_> = pages.iter().collect();
    assert_eq!(pages.len() as u64, PAGES);
}

/// Sends the number of each arrived page.
struct Arrived(Mutex<Sender<u64>>);

impl PageRequester for Arrived {
    fn answer(&self, page: u64, content: Result<&[u8; 4096], Failure<'_>>) -> Answer {
        // The end of a request calls this again, with a failure.
        if content.is_ok() {
            self.0.lock().unwrap().send(page).unwrap();
        }
        Answer::Taken
    }
}

fn since(path: &Path, base: &Path) -> Value {
    json!({"command": "snapshot", "path": path, "base": base})
}

/// A guest in its sandbox is saved to a folder that its process cannot open: the client makes the
/// files, and removes them if the save fails.
#[test]
fn outside_of_the_sandbox() {
    let [folder, other] = [(); 2].map(|()| TempDir::new().unwrap());
    let [first, second] = ["first", "second"].map(|name| other.path().join(name));
    let guest = Guest::start(folder.path(), ENDLESS);
    let socket = guest.socket.display();
    for (words, is_saved) in [
        (format!("{} --track", first.display()), true),
        (format!("{} --track", first.display()), false),
        (
            format!("{} --base {}", second.display(), first.display()),
            true,
        ),
        (
            format!("{}/no --base {}", other.path().display(), first.display()),
            false,
        ),
    ] {
        let output = lacuna(&format!("snapshot save {words} --control {socket}"));
        assert_eq!(output.status.success(), is_saved, "{words}: {output:?}");
    }
    assert_eq!(guest.client().state("stop"), "ended");
    assert_eq!(guest.end().0, 4);
    lacuna::migrate::Snapshot::open(&second).unwrap();
    assert_eq!(std::fs::read_dir(other.path()).unwrap().count(), 2);
}

/// Each snapshot has the changes since the one before, and each is restored with its bases.
#[test]
fn diffs() {
    let folder = TempDir::new().unwrap();
    let [first, second, third, failed] =
        ["first", "second", "third", "failed"].map(|name| folder.path().join(name));
    let whole = json!({"command": "snapshot", "path": first, "track": true});
    let guest = saved_and_paused(folder.path(), "", "", &whole);
    let mut client = guest.client();
    let text = client.refused(since(&second, &third));
    assert!(
        text.contains("the last snapshot of this guest is"),
        "{text}"
    );
    let text = client.refused(since(&folder.path().join("nowhere/x"), &first));
    assert!(text.contains("has to be in the folder of"), "{text}");
    // A failed snapshot loses no page of the next one.
    std::fs::create_dir(&failed).unwrap();
    let whole = |track| json!({"command": "snapshot", "path": failed, "track": track});
    for request in [since(&failed, &first), whole(true), whole(false)] {
        let text = client.refused(request);
        assert!(text.contains("exists already"), "{text}");
    }
    let words = |path: &Path, base: &Path| {
        let [path, base, socket] = [path, base, &guest.socket].map(Path::display);
        format!("snapshot save {path} --base {base} --control {socket} --json -")
    };
    let output = lacuna(&words(&second, &first));
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    client.state("resume");
    let output = lacuna(&words(&third, &second));
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    let pages = json["saved"]["rounds"][0].as_u64().unwrap();
    assert!(pages < PAGES, "not all pages: {json}");
    assert_eq!(guest.end().0, 0);
    for path in [&second, &third] {
        restores(path, "");
        restores(path, "--lazy");
    }
    serves(&third, folder.path());
    std::fs::rename(&first, folder.path().join("away")).unwrap();
    let (code, errors) = failure(&format!("snapshot restore {}", third.display()));
    assert!(code == 2 && errors.contains("first"), "{code} {errors}");
    std::fs::create_dir(&first).unwrap();
    for entry in std::fs::read_dir(&third).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), first.join(entry.file_name())).unwrap();
    }
    let (code, errors) = failure(&format!("snapshot restore {}", third.display()));
    assert!(
        code == 2 && errors.contains("it is not the one that"),
        "{code} {errors}"
    );
}

/// Snapshots that are damaged, missing or of another machine, and options that do not fit.
#[test]
fn snapshots_that_cannot_be_restored() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("saved");
    let guest = Guest::start(folder.path(), &format!("{ENDLESS} --arch arm64"));
    let mut client = guest.client();
    let text = client.refused(since(&path, &path));
    assert!(
        text.contains("save a whole snapshot with track first"),
        "{text}"
    );
    assert!(!client.snapshot(&path)["snapshot"].is_null());
    let again = client.snapshot(&path)["error"]["text"].to_string();
    assert!(
        again.contains("exists already: name another path"),
        "{again}"
    );
    client.state("stop");
    assert_eq!(guest.end().0, 4);

    let restore = |options: &str| failure(&format!("snapshot restore {options}"));
    let saved = path.display();
    for (options, told) in [
        (
            format!("{}/none", folder.path().display()),
            "none: cannot find a snapshot there",
        ),
        (format!("{saved} --backend kvm"), "give --backend soft"),
        (
            format!("{saved} --memory-kind hugetlbfs --resident 4M"),
            "leave --resident out",
        ),
        (format!("{saved} --resident 64K"), "memory budget too small"),
    ] {
        let (code, errors) = restore(&options);
        assert!(code == 2 || code == 3, "{code} {errors}");
        assert!(errors.contains(told), "{options}: {errors}");
    }
    let pages = path.join("pages");
    let mut bytes = std::fs::read(&pages).unwrap();
    bytes[0] ^= 1;
    std::fs::write(&pages, bytes).unwrap();
    let (code, errors) = restore(&saved.to_string());
    assert_eq!(code, 2, "{errors}");
    assert!(
        errors.contains("pages: its checksum differs: the snapshot is damaged"),
        "{errors}"
    );
    let mut rest = String::new();
    std::fs::File::open(path.join("snapshot.json"))
        .unwrap()
        .read_to_string(&mut rest)
        .unwrap();
    assert!(rest.contains("\"format\": 1"));
}

/// A URL is no path of the current folder: it names a store, or says what to do.
#[test]
fn urls() {
    let folder = TempDir::new().unwrap();
    let guest = Guest::start(folder.path(), ENDLESS);
    let save = |url: &str| {
        let socket = guest.socket.display();
        failure(&format!("snapshot save {url} --control {socket}"))
    };
    let told = match cfg!(feature = "s3") {
        true => "s3://",
        false => "build it with `cargo build --release --features s3`",
    };
    for (url, told) in [
        ("s3://bucket/saved", told),
        ("gs://bucket/saved", "give s3://bucket/prefix, or the path"),
        ("http://host/saved", "give s3://bucket/prefix, or the path"),
        ("file:///saved", "give s3://bucket/prefix, or the path"),
    ] {
        let (code, errors) = save(url);
        assert!(code != 0 && errors.contains(told), "{url}: {errors}");
    }
    guest.client().state("stop");
    assert_eq!(guest.end().0, 4);
}
