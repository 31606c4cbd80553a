//! `cargo xtask compare OLD [NEW]`: two commits, built and measured in turns on one machine.
//!
//! ```text
//! resolve OLD, NEW ─► build each in its own worktree under target/compare   (commit.rs)
//!                  ─► rounds of  old null new  new null old                 (lab.rs)
//!                     each slice is that commit's own `lacuna lab PART --json`
//!                  ─► pair the results by id, one ratio a round             (pair.rs, stats.rs)
//!                  ─► callgrind: instructions per fault and per access      (count.rs)
//!                  ─► table, JSON                                           (report.rs)
//! ```
//! The arm *null* runs the old commit's binary once more. Its difference is the noise of the
//! method. So a result counts as slower only if its interval excludes 1 and does not meet the
//! null's interval.

mod arguments;
mod commit;
mod count;
mod lab;
mod pair;
mod progress;
mod report;
mod stats;

use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;

use arguments::{Arguments, Request};
use commit::Built;
use pair::Arm;
use progress::Progress;
use report::Comparison;

/// Why two commits could not be compared. Printed as it is.
#[derive(Debug)]
pub struct Failure(String);

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// An error that names the attempt.
pub fn failure<T>(what: impl fmt::Display) -> Result<T, Failure> {
    Err(Failure(what.to_string()))
}

/// Carries out `cargo xtask compare` with `arguments`.
///
/// The exit code is 0 if nothing became slower, 1 if something did, 2 for wrong arguments, and 3
/// if the commits could not be compared.
pub fn run(arguments: &[String]) -> ExitCode {
    let arguments = match arguments::parse(arguments) {
        Ok(Request::Compare(arguments)) => arguments,
        Ok(Request::Help) => {
            println!("{}", arguments::HELP);
            return ExitCode::SUCCESS;
        }
        Err(wrong) => {
            eprintln!("compare: {wrong}\n\n{}", arguments::HELP);
            return ExitCode::from(2);
        }
    };
    match compare(&arguments) {
        Ok(comparison) if comparison.anything_slower() => ExitCode::from(1),
        Ok(_) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("compare: {failure}");
            ExitCode::from(3)
        }
    }
}

fn compare(arguments: &Arguments) -> Result<Comparison, Failure> {
    let root = commit::root()?;
    let old = commit::resolve(&root, &arguments.old)?;
    let new = match &arguments.new {
        Some(new) => commit::resolve(&root, new)?,
        None => commit::head_of_clean_tree(&root)?,
    };
    let folder = root.join("target/compare");
    let mut progress = Progress::new();
    let old = commit::build(&root, &folder.join("old"), old, &mut progress)?;
    let new = commit::build(&root, &folder.join("new"), new, &mut progress)?;

    let mut comparison = Comparison::new(&old.commit, &new.commit, arguments);
    measure(arguments, &old, &new, &mut comparison, &mut progress)?;
    if arguments.instructions {
        count(&old, &new, &folder, &mut comparison, &mut progress)?;
    }
    progress.done();
    print!("{}", report::table(&comparison));
    if let Some(path) = &arguments.json {
        write(path, &report::json(&comparison))?;
    }
    Ok(comparison)
}

/// Runs every part in turns, one palindrome of arms a round. The first round only warms up.
fn measure(
    arguments: &Arguments,
    old: &Built,
    new: &Built,
    comparison: &mut Comparison,
    progress: &mut Progress,
) -> Result<(), Failure> {
    if arguments.rounds == 0 {
        return Ok(());
    }
    for part in &arguments.parts {
        let mut samples = pair::Samples::default();
        let mut slices = 0;
        let all = (arguments.rounds + 1) * pair::ROUND.len();
        'part: for round in 0..=arguments.rounds {
            for arm in pair::ROUND {
                slices += 1;
                progress.say(&format!("{part}: slice {slices} of {all}"));
                let built = if arm == Arm::New { new } else { old };
                let figures = match lab::run(&built.binary, part, arguments.length)? {
                    lab::Outcome::Figures(figures) => figures,
                    lab::Outcome::EndedEarly(figures, why) => {
                        comparison.ended_early(&built.commit, part, &why);
                        figures
                    }
                    lab::Outcome::Failed(why) => {
                        comparison.failed(&built.commit, part, &why);
                        break 'part;
                    }
                };
                if round > 0 {
                    samples.add(round - 1, arm, figures);
                }
            }
        }
        comparison.add(samples.into_rows());
    }
    Ok(())
}

fn count(
    old: &Built,
    new: &Built,
    folder: &std::path::Path,
    comparison: &mut Comparison,
    progress: &mut Progress,
) -> Result<(), Failure> {
    for (arch, probe) in count::probes() {
        let name = probe.id(arch);
        progress.say(&format!("callgrind: {name}"));
        let mut counted = |built: &Built| {
            let counts = count::per_unit(&built.binary, (arch, probe), folder);
            counts
                .map_err(|why| comparison.failed(&built.commit, &name, &why.to_string()))
                .ok()
        };
        if let (Some(old), Some(new)) = (counted(old), counted(new)) {
            comparison.counts.push(count::Counted { name, old, new });
        }
    }
    Ok(())
}

fn write(path: &PathBuf, text: &str) -> Result<(), Failure> {
    std::fs::write(path, text)
        .map_err(|error| Failure(format!("cannot write {}: {error}", path.display())))
}
