//! The suite's process: it starts a process for each rule, and reads its lines.

use crate::image::{Image, ImageError};
use crate::queue::LOOK;
use crate::report::{Outcome, Report};
use crate::rule::{Check, Line, Needs, Order, Rule, Subject};
use crate::rules::{all, be_killed, rule};
use crate::verdict::{Stop, Target, Verdict, keep};
use lacuna_sys::Userfaultfd;
use rustix::process::{Signal, set_parent_process_death_signal};
use std::collections::VecDeque;
use std::io::{self, BufRead as _, BufReader};
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

/// A handler that has closed the connection has probably died. So the limit is divided by this.
const AFTER_CLOSE: u32 = 10;
/// VMs that a rule about killed ones kills.
const KILLED: usize = 4;

/// Why no rule can be checked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SuiteError {
    /// The memory file.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// No descriptor.
    #[error(
        "this process gets no userfaultfd: {0}; `lacuna doctor` says what to change on this host"
    )]
    Userfaultfd(io::Error),
    /// No handler.
    #[error("there is no socket at {}: start the handler first, or use --restart", .0.display())]
    Socket(PathBuf),
    /// No process.
    #[error("cannot start {what}: {source}")]
    Start {
        /// What does not start.
        what: String,
        /// The system's error.
        source: io::Error,
    },
}

/// A handler, and how its rules are checked.
pub struct Suite {
    /// Where the handler listens.
    pub socket: PathBuf,
    /// The memory file that the handler serves.
    pub memory: PathBuf,
    /// The longest time without any progress of a rule.
    pub timeout: Duration,
    /// A shell command that starts a new handler, and returns. It is executed before each rule.
    pub restart: Option<String>,
    /// A command that calls [`check_one`](crate::check_one) with the given text.
    pub again: Box<dyn Fn(&str) -> Command + Send + Sync>,
}

impl Suite {
    /// Checks what the suite itself needs.
    ///
    /// # Errors
    /// The memory file cannot be used, or this process gets no userfaultfd.
    pub fn check_host(&self) -> Result<(), SuiteError> {
        Image::check(&self.memory)?;
        let uffd = Userfaultfd::open_user_with_removals();
        uffd.map(drop)
            .map_err(|errno| SuiteError::Userfaultfd(errno.into()))
    }

    /// Checks that there is a socket. It does not connect: that is a rule's.
    ///
    /// # Errors
    /// There is none, although the handler is not started for each rule.
    pub fn check_socket(&self) -> Result<(), SuiteError> {
        let found = self.socket.metadata();
        match found.is_ok_and(|found| found.file_type().is_socket()) || self.restart.is_some() {
            true => Ok(()),
            false => Err(SuiteError::Socket(self.socket.clone())),
        }
    }

    /// Checks one rule.
    ///
    /// # Errors
    /// No process starts.
    pub fn run(&self, rule: &'static Rule) -> Result<Report, SuiteError> {
        let begin = Instant::now();
        let mut events = VecDeque::new();
        let outcome = match (&rule.check, &self.restart) {
            (Check::Daemon(target, _), _) => Err(Stop::without(*target)).into(),
            (Check::Handler(needs, _), Some(_)) if *needs != Needs::OneVm => Outcome::Skipped {
                reason: "a handler that is started for each VM (--restart) serves no next VM"
                    .into(),
            },
            (Check::Handler(needs, _), _) => {
                self.restart_handler()?;
                self.judge(rule, *needs, &mut events)?
            }
        };
        Ok(Report {
            rule,
            outcome,
            events: events.into(),
            took: begin.elapsed(),
        })
    }

    fn restart_handler(&self) -> Result<(), SuiteError> {
        let Some(restart) = &self.restart else {
            return Ok(());
        };
        let failed = |source| SuiteError::Start {
            what: format!("the handler ({restart})"),
            source,
        };
        let mut shell = Command::new("/bin/sh");
        // The report has stdout for itself.
        shell
            .args(["-c", restart])
            .stdin(Stdio::null())
            .stdout(io::stderr());
        let mut child = shell.spawn().map_err(failed)?;
        let begin = Instant::now();
        let status = loop {
            match child.try_wait().map_err(failed)? {
                Some(status) => break status,
                None if begin.elapsed() < self.timeout => thread::sleep(LOOK),
                None => {
                    // It may end at this moment.
                    let _ = child.kill();
                    let _ = child.wait();
                    let what = format!(
                        "it has not returned within {:?}; let it start the handler in the \
                         background (COMMAND &)",
                        self.timeout
                    );
                    return Err(failed(io::Error::other(what)));
                }
            }
        };
        match status.success() {
            true => Ok(()),
            false => Err(failed(io::Error::other(status.to_string()))),
        }
    }

    fn judge(
        &self,
        rule: &Rule,
        needs: Needs,
        events: &mut VecDeque<String>,
    ) -> Result<Outcome, SuiteError> {
        if needs == Needs::KilledVms {
            for _ in 0..KILLED {
                let outcome = self.watch(self.start(rule, true)?, events);
                // The VM's process is killed here, while the handler has faults of it.
                if outcome != Outcome::Pass {
                    return Ok(outcome);
                }
                keep(events, "a VM was killed in the middle".into());
            }
        }
        Ok(self.watch(self.start(rule, false)?, events))
    }

    fn start(&self, rule: &Rule, is_victim: bool) -> Result<Process, SuiteError> {
        let order = Order {
            rule: rule.name.into(),
            socket: self.socket.clone(),
            memory: self.memory.clone(),
            is_started: self.restart.is_some(),
            is_victim,
        };
        let order = serde_json::to_string(&order).expect("an order has a JSON form");
        Process::start((self.again)(&order))
    }

    /// Reads the lines of a process until its outcome, and kills it.
    fn watch(&self, mut process: Process, events: &mut VecDeque<String>) -> Outcome {
        let mut expected = "a process of the suite begins to check the rule".to_owned();
        let mut limit = self.timeout;
        loop {
            match process.next_line(limit) {
                Next::Line(Line::Event(text)) => keep(events, text),
                Next::Line(Line::Expect(text)) => expected = text,
                Next::Line(Line::Closed) => {
                    keep(
                        events,
                        "the handler has closed the connection, or died".into(),
                    );
                    limit = self.timeout / AFTER_CLOSE;
                }
                Next::Line(Line::Pass) => return Outcome::Pass,
                Next::Line(Line::Fail { expected, seen }) => {
                    return Outcome::Failed { expected, seen };
                }
                Next::Line(Line::Skip(reason)) => return Outcome::Skipped { reason },
                Next::Nothing => {
                    let seen = format!("nothing within {limit:?}");
                    return Outcome::Failed { expected, seen };
                }
                Next::End(status) => {
                    let seen = format!("the VM's process has ended: {status}");
                    return Outcome::Failed { expected, seen };
                }
            }
        }
    }
}

/// What a process of a rule does next.
enum Next {
    Line(Line),
    Nothing,
    End(ExitStatus),
}

/// The process of a rule. It is killed when it is dropped: its threads may wait in the kernel.
struct Process {
    child: Child,
    lines: Receiver<Line>,
}

impl Process {
    fn start(mut command: Command) -> Result<Self, SuiteError> {
        let failed = |source| SuiteError::Start {
            what: "a process of the suite".into(),
            source,
        };
        let started = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let mut child = started.map_err(failed)?;
        let stdout = child.stdout.take().expect("a pipe");
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            // Other lines come from a test program.
            let texts = BufReader::new(stdout).lines().map_while(Result::ok);
            let mut lines = texts.filter_map(|text| serde_json::from_str(&text).ok());
            lines.try_for_each(|line| sender.send(line))
        });
        Ok(Self { child, lines })
    }

    fn next_line(&mut self, limit: Duration) -> Next {
        match self.lines.recv_timeout(limit) {
            Ok(line) => Next::Line(line),
            Err(mpsc::RecvTimeoutError::Timeout) => Next::Nothing,
            Err(mpsc::RecvTimeoutError::Disconnected) => match self.child.wait() {
                Ok(status) => Next::End(status),
                Err(_) => Next::Nothing,
            },
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Checks one rule in this process, which [`Suite::again`] has started with `order`, and prints
/// lines for the suite to stdout.
///
/// # Errors
/// `order` is not the suite's text.
pub fn check_one(order: &str) -> Result<(), String> {
    // A thread of the suite waits for this process until its end.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    let order: Order = serde_json::from_str(order).map_err(|error| error.to_string())?;
    let rule = rule(&order.rule).ok_or_else(|| format!("{} is no rule", order.rule))?;
    let image = Image::open(Path::new(&order.memory)).map_err(|error| error.to_string())?;
    let subject = Subject { order, image };
    let verdict: Verdict = match rule.check {
        Check::Handler(..) if subject.order.is_victim => be_killed(&subject),
        Check::Handler(_, check) => check(&subject),
        Check::Daemon(..) => return Err(format!("{} is no rule for a handler", rule.name)),
    };
    match verdict {
        Ok(()) => Line::Pass,
        Err(Stop::Failed { expected, seen }) => Line::Fail { expected, seen },
        Err(Stop::Skipped(reason)) => Line::Skip(reason),
    }
    .print();
    Ok(())
}

/// The rules with these names. For an empty list, all rules for `targets`.
///
/// # Errors
/// The first name that is no rule's.
pub fn chosen<'a>(names: &'a [String], targets: &[Target]) -> Result<Vec<&'static Rule>, &'a str> {
    if names.is_empty() {
        return Ok(all()
            .filter(|rule| targets.contains(&rule.target()))
            .collect());
    }
    let found = names.iter().map(|name| rule(name).ok_or(name.as_str()));
    found.collect()
}
