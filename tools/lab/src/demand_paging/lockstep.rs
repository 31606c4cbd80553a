//! VMs in processes of their own, which touch their memory at the same time.
//!
//! Two VMs in one process would share its address space, and so a part of what two vCPUs share. A
//! VM of a comparison has a process of its own too, because the lab's process has run other guests
//! before. Each child is `lacuna test demand-paging --lockstep`. It lives for all runs, so that its
//! host's memory stays.
//!
//! ```text
//! parent   line ─►                line ─► (to all children)
//! child    boots a guest ─► ready          touches all pages ─► the outcome as JSON, one line
//! ```

use super::{DemandPaging, Fixture, Outcome};
use crate::experiment::{LabError, LabResult};
use crate::options::{KINDS, name_of};
use std::io::{BufRead, BufReader, Lines, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// The option of the command for a child; it is for the lab alone.
pub const LOCKSTEP: &str = "lockstep";
const READY: &str = "ready";

/// The work of a child, until the end of `lines`: each line is a step.
///
/// # Errors
/// A guest failed, or the parent has ended in the middle of a run.
pub fn serve(options: &DemandPaging, lines: impl BufRead, mut answers: impl Write) -> LabResult {
    let fixture = Fixture::soft(options)?;
    let mut lines = lines.lines();
    while let Some(Ok(_)) = lines.next() {
        let (outcome, _) = fixture.run(options, || {
            say(&mut answers, READY)?;
            lines.next().ok_or_else(ended)?.map_err(io)?;
            Ok(())
        })?;
        let json = serde_json::to_string(&outcome).expect("it has a JSON form");
        say(&mut answers, &json)?;
    }
    Ok(())
}

fn io(error: std::io::Error) -> LabError {
    LabError::io("talk to a process of `lacuna test demand-paging`")(error)
}

fn ended() -> LabError {
    io(std::io::ErrorKind::UnexpectedEof.into())
}

fn say(to: &mut impl Write, line: &str) -> LabResult {
    writeln!(to, "{line}").and_then(|()| to.flush()).map_err(io)
}

/// A child.
pub struct Process {
    child: Child,
    to: ChildStdin,
    from: Lines<BufReader<ChildStdout>>,
}

impl Process {
    /// Starts the program at `lacuna` as a child: the vCPUs of its VMs exit at missing pages.
    pub fn start(lacuna: &Path, options: &DemandPaging) -> LabResult<Self> {
        let guest = &options.guest;
        let kind = name_of(&KINDS, &guest.memory_kind);
        let pin = guest.pin.iter().map(|cores| format!("--pin={cores}"));
        let mut child = Command::new(lacuna)
            .args(["test", "demand-paging", "--by=exits"])
            .arg(format!("--{LOCKSTEP}"))
            .arg(format!("--vcpus={}", guest.vcpus))
            .arg(format!("--bytes={}", guest.bytes.0))
            .arg(format!("--memory-kind={}", kind))
            .args(pin)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(io)?;
        let from = child.stdout.take().expect("it is piped");
        Ok(Self {
            to: child.stdin.take().expect("it is piped"),
            from: BufReader::new(from).lines(),
            child,
        })
    }

    fn next_line(&mut self) -> LabResult<String> {
        self.from.next().ok_or_else(ended)?.map_err(io)
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
        say(&mut process.to, "boot")?;
    }
    for process in &mut *processes {
        process.next_line()?;
    }
    for process in &mut *processes {
        say(&mut process.to, "go")?;
    }
    let (mut pages, mut longest) = (0, 0);
    for process in processes {
        let outcome: Outcome = serde_json::from_str(&process.next_line()?)
            .map_err(|error| LabError::Other(Box::new(error)))?;
        pages += outcome.pages;
        longest = longest.max(outcome.ns);
    }
    Ok(pages as f64 * 1e9 / longest as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::needs_guests;
    use crate::options::options_of;
    use lacuna_skip::test;

    fn served(lines: &str) -> (LabResult, Vec<String>) {
        needs_guests();
        let options = options_of("--by exits --memory-kind pool --bytes 2M");
        let mut answers = Vec::new();
        let done = serve(&options, lines.as_bytes(), &mut answers);
        let answers = String::from_utf8(answers).unwrap();
        (done, answers.lines().map(str::to_owned).collect())
    }

    #[test]
    fn a_child_boots_a_vm_for_each_pair_of_lines() {
        let (done, answers) = served("boot\ngo\nboot\ngo\n");
        done.unwrap();
        assert_eq!([&*answers[0], &*answers[2]], [READY; 2], "{answers:?}");
        for line in [&answers[1], &answers[3]] {
            let outcome: Outcome = serde_json::from_str(line).unwrap();
            assert_eq!(outcome.pages, 512);
        }
        assert_eq!(answers.len(), 4);
    }

    #[test]
    fn a_child_ends_with_its_parent() {
        let (done, answers) = served("");
        done.unwrap();
        assert!(answers.is_empty());
        let (cut, answers) = served("boot\n");
        assert!(cut.unwrap_err().to_string().contains("end of file"));
        assert_eq!(answers, [READY]);
    }
}
