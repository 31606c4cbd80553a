//! `lacuna lab pml`: what it costs to know which pages a running guest writes.

mod ending;
mod harvest;
mod kvm;
mod score;

use crate::experiment::{LabError, Options};
use crate::report::Progress;
use crate::result::Report;

/// Measures everything.
///
/// # Errors
/// The first experiment that could not be carried out. What this machine lacks is skipped.
pub fn run(options: &Options, report: &mut Report) -> Result<(), LabError> {
    let steps = score::STEPS + ending::STEPS + harvest::STEPS + kvm::STEPS;
    let progress = Progress::new(steps, options.verbosity);
    score::measure(options, report, &progress)?;
    ending::measure(options, report, &progress)?;
    harvest::measure(options, report, &progress)?;
    kvm::measure(options, report, &progress)
}
