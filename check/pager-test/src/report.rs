//! Results of rules, for people and for programs.

use crate::rule::Rule;
use crate::verdict::{Stop, Verdict};
use serde::{Serialize, Serializer};
use std::fmt::{self, Display};
use std::time::Duration;

/// The result of a rule.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase", tag = "outcome")]
pub enum Outcome {
    /// The program under test meets it.
    Pass,
    /// The program breaks it.
    Failed {
        /// What the rule requires at the point where it failed.
        expected: String,
        /// What happened instead.
        seen: String,
    },
    /// It cannot be checked here.
    Skipped {
        /// Why not.
        reason: String,
    },
}

impl Outcome {
    fn word(&self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Failed { .. } => "FAILED",
            Self::Skipped { .. } => "skipped",
        }
    }
}

impl From<Verdict> for Outcome {
    fn from(verdict: Verdict) -> Self {
        match verdict {
            Ok(()) => Self::Pass,
            Err(Stop::Failed { expected, seen }) => Self::Failed { expected, seen },
            Err(Stop::Skipped(reason)) => Self::Skipped { reason },
        }
    }
}

/// A rule, its result, and what happened.
#[derive(Debug)]
pub struct Report {
    /// The rule.
    pub rule: &'static Rule,
    /// The result.
    pub outcome: Outcome,
    /// The last events before the end, in their order.
    pub events: Vec<String>,
    /// The time that the check took.
    pub took: Duration,
}

impl Report {
    /// Whether the program under test breaks the rule.
    pub fn is_failed(&self) -> bool {
        matches!(self.outcome, Outcome::Failed { .. })
    }
}

impl Serialize for Report {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Flat<'a> {
            rule: &'a str,
            requires: &'a str,
            origin: &'a str,
            #[serde(flatten)]
            outcome: &'a Outcome,
            events: &'a [String],
            seconds: f64,
        }
        Flat {
            rule: self.rule.name,
            requires: self.rule.requires,
            origin: self.rule.origin,
            outcome: &self.outcome,
            events: &self.events,
            seconds: self.took.as_secs_f64(),
        }
        .serialize(serializer)
    }
}

/// The reports of a run.
#[derive(Debug, Default)]
pub struct Reports(pub Vec<Report>);

impl Reports {
    /// The number of rules that the program under test breaks.
    pub fn failed(&self) -> usize {
        self.0.iter().filter(|report| report.is_failed()).count()
    }

    fn skipped(&self) -> usize {
        let is_skipped = |report: &&Report| matches!(report.outcome, Outcome::Skipped { .. });
        self.0.iter().filter(is_skipped).count()
    }

    fn passed(&self) -> usize {
        self.0.len() - self.failed() - self.skipped()
    }
}

impl Serialize for Reports {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Flat<'a> {
            passed: usize,
            failed: usize,
            skipped: usize,
            rules: &'a [Report],
        }
        Flat {
            passed: self.passed(),
            failed: self.failed(),
            skipped: self.skipped(),
            rules: &self.0,
        }
        .serialize(serializer)
    }
}

/// The reports, and how many of each result there are.
impl Display for Reports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for report in &self.0 {
            write!(f, "{report}")?;
        }
        let (passed, failed, skipped) = (self.passed(), self.failed(), self.skipped());
        writeln!(f, "\n{passed} passed, {failed} failed, {skipped} skipped")
    }
}

/// One line for a rule. A failed one also says what was expected and what happened, in its order.
impl Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, word) = (self.rule.name, self.outcome.word());
        write!(f, "{word:<8}{name}")?;
        match &self.outcome {
            Outcome::Pass => writeln!(f),
            Outcome::Skipped { reason } => writeln!(f, ": {reason}"),
            Outcome::Failed { expected, seen } => {
                writeln!(f, "\n        rule:     {}", self.rule.requires)?;
                writeln!(f, "        see:      {}", self.rule.origin)?;
                writeln!(f, "        expected: {expected}")?;
                writeln!(f, "        seen:     {seen}")?;
                for (number, event) in (1..).zip(&self.events) {
                    writeln!(f, "        {number:>6}. {event}")?;
                }
                Ok(())
            }
        }
    }
}
