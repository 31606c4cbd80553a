//! The same guest program in other machines (QEMU), and natively.
//!
//! A benchmark image prints the begin and the end of its work on the serial line, or on stdout when
//! it runs natively. The host's clock times the work, not the guest's:
//!
//! ```text
//! BEGIN alu                             ─┬─ this moment
//! END alu ops=20000 insns=320000 ...    ─┴─ to this one: insns / seconds is a rate
//! ```
//!
//! A line takes some microseconds to arrive, so the work should last a tenth of a second. If a
//! machine is not installed ([`ExternalError::Unavailable`]), its results are *skipped*.

use std::io::{self, BufRead, BufReader, PipeReader, Read, Write};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
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
    /// It did not end in time, or it timed no work.
    #[error("{program}: {problem}; its last lines: {tail}")]
    Protocol {
        /// The program.
        program: String,
        /// The problem with it.
        problem: String,
        /// The last lines it printed.
        tail: String,
    },
}

/// The timed work of a benchmark program.
#[derive(Clone, PartialEq, Debug)]
pub struct Timed {
    /// Host seconds from `BEGIN` to `END`.
    pub seconds: f64,
    /// The fields of its `END`, `name=value`.
    fields: String,
}

impl Timed {
    /// The count in `field` of `END`, divided by the seconds; `None` without that field.
    pub fn rate(&self, field: &str) -> Option<f64> {
        Some(count(&self.fields, field)? as f64 / self.seconds)
    }
}

fn count(fields: &str, name: &str) -> Option<u64> {
    let mut words = fields.split_whitespace();
    let value = words.find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    value?.parse().ok()
}

/// System QEMU.
pub(crate) const QEMU: &str = "qemu-system-x86_64";

/// QEMU for a guest of ours with `memory_mib` MiB.
///
/// # Errors
/// [`ExternalError::Unavailable`] when QEMU is not installed.
pub(crate) fn qemu(memory_mib: u64) -> Result<Command, ExternalError> {
    const WORDS: &str = "-nodefaults -no-user-config -no-reboot -M q35 -display none -serial stdio \
                         -device isa-debug-exit,iobase=0xf4,iosize=4";
    let program =
        find(QEMU).ok_or_else(|| ExternalError::Unavailable(format!("{QEMU} is not installed")))?;
    let mut command = Command::new(program);
    command.args(WORDS.split(' '));
    command.args(["-m", &format!("{memory_mib}M")]);
    Ok(command)
}

/// Runs the PVH image `elf` in system QEMU without KVM (TCG), on one processor with `memory_mib`
/// MiB, for at most `limit`. Returns its work.
///
/// # Errors
/// [`ExternalError::Unavailable`] when QEMU is not installed.
pub fn qemu_tcg(
    elf: &Path,
    append: &str,
    memory_mib: u64,
    limit: Duration,
) -> Result<Timed, ExternalError> {
    let mut command = qemu(memory_mib)?;
    command.args(["-accel", "tcg", "-cpu", "max", "-append", append]);
    command.arg("-kernel").arg(elf);
    run(command, limit)
}

/// Runs `elf` as a program of this host with `arguments`, for at most `limit`. Returns its work.
///
/// # Errors
/// [`ExternalError::Unavailable`] when `elf` is empty: `lacuna_guest` was built for another
/// machine. [`ExternalError::Start`] where the temporary directory does not allow programs.
pub fn native(elf: &[u8], arguments: &[&str], limit: Duration) -> Result<Timed, ExternalError> {
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
    let executable = |path: &PathBuf| {
        path.metadata()
            .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    };
    let path = std::env::var_os("PATH")?;
    let mut programs = std::env::split_paths(&path).map(|dir| dir.join(program));
    programs.find(executable)
}

/// Runs `command` to its end and notes when each line arrives.
fn run(command: Command, limit: Duration) -> Result<Timed, ExternalError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let deadline = Instant::now() + limit;
    let (mut child, lines) = spawn(command).map_err(|source| ExternalError::Start {
        program: program.clone(),
        source,
    })?;
    let mut printed = Vec::new();
    let mut timer = Timer::default();
    let in_time = loop {
        match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok((at, line)) => {
                timer.line(at, &line);
                printed.push(line);
            }
            Err(RecvTimeoutError::Disconnected) => break child.ends_before(deadline),
            Err(RecvTimeoutError::Timeout) => break false,
        }
    };
    let found = match in_time {
        true => timer.done.ok_or_else(|| "it timed nothing".to_owned()),
        false => Err(format!("it did not end within {limit:?}")),
    };
    found.map_err(|problem| ExternalError::Protocol {
        program,
        problem,
        tail: printed[printed.len().saturating_sub(5)..].join(" | "),
    })
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

/// A child process; it is killed when this value is dropped.
pub(crate) struct Reaped(Child);

impl Reaped {
    /// Whether it has ended by `deadline`.
    fn ends_before(&mut self, deadline: Instant) -> bool {
        loop {
            if let Ok(Some(_)) = self.0.try_wait() {
                return true;
            }
            if Instant::now() >= deadline {
                return false;
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
pub(crate) struct Timer {
    begun: Option<Instant>,
    pub(crate) done: Option<Timed>,
}

impl Timer {
    pub(crate) fn line(&mut self, at: Instant, line: &str) {
        if line.starts_with("BEGIN ") {
            self.begun = Some(at);
        }
        if let Some((fields, begun)) = line.strip_prefix("END ").zip(self.begun) {
            self.done = Some(Timed {
                seconds: (at - begun).as_secs_f64(),
                fields: fields.to_owned(),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    #[test]
    fn work_is_timed_by_the_host() {
        let script = b"#!/bin/sh\necho hello\necho BEGIN alu\nsleep 1\n\
                       printf \"END alu ops=$1 sum=1f\\r\\n\"\nexit 3\n";
        let alu = native(script, &["1000"], LIMIT).unwrap();
        assert!(alu.seconds > 0.15);
        assert_eq!(alu.rate("ops"), Some(1000.0 / alu.seconds));
        assert_eq!((alu.rate("insns"), alu.rate("sum")), (None, None));
    }

    #[test]
    fn malformed_runs_are_errors_that_quote_the_program() {
        for body in ["echo no work", "echo BEGIN a", "echo END a ops=1"] {
            let error = native(format!("#!/bin/sh\n{body}\n").as_bytes(), &[], LIMIT).unwrap_err();
            let text = error.to_string();
            assert!(text.contains("it timed nothing; its last lines"), "{text}");
        }
    }

    #[test]
    fn a_program_that_hangs_is_ended() {
        // Long enough to start the program and to read its line, also on a busy machine.
        let limit = Duration::from_secs(3);
        let start = Instant::now();
        let error = native(b"#!/bin/sh\necho BEGIN x\nexec sleep 60\n", &[], limit).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("did not end within 3s; its last lines: BEGIN x"),
            "{text}"
        );
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
        assert!(find("sh").is_some());
        assert!(find("no such program").is_none());
        assert!(find("../../etc/passwd").is_none(), "not executable");
    }
}
