//! The same guest program in other machines (QEMU), and natively.
//!
//! A benchmark image prints the begin and the end of its phases on the serial line, or on stdout
//! when it runs natively. The host's clock times them, not the guest's:
//!
//! ```text
//! BEGIN alu                             ─┬─ this moment
//! END alu ops=20000 insns=320000 ...    ─┴─ to this one: insns / seconds is a rate
//! ```
//!
//! A line takes some microseconds to arrive, so a phase should last a tenth of a second. If a
//! machine is not installed ([`ExternalError::Unavailable`]), its results are *skipped*.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, PipeReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// The most output that is read from a program: an endlessly printing guest must not fill our
/// memory.
const OUTPUT_LIMIT: u64 = 1 << 20;
/// How often a program is polled for its end.
const POLL: Duration = Duration::from_millis(2);

/// Why a program gave no rates.
#[derive(Debug, thiserror::Error)]
pub enum ExternalError {
    /// The program is not on this machine, or cannot run our images. Results that need it are
    /// skipped.
    #[error("{0}")]
    Unavailable(String),
    /// It could not be started.
    #[error("cannot start {program}: {source}")]
    Start {
        /// The program.
        program: String,
        /// The host's reason.
        source: io::Error,
    },
    /// It did not end within its time.
    #[error("{program} did not end within {limit:?}; its last lines: {tail}")]
    Timeout {
        /// The program.
        program: String,
        /// The time it had.
        limit: Duration,
        /// The last lines it printed.
        tail: String,
    },
    /// It ended, but not with a well-formed list of phases.
    #[error("{program}: {problem}; its last lines: {tail}")]
    Protocol {
        /// The program.
        program: String,
        /// The problem with its output.
        problem: String,
        /// The last lines it printed.
        tail: String,
    },
}

/// One timed phase of a benchmark program.
#[derive(Clone, PartialEq, Debug)]
pub struct Phase {
    /// The name after `BEGIN`.
    pub name: String,
    /// Host seconds from `BEGIN` to `END`.
    pub seconds: f64,
    /// The fields of its `END`: always `ops`; a checksum or other counts if the program has them.
    pub fields: BTreeMap<String, String>,
}

impl Phase {
    /// The count in `field` of `END`, divided by the seconds; `None` without that field.
    pub fn rate(&self, field: &str) -> Option<f64> {
        let count: u64 = self.fields.get(field)?.parse().ok()?;
        Some(count as f64 / self.seconds)
    }
}

/// A program's run.
#[derive(Clone, PartialEq, Debug)]
pub struct Run {
    /// Its phases, in order.
    pub phases: Vec<Phase>,
    /// How it ended.
    pub status: ExitStatus,
    /// Everything it printed.
    pub output: String,
}

impl Run {
    /// The value that the guest wrote to QEMU's `isa-debug-exit` port. QEMU's exit code is twice
    /// that, plus one. `None` if it ended in another way.
    pub fn debug_exit(&self) -> Option<i32> {
        self.status
            .code()
            .filter(|code| code % 2 == 1)
            .map(|code| code / 2)
    }
}

/// The machine that QEMU emulates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QemuMachine {
    /// Guest memory, in MiB.
    pub memory_mib: u32,
    /// Processors.
    pub vcpus: u32,
}

/// Runs the PVH image `elf` in system QEMU without KVM (TCG), for at most `limit`.
///
/// # Errors
/// [`ExternalError::Unavailable`] when QEMU is not installed.
pub fn qemu_tcg(
    elf: &Path,
    append: &str,
    machine: QemuMachine,
    limit: Duration,
) -> Result<Run, ExternalError> {
    const PROGRAM: &str = "qemu-system-x86_64";
    let program = find(PROGRAM)
        .ok_or_else(|| ExternalError::Unavailable(format!("{PROGRAM} is not installed")))?;
    let mut command = Command::new(program);
    command
        .args([
            "-nodefaults",
            "-no-user-config",
            "-accel",
            "tcg",
            "-M",
            "q35",
        ])
        .args([
            "-cpu",
            "max",
            "-display",
            "none",
            "-serial",
            "stdio",
            "-no-reboot",
        ])
        .args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4"])
        .args(["-m", &format!("{}M", machine.memory_mib)])
        .args(["-smp", &machine.vcpus.to_string()])
        .args(["-append", append])
        .arg("-kernel")
        .arg(elf);
    run(command, limit)
}

/// Why there is no figure of Bochs, for the report. Bochs boots from a disk and cannot load an ELF
/// image, so it is always [`ExternalError::Unavailable`].
pub fn bochs() -> ExternalError {
    ExternalError::Unavailable(match find("bochs") {
        Some(path) => format!(
            "{} cannot load an ELF image, only boot a disk",
            path.display()
        ),
        None => "bochs is not installed".into(),
    })
}

/// Runs `elf` as a program of this host with `arguments`, for at most `limit`.
///
/// # Errors
/// [`ExternalError::Unavailable`] when `elf` is empty: `lacuna_guest` was built for another
/// machine. [`ExternalError::Start`] where the temporary directory does not allow programs.
pub fn native(elf: &[u8], arguments: &[&str], limit: Duration) -> Result<Run, ExternalError> {
    if elf.is_empty() {
        let why = "there is no native build of this benchmark";
        return Err(ExternalError::Unavailable(why.into()));
    }
    let start = |source| ExternalError::Start {
        program: "the native benchmark".into(),
        source,
    };
    let path = write_program(elf).map_err(start)?;
    // Another thread of this process may be starting a program at the same time. Until its child
    // has closed the descriptors that it inherited, our file counts as open for writing.
    for _ in 0..50 {
        let mut command = Command::new(&path);
        command.args(arguments);
        match run(command, limit) {
            Err(ExternalError::Start { source, .. })
                if source.kind() == io::ErrorKind::ExecutableFileBusy =>
            {
                std::thread::sleep(POLL);
            }
            other => return other,
        }
    }
    Err(start(io::ErrorKind::ExecutableFileBusy.into()))
}

fn write_program(bytes: &[u8]) -> io::Result<tempfile::TempPath> {
    use std::os::unix::fs::PermissionsExt;
    let mut file = tempfile::Builder::new()
        .prefix("lacuna-bench-")
        .tempfile()?;
    file.write_all(bytes)?;
    file.as_file()
        .set_permissions(std::fs::Permissions::from_mode(0o700))?;
    Ok(file.into_temp_path())
}

/// Where `program` is on this machine's `PATH`.
pub fn find(program: &str) -> Option<PathBuf> {
    find_in(&std::env::var_os("PATH")?, program)
}

fn find_in(path: &OsStr, program: &str) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt;
    let executable = |path: &PathBuf| {
        path.metadata()
            .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    };
    std::env::split_paths(path)
        .map(|dir| dir.join(program))
        .find(executable)
}

/// Runs `command` to its end and notes when each line arrives.
fn run(command: Command, limit: Duration) -> Result<Run, ExternalError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let deadline = Instant::now() + limit;
    let (mut child, lines) = spawn(command).map_err(|source| ExternalError::Start {
        program: program.clone(),
        source,
    })?;
    let mut output = String::new();
    let mut phases = Phases::default();
    let ended = loop {
        match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok((at, line)) => {
                output.push_str(&line);
                output.push('\n');
                phases.line(at, &line);
            }
            Err(RecvTimeoutError::Disconnected) => break child.wait_until(deadline),
            Err(RecvTimeoutError::Timeout) => break None,
        }
    };
    let tail = || last_lines(&output);
    let Some(status) = ended else {
        return Err(ExternalError::Timeout {
            program,
            limit,
            tail: tail(),
        });
    };
    match phases.finish() {
        Ok(phases) => Ok(Run {
            phases,
            status,
            output,
        }),
        Err(problem) => Err(ExternalError::Protocol {
            program,
            problem,
            tail: tail(),
        }),
    }
}

/// Starts `command`, and passes on its printed lines with their times.
pub(crate) fn spawn(mut command: Command) -> io::Result<(Reaped, Receiver<(Instant, String)>)> {
    let (reader, writer) = io::pipe()?;
    command
        .stdin(Stdio::null())
        .stdout(writer.try_clone()?)
        .stderr(writer);
    let child = Reaped(command.spawn()?);
    // The command holds our write ends: without this the pipe would never end.
    drop(command);
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || read_lines(reader, &sender));
    Ok((child, lines))
}

fn read_lines(reader: PipeReader, lines: &mpsc::Sender<(Instant, String)>) {
    let mut reader = BufReader::new(reader.take(OUTPUT_LIMIT));
    let mut line = Vec::new();
    while matches!(reader.read_until(b'\n', &mut line), Ok(read) if read > 0) {
        let at = Instant::now();
        let text = String::from_utf8_lossy(&line).trim_end().to_owned();
        if lines.send((at, text)).is_err() {
            return;
        }
        line.clear();
    }
}

fn last_lines(output: &str) -> String {
    let lines: Vec<&str> = output.lines().collect();
    lines[lines.len().saturating_sub(5)..].join(" | ")
}

/// A child process; it is killed when this value is dropped.
pub(crate) struct Reaped(Child);

impl Reaped {
    /// How it ended, or `None` if it still runs at `deadline`.
    fn wait_until(&mut self, deadline: Instant) -> Option<ExitStatus> {
        loop {
            if let Ok(Some(status)) = self.0.try_wait() {
                return Some(status);
            }
            if Instant::now() >= deadline {
                return None;
            }
            std::thread::sleep(POLL);
        }
    }
}

impl Drop for Reaped {
    fn drop(&mut self) {
        // Both fail only if the child has already ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Reads the protocol line by line. Lines without `BEGIN` or `END` are not part of it.
#[derive(Default)]
pub(crate) struct Phases {
    done: Vec<Phase>,
    open: Option<(String, Instant)>,
    problem: Option<String>,
}

impl Phases {
    pub(crate) fn line(&mut self, at: Instant, line: &str) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let step = match words[..] {
            ["BEGIN", name] => self.begin(at, name),
            ["END", name, ref fields @ ..] => self.end(at, name, fields),
            _ => Ok(()),
        };
        if let Err(problem) = step {
            self.problem.get_or_insert(problem);
        }
    }

    fn begin(&mut self, at: Instant, name: &str) -> Result<(), String> {
        match self.open.replace((name.to_owned(), at)) {
            None => Ok(()),
            Some((open, _)) => Err(format!("BEGIN {name} inside of {open}")),
        }
    }

    fn end(&mut self, at: Instant, name: &str, fields: &[&str]) -> Result<(), String> {
        let pair = |field: &&str| {
            field
                .split_once('=')
                .map(|(k, v)| (k.to_owned(), v.to_owned()))
        };
        let fields: BTreeMap<_, _> = fields.iter().filter_map(pair).collect();
        if fields
            .get("ops")
            .is_none_or(|count| count.parse::<u64>().is_err())
        {
            return Err(format!("END {name} without ops=N"));
        }
        match self.open.take() {
            Some((open, since)) if open == name => {
                let seconds = at.duration_since(since).as_secs_f64();
                self.done.push(Phase {
                    name: open,
                    seconds,
                    fields,
                });
                Ok(())
            }
            _ => Err(format!("END {name} without its BEGIN")),
        }
    }

    pub(crate) fn finish(self) -> Result<Vec<Phase>, String> {
        match (self.problem, self.open) {
            (Some(problem), _) => Err(problem),
            (None, Some((open, _))) => Err(format!("{open} has no END")),
            (None, None) if self.done.is_empty() => Err("it timed nothing".into()),
            (None, None) => Ok(self.done),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    #[test]
    fn phases_are_timed_by_the_host() {
        let script = b"#!/bin/sh\necho hello\necho BEGIN alu\nsleep 1\n\
                       echo END alu ops=$1\n\
                       printf 'BEGIN mem\\r\\nEND mem ops=7 sum=1f\\r\\n'\nexit 3\n";
        let run = native(script, &["1000"], LIMIT).unwrap();
        assert_eq!((run.status.code(), run.debug_exit()), (Some(3), Some(1)));
        assert!(run.output.starts_with("hello\n"));
        let [alu, mem] = &run.phases[..] else {
            panic!("{:?}", run.phases)
        };
        assert_eq!(
            (alu.name.as_str(), mem.fields["sum"].as_str()),
            ("alu", "1f")
        );
        assert!(alu.seconds > 0.15);
        assert_eq!(alu.rate("ops"), Some(1000.0 / alu.seconds));
        assert_eq!((mem.rate("insns"), mem.rate("sum")), (None, None));
    }

    #[test]
    fn malformed_runs_are_errors_that_quote_the_program() {
        for (body, problem) in [
            ("echo no phases", "it timed nothing"),
            ("echo BEGIN a", "a has no END"),
            ("echo BEGIN a; echo BEGIN b", "BEGIN b inside of a"),
            ("echo END a ops=1", "END a without its BEGIN"),
            ("echo BEGIN a; echo END b ops=1", "END b without its BEGIN"),
            ("echo BEGIN a; echo END a ops=many", "END a without ops=N"),
        ] {
            let error = native(format!("#!/bin/sh\n{body}\n").as_bytes(), &[], LIMIT).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(problem), "{text} should contain {problem}");
            assert!(text.contains("its last lines"), "{text}");
        }
    }

    #[test]
    fn a_program_that_hangs_is_ended() {
        // Long enough to start the program and to read its line, also on a busy machine.
        let limit = Duration::from_secs(3);
        let start = Instant::now();
        let error = native(b"#!/bin/sh\necho BEGIN x\nexec sleep 60\n", &[], limit).unwrap_err();
        assert!(matches!(error, ExternalError::Timeout { .. }), "{error}");
        assert!(error.to_string().ends_with("BEGIN x"));
        assert!(start.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn what_is_no_program_cannot_be_started() {
        let error = native(b"\x7fELF but not really", &[], LIMIT).unwrap_err();
        assert!(matches!(error, ExternalError::Start { .. }), "{error}");
        let error = native(b"", &[], LIMIT).unwrap_err();
        assert!(matches!(error, ExternalError::Unavailable(_)), "{error}");
    }

    #[test]
    fn programs_are_found_on_the_path_only() {
        assert!(find_in(OsStr::new("/bin:/usr/bin"), "sh").is_some());
        assert!(find_in(OsStr::new("/nonexistent"), "sh").is_none());
        assert!(
            find_in(OsStr::new("/etc"), "passwd").is_none(),
            "not executable"
        );
    }
}
