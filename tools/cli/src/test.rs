//! `lacuna test`: one mechanism under a chosen load, with a table and JSON.

use crate::args::{DemandPagingArgs, Output, TestArgs, TestCommand, Tool};
use crate::exit::Exit;
use crate::lab::{reported, settled, verbosity};
use crate::run::exit_of;
use lacuna_lab::demand_paging::lockstep;
use lacuna_lab::experiment::LabError;
use lacuna_lab::host_info::HostInfo;
use lacuna_lab::report::{Progress, Verbosity};
use lacuna_lab::result::{SCHEMA, command_line, to_json};
use serde::Serialize;
use std::fmt::Display;
use std::io;

/// Carries out the test of `args` and prints its result.
pub fn test(args: &TestArgs) -> Exit {
    match &args.test {
        TestCommand::DemandPaging(args) => demand_paging(args),
        TestCommand::DirtyLog(Tool { options, output }) => {
            measured(output, options.check(), |verbosity| options.run(verbosity))
        }
        TestCommand::AccessTracking(Tool { options, output }) => {
            measured(output, options.check(), |verbosity| options.run(verbosity))
        }
    }
}

fn demand_paging(args: &DemandPagingArgs) -> Exit {
    let options = &args.options;
    if args.lockstep && options.check().is_ok() {
        let served = lockstep::serve(options, io::stdin().lock(), io::stdout().lock());
        let failed = |error: LabError| (Exit::from(&error), error.to_string());
        return exit_of(served.map(|()| Exit::Done).map_err(failed));
    }
    measured(&args.output, options.check(), |verbosity| {
        options.run(&Progress::new(2, verbosity))
    })
}

/// Carries out `test`, if its options can be had together, and prints its result.
fn measured<T: Serialize + Display>(
    output: &Output,
    checked: Result<(), impl Display>,
    test: impl FnOnce(Verbosity) -> Result<T, LabError>,
) -> Exit {
    if let Err(why) = checked {
        return exit_of(Err((Exit::Usage, why.to_string())));
    }
    reported(output, |signals| {
        let (outcome, done) = match test(verbosity(output)) {
            Ok(outcome) => (Some(outcome), Ok(())),
            Err(error) => (None, Err(error)),
        };
        let (exit, ended_early) = settled(done, signals);
        let text = outcome.as_ref().map_or(String::new(), T::to_string);
        (exit, text, to_json(&Tested::of(ended_early, outcome)))
    })
}

/// The JSON form of a result.
#[derive(Serialize)]
pub(crate) struct Tested<T> {
    schema: u32,
    host: HostInfo,
    command: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    ended_early: Option<String>,
    #[serde(flatten)]
    outcome: Option<T>,
}

impl<T: Serialize> Tested<T> {
    /// The result of this command.
    pub(crate) fn of(ended_early: Option<String>, outcome: Option<T>) -> Self {
        Self {
            schema: SCHEMA,
            host: HostInfo::detect(),
            command: command_line(),
            ended_early,
            outcome,
        }
    }
}
