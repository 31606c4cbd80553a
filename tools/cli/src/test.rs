//! `lacuna test`: one mechanism under a chosen load, with a table and JSON.

use crate::args::{DemandPagingArgs, Output, TestArgs, TestCommand};
use crate::exit::Exit;
use crate::lab::{reported, settled, verbosity};
use crate::output::complain;
use lacuna_lab::demand_paging::lockstep;
use lacuna_lab::experiment::LabError;
use lacuna_lab::host_info::HostInfo;
use lacuna_lab::report::Progress;
use serde::Serialize;
use std::fmt::Display;
use std::io;

/// Carries out the test of `args` and prints its result.
pub fn test(args: &TestArgs) -> Exit {
    match &args.what {
        TestCommand::DemandPaging(args) => demand_paging(args),
    }
}

fn demand_paging(args: &DemandPagingArgs) -> Exit {
    let options = &args.options;
    if let Err(why) = options.check() {
        complain(why);
        return Exit::Usage;
    }
    if args.lockstep {
        let served = lockstep::serve(options, io::stdin().lock(), io::stdout().lock());
        return served.map_or_else(
            |error| {
                complain(&error.to_string());
                Exit::from(&error)
            },
            |()| Exit::Done,
        );
    }
    measured(&args.output, 2, |progress| options.run(progress))
}

/// Carries out `test`, which has `steps` steps, and prints its result.
fn measured<T: Serialize + Display>(
    output: &Output,
    steps: u64,
    test: impl FnOnce(&Progress) -> Result<T, LabError>,
) -> Exit {
    reported(output, |signals| {
        let (outcome, done) = match test(&Progress::new(steps, verbosity(output))) {
            Ok(outcome) => (Some(outcome), Ok(())),
            Err(error) => (None, Err(error)),
        };
        let (exit, ended_early) = settled(done, signals);
        let text = outcome.as_ref().map_or(String::new(), T::to_string);
        let result = Tested {
            schema: 1,
            host: HostInfo::detect(),
            command: std::env::args().collect::<Vec<_>>().join(" "),
            ended_early,
            outcome,
        };
        let json = serde_json::to_string_pretty(&result).expect("a result has a JSON form");
        (exit, text, json + "\n")
    })
}

/// The JSON form of a result.
#[derive(Serialize)]
struct Tested<T> {
    schema: u32,
    host: HostInfo,
    command: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    ended_early: Option<String>,
    #[serde(flatten)]
    outcome: Option<T>,
}
