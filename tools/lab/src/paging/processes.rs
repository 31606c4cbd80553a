//! VMs in processes of their own: two VMs with one vCPU each, and for comparison one VM with two
//! vCPUs.
//!
//! Two VMs in one process would share its address space, and so a part of what two vCPUs share. The
//! VM with two vCPUs has a process of its own too, because the lab's process has run other guests
//! before. Each child is this program. It lives for all slices, so that its host's memory stays.
//!
//! ```text
//! parent   boot ─►            go ─► (to all children)
//! child            ◄─ ready          touches all pages ◄─ PAGES NS
//! ```

use super::fixture::{Arm, Fixture, Work};
use super::machine::Machine;
use crate::experiment::{LabError, LabResult};
use lacuna::Arch;
use lacuna::memory::MemoryKind;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// The name of the command that makes a child of this program; it is for the lab alone.
pub const COMMAND: &str = "lab-vm";
const BOOT: &str = "boot";
const GO: &str = "go";
const READY: &str = "ready";

/// The work of a child: VMs whose pages are provided by exits, one for each `boot`. The thread of
/// their first vCPU runs on core number `core`, and the others on the cores after it.
///
/// # Errors
/// The parent sent an unknown word, or a guest failed.
pub fn serve(
    kind: MemoryKind,
    (vcpus, pages): (usize, u64),
    core: usize,
    words: impl BufRead,
    mut answers: impl Write,
) -> LabResult {
    let fixture = Fixture::new(kind, Work::new(Arch::X86_64, vcpus, pages))?;
    let mut words = words.lines();
    while let Some(Ok(word)) = words.next() {
        expect(&word, BOOT)?;
        let machine = Machine::new(&fixture, Arm::Exits)?;
        fixture.run(&machine, Some(core), || {
            say(&mut answers, READY)?;
            expect(&words.next().unwrap_or(Ok(String::new())).map_err(io)?, GO)
        })?;
        let (pages, ns) = machine.touched()?;
        say(&mut answers, &format!("{pages} {ns}"))?;
    }
    Ok(())
}

fn io(error: std::io::Error) -> LabError {
    LabError::io(format!("talk to a process of `lacuna {COMMAND}`"))(error)
}

fn say(to: &mut impl Write, word: &str) -> LabResult {
    writeln!(to, "{word}").and_then(|()| to.flush()).map_err(io)
}

fn said(line: &str) -> LabError {
    LabError::Guest(format!("a process of `lacuna {COMMAND}` said {line:?}"))
}

fn expect(word: &str, wanted: &str) -> LabResult {
    let is_it = word.trim_end() == wanted;
    let other = || LabError::Guest(format!("{} instead of {wanted}", said(word)));
    is_it.then_some(()).ok_or_else(other)
}

/// A child.
pub struct Process {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Process {
    /// Starts the program at `lacuna` as a child. Its VMs have `vcpus` vCPUs and `pages` pages.
    pub fn start(
        lacuna: &Path,
        kind: MemoryKind,
        (vcpus, pages): (usize, u64),
        core: usize,
    ) -> LabResult<Self> {
        let mut command = Command::new(lacuna);
        let sizes = [vcpus.to_string(), pages.to_string(), core.to_string()];
        command.arg(COMMAND).args(sizes);
        if kind == MemoryKind::Budget {
            command.arg("--pool");
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(io)?;
        let from = child.stdout.take().expect("it is piped");
        Ok(Self {
            to: child.stdin.take().expect("it is piped"),
            from: BufReader::new(from),
            child,
        })
    }

    fn next_line(&mut self) -> LabResult<String> {
        let mut line = String::new();
        self.from.read_line(&mut line).map_err(io)?;
        Ok(line)
    }
}

/// Ends the child.
impl Drop for Process {
    fn drop(&mut self) {
        // It fails only if the child has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Pages a second of fresh VMs that touch at the same time, one in each of `processes`.
pub fn together(processes: &mut [Process]) -> LabResult<f64> {
    for process in &mut *processes {
        say(&mut process.to, BOOT)?;
    }
    for process in &mut *processes {
        expect(&process.next_line()?, READY)?;
    }
    for process in &mut *processes {
        say(&mut process.to, GO)?;
    }
    let (mut pages, mut longest) = (0.0, 0.0_f64);
    for process in processes {
        let line = process.next_line()?;
        let found = line.trim_end().split_once(' ');
        let found = found.and_then(|(pages, ns)| Some((pages.parse().ok()?, ns.parse().ok()?)));
        let (touched, ns): (f64, f64) = found.ok_or_else(|| said(&line))?;
        pages += touched;
        longest = longest.max(ns);
    }
    Ok(pages * 1e9 / longest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::needs_guests;
    use lacuna_skip::test;

    #[test]
    fn a_child_boots_a_vm_for_each_slice() {
        needs_guests();
        let words = "boot\ngo\nboot\ngo\n".as_bytes();
        let mut answers = Vec::new();
        serve(MemoryKind::Budget, (1, 512), 0, words, &mut answers).unwrap();
        let answers = String::from_utf8(answers).unwrap();
        let lines: Vec<&str> = answers.lines().collect();
        assert_eq!(lines.len(), 4, "{answers}");
        assert_eq!([lines[0], lines[2]], [READY; 2], "{answers}");
        for line in [lines[1], lines[3]] {
            assert!(line.starts_with("512 "), "{answers}");
        }
    }

    #[test]
    fn a_child_ends_with_its_parent_and_refuses_other_words() {
        needs_guests();
        let mut answers = Vec::new();
        serve(MemoryKind::Budget, (1, 512), 0, "".as_bytes(), &mut answers).unwrap();
        for words in ["hello\n", "boot\n", "boot\nstop\n"] {
            let words = words.as_bytes();
            let served = serve(MemoryKind::Budget, (1, 512), 0, words, &mut answers);
            let refused = served.unwrap_err();
            assert!(refused.to_string().contains("instead of"), "{refused}");
        }
    }
}
