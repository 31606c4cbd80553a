//! Ctrl-C, SIGHUP and SIGTERM: the first signal ends the command, which still prints its result;
//! the second one ends it at once.

use lacuna_skip::test;
use rustix::fs::{CWD, FileType, Mode, OFlags, fcntl_getfl, fcntl_setfl, mknodat};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, PipeReader, Read as _, Write};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Longer than any machine needs: a test that takes so long has failed.
const LIMIT: Duration = Duration::from_secs(120);
/// A guest that runs until it is stopped.
const ENDLESS: &str = "run bm --memory 32M --resident 16M --append seconds=1000000 --quiet";

/// A command that catches signals.
pub struct Running(pub Child);

impl Running {
    fn start(line: &str, stdout: Stdio) -> Self {
        Self::with_errors_to(line, stdout, Stdio::null())
    }

    pub fn with_errors_to(line: &str, stdout: Stdio, stderr: Stdio) -> Self {
        if let Some(reason) = lacuna_guest::unavailable() {
            lacuna_skip::skip_test(reason);
        }
        let mut command = Command::new(env!("CARGO_BIN_EXE_lacuna"));
        command.args(line.split_whitespace());
        command.stdout(stdout).stderr(stderr);
        let running = Self(command.spawn().unwrap());
        running.wait_for_handlers();
        running
    }

    /// A signal that arrives before the command catches it kills the process.
    pub fn wait_for_handlers(&self) {
        self.wait_until(|| self.catches(Signal::TERM));
    }

    /// Whether the process catches `signal`: `SigCgt` of proc(5).
    fn catches(&self, signal: Signal) -> bool {
        let caught = signals_of(&self.0.id().to_string(), "SigCgt:");
        caught >> (signal.as_raw() - 1) & 1 == 1
    }

    fn wait_until(&self, condition: impl Fn() -> bool) {
        let deadline = Instant::now() + LIMIT;
        while !condition() {
            assert!(Instant::now() < deadline, "it does not come to it");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub fn send(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    fn ended(&mut self) -> Option<ExitStatus> {
        self.0.try_wait().unwrap()
    }

    pub fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + LIMIT;
        loop {
            if let Some(status) = self.ended() {
                return status;
            }
            assert!(Instant::now() < deadline, "it does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Kills the process when a test fails.
impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A set of signals of a process: proc(5).
fn signals_of(process: &str, set: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(set));
    u64::from_str_radix(line.unwrap().trim(), 16).unwrap()
}

fn json(path: &Path) -> serde_json::Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn the_first_signal_ends_a_run_and_its_result_is_told() {
    let seeded = format!("{ENDLESS} --seed 1");
    let hangs_up = !ignores_hangups();
    for (line, signal, code, name) in [
        (ENDLESS, Signal::INT, 130, "SIGINT"),
        (ENDLESS, Signal::HUP, 129, "SIGHUP"),
        (ENDLESS, Signal::TERM, 143, "SIGTERM"),
        (&*seeded, Signal::INT, 130, "SIGINT"),
    ] {
        if signal == Signal::HUP && !hangs_up {
            lacuna_skip::skip("SIGHUP is ignored, as below nohup");
            continue;
        }
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out.json");
        let line = format!("{line} --json {}", out.display());
        let mut running = Running::start(&line, Stdio::null());
        running.send(signal);
        assert_eq!(running.wait().code(), Some(code), "{line}");
        let json = json(&out);
        assert_eq!(json["exit_code"], code);
        let outcome = json["outcome"].as_str().unwrap();
        assert!(
            outcome.contains(&format!("interrupted by {name}")),
            "{outcome}"
        );
        assert_eq!(json["options"]["image"], "bm");
    }
}

/// Whether this process, and so each that it starts, ignores SIGHUP.
fn ignores_hangups() -> bool {
    let signals = signals_of("self", "SigIgn:");
    signals >> (Signal::HUP.as_raw() - 1) & 1 == 1
}

/// `nohup` starts a command with SIGHUP ignored.
#[test]
fn an_ignored_hangup_stays_ignored() {
    if let Some(reason) = lacuna_guest::unavailable() {
        lacuna_skip::skip_test(reason);
    }
    let mut command = Command::new("sh");
    let script = format!(
        "trap '' HUP; exec {} {ENDLESS}",
        env!("CARGO_BIN_EXE_lacuna")
    );
    command.args(["-c", &script]);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut running = Running(command.spawn().unwrap());
    running.wait_for_handlers();
    assert!(!running.catches(Signal::HUP));
    running.send(Signal::HUP);
    running.send(Signal::TERM);
    assert_eq!(running.wait().code(), Some(143));
}

/// A command with a result for a named pipe waits for a reader, and says so. A signal ends the
/// wait.
#[test]
fn a_result_waits_for_a_reader_of_its_pipe_or_a_signal() {
    for reads in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let to = pipe.display();
        let line = format!("run hello --memory 16M --resident 16M --quiet --json {to}");
        let mut running = Running::with_errors_to(&line, Stdio::null(), Stdio::piped());
        let errors = running.0.stderr.take().unwrap();
        let mut errors = BufReader::new(errors).lines().map(Result::unwrap);
        let says = errors.any(|line| line.contains("waiting until a process reads the pipe"));
        assert!(says);
        let code = if reads {
            assert_eq!(json(&pipe)["exit_code"], 0);
            0
        } else {
            running.send(Signal::TERM);
            assert!(errors.any(|line| line.contains("no process reads it")));
            3
        };
        assert_eq!(running.wait().code(), Some(code));
    }
}

#[test]
fn the_first_signal_ends_the_lab_and_what_was_measured_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out.json");
    let line = format!("lab apf --quick --quiet --json {}", out.display());
    let mut running = Running::start(&line, Stdio::null());
    running.send(Signal::INT);
    assert_eq!(running.wait().code(), Some(130));
    let json = json(&out);
    assert_eq!(json["ended_early"], "interrupted by SIGINT");
    assert!(json["results"].is_array(), "{json}");
}

/// A guest runs from pages of another process over a bad link.
#[test]
fn a_process_serves_pages_to_another_until_a_signal() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, out) = (dir.path().join("pages"), dir.path().join("out.json"));
    let (at, to) = (socket.display(), out.display());
    let mut serves = Running::start(
        &format!("serve zeros {at} --memory 16M --latency 1us --loss 0.05 --json {to} --quiet"),
        Stdio::null(),
    );
    serves.wait_until(|| socket.exists());
    let mode = socket.metadata().unwrap().permissions().mode();
    assert_eq!(
        mode & 0o777,
        0o600,
        "no other user reads the guest's memory"
    );
    let mut runs = Running::start(
        &format!("run verify --memory 16M --append rounds=1 --pages-from peer:{at} --quiet"),
        Stdio::null(),
    );
    assert_eq!(runs.wait().code(), Some(0));
    serves.send(Signal::TERM);
    assert_eq!(serves.wait().code(), Some(143));
    assert!(!socket.exists(), "the socket is removed");
    let json = json(&out);
    assert_eq!(json["connections"], 1, "{json}");
    assert!(json["provided"].as_u64().unwrap() > 1000, "{json}");
    assert_eq!(json["failed"], 0, "{json}");
}

#[test]
fn a_result_that_is_lost_outweighs_the_signal() {
    for line in [ENDLESS, "lab apf --quick --quiet"] {
        let full = std::fs::File::options().write(true).open("/dev/full");
        let mut running = Running::start(&format!("{line} --json -"), full.unwrap().into());
        running.send(Signal::INT);
        assert_eq!(running.wait().code(), Some(3), "{line}");
    }
}

/// A full pipe: a process that writes to it waits.
fn full_pipe() -> (PipeReader, Stdio) {
    let (reader, mut writer) = std::io::pipe().unwrap();
    let flags = fcntl_getfl(&writer).unwrap();
    fcntl_setfl(&writer, flags | OFlags::NONBLOCK).unwrap();
    while writer.write(&[0; 4096]).is_ok() {}
    while writer.write(&[0]).is_ok() {}
    fcntl_setfl(&writer, flags).unwrap();
    (reader, writer.into())
}

#[test]
fn a_second_signal_ends_what_is_stuck() {
    let (_reader, stdout) = full_pipe();
    let mut running = Running::start(ENDLESS, stdout);
    let deadline = Instant::now() + LIMIT;
    // One signal alone cannot end the command, because the summary goes into the full pipe.
    while running.ended().is_none() {
        assert!(Instant::now() < deadline, "no signal ends it");
        running.send(Signal::TERM);
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(running.wait().code(), Some(143));
}

#[test]
fn a_save_that_a_signal_ends_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let control = folder.path().join("control");
    let silent = UnixListener::bind(&control).unwrap();
    let saved = folder.path().join("saved");
    let line = format!(
        "snapshot save {} --quiet --control {}",
        saved.display(),
        control.display()
    );
    let mut running = Running::with_errors_to(&line, Stdio::null(), Stdio::piped());
    let (mut request, _) = silent.accept().unwrap();
    // The folder has been made when the request comes.
    let _ = request.read(&mut [0; 1]).unwrap();
    running.send(Signal::INT);
    let mut errors = String::new();
    let mut stderr = running.0.stderr.take().unwrap();
    stderr.read_to_string(&mut errors).unwrap();
    assert_eq!(running.wait().code(), Some(130), "{errors}");
    assert!(errors.contains("interrupted by SIGINT"), "{errors}");
    let left = std::fs::read_dir(folder.path()).unwrap();
    let left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["control"], "{errors}");
}
