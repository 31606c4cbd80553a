//! A rule, what its function gets, and how it ends.

use crate::image::Image;
use crate::trial::Trial;
use crate::verdict::{Target, Verdict};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A requirement that a program under test meets or breaks.
#[derive(Debug)]
pub struct Rule {
    /// Its stable name.
    pub name: &'static str,
    /// What it requires and why, in one sentence.
    pub requires: &'static str,
    /// The thread of a project where the mistake was reported, or the interface's text.
    pub origin: &'static str,
    /// Checks it.
    pub(crate) check: Check,
}

impl Rule {
    /// The program that it is about.
    pub fn target(&self) -> Target {
        match self.check {
            Check::Handler(..) => Target::Handler,
            Check::Daemon(target, _) => target,
        }
    }
}

/// How a rule is checked.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Check {
    /// In a process of its own, which is the VMs.
    Handler(Needs, fn(&Subject) -> Verdict),
    /// In the suite's process: no thread of it accesses memory that the daemon fills.
    Daemon(Target, fn(&Trial<'_>) -> Verdict),
}

/// The VMs that a rule connects to a handler.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Needs {
    /// One.
    OneVm,
    /// Several, one after the other or at once. A handler that is started for each VM is not asked.
    SeveralVms,
    /// As [`SeveralVms`](Self::SeveralVms): some that are killed, then one.
    KilledVms,
}

/// The handler that a rule is checked against.
#[derive(Debug)]
pub(crate) struct Subject {
    pub(crate) order: Order,
    pub(crate) image: Image,
}

/// What the suite tells the process of a rule.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Order {
    pub(crate) rule: String,
    pub(crate) socket: PathBuf,
    pub(crate) memory: PathBuf,
    /// The handler has just been started: its socket may not be there yet.
    pub(crate) is_started: bool,
    /// This process is a VM that the suite kills, and checks no rule.
    pub(crate) is_victim: bool,
}

/// A line from the process of a rule to the suite.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Line {
    /// Something happened.
    Event(String),
    /// The process waits for this. If it waits too long, this was expected.
    Expect(String),
    /// The handler has closed the VM's connection. It may still serve the VM.
    Closed,
    Pass,
    Fail {
        expected: String,
        seen: String,
    },
    Skip(String),
}

impl Line {
    /// Prints the line. The suite restarts its clock when it reads one.
    pub(crate) fn print(&self) {
        println!(
            "{}",
            serde_json::to_string(self).expect("a line has a JSON form")
        );
    }
}

/// Reports that something happened.
pub(crate) fn event(text: impl Into<String>) {
    Line::Event(text.into()).print();
}

/// Reports what must happen next within the suite's limit.
pub(crate) fn expect(text: impl Into<String>) {
    Line::Expect(text.into()).print();
}
