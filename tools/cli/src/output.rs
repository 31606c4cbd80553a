//! What the command prints, and where. A result goes to stdout as text, and to the target of
//! `--json` as JSON. The guest's lines and error messages go to stderr.

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

/// Writes a result to where `output` says. With `--json -`, stdout gets the JSON and no text.
///
/// # Errors
/// The JSON or the text cannot be written. If both fail, the error is that of the JSON.
pub fn tell(output: &Output, text: &str, json: &str) -> Result<(), WriteError> {
    match &output.json {
        Some(JsonTarget::Stdout) => print(json),
        Some(JsonTarget::File(path)) => {
            // Write both even if one fails: they may be on different disks.
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

/// Prints to stdout. A closed pipe (`lacuna doctor | head -1`) is no error: its reader has read
/// what it wanted.
///
/// # Errors
/// The write fails for another reason, such as a full disk.
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

/// Prints an error message to stderr. If that fails, only the exit code reports the error.
pub fn complain(text: &str) {
    let _ = writeln!(io::stderr(), "lacuna: {text}");
}

/// Prints a line of the guest to stderr. A failed write is ignored, so that a closed pipe does not
/// end the guest.
pub fn print_guest_line(line: &str) {
    let _ = writeln!(io::stderr(), "{}", for_stderr(line));
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
