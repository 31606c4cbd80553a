//! `lacuna lab`: experiments, a table, JSON.

use crate::args::{Experiment, LabArgs};
use crate::exit::Exit;
use crate::output::tell;
use lacuna_lab::experiment::{LabError, Options};
use lacuna_lab::report::{Verbosity, table};
use lacuna_lab::result::Report;
use lacuna_lab::{apf, base, pml, thp};

/// Runs the chosen experiments and tells their results.
pub fn lab(args: &LabArgs) -> Exit {
    let mut report = Report::new(std::env::args().collect::<Vec<_>>().join(" "));
    if args.quick {
        report.say(
            "A quick look: few and short rounds, for CI and for newcomers. `lacuna lab` measures \
             properly, in some forty minutes.",
        );
    }
    let done = options(args).and_then(|options| {
        let run = |experiment| match experiment {
            Experiment::Apf => apf::run(&options, &mut report),
            Experiment::Thp => thp::run(&options, &mut report),
            Experiment::Pml => pml::run(&options, &mut report),
            Experiment::Base => base::run(&options, &mut report),
        };
        args.chosen().into_iter().try_for_each(run)
    });
    // What was measured before something failed is told all the same.
    let told = tell(&args.output, &table(&report), &report.to_json());
    match (done, told) {
        (Ok(()), Ok(())) => Exit::Done,
        (Err(error), _) => refuse(&error),
        (_, Err(error)) => refuse(&error),
    }
}

fn options(args: &LabArgs) -> Result<Options, LabError> {
    let lacuna = std::env::current_exe().map_err(|source| LabError::Io {
        what: "find this program".into(),
        source,
    })?;
    Ok(Options {
        quick: args.quick,
        lacuna,
        swap_dir: std::env::temp_dir(),
        verbosity: if args.output.quiet {
            Verbosity::Quiet
        } else {
            Verbosity::Normal
        },
    })
}

fn refuse(error: &dyn std::error::Error) -> Exit {
    eprintln!("lacuna: {error}");
    Exit::Host
}
