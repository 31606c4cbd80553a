//! Prints the progress of the comparison on stderr.

use std::io::{IsTerminal, Write, stderr};
use std::time::Instant;

/// On a terminal, one rewritten status line; elsewhere, one line for each step.
pub struct Progress {
    start: Instant,
    terminal: bool,
    last: String,
}

impl Progress {
    /// Starts the clock now.
    pub fn new() -> Self {
        Self {
            start: Instant::now(),
            terminal: stderr().is_terminal(),
            last: String::new(),
        }
    }

    /// Shows the present step. Without a terminal, prints a line only if the step changes.
    pub fn say(&mut self, what: &str) {
        let seconds = self.start.elapsed().as_secs();
        if self.terminal {
            let line: String = format!("[{seconds:4} s] {what}").chars().take(99).collect();
            eprint!("\r\x1b[2K{line}");
            let _ = stderr().flush();
        } else if step(what) != step(&self.last) {
            eprintln!("[{seconds:4} s] {}", step(what));
        }
        what.clone_into(&mut self.last);
    }

    /// Leaves the terminal's line empty.
    pub fn done(&self) {
        if self.terminal {
            eprint!("\r\x1b[2K");
            let _ = stderr().flush();
        }
    }
}

/// The step without its details: the text before the last colon.
fn step(what: &str) -> &str {
    what.rsplit_once(": ").map_or(what, |(step, _)| step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn details_are_no_new_step() {
        assert_eq!(step("base.fault: slice 3 of 48"), "base.fault");
        assert_eq!(step("build 1234567: Compiling lacuna-mmu"), "build 1234567");
        assert_eq!(step("read"), "read");
    }
}
