//! `lacuna test`: one mechanism under a chosen load, with a table and JSON.

use crate::args::{DemandPagingArgs, Output, TestArgs, TestCommand};
use crate::exit::Exit;
use crate::lab::verbosity;
use crate::output::{check_target, complain, write_result_until_signal};
use crate::signals::Signals;
use lacuna_lab::demand_paging::lockstep;
use lacuna_lab::experiment::LabError;
use lacuna_lab::host_info::HostInfo;
use lacuna_lab::interrupt;
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
        return served.map_or_else(|error| failed(&error), |()| Exit::Done);
    }
    measured(&args.output, 2, |progress| options.run(progress))
}

/// Carries out `test`, which has `steps` steps, and prints its result.
fn measured<T: Serialize + Display>(
    output: &Output,
    steps: u64,
    test: impl FnOnce(&Progress) -> Result<T, LabError>,
) -> Exit {
    let signals = match Signals::catch(&interrupt::flag()) {
        Ok(signals) => signals,
        Err(error) => {
            complain(&format!("cannot catch signals: {error}"));
            return Exit::Host;
        }
    };
    if let Err(error) = check_target(output) {
        complain(&error.to_string());
        return Exit::Host;
    }
    let done = test(&Progress::new(steps, verbosity(output)));
    let outcome = match (done, signals.caught()) {
        (Ok(outcome), _) => outcome,
        (Err(error), None) => return failed(&error),
        (Err(_), Some(signal)) => {
            complain(&format!("interrupted by {signal}"));
            return Exit::Interrupted(signal);
        }
    };
    let result = Tested {
        schema: 1,
        host: HostInfo::detect(),
        command: std::env::args().collect::<Vec<_>>().join(" "),
        outcome: &outcome,
    };
    let json = serde_json::to_string_pretty(&result).expect("a result has a JSON form") + "\n";
    match write_result_until_signal(output, &outcome.to_string(), &json, &signals) {
        Ok(()) => Exit::Done,
        Err(error) => {
            complain(&error.to_string());
            Exit::Host
        }
    }
}

/// The JSON form of a result.
#[derive(Serialize)]
struct Tested<'a, T> {
    schema: u32,
    host: HostInfo,
    command: String,
    #[serde(flatten)]
    outcome: &'a T,
}

fn failed(error: &LabError) -> Exit {
    complain(&error.to_string());
    Exit::from(error)
}
