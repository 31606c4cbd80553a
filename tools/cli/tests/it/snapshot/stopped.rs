//! Guests that are stopped through the socket, and by a signal.

use crate::guest::{Guest, has_kvm};
use crate::signals::Running;
use clap::Parser as _;
use lacuna::PageCount;
use lacuna::migrate::{Folder, LocalFolder, Snapshot, StoredFile};
use lacuna::source::{FileError, PageRequest, PageSource, Policy};
use lacuna_cli::args::{self, Cli, Patience};
use lacuna_cli::pages::Restoring;
use lacuna_cli::run::{Lazy, Opened, Start, exit_of, run_from};
use lacuna_skip::test;
use rustix::process::Signal;
use serde_json::{Value, json};
use std::io::{self, BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
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
    rustix::process::kill_process(pid, Signal::TERM).unwrap();
    let (code, json) = guest.end();
    assert_eq!(code, 143, "{json}");
}

/// Saves a guest with async page faults, so that the restore of a vCPU reads the guest's memory.
fn saved(folder: &Path, path: &Path) {
    let guest = Guest::start(folder, ENDLESS);
    let mut client = guest.client();
    loop {
        let saved = client.snapshot(path);
        assert!(saved["snapshot"]["pages"].is_u64(), "{saved}");
        let state = std::fs::read(path.join("snapshot.json")).unwrap();
        let state: Value = serde_json::from_slice(&state).unwrap();
        if state["state"]["vcpus"][0]["X86"]["apf"]["enable"] != 0 {
            break;
        }
        std::fs::remove_dir_all(path).unwrap();
    }
    client.state("stop");
    assert_eq!(guest.end().0, 4);
}

/// The snapshot that [`restoring_process`] restores.
const RESTORES: &str = "LACUNA_TEST_RESTORES";
/// Its message when it waits for a page.
const ASKED: &str = "the snapshot was asked for a page";

/// The first signal ends a lazy restore whose store no longer answers, before the guest runs: a
/// vCPU is restored, and waits for a page.
#[test]
fn a_signal_ends_a_lazy_restore_that_has_not_begun() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("saved");
    saved(folder.path(), &path);
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([
        "--exact",
        "snapshot::stopped::restoring_process",
        "--nocapture",
    ]);
    command.env(RESTORES, &path).stdout(Stdio::null());
    let mut restore = Running(command.stderr(Stdio::piped()).spawn().unwrap());
    let errors = BufReader::new(restore.0.stderr.take().unwrap()).lines();
    let mut errors = errors.map(Result::unwrap);
    assert!(errors.any(|line| line.contains(ASKED)));
    restore.send(Signal::TERM);
    assert!(errors.any(|line| line.ends_with("interrupted by SIGTERM before the guest ran")));
    assert_eq!(restore.wait().code(), Some(143));
}

/// The process of the test above; without its variable this is no test. It is
/// `lacuna snapshot restore --lazy --patience forever` from a store that is unavailable once the
/// snapshot is open.
#[test]
fn restoring_process() {
    let Some(path) = std::env::var_os(RESTORES) else {
        return;
    };
    let signals = lacuna_cli::signals::Signals::catch(&Arc::default()).unwrap();
    let folder = Leaves(LocalFolder::new(Path::new(&path)));
    let snapshot = Snapshot::open_in(Arc::new(folder)).unwrap();
    let interrupt = signals.flag().unwrap();
    let lazy = Lazy {
        snapshot: &snapshot,
        policy: Patience::policy(Some(Patience::Forever)),
        counts: Arc::new(Restoring::new(&snapshot)),
        interrupt: &interrupt,
        record: None,
        replay: None,
    };
    let line = "lacuna snapshot restore saved --lazy --patience forever";
    let Some(args::Command::Snapshot(args)) = Cli::parse_from(line.split(' ')).command else {
        panic!("another command");
    };
    let args::SnapshotCommand::Restore(args) = args.what else {
        panic!("another command");
    };
    let run = args.on.machine(String::new(), snapshot.machine());
    let opened = Opened::open(&run.on, false).unwrap();
    let exit = exit_of(run_from(&run, Start::Lazily(&lazy), &signals, opened));
    std::process::exit(exit.code().into());
}

/// A store without pages, once its files are open.
struct Leaves(LocalFolder);

impl Folder for Leaves {
    fn path(&self) -> &Path {
        self.0.path()
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn StoredFile>> {
        let file = self.0.open(name)?;
        Ok(match name {
            "memory" => Box::new(Away(file)),
            _ => file,
        })
    }

    fn beside(&self, name: &str) -> io::Result<Arc<dyn Folder>> {
        self.0.beside(name)
    }
}

struct Away(Box<dyn StoredFile>);

impl StoredFile for Away {
    fn length(&self) -> u64 {
        self.0.length()
    }

    fn read_exact_at(&self, _into: &mut [u8], _offset: u64) -> io::Result<()> {
        Err(io::Error::other("the store is away"))
    }

    fn page_source(&self, _: PageCount, _: Policy) -> Result<Box<dyn PageSource>, FileError> {
        Ok(Box::new(Silent::default()))
    }
}

/// Keeps all requests.
#[derive(Default)]
struct Silent(Mutex<Vec<PageRequest>>);

impl PageSource for Silent {
    fn describe(&self) -> String {
        "a store that does not answer".into()
    }

    fn fetch(&self, request: PageRequest) {
        self.0.lock().unwrap().push(request);
        eprintln!("{ASKED}");
    }
}
