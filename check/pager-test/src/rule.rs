//! A rule, what its function gets, and how it ends.

use crate::image::Image;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A requirement that a handler meets or breaks.
#[derive(Debug)]
pub struct Rule {
    /// Its stable name.
    pub name: &'static str,
    /// What it requires and why, in one sentence.
    pub requires: &'static str,
    /// The thread of a project where the mistake was reported, or the interface's text.
    pub origin: &'static str,
    /// The VMs that it needs.
    pub needs: Needs,
    /// Checks it.
    pub(crate) check: fn(&Subject) -> Verdict,
}

/// The VMs that a rule connects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Needs {
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

/// A rule that is not met, or that could not be checked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Stop {
    Failed { expected: String, seen: String },
    Skipped(String),
}

impl Stop {
    pub(crate) fn failed(expected: impl Into<String>, seen: impl Into<String>) -> Self {
        let (expected, seen) = (expected.into(), seen.into());
        Self::Failed { expected, seen }
    }

    /// The host refuses something that the rule needs.
    pub(crate) fn host(what: &str) -> impl Fn(lacuna_sys::Errno) -> Self {
        move |errno| Self::Skipped(format!("this host cannot {what}: {errno}"))
    }
}

/// The result of a rule's function.
pub(crate) type Verdict = Result<(), Stop>;

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
