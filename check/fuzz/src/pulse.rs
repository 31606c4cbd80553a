//! Detects hangs. If a run makes no progress for [`HANG`], the watchdog prints the stacks of all
//! threads and ends the process.

use std::backtrace::Backtrace;
use std::process::{Command, exit};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

/// Longer than any step of a correct run takes on a busy machine.
const HANG: Duration = Duration::from_secs(120);

/// The progress of a run, which the watchdog observes.
#[derive(Default)]
pub struct Pulse {
    beats: AtomicU64,
    doing: Mutex<String>,
    again: Mutex<String>,
    panics: Mutex<Vec<String>>,
}

fn text(of: &Mutex<String>) -> String {
    of.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// A stack's frames within this workspace.
fn ours(stack: &str) -> String {
    let lines: Vec<&str> = stack.lines().collect();
    let is_ours = |pair: &&[&str]| pair[1].trim_start().starts_with("at ./");
    let pairs = lines.windows(2).filter(is_ours);
    pairs
        .map(|pair| format!("{}\n{}\n", pair[0], pair[1]))
        .collect()
}

impl Pulse {
    /// Starts the watchdog: after [`HANG`] without a beat, the process ends with exit code 1. From
    /// now on, panics of all threads are recorded with their stacks.
    pub fn watched() -> Arc<Self> {
        let pulse = Arc::new(Self::default());
        let watched = Arc::clone(&pulse);
        spawn(move || watched.watch());
        let kept = Arc::clone(&pulse);
        std::panic::set_hook(Box::new(move |info| {
            let text = format!("{info}\n{}", ours(&Backtrace::force_capture().to_string()));
            let panics = kept.panics.lock();
            panics.unwrap_or_else(PoisonError::into_inner).push(text);
        }));
        pulse
    }

    /// Reports progress of the run.
    pub fn beat(&self) {
        self.beats.fetch_add(1, Ordering::Relaxed);
    }

    /// Records the step that the run begins now.
    pub fn doing(&self, what: &str) {
        self.beat();
        let mut doing = self.doing.lock().unwrap_or_else(PoisonError::into_inner);
        doing.clear();
        doing.push_str(what);
    }

    /// Sets the command that reproduces the run.
    pub fn set_again(&self, command: &str) {
        *self.again.lock().unwrap_or_else(PoisonError::into_inner) = command.to_owned();
    }

    /// Takes the panics so far, and the last recorded step.
    pub fn take_report(&self) -> String {
        let mut panics = self.panics.lock().unwrap_or_else(PoisonError::into_inner);
        let panics = std::mem::take(&mut *panics).join("\n");
        format!("{panics}\nlast operation: {}", text(&self.doing))
    }

    fn watch(&self) {
        let (mut seen, mut since) = (0, Instant::now());
        loop {
            sleep(Duration::from_millis(500));
            let now = self.beats.load(Ordering::Relaxed);
            if now != seen {
                (seen, since) = (now, Instant::now());
            }
            if since.elapsed() > HANG {
                eprintln!(
                    "HANG: no step ended for {} s\n{}",
                    HANG.as_secs(),
                    self.take_report()
                );
                eprintln!("{}", threads());
                eprintln!("again: {}", text(&self.again));
                exit(1);
            }
        }
    }
}

/// The activity of each thread of this process: its stack by a debugger, or without a debugger its
/// state from the kernel.
fn threads() -> String {
    let pid = std::process::id().to_string();
    let debugger = Command::new("gdb")
        .args(["-p", &pid, "-batch", "-ex", "thread apply all backtrace 40"])
        .output();
    if let Ok(output) = debugger
        && output.status.success()
    {
        return String::from_utf8_lossy(&output.stdout).into_owned();
    }
    let mut out = String::new();
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten();
    for task in tasks.flatten() {
        for file in ["comm", "stat", "wchan", "syscall"] {
            let text = std::fs::read_to_string(task.path().join(file)).unwrap_or_default();
            out.push_str(&format!("{file}: {}\n", text.trim()));
        }
    }
    out
}
