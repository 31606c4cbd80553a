//! `lacuna lab`: experiments, a table, JSON.

use crate::args::{Experiment, LabArgs};
use crate::exit::Exit;
use crate::output::tell;
use lacuna_lab::base::{self, LabError};
use lacuna_lab::report::{Verbosity, table};
use lacuna_lab::result::Report;

/// Runs the chosen experiments and tells their results.
pub fn lab(args: &LabArgs) -> Exit {
    let mut report = Report::new(std::env::args().collect::<Vec<_>>().join(" "));
    let done = args
        .chosen()
        .into_iter()
        .try_for_each(|experiment| match experiment {
            Experiment::Base => run_base(args, &mut report),
        });
    // What was measured before something failed is told all the same.
    let told = tell(&args.output, &table(&report), &report.to_json());
    match (done, told) {
        (Ok(()), Ok(())) => Exit::Done,
        (Err(error), _) => refuse(&error),
        (_, Err(error)) => refuse(&error),
    }
}

fn run_base(args: &LabArgs, report: &mut Report) -> Result<(), LabError> {
    let lacuna = std::env::current_exe().map_err(|source| LabError::Io {
        what: "find this program".into(),
        source,
    })?;
    let options = base::Options {
        quick: args.quick,
        lacuna,
        swap_dir: std::env::temp_dir(),
        verbosity: if args.output.quiet {
            Verbosity::Quiet
        } else {
            Verbosity::Normal
        },
    };
    base::run(&options, report)
}

fn refuse(error: &dyn std::error::Error) -> Exit {
    eprintln!("lacuna: {error}");
    Exit::Host
}
