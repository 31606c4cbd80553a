//! `lacuna run --pages-from`: a guest with memory from a source, and failing sources.

use assert_cmd::Command;
use lacuna::PageCount;
use lacuna::source::{Faults, Injected, PageRequest, PageSource, Server, Zeros, serve};
use lacuna_skip::test;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tempfile::TempDir;

const RUN: &str = "run verify --memory 16M --resident 4M --append rounds=1 --json - --pages-from";

/// Exit code, JSON and errors of a run; skipped in a build without guests.
fn run(options: &str) -> (i32, serde_json::Value, String) {
    if let Some(reason) = lacuna_guest::unavailable() {
        lacuna_skip::skip_test(reason);
    }
    let mut command = Command::cargo_bin("lacuna").expect("cargo builds it for this test");
    let line = format!("{RUN} {options}");
    let output = command.args(line.split_whitespace()).output().unwrap();
    let json = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code().unwrap(), json, errors)
}

fn serves(path: &Path, memory: u64, source: impl PageSource + 'static) -> Server {
    let listener = UnixListener::bind(path).unwrap();
    serve(listener, PageCount::from_bytes(memory), Arc::new(source)).unwrap()
}

/// The run was whole, and its pages came from the source.
fn assert_done(options: &str) {
    let (code, json, errors) = run(options);
    assert_eq!(code, 0, "{options}: {errors}");
    assert_eq!(json["outcome"], "done", "{options}: {errors}");
    let pages = &json["last"]["pages"];
    let count = |name: &str| pages[name].as_u64().unwrap();
    assert_eq!(count("total"), 4096, "{options}: {pages}");
    assert_eq!(
        count("present") + count("missing"),
        4096,
        "{options}: {pages}"
    );
    assert_eq!(count("lost"), 0, "{options}: {pages}");
    // The guest writes most of its memory.
    assert!(count("present") > 2048, "{options}: {pages}");
}

#[test]
fn a_guest_runs_from_each_source() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("memory");
    let sparse = std::fs::File::create(&file).unwrap();
    sparse.set_len(16 << 20).unwrap();
    let diff = folder.path().join("diff");
    let sparse = std::fs::File::create(&diff).unwrap();
    sparse.set_len(16 << 20).unwrap();
    let diff = diff.display();
    let peer = folder.path().join("peer");
    let faults = Faults {
        loss: 0.05,
        resend: Duration::from_millis(1),
        reordering: 0.2,
        ..Faults::latency(Duration::from_micros(200))
    };
    let _server = serves(&peer, 16 << 20, Injected::new(Zeros, faults).unwrap());
    let (file, peer) = (file.display(), peer.display());
    for options in [
        "zeros".into(),
        "zeros --exit-on-missing --apf off".into(),
        "zeros --seed 7 --exit-on-missing".into(),
        format!("file:{file}"),
        format!("file:{file} --exit-on-missing"),
        format!("file:{file}+{diff}"),
        format!("peer:{peer}"),
        format!("peer:{peer} --exit-on-missing"),
        format!("peer:{peer} --exit-on-missing --apf off"),
    ] {
        assert_done(&options);
    }
}

/// The run loop accepts tokens for the guest, and the guest sees each event in its form.
#[test]
fn an_aarch64_guest_is_told_of_missing_pages() {
    let folder = TempDir::new().unwrap();
    let peer = folder.path().join("peer");
    let slow = Faults::latency(Duration::from_micros(200));
    let _server = serves(&peer, 16 << 20, Injected::new(Zeros, slow).unwrap());
    for form in ["abort", "sdei"] {
        for exits in ["", "--exit-on-missing"] {
            let mut command = Command::cargo_bin("lacuna").expect("cargo builds it for this test");
            let line = "run verify --arch arm64 --memory 16M --resident 4M --json - --pages-from";
            let words = format!("rounds=1 apf={form}");
            let output = command
                .args(line.split_whitespace())
                .arg(format!("peer:{}", peer.display()))
                .args(exits.split_whitespace())
                .args(["--append", &words])
                .output()
                .unwrap();
            let errors = String::from_utf8_lossy(&output.stderr);
            let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
            assert_eq!(json["outcome"], "done", "{words} {exits}: {errors}");
            let apf = &json["last"]["apf"];
            let counts = [
                &apf["taken"],
                &apf["guest"]["not_present"],
                &apf["guest"]["ready"],
            ];
            let counts = counts.map(|count| count.as_u64().unwrap());
            assert!(counts.iter().all(|count| *count > 500), "{words}: {apf}");
            assert_eq!(apf["guest"]["lost"], 0, "{words}: {apf}");
        }
    }
}

#[test]
fn sources_that_cannot_be_used_are_refused() {
    let folder = TempDir::new().unwrap();
    let short = folder.path().join("short");
    std::fs::write(&short, [0; 5000]).unwrap();
    let few = folder.path().join("few");
    let _server = serves(&few, 1 << 20, Zeros);
    let (short, few) = (short.display(), few.display());
    for (options, code, told) in [
        (
            "file:/nonexistent/m".into(),
            2,
            "cannot open the memory file /nonexistent/m",
        ),
        (
            format!("file:{short}"),
            2,
            "has 1 pages of 4 KiB and the guest needs 4096",
        ),
        (
            format!("peer:{few}"),
            2,
            "the peer has 256 pages and the guest needs 4096",
        ),
        (
            format!("file:{short} --seed 3"),
            2,
            "--seed repeats a run only with zeros",
        ),
        (
            format!("peer:/{}", "long".repeat(50)),
            2,
            "the socket's path has 201 bytes and may have 107",
        ),
        (
            format!("file:{short}+/nonexistent/d"),
            2,
            "has 1 pages of 4 KiB and the guest needs 4096",
        ),
        ("snapshot:/nonexistent/s".into(), 2, "/nonexistent/s"),
        (
            "objects:gs://bucket/memory".into(),
            2,
            "gs://bucket: no such store is supported",
        ),
        (
            "tape:/x".into(),
            2,
            "use zeros, file:PATH, file:BASE+DIFF, snapshot:PATH, objects:URL, peer:PATH or",
        ),
        (
            "zeros --backend kvm --seed 3".into(),
            2,
            "--seed needs the soft backend",
        ),
    ] {
        let (found, _, errors) = run(&options);
        assert_eq!(found, code, "{options}: {errors}");
        assert!(errors.contains(told), "{options}: {errors}");
    }
}

#[test]
fn memory_that_cannot_be_served_is_refused() {
    let folder = TempDir::new().unwrap();
    let (at, long) = (folder.path().display(), "long".repeat(50));
    for (options, told) in [
        (
            format!("zeros /{long}"),
            "a socket's path has at most 107 bytes",
        ),
        (
            format!("zeros {at}/s --memory 1000"),
            "give whole pages of 4 KiB",
        ),
        (
            format!("zeros {at}/s --memory 0"),
            "give whole pages of 4 KiB",
        ),
        (format!("file:/dev/zero {at}/s"), "is not a regular file"),
        (format!("file:{at} {at}/s"), "is not a regular file"),
        (format!("peer:{at}/none/{long} {at}/s"), "may have 107"),
    ] {
        let mut command = Command::cargo_bin("lacuna").expect("cargo builds it for this test");
        let line = format!("serve {options}");
        let output = command.args(line.split_whitespace()).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{options}: {errors}");
        assert!(errors.contains(told), "{options}: {errors}");
    }
}

#[test]
fn a_guest_on_kvm_runs_from_a_source() {
    if let Err(reason) = lacuna::kvm::available() {
        lacuna_skip::skip_test(reason);
    }
    assert_done("zeros --backend kvm");
    assert_done("zeros --backend kvm --exit-on-missing --vcpus 2");
    assert_done("zeros --backend kvm --exit-on-missing --apf off");
}

/// Provides what the loader needs, and then nothing.
struct Ends;

impl PageSource for Ends {
    fn describe(&self) -> String {
        "a memory that ends".into()
    }

    fn fetch(&self, request: PageRequest) {
        let _ = match request.page().0 {
            0..2048 => request.provide(&[0; 4096]),
            _ => request.fail("the disk has failed"),
        };
    }
}

#[test]
fn a_page_that_a_source_loses_ends_the_run_and_is_never_zeros() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("peer");
    let _server = serves(&path, 16 << 20, Ends);
    for options in ["", "--exit-on-missing"] {
        let (code, json, errors) = run(&format!("peer:{} {options}", path.display()));
        assert_eq!(code, 3, "{json} {errors}");
        let outcome = json["outcome"].as_str().unwrap();
        let told = "does not provide it: the disk has failed";
        assert!(outcome.contains(told), "{outcome}");
        assert!(json["last"]["pages"]["lost"].as_u64() > Some(0), "{json}");
    }
}

/// Provides what the loader needs, and keeps all other requests.
struct Keeps {
    /// Pages from 0 on that it provides.
    provides: u64,
    kept: Mutex<Vec<PageRequest>>,
}

impl Default for Keeps {
    fn default() -> Self {
        Self {
            provides: 2048,
            kept: Mutex::default(),
        }
    }
}

impl Keeps {
    fn kept(&self) -> MutexGuard<'_, Vec<PageRequest>> {
        self.kept.lock().unwrap()
    }
}

impl PageSource for Keeps {
    fn describe(&self) -> String {
        "a memory that takes its time".into()
    }

    fn fetch(&self, request: PageRequest) {
        match request.page().0 < self.provides {
            true => _ = request.provide(&[0; 4096]),
            false => self.kept().push(request),
        }
    }
}

#[test]
fn patience_says_when_a_page_is_lost() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("peer");
    let _server = serves(&path, 16 << 20, Keeps::default());
    let (code, json, errors) = run(&format!("peer:{} --patience 1s", path.display()));
    assert_eq!(code, 3, "{json} {errors}");
    let outcome = json["outcome"].as_str().unwrap();
    assert!(outcome.contains("the peer has not sent page"), "{outcome}");
}

#[test]
fn a_guest_that_waits_forever_is_ended_by_a_signal() {
    if let Some(reason) = lacuna_guest::unavailable() {
        lacuna_skip::skip_test(reason);
    }
    // Without any page, the loader waits, before there is a vCPU.
    for (provides, exits) in [(2048, ""), (2048, "--exit-on-missing"), (0, "")] {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("peer");
        // Make a new source each time: the next run must not see a late request of this one.
        let keeps = Arc::new(Keeps {
            provides,
            ..Keeps::default()
        });
        let _server = serves(&path, 16 << 20, Arc::clone(&keeps));
        let line = format!("{RUN} peer:{} --patience forever {exits}", path.display());
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_lacuna"));
        let command = command.args(line.split_whitespace());
        let mut child = command.stdout(Stdio::null()).spawn().unwrap();
        // Wait until the run requests a page.
        while keeps.kept().is_empty() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        let code = child.wait().unwrap().code();
        assert_eq!(code, Some(130), "{provides} {exits}");
    }
}

/// The process that serves pages dies, and another one takes its place.
#[test]
fn a_guest_that_waits_for_a_process_that_died_says_so() {
    if let Some(reason) = lacuna_guest::unavailable() {
        lacuna_skip::skip_test(reason);
    }
    let folder = TempDir::new().unwrap();
    let (path, control) = (folder.path().join("peer"), folder.path().join("control"));
    let keeps = Arc::new(Keeps::default());
    let server = serves(&path, 16 << 20, Arc::clone(&keeps));
    let line = format!("{RUN} peer:{} --patience forever --quiet", path.display());
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_lacuna"));
    command
        .args(line.split_whitespace())
        .arg("--control")
        .arg(&control);
    let command = command.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    while keeps.kept().is_empty() {
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(server);
    keeps.kept().clear();
    let mut errors = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut told = |words: &str| {
        let line = errors.find(|line| line.as_ref().unwrap().contains(words));
        line.unwrap_or_else(|| panic!("no line says: {words}"))
            .unwrap()
    };
    let text = told("provides no pages: ");
    assert!(text.contains(&*path.to_string_lossy()), "{text}");
    let mut stream = UnixStream::connect(&control).unwrap();
    stream.write_all(b"{\"command\":\"status\"}\n").unwrap();
    let mut answer = String::new();
    BufReader::new(&stream).read_line(&mut answer).unwrap();
    let answer: serde_json::Value = serde_json::from_str(&answer).unwrap();
    let status = &answer["status"];
    let outage = status["outage"].as_str().unwrap();
    assert!(outage.contains("provides no pages: "), "{status}");
    assert_eq!(status["pages"]["whole"], false, "{status}");
    std::fs::remove_file(&path).unwrap();
    // Its name is the first server's, so it has the same memory.
    let _server = serves(&path, 16 << 20, Named(Zeros));
    told("provides pages again");
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

/// Zeros under the name of [`Keeps`].
struct Named(Zeros);

impl PageSource for Named {
    fn describe(&self) -> String {
        Keeps::default().describe()
    }

    fn fetch(&self, request: PageRequest) {
        self.0.fetch(request);
    }
}
