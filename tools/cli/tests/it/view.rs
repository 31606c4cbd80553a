//! The view on a terminal: it is shown, takes keys, and leaves the terminal as it was.

use crate::guest::{Guest, lacuna};
use lacuna_skip::test;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use tempfile::TempDir;

/// A command on a terminal of `script`, which shows the terminal's modes afterwards.
struct OnTerminal {
    child: Child,
    keys: ChildStdin,
    output: ChildStdout,
    shown: String,
}

impl OnTerminal {
    fn start(line: &str) -> Self {
        if let Some(reason) = lacuna_guest::unavailable() {
            lacuna_skip::skip_test(reason);
        }
        let lacuna = env!("CARGO_BIN_EXE_lacuna");
        let shell = format!("stty rows 24 cols 80; {lacuna} {line}; echo code $?; stty -a");
        let mut command = Command::new("script");
        command.args(["-qec", &shell, "/dev/null"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let Ok(mut child) = command.spawn() else {
            lacuna_skip::skip_test("there is no script(1), which gives a command a terminal");
        };
        Self {
            keys: child.stdin.take().unwrap(),
            output: child.stdout.take().unwrap(),
            child,
            shown: String::new(),
        }
    }

    fn wait_for(&mut self, text: &str) {
        let mut bytes = [0; 4096];
        while !self.shown.contains(text) {
            let read = self.output.read(&mut bytes).unwrap();
            assert!(read > 0, "no {text}: {}", self.shown.escape_debug());
            self.shown += &String::from_utf8_lossy(&bytes[..read]);
        }
    }
}

impl Drop for OnTerminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
    }
}

#[test]
fn a_quit_view_leaves_the_terminal_as_it_was() {
    let line = "run bm --memory 32M --resident 16M --append seconds=1000000";
    let mut run = OnTerminal::start(line);
    run.wait_for("[q]uit");
    run.keys.write_all(b"q").unwrap();
    run.wait_for("code 130");
    run.wait_for("noflsh");
    let (_, after) = run
        .shown
        .split_once("\x1b[?1049l")
        .expect("the screen is left");
    assert!(after.contains("memory    guest 32M"), "{after}");
    assert!(after.contains("outcome   interrupted by SIGINT"), "{after}");
    // A mode that is off has a dash in front.
    for mode in ["isig", "icanon", "opost", "echo"] {
        assert!(
            after.split_whitespace().any(|word| word == mode),
            "{mode}: {after}"
        );
    }
}

/// Without a terminal there is a line a second. The VM's end ends the view with a message.
#[test]
fn a_top_without_a_terminal_has_lines_until_the_vm_ends() {
    let folder = TempDir::new().unwrap();
    let endless = "bm --memory 16M --resident 8M --append=seconds=1000000";
    let guest = Guest::start(folder.path(), endless);
    let mut top = Command::new(env!("CARGO_BIN_EXE_lacuna"));
    top.args(["ctl", guest.socket.to_str().unwrap(), "top"]);
    let mut top = top
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut lines = BufReader::new(top.stdout.take().unwrap());
    while !line.contains(" s  running ") {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0);
    }
    assert!(
        line.contains("of 16M") && line.contains("steps/s"),
        "{line}"
    );
    lacuna(&format!("ctl {} stop", guest.socket.display()));
    assert_eq!(guest.end().0, 4);
    let ended = top.wait_with_output().unwrap();
    let errors = String::from_utf8(ended.stderr).unwrap();
    assert!(errors.contains("closed its control socket"), "{errors}");
    assert_eq!(ended.status.code(), Some(0));
}
