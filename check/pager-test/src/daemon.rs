//! Daemons that save and restore VMs, and the process of a whole run for them.

use crate::process::SOCKET;
use crate::report::{Outcome, Report};
use crate::rule::{Check, Rule};
use crate::trial::{Commands, Trial};
use crate::verdict::{Stop, Target};
use std::time::{Duration, Instant};

/// Daemons that speak Cloud Hypervisor's migration protocol, and how their rules are checked.
#[derive(Debug)]
pub struct Daemons(Commands);

impl Daemons {
    /// Daemons with these shell commands. Each contains `{socket}`, and runs in the foreground.
    /// `timeout` is the longest time without any progress of a rule.
    ///
    /// # Errors
    /// A command without `{socket}`.
    pub fn new(commands: Vec<(Target, String)>, timeout: Duration) -> Result<Self, String> {
        let without = commands
            .iter()
            .find(|(_, command)| !command.contains(SOCKET));
        match without {
            Some((target, _)) => Err(format!(
                "{} needs {SOCKET} in its command: the suite puts the path of its socket there",
                target.option()
            )),
            None => Ok(Self(Commands::new(commands, timeout))),
        }
    }

    /// The daemons that there are.
    pub fn targets(&self) -> Vec<Target> {
        self.0.targets().collect()
    }

    /// Checks one rule. It starts the daemons that the rule needs, and ends them.
    pub fn run(&self, rule: &'static Rule) -> Report {
        let begin = Instant::now();
        let mut events = Vec::new();
        let outcome: Outcome = match (rule.check, tempfile::tempdir()) {
            (Check::Daemon(target, check), Ok(folder)) => {
                let trial = Trial::new(&self.0, folder);
                let verdict = trial.required(target).and_then(|_| check(&trial));
                events = trial.into_events();
                verdict.into()
            }
            (Check::Daemon(..), Err(error)) => {
                Err(Stop::host("make a folder for a socket")(error)).into()
            }
            (Check::Handler(..), _) => Err(Stop::without(Target::Handler)).into(),
        };
        Report {
            rule,
            outcome,
            events,
            took: begin.elapsed(),
        }
    }
}
