//! `lacuna lab`: the first look, or chosen experiments; a table, JSON and a report.

use crate::args::{Chosen, Experiment, JsonTarget, LabArgs, Output, Parts};
use crate::args::{arch_of, repeats, temp_dir};
use crate::exit::Exit;
use crate::output::{check_target, complain, write_result_until_signal};
use crate::run::{Refusal, catch_signals, exit_of};
use crate::signals::Signals;
use lacuna::Arch;
use lacuna_lab::experiment::{LabError, LabResult, Options};
use lacuna_lab::first_look::FirstLook;
use lacuna_lab::host_info::HostInfo;
use lacuna_lab::report::{Progress, Verbosity, table};
use lacuna_lab::result::{Report, command_line};
use lacuna_lab::{
    apf, base, interrupt, letters, migrate, pager, paging, pml, postcopy, restore, thp,
};
use lacuna_report::{Run, compared, html, markdown};
use std::fs::OpenOptions;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// The commit that this program was built from; empty if it is not known.
const COMMIT: &str = env!("LACUNA_COMMIT");

/// Measures what `args` choose, or reads a saved run, and shows the results.
pub fn lab(args: &LabArgs) -> Exit {
    exit_of(shown(args))
}

fn shown(args: &LabArgs) -> Result<Exit, Refusal> {
    // A wrong file ends the command before it measures.
    let other = args.compare.as_deref().map(|path| read(path, Run::parse));
    let other = other.transpose()?;
    let chosen = args.chosen();
    let begun = match &chosen {
        Chosen::Parts(parts) if args.resume => interrupted_run(args, parts)?,
        _ => None,
    };
    let signals = catch_signals(&interrupt::flag())?;
    check_target(&args.output)?;
    args.report.as_deref().map_or(Ok(()), check_report)?;
    let (exit, text, json) = match (&args.from, chosen) {
        (Some(path), _) => {
            let report: Report = read(path, from_json)?;
            (Exit::Done, table(&report), report.to_json())
        }
        (None, Chosen::FirstLook) => first_look(args, command_line(), &signals),
        (None, Chosen::Parts(parts)) => {
            let report = begun.unwrap_or_else(|| Report::new(command_line()));
            experiments(args, &parts, report, &signals)
        }
    };
    let run = Run::parse(&json).map_err(|why| (Exit::Host, why))?;
    let text = match &other {
        _ if args.markdown => markdown(&run, other.as_ref()),
        Some(other) => format!("{text}\n{}", compared(&run, other)),
        None => text,
    };
    write_result_until_signal(&args.output, &text, &json, &signals)?;
    if let Some(path) = &args.report {
        let page = html(&run, other.as_ref());
        std::fs::write(path, page).map_err(|error| unwritten(path, &error))?;
    }
    Ok(exit)
}

/// What `parse` makes of the file at `path`.
fn read<T>(path: &Path, parse: impl Fn(&str) -> Result<T, String>) -> Result<T, Refusal> {
    let path_name = path.display();
    let text = std::fs::read_to_string(path)
        .map_err(|error| (Exit::Usage, format!("cannot read {path_name}: {error}")))?;
    parse(&text).map_err(|why| {
        let what = "is not the JSON of `lacuna lab --json`";
        (Exit::Usage, format!("{path_name} {what}: {why}"))
    })
}

fn from_json(text: &str) -> Result<Report, String> {
    serde_json::from_str(text).map_err(|error| error.to_string())
}

/// The report in the file of `--json`, up to its last finished experiment. Nothing if the file is
/// new or empty: no experiment has finished.
fn interrupted_run(args: &LabArgs, parts: &[Parts]) -> Result<Option<Report>, Refusal> {
    let Some(JsonTarget::File(path)) = &args.output.json else {
        return Err((Exit::Usage, "--resume needs a file: --json FILE".into()));
    };
    if !path.metadata().is_ok_and(|found| found.len() > 0) {
        return Ok(None);
    }
    let mut report: Report = read(path, from_json)?;
    let (then, now) = (&report.host, HostInfo::detect());
    let machine = |host: &HostInfo| (host.cpu.clone(), host.cores, host.kernel.clone());
    let commands: Vec<String> = parts.iter().map(|parts| repeats(args, parts)).collect();
    let done = report.finished.iter().map(|done| &done.command);
    let foreign = done.clone().find(|command| !commands.contains(command));
    let why = if report.ended_early.is_none() {
        "its run is complete".to_owned()
    } else if machine(then) != machine(&now) {
        format!("it was measured on another host: {then}")
    } else if report.commit != COMMIT {
        format!("it was measured at commit {}, not {COMMIT}", report.commit)
    } else if let Some(foreign) = foreign {
        format!("it has the results of `{foreign}`, which this command does not measure")
    } else {
        report.keep_finished();
        report.ended_early = None;
        return Ok(Some(report));
    };
    let path = path.display();
    let advice = "leave --resume out to begin again";
    Err((
        Exit::Usage,
        format!("{path} cannot be continued: {why}; {advice}"),
    ))
}

/// Checks before the command measures that the report can be written. A pipe or a device is not
/// opened.
fn check_report(path: &Path) -> Result<(), Refusal> {
    let found = path.metadata();
    if found.is_ok_and(|found| !found.is_file() && !found.is_dir()) {
        return Ok(());
    }
    let opened = OpenOptions::new().append(true).create(true).open(path);
    opened.map(drop).map_err(|error| unwritten(path, &error))
}

fn unwritten(path: &Path, error: &io::Error) -> Refusal {
    let path = path.display();
    let advice = "--from makes it from the JSON of a run";
    let what = format!("cannot write the report to {path}: {error}; {advice}");
    (Exit::Host, what)
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
    look.report.commit = COMMIT.into();
    let done = options(args).and_then(|options| look.run(&options));
    let (exit, why) = settled(done, signals);
    look.report.ended_early = why;
    (exit, look.text(), look.report.to_json())
}

/// Continues `report` with the experiments that it does not have.
fn experiments(args: &LabArgs, parts: &[Parts], mut report: Report, signals: &Signals) -> Results {
    report.commit = COMMIT.into();
    if args.quick && report.finished.is_empty() {
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
    let is_left = |command: &String| report.finished.iter().all(|done| done.command != *command);
    let left = archs.into_iter().zip(parts);
    let left = left.map(|(arch, parts)| (arch, parts, repeats(args, parts)));
    let left: Vec<_> = left.filter(|(_, _, command)| is_left(command)).collect();
    if args.full && !args.quick && !args.output.quiet {
        let minutes = left
            .iter()
            .map(|(_, (experiment, _), _)| experiment.minutes());
        announce(minutes.sum(), &args.output);
    }
    let done = options(args).and_then(|options| {
        left.into_iter()
            .try_for_each(|(arch, (experiment, parts), command)| {
                let options = Options {
                    arch,
                    parts: parts.clone(),
                    ..options.clone()
                };
                let begun = Instant::now();
                measure(*experiment, &options, &mut report)?;
                report.finish(command, begun.elapsed());
                save(&args.output, &report);
                Ok(())
            })
    });
    let (exit, why) = settled(done, signals);
    report.ended_early = why;
    if report.ended_early.is_some() && !report.finished.is_empty() && is_resumable(&args.output) {
        complain("the same command with --resume continues after the last finished experiment");
    }
    (exit, table(&report), report.to_json())
}

fn measure(experiment: Experiment, options: &Options, report: &mut Report) -> LabResult {
    // The ids of these results name the contract of their guests, or the letter.
    report.begin(match experiment {
        Experiment::ApfArm64 | Experiment::Letters => Arch::X86_64,
        _ => options.arch,
    });
    match experiment {
        Experiment::ApfArm64 => apf::arm64::run(options, report),
        Experiment::Apf => apf::run(options, report),
        Experiment::Thp => thp::run(options, report),
        Experiment::Pml => pml::run(options, report),
        Experiment::Paging => paging::run(options, report),
        Experiment::Postcopy => postcopy::run(options, report),
        Experiment::Restore => restore::run(options, report),
        Experiment::Migrate => migrate::run(options, report),
        Experiment::Pager => pager::run(options, report),
        Experiment::Base => base::run(options, report),
        Experiment::Letters => letters::run(options, report),
    }
}

/// Says on stderr how long a full measurement takes.
fn announce(minutes: u64, output: &Output) {
    let advice = match is_resumable(output) {
        true => "--resume continues it if it is interrupted",
        false => "with --json FILE, --resume can continue it if it is interrupted",
    };
    let (hours, minutes) = (minutes / 60, minutes % 60);
    complain(&format!(
        "this takes about {hours} h {minutes} min on two idle cores; {advice}"
    ));
}

/// Whether the JSON goes to a file that a later command can read.
fn is_resumable(output: &Output) -> bool {
    matches!(&output.json, Some(JsonTarget::File(path)) if path.is_file())
}

/// Saves what has finished, so that `--resume` can continue even if this process is killed. The
/// command's end writes the file again, and reports an error of it.
fn save(output: &Output, report: &Report) {
    if let Some(JsonTarget::File(path)) = &output.json
        && is_resumable(output)
    {
        let mut report = report.clone();
        report.ended_early = Some("the process ended before the rest was measured".into());
        let _ = std::fs::write(path, report.to_json());
    }
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
