//! Runs the example `vmm`: the guest is saved, restored lazily, and moved to another process, on
//! one backend and from one to the other.

use lacuna_skip::test;
use std::fs;
use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

/// Longer than any step takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A process of the example.
struct Vmm {
    process: Child,
    lines: Receiver<String>,
}

impl Vmm {
    fn start(arguments: &[&str]) -> Self {
        let program = crate::examples::program("vmm");
        let mut process = Command::new(program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a process");
        let (to, lines) = channel();
        pass(process.stdout.take().expect("a pipe"), to.clone());
        pass(process.stderr.take().expect("a pipe"), to);
        Self { process, lines }
    }

    /// The next line, which comes before the patience of this test ends.
    fn line(&self, seen: &mut Vec<String>) -> String {
        let line = self.lines.recv_timeout(PATIENCE);
        let line = line.unwrap_or_else(|error| panic!("{error} after {seen:#?}"));
        seen.push(line.clone());
        line
    }

    /// Waits for a line that begins with `before`, and returns the rest of it.
    fn next(&self, before: &str) -> String {
        let mut seen = vec![];
        loop {
            if let Some(rest) = self.line(&mut seen).strip_prefix(before) {
                return rest.into();
            }
        }
    }

    /// Waits until the guest has written pages, and the second process has seen more than `before`
    /// rounds. Returns their number.
    fn works(&self, before: u64) -> u64 {
        let (mut seen, mut dirty, mut rounds) = (vec![], 0_u64, 0);
        while dirty == 0 || rounds <= before {
            let line = self.line(&mut seen);
            match *line.split(' ').collect::<Vec<_>>() {
                [pages, "dirty", "pages"] => dirty = pages.parse().expect("a number"),
                ["second", "process:", count, "rounds"] => {
                    rounds = count.parse().expect("a number");
                }
                _ => {}
            }
        }
        rounds
    }

    fn command(&mut self, line: &str) {
        let stdin = self.process.stdin.as_mut().expect("a pipe");
        writeln!(stdin, "{line}").expect("the process reads");
    }

    fn ends(mut self) {
        let _ = self.next("the VMM stopped the run");
        assert!(self.process.wait().expect("a process").success());
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn pass(from: impl Read + Send + 'static, to: Sender<String>) {
    thread::spawn(move || {
        let lines = BufReader::new(from).lines().map_while(Result::ok);
        lines.for_each(|line| drop(to.send(line)));
    });
}

/// A new folder with a disk, and the certificates under the names of the example.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("a folder");
    fs::write(folder.join("disk"), [0; 4096]).expect("a file");
    let certificates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../migrate/tests/certificates");
    for (from, to) in [
        ("authority.pem", "ca.pem"),
        ("host.pem", "cert.pem"),
        ("host.key", "key.pem"),
    ] {
        fs::copy(certificates.join(from), folder.join(to)).expect("a file");
    }
    folder
}

/// The guest boots on `first`, is restored from a snapshot on `second`, and moves to `third`.
fn travels([first, second, third]: [&str; 3]) {
    if [first, second, third].contains(&"kvm")
        && let Err(reason) = lacuna::kvm::available()
    {
        lacuna_skip::skip_test(reason);
    }
    let folder = folder(&format!("vmm-{first}-{second}-{third}"));
    let at = |name| folder.join(name).display().to_string();
    let (disk, snapshot) = (format!("disk={}", at("disk")), at("snapshot"));
    let (address, tls) = match cfg!(feature = "tls") {
        true => ("tls:localhost:0", Some(format!("tls={}", at("")))),
        false => ("tcp:localhost:0", None),
    };
    let with = |words: &[&str]| {
        let words = words.iter().copied();
        let all: Vec<&str> = words.chain(Some(&*disk)).chain(tls.as_deref()).collect();
        Vmm::start(&all)
    };

    let mut source = with(&[first]);
    source.command("for the console");
    let rounds = source.works(0);
    source.command(&format!("!save {snapshot}"));
    let _ = source.next("saved");
    source.command("!quit");
    source.ends();

    let mut restored = with(&[second, &format!("restore={snapshot}")]);
    let rounds = restored.works(rounds);
    let mut destination = with(&[third, &format!("listen={address}")]);
    let address = destination.next("listens at ");
    restored.command(&format!("!send {address}"));
    restored.ends();
    destination.works(rounds);
    destination.command("!quit");
    destination.ends();
    fs::remove_dir_all(folder).expect("a folder");
}

#[test]
fn a_guest_travels_on_soft() {
    travels(["soft", "soft", "soft"]);
}

#[test]
fn a_guest_travels_from_soft_to_kvm_and_back() {
    travels(["soft", "kvm", "soft"]);
}
