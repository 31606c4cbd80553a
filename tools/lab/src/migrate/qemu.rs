//! Moves a guest between two processes of QEMU, driven by QMP over UNIX sockets.

use super::beats::{Beats, Seen};
use crate::backed::back;
use crate::experiment::LabResult;
use crate::external::{ExternalError, QEMU, Reaped, qemu, spawn};
use crate::interrupt;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::Receiver;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The longest time that QEMU takes for one answer, or for a move.
const LIMIT: Duration = Duration::from_secs(60);
/// How often something is tried again.
const AGAIN: Duration = Duration::from_millis(1);

/// What runs the guest's instructions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Accelerator {
    /// QEMU's translator.
    Tcg,
    /// `/dev/kvm`.
    Kvm,
}

/// How QEMU moves a guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// Memory first, over one connection or (multifd) over two more.
    PreCopy { multifd: bool },
    /// The guest first; its requests over the same connection or (preempt) over one of their own.
    PostCopy { preempt: bool },
}

/// The machine, and how it is moved.
#[derive(Clone, Debug)]
pub struct Scene {
    pub accelerator: Accelerator,
    /// The guest's image.
    pub image: PathBuf,
    /// Its whole command line.
    pub words: String,
    /// Its words of that which do not describe the machine.
    pub own_words: &'static str,
    pub memory_mib: u64,
    pub vcpus: usize,
    /// The longest pause that a pre-copy aims for.
    pub downtime: Duration,
    /// The time between the guest's first line and the move.
    pub settle: Duration,
}

/// How a guest has moved. Times are in seconds.
#[derive(Clone, Copy, Debug)]
pub struct Found {
    /// From its event `STOP` on the source to its event `RESUME` on the destination.
    pub downtime: f64,
    /// The downtime that `query-migrate` reports, without the destination's work.
    pub said: f64,
    /// The total time that `query-migrate` reports.
    pub total: f64,
    /// From the end of the guest on the source until each of its threads has printed a line on the
    /// destination. `None`: one never has.
    pub blackout: Option<f64>,
    /// The guest has found a wrong page, or crashed.
    pub is_damaged: bool,
}

/// Starts the guest in one process, and moves it to another one. `folder` is empty.
pub fn move_once(scene: &Scene, way: Way, folder: &Path) -> LabResult<Found> {
    interrupt::check()?;
    let source = Qemu::start(scene, folder, "source", &[])?;
    if Beats::new(scene.vcpus).listen(&source.lines, LIMIT) != Seen::All {
        return Err(failed("the guest does not start").into());
    }
    thread::sleep(scene.settle);
    let mut source = source;
    back(scene.memory_mib << 20)?;
    let mut destination = Qemu::start(scene, folder, "destination", &["-incoming", "defer"])?;
    let capabilities = way.capabilities();
    for qemu in [&mut source, &mut destination] {
        qemu.execute(
            "migrate-set-capabilities",
            &json!({"capabilities": capabilities}),
        )?;
    }
    // No limit: 2^40 bytes a second; 0 is none for pages after the guest.
    let limits = json!({
        "max-bandwidth": 1_u64 << 40,
        "max-postcopy-bandwidth": 0,
        "downtime-limit": scene.downtime.as_millis() as u64,
    });
    source.execute("migrate-set-parameters", &limits)?;
    let to = json!({"uri": format!("unix:{}", folder.join("moves").display())});
    destination.execute("migrate-incoming", &to)?;
    source.execute("migrate", &to)?;
    if matches!(way, Way::PostCopy { .. }) {
        source.start_post_copy()?;
    }
    let (stopped, moved) = source.until_moved()?;
    let mut listening = Beats::new(scene.vcpus);
    let seen = listening.listen(&destination.lines, LIMIT / 6);
    let is_damaged = seen != Seen::All || listening.is_damaged_later(&destination.lines);
    // After damage to the guest, QEMU may have ended. Its earlier events are there all the same.
    let _ = destination.ask("query-status", &json!({}));
    let resumed = destination.time("RESUME")?;
    let seconds = |name: &str| moved[name].as_f64().unwrap_or_default() / 1e3;
    Ok(Found {
        downtime: resumed.saturating_duration_since(stopped).as_secs_f64(),
        said: seconds("downtime"),
        total: seconds("total-time"),
        blackout: listening
            .last_first()
            .map(|at| (at - stopped).as_secs_f64()),
        is_damaged,
    })
}

impl Way {
    fn capabilities(self) -> Value {
        let named = |name: &str, state: bool| json!({"capability": name, "state": state});
        let mut all = vec![named("events", true)];
        match self {
            Self::PreCopy { multifd } => all.push(named("multifd", multifd)),
            Self::PostCopy { preempt } => {
                all.push(named("postcopy-ram", true));
                if preempt {
                    all.push(named("postcopy-preempt", true));
                }
            }
        }
        Value::from(all)
    }
}

fn failed(problem: impl Into<String>) -> ExternalError {
    ExternalError::Protocol {
        program: QEMU.into(),
        problem: problem.into(),
        tail: String::new(),
    }
}

/// A process of QEMU.
struct Qemu {
    /// Killed when this is dropped.
    _process: Reaped,
    lines: Receiver<(Instant, String)>,
    answers: BufReader<UnixStream>,
    commands: UnixStream,
    /// Received events, with their times.
    events: Vec<(Instant, Value)>,
    /// One moment on two clocks.
    now: (SystemTime, Instant),
}

impl Qemu {
    fn start(scene: &Scene, folder: &Path, name: &str, more: &[&str]) -> LabResult<Self> {
        let socket = folder.join(name);
        let mut command = qemu(scene.memory_mib)?;
        command
            .args(match scene.accelerator {
                Accelerator::Tcg => ["-accel", "tcg", "-cpu", "max"].as_slice(),
                // Nested hosts lack the MSR of arch-capabilities.
                Accelerator::Kvm => &["-accel", "kvm", "-cpu", "host,-arch-capabilities"],
            })
            .args(match scene.accelerator {
                Accelerator::Tcg => [].as_slice(),
                // The larger firmware is slow where kernel code is emulated.
                Accelerator::Kvm => &["-bios", "qboot.rom"],
            })
            .args(["-smp", &scene.vcpus.to_string()])
            .args(["-append", &scene.words])
            .arg("-kernel")
            .arg(&scene.image)
            .arg("-qmp")
            .arg(format!("unix:{},server=on,wait=off", socket.display()))
            .args(more);
        let not_started = |source| ExternalError::Start {
            program: QEMU.into(),
            source,
        };
        let (process, lines) = spawn(command).map_err(not_started)?;
        let stream = connect(&socket)?;
        stream.set_read_timeout(Some(LIMIT)).map_err(not_started)?;
        let commands = stream.try_clone().map_err(not_started)?;
        let mut qemu = Self {
            _process: process,
            lines,
            answers: BufReader::new(stream),
            commands,
            events: Vec::new(),
            now: (SystemTime::now(), Instant::now()),
        };
        // QEMU's greeting.
        qemu.read()?;
        qemu.execute("qmp_capabilities", &json!({}))?;
        Ok(qemu)
    }

    fn read(&mut self) -> Result<Value, ExternalError> {
        let mut line = String::new();
        let read = self.answers.read_line(&mut line);
        match read.map_err(|error| failed(format!("no answer by QMP: {error}")))? {
            0 => Err(failed("it has ended")),
            _ => serde_json::from_str(&line).map_err(|error| failed(error.to_string())),
        }
    }

    /// When an event happened, by the clock of this process.
    fn time_of(&self, event: &Value) -> Instant {
        let part = |name: &str| event["timestamp"][name].as_u64().unwrap_or_default();
        let since =
            Duration::from_secs(part("seconds")) + Duration::from_micros(part("microseconds"));
        let (wall, now) = self.now;
        let wall = wall.duration_since(UNIX_EPOCH).unwrap_or_default();
        now + since.saturating_sub(wall)
    }

    fn note(&mut self, event: Value) {
        let at = self.time_of(&event);
        self.events.push((at, event));
    }

    /// Carries out a command, and returns its answer: `Err` is QEMU's refusal.
    fn ask(&mut self, command: &str, with: &Value) -> Result<Result<Value, Value>, ExternalError> {
        let text = format!("{}\n", json!({"execute": command, "arguments": with}));
        let written = self.commands.write_all(text.as_bytes());
        written.map_err(|error| failed(format!("no command by QMP: {error}")))?;
        loop {
            let mut answer = self.read()?;
            match answer.get("event") {
                Some(_) => self.note(answer),
                None if answer.get("error").is_some() => return Ok(Err(answer["error"].take())),
                None => return Ok(Ok(answer["return"].take())),
            }
        }
    }

    fn execute(&mut self, command: &str, with: &Value) -> Result<Value, ExternalError> {
        let answer = self.ask(command, with)?;
        answer.map_err(|error| failed(format!("{command}: {error}")))
    }

    /// Lets the guest go before its memory, as soon as the migration has begun.
    fn start_post_copy(&mut self) -> Result<(), ExternalError> {
        let started = again(LIMIT, || {
            Ok(self.ask("migrate-start-postcopy", &json!({}))?.ok())
        })?;
        started
            .map(|_| ())
            .ok_or_else(|| failed("migrate-start-postcopy is refused"))
    }

    /// Waits until the guest has moved. Returns when the guest stopped here, and QEMU's report.
    fn until_moved(&mut self) -> Result<(Instant, Value), ExternalError> {
        let mut looked = 0;
        loop {
            for (_, event) in &self.events[looked..] {
                if event["event"] == "MIGRATION" {
                    match event["data"]["status"].as_str() {
                        Some("failed") => return Err(failed("the migration has failed")),
                        Some("completed") => return Ok((self.time("STOP")?, self.times()?)),
                        _ => {}
                    }
                }
            }
            looked = self.events.len();
            let event = self.read()?;
            self.note(event);
        }
    }

    /// QEMU's report of the migration's times. QEMU sets them after its event `completed`.
    fn times(&mut self) -> Result<Value, ExternalError> {
        let moved = again(LIMIT, || {
            let moved = self.execute("query-migrate", &json!({}))?;
            let is_set = moved["total-time"].as_u64() > Some(0) && moved["downtime"].is_u64();
            Ok(is_set.then_some(moved))
        })?;
        moved.ok_or_else(|| failed("query-migrate says no times"))
    }

    /// The time of a received event.
    fn time(&self, event: &str) -> Result<Instant, ExternalError> {
        let found = self
            .events
            .iter()
            .find(|(_, found)| found["event"] == event);
        let found = found.map(|(at, _)| *at);
        found.ok_or_else(|| failed(format!("the guest has moved without the event {event}")))
    }
}

/// Tries until `attempt` finds something, for `limit` at most.
fn again<T>(
    limit: Duration,
    mut attempt: impl FnMut() -> Result<Option<T>, ExternalError>,
) -> Result<Option<T>, ExternalError> {
    let deadline = Instant::now() + limit;
    loop {
        match attempt()? {
            None if Instant::now() < deadline => thread::sleep(AGAIN),
            found => return Ok(found),
        }
    }
}

/// Connects to a socket that QEMU is about to make.
fn connect(socket: &Path) -> Result<UnixStream, ExternalError> {
    let connected = again(LIMIT / 6, || Ok(UnixStream::connect(socket).ok()))?;
    connected.ok_or_else(|| failed(format!("it does not listen at {}", socket.display())))
}
