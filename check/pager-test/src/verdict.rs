//! How a check ends, and the events before.

use std::collections::VecDeque;
use std::fmt::Display;

/// Events that a report keeps: the last ones before the end.
const EVENTS: usize = 40;

/// A program under test.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Target {
    /// A page-fault handler that speaks Firecracker's handshake.
    Handler,
    /// A daemon that saves VMs, by Cloud Hypervisor's migration protocol.
    SaveDaemon,
    /// A daemon that restores a VM with all of its memory in place.
    RestoreDaemon,
    /// A daemon that restores a VM, and sends its memory on demand.
    OnDemandDaemon,
}

impl Target {
    /// The option of `lacuna pager-test` that names the program.
    pub fn option(self) -> &'static str {
        match self {
            Self::Handler => "--socket",
            Self::SaveDaemon => "--save-daemon",
            Self::RestoreDaemon => "--restore-daemon",
            Self::OnDemandDaemon => "--on-demand-daemon",
        }
    }
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

    /// The run lacks the program that the rule needs.
    pub(crate) fn without(target: Target) -> Self {
        Self::Skipped(format!("it needs {}", target.option()))
    }

    /// The host refuses something that the rule needs.
    pub(crate) fn host<E: Display>(what: &str) -> impl Fn(E) -> Self {
        move |error| Self::Skipped(format!("this host cannot {what}: {error}"))
    }
}

/// The result of a rule's function.
pub(crate) type Verdict = Result<(), Stop>;

/// Adds an event, and forgets the oldest one of too many.
pub(crate) fn keep(events: &mut VecDeque<String>, text: String) {
    if events.len() == EVENTS {
        events.pop_front();
    }
    events.push_back(text);
}
