//! What the command prints, and where. A result goes to stdout as text, and to the target of
//! `--json` as JSON. The guest's lines and error messages go to stderr.
//!
//! The caller decides where stdout goes. A departed reader (`lacuna doctor | head -1`) is no error,
//! and neither is `/dev/null`. A closed stdout (`>&-`) is `/dev/null` too: Rust's runtime opens
//! `/dev/null` there before `main`. Some callers open it to discard output, and the two cases
//! cannot be distinguished. A failed write, as on a full disk, is an error.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::fs::OpenOptions;
use std::io::{self, IsTerminal, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::args::{JsonTarget, Output};
use crate::exit::Exit;
use crate::pipe;
use crate::signals::Signals;
use rustix::termios::tcgetwinsize;

/// The gap between two parts of a line.
const GAP: &str = "   ";
/// The columns of a terminal that does not report their number.
const COLUMNS: usize = 80;
/// Lines that are kept while a view has the terminal.
const KEPT_MAX: usize = 10_000;

/// Output that could not be written, or not all of it.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {what} to {target}: {source}; {advice}")]
pub struct WriteError {
    what: &'static str,
    target: String,
    source: io::Error,
    advice: &'static str,
}

impl WriteError {
    fn json(target: String, source: io::Error) -> Self {
        Self {
            what: "the JSON",
            target,
            source,
            advice: "run again, with --json and a file that can be written",
        }
    }
}

impl From<WriteError> for (Exit, String) {
    fn from(error: WriteError) -> Self {
        (Exit::Host, error.to_string())
    }
}

/// Checks before a command begins its work that a file for JSON can be written. The file's content
/// stays as it is. A pipe or a device is not opened: its reader would see an end.
///
/// # Errors
/// The file cannot be opened for writing.
pub fn check_target(output: &Output) -> Result<(), WriteError> {
    let Some(JsonTarget::File(path)) = &output.json else {
        return Ok(());
    };
    if path
        .metadata()
        .is_ok_and(|found| !found.is_file() && !found.is_dir())
    {
        return Ok(());
    }
    let opened = OpenOptions::new().append(true).create(true).open(path);
    let failed = |source| WriteError::json(path.display().to_string(), source);
    opened.map(drop).map_err(failed)
}

/// As [`write_result_until_signal`], for a command that catches no signals.
///
/// # Errors
/// As [`write_result_until_signal`].
pub fn write_result(output: &Output, text: &str, json: &str) -> Result<(), WriteError> {
    write_result_until_signal(output, text, json, &Signals::default())
}

/// Writes a result to where `output` says. With `--json -`, stdout gets the JSON and no text. If
/// the JSON goes to a named pipe, waits for a process that reads it, unless there is a signal.
///
/// # Errors
/// The JSON or the text cannot be written. If both fail, the error is the JSON's.
pub fn write_result_until_signal(
    output: &Output,
    text: &str,
    json: &str,
    signals: &Signals,
) -> Result<(), WriteError> {
    match &output.json {
        Some(JsonTarget::Stdout) => print_json(json),
        Some(JsonTarget::File(path)) => {
            // Write both even if one fails: they may be on different disks.
            let printed = print(text);
            let failed = |source| WriteError::json(path.display().to_string(), source);
            let written = if pipe::is_pipe(path) {
                pipe::write(path, json.as_bytes(), signals, || {
                    complain(&format!(
                        "waiting until a process reads the pipe {}, for the JSON; a signal ends \
                         this",
                        path.display()
                    ));
                })
            } else {
                std::fs::write(path, json)
            };
            written.map_err(failed)?;
            printed
        }
        None => print(text),
    }
}

/// Prints JSON to stdout.
///
/// # Errors
/// As [`print()`].
pub fn print_json(json: &str) -> Result<(), WriteError> {
    write(json).map_err(|source| WriteError::json("stdout".into(), source))
}

/// Prints text to stdout.
///
/// # Errors
/// The write fails for another reason, such as a full disk.
pub fn print(text: &str) -> Result<(), WriteError> {
    write(text).map_err(|source| WriteError {
        what: "the text",
        target: "stdout".into(),
        source,
        advice: "what was printed before is incomplete",
    })
}

fn write(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    let written = stdout.write_all(text.as_bytes());
    match written.and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
        _ => Ok(()),
    }
}

/// Prints an error message to stderr. If that fails, only the exit code reports the error.
pub fn complain(text: &str) {
    print_line(&format!("lacuna: {text}"));
}

/// Prints a line of the guest to stderr. A failed write is ignored, so that a closed pipe does not
/// end the guest.
pub fn print_guest_line(line: &str) {
    print_line(&for_stderr(line));
}

/// Prints a line to stderr, or keeps it while a view has the terminal.
fn print_line(line: &str) {
    match &mut *kept() {
        Some(kept) => kept.push(line),
        None => drop(writeln!(io::stderr(), "{line}")),
    }
}

/// Lines for stderr. The mutex also keeps lines of several threads apart.
static KEPT: Mutex<Option<Kept>> = Mutex::new(None);

fn kept() -> MutexGuard<'static, Option<Kept>> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lines that wait for the end of a view.
#[derive(Default)]
struct Kept {
    lines: VecDeque<String>,
    dropped: u64,
}

impl Kept {
    fn push(&mut self, line: &str) {
        if self.lines.len() == KEPT_MAX {
            self.lines.pop_front();
            self.dropped += 1;
        }
        self.lines.push_back(line.to_owned());
    }
}

/// Keeps lines for stderr from now on, because a view has the terminal.
pub(crate) fn keep_lines() {
    kept().get_or_insert_default();
}

/// The last `most` of the kept lines.
pub(crate) fn kept_lines(most: usize) -> Vec<String> {
    let kept = kept();
    let lines = kept.as_ref().map(|kept| &kept.lines);
    let first = lines.map_or(0, |lines| lines.len().saturating_sub(most));
    lines
        .into_iter()
        .flat_map(|lines| lines.range(first..))
        .cloned()
        .collect()
}

/// Prints the kept lines, and keeps no more.
pub(crate) fn print_kept_lines() {
    let Some(Kept { lines, dropped }) = kept().take() else {
        return;
    };
    for line in lines {
        print_line(&line);
    }
    if dropped > 0 {
        complain(&format!(
            "{dropped} earlier lines are not shown: redirect stderr to keep them all"
        ));
    }
}

/// Stderr for the events of `LACUNA_LOG`: each write has whole lines.
#[derive(Clone, Copy)]
pub(crate) struct Events;

impl Write for Events {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut *kept() {
            Some(kept) => {
                let text = String::from_utf8_lossy(bytes);
                text.lines().for_each(|line| kept.push(line));
                Ok(bytes.len())
            }
            None => io::stderr().write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A line of the guest as it is printed to stderr. On a terminal, control characters are escaped: a
/// guest could otherwise change the terminal's title or make it send input. A file or a pipe gets
/// the line unchanged.
fn for_stderr(line: &str) -> Cow<'_, str> {
    if io::stderr().is_terminal() {
        visible(line)
    } else {
        Cow::Borrowed(line)
    }
}

/// `line` with each control character except tab escaped: ESC becomes `\u{1b}`.
pub fn visible(line: &str) -> Cow<'_, str> {
    let obeyed = |c: char| c.is_control() && c != '\t';
    if !line.contains(obeyed) {
        return Cow::Borrowed(line);
    }
    let mut shown = String::with_capacity(line.len() + 16);
    for c in line.chars() {
        if obeyed(c) {
            shown.extend(c.escape_unicode());
        } else {
            shown.push(c);
        }
    }
    Cow::Owned(shown)
}

/// The columns of the terminal on stderr.
pub fn columns() -> usize {
    match tcgetwinsize(std::io::stderr()) {
        Ok(size) if size.ws_col > 0 => size.ws_col.into(),
        _ => COLUMNS,
    }
}

/// `text` in lines of at most `columns`. A line ends between two parts, or between two words of a
/// part wider than a line. A wider word stays whole.
pub fn fit(text: &str, columns: usize) -> String {
    let mut lines = String::new();
    let mut at = 0;
    let mut put = |words: &str, gap: &str| {
        let width = words.chars().count();
        if at > 0 && at + gap.len() + width > columns {
            lines.push('\n');
            at = 0;
        } else if at > 0 {
            lines.push_str(gap);
            at += gap.len();
        }
        lines.push_str(words);
        at += width;
    };
    for part in text.split(GAP) {
        if part.chars().count() <= columns {
            put(part, GAP);
            continue;
        }
        for (n, word) in part.split(' ').enumerate() {
            put(word, if n == 0 { GAP } else { " " });
        }
    }
    lines
}

/// A number of vCPUs in words.
pub fn vcpus(number: usize) -> String {
    match number {
        1 => "1 vCPU".into(),
        number => format!("{number} vCPUs"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_gets_the_json_and_a_bad_path_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.json");
        let to = |path| Output {
            json: Some(JsonTarget::File(path)),
            quiet: false,
        };
        write_result(&to(path.clone()), "", "{}\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{}\n");
        check_target(&to(path.clone())).unwrap();
        assert_eq!(
            std::fs::read_to_string(&path).unwrap(),
            "{}\n",
            "the check keeps a result"
        );
        check_target(&to(dir.path().into())).unwrap_err();
        let error = write_result(&to("/nonexistent/out.json".into()), "", "{}\n").unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("cannot write the JSON to /nonexistent/out.json: No such file")
        );
    }

    #[test]
    fn a_terminal_is_sent_no_control_characters() {
        for (line, shown) in [
            ("plain\ttext, ünïcode", "plain\ttext, ünïcode"),
            ("\x1b]0;title\x07", "\\u{1b}]0;title\\u{7}"),
            ("\u{9b}2J", "\\u{9b}2J"),
            ("back\x08\x7f", "back\\u{8}\\u{7f}"),
        ] {
            assert_eq!(visible(line), shown);
        }
    }

    #[test]
    fn text_is_broken_between_parts_and_then_between_words() {
        for (columns, lines) in [
            (40, "one two   three four   five"),
            (22, "one two   three four\nfive"),
            (10, "one two\nthree four\nfive"),
            (6, "one\ntwo\nthree\nfour\nfive"),
            (3, "one\ntwo\nthree\nfour\nfive"),
        ] {
            assert_eq!(
                fit("one two   three four   five", columns),
                lines,
                "{columns}"
            );
        }
    }
}
