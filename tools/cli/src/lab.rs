//! `lacuna lab`: experiments, a table, JSON.

use crate::args::{Experiment, LabArgs};
use crate::exit::Exit;
use crate::output::{complain, tell};
use crate::signals::Signals;
use lacuna_lab::experiment::{LabError, Options};
use lacuna_lab::report::{Verbosity, table};
use lacuna_lab::result::Report;
use lacuna_lab::{apf, base, interrupt, pml, thp};

/// Runs the chosen experiments and tells their results.
pub fn lab(args: &LabArgs) -> Exit {
    let signals = match Signals::catch(&interrupt::flag()) {
        Ok(signals) => signals,
        Err(error) => {
            complain(&format!("cannot catch signals: {error}"));
            return Exit::Host;
        }
    };
    let mut report = Report::new(std::env::args().collect::<Vec<_>>().join(" "));
    if args.quick {
        report.say(
            "A quick look: few and short rounds, for CI and for newcomers. `lacuna lab` measures \
             properly, in some fifty minutes.",
        );
    }
    let done = options(args).and_then(|options| {
        let run = |(experiment, parts)| {
            let options = Options {
                parts,
                ..options.clone()
            };
            match experiment {
                Experiment::Apf => apf::run(&options, &mut report),
                Experiment::Thp => thp::run(&options, &mut report),
                Experiment::Pml => pml::run(&options, &mut report),
                Experiment::Base => base::run(&options, &mut report),
            }
        };
        args.chosen().into_iter().try_for_each(run)
    });
    let (exit, why) = match (done, signals.caught()) {
        (Ok(()), _) => (Exit::Done, None),
        // Ctrl-C reaches the programs beside us too: their failure is its doing.
        (Err(_), Some(signal)) => (
            Exit::Interrupted(signal),
            Some(format!("interrupted by {signal}")),
        ),
        (Err(error), None) => (Exit::from(&error), Some(error.to_string())),
    };
    if let Some(why) = &why {
        complain(why);
    }
    // What was measured before something failed is told all the same.
    report.ended_early = why;
    match tell(&args.output, &table(&report), &report.to_json()) {
        Ok(()) => exit,
        Err(error) => {
            complain(&error.to_string());
            Exit::Host
        }
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
        parts: Vec::new(),
    })
}
