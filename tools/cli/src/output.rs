//! Where a result goes: text for people on stdout, JSON where it was asked for. Everything else
//! goes to stderr: what the guest prints, and what went wrong.

use std::borrow::Cow;
use std::io::{self, IsTerminal, Write};

use crate::args::{JsonTarget, Output};

/// A result that could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to {target}: {source}; the result is lost: give it another place")]
pub struct WriteError {
    target: String,
    source: io::Error,
}

/// Tells a result as `output` asks: with `--json -`, stdout carries the JSON and nothing else.
///
/// # Errors
/// When the JSON or the text cannot be written.
pub fn tell(output: &Output, text: &str, json: &str) -> Result<(), WriteError> {
    match &output.json {
        Some(JsonTarget::Stdout) => print(json),
        Some(JsonTarget::File(path)) => {
            // Both are tried: a full disk under the one says nothing about the other.
            let printed = print(text);
            let failed = |source| WriteError {
                target: path.display().to_string(),
                source,
            };
            std::fs::write(path, json).map_err(failed)?;
            printed
        }
        None => print(text),
    }
}

/// Prints to stdout. A reader that has gone (`lacuna doctor | head -1`) is no error: it has what
/// it wanted.
///
/// # Errors
/// When stdout takes no more for another reason, such as a full disk.
pub fn print(text: &str) -> Result<(), WriteError> {
    let mut stdout = io::stdout().lock();
    let written = stdout.write_all(text.as_bytes());
    match written.and_then(|()| stdout.flush()) {
        Err(source) if source.kind() != io::ErrorKind::BrokenPipe => Err(WriteError {
            target: "stdout".into(),
            source,
        }),
        _ => Ok(()),
    }
}

/// Says on stderr what went wrong. If that is broken too, the exit code still says it.
pub fn complain(text: &str) {
    let _ = writeln!(io::stderr(), "lacuna: {text}");
}

/// Prints a line of the guest's on stderr. A reader that has gone does not end the guest.
pub fn print_guest_line(line: &str) {
    let _ = writeln!(io::stderr(), "{}", for_stderr(line));
}

/// A line of the guest's as stderr may have it. A terminal obeys control characters (a guest could
/// retitle it, or make it type), so that there they are shown by their names; a file or pipe gets
/// them as they are.
fn for_stderr(line: &str) -> Cow<'_, str> {
    if io::stderr().is_terminal() {
        visible(line)
    } else {
        Cow::Borrowed(line)
    }
}

/// `line` with its control characters, tabs apart, as `\u{1b}`.
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
        tell(&to(path.clone()), "", "{}\n").unwrap();
        assert_eq!(std::fs::read_to_string(path).unwrap(), "{}\n");
        let error = tell(&to("/nonexistent/out.json".into()), "", "{}\n").unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("cannot write to /nonexistent/out.json: No such file")
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
}
