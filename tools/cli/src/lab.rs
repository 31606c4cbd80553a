//! `lacuna lab`: the first look, or chosen experiments; a table and JSON.

use crate::args::{Chosen, Experiment, LabArgs, Output, Parts, arch_of, temp_dir};
use crate::exit::Exit;
use crate::output::{check_target, complain, write_result_until_signal};
use crate::run::{Refusal, catch_signals, exit_of};
use crate::signals::Signals;
use lacuna::Arch;
use lacuna_lab::experiment::{LabError, Options};
use lacuna_lab::first_look::FirstLook;
use lacuna_lab::report::{Progress, Verbosity, table};
use lacuna_lab::result::{Report, command_line};
use lacuna_lab::{
    apf, base, interrupt, letters, migrate, pager, paging, pml, postcopy, restore, thp,
};
use std::sync::Arc;

/// Measures what `args` choose and prints the results.
pub fn lab(args: &LabArgs) -> Exit {
    let command = command_line();
    reported(&args.output, |signals| match args.chosen() {
        Chosen::FirstLook => first_look(args, command, signals),
        Chosen::Parts(parts) => experiments(args, &parts, command, signals),
    })
}

/// Prints what `measure` returns. A signal ends it early.
pub(crate) fn reported(output: &Output, measure: impl FnOnce(&Signals) -> Results) -> Exit {
    let report = || -> Result<Exit, Refusal> {
        let signals = catch_signals(&interrupt::flag())?;
        check_target(output)?;
        let (exit, text, json) = measure(&signals);
        write_result_until_signal(output, &text, &json, &signals)?;
        Ok(exit)
    };
    exit_of(report())
}

/// The exit code, the text, and the JSON.
pub(crate) type Results = (Exit, String, String);

fn first_look(args: &LabArgs, command: String, signals: &Signals) -> Results {
    let mut look = FirstLook::new(command);
    let done = options(args).and_then(|options| look.run(&options));
    let (exit, why) = settled(done, signals);
    look.report.ended_early = why;
    (exit, look.text(), look.report.to_json())
}

fn experiments(args: &LabArgs, parts: &[Parts], command: String, signals: &Signals) -> Results {
    let mut report = Report::new(command);
    if args.quick {
        report.say(
            "A quick run: few and short rounds, for CI. Figures to quote come from the same \
             command without --quick.",
        );
    }
    let archs = parts.iter().map(|parts| arch_of(parts, args.arch));
    let archs: Vec<Arch> = match archs.collect::<Result<_, _>>() {
        Ok(archs) => archs,
        Err(why) => {
            complain(&why);
            report.ended_early = Some(why);
            return (Exit::Usage, table(&report), report.to_json());
        }
    };
    let done = options(args).and_then(|options| {
        archs
            .iter()
            .zip(parts)
            .try_for_each(|(&arch, (experiment, parts))| {
                let options = Options {
                    arch,
                    parts: parts.clone(),
                    ..options.clone()
                };
                // The ids of these results name the contract of their guests, or the letter.
                report.begin(match experiment {
                    Experiment::ApfArm64 | Experiment::Letters => Arch::X86_64,
                    _ => options.arch,
                });
                match experiment {
                    Experiment::ApfArm64 => apf::arm64::run(&options, &mut report),
                    Experiment::Apf => apf::run(&options, &mut report),
                    Experiment::Thp => thp::run(&options, &mut report),
                    Experiment::Pml => pml::run(&options, &mut report),
                    Experiment::Paging => paging::run(&options, &mut report),
                    Experiment::Postcopy => postcopy::run(&options, &mut report),
                    Experiment::Restore => restore::run(&options, &mut report),
                    Experiment::Migrate => migrate::run(&options, &mut report),
                    Experiment::Pager => pager::run(&options, &mut report),
                    Experiment::Base => base::run(&options, &mut report),
                    Experiment::Letters => letters::run(&options, &mut report),
                }
            })
    });
    let (exit, why) = settled(done, signals);
    report.ended_early = why;
    (exit, table(&report), report.to_json())
}

/// The exit code, and the reason for an early end. Results from before an error are printed all the
/// same.
pub(crate) fn settled(done: Result<(), LabError>, signals: &Signals) -> (Exit, Option<String>) {
    let (exit, why) = match (done, signals.caught()) {
        (Ok(()), _) => return (Exit::Done, None),
        // Ctrl-C reaches the programs that the lab has started too, so their failure follows from
        // it.
        (Err(_), Some(signal)) => (
            Exit::Interrupted(signal),
            format!("interrupted by {signal}"),
        ),
        (Err(error), None) => (Exit::from(&error), error.to_string()),
    };
    complain(&why);
    (exit, Some(why))
}

/// Whether progress is shown.
pub(crate) const fn verbosity(output: &Output) -> Verbosity {
    if output.quiet {
        Verbosity::Quiet
    } else {
        Verbosity::Normal
    }
}

fn options(args: &LabArgs) -> Result<Options, LabError> {
    let lacuna = std::env::current_exe().map_err(LabError::io("find this program"))?;
    Ok(Options {
        quick: args.quick,
        scale: args.scale.unwrap_or(1),
        arch: Arch::X86_64,
        lacuna,
        swap_dir: temp_dir(),
        progress: Arc::new(Progress::new(0, verbosity(&args.output))),
        parts: Vec::new(),
    })
}
