//! `lacuna lab letters`: the experiments of the five source documents at their published size, in
//! their own layout, with the published figures beside ours.
//!
//! | part | experiment |
//! |---|---|
//! | `talk` | x86 async page faults, KVM Forum 2010 |
//!
//! Each part says what differs from the original, and why.

mod talk;

use crate::experiment::{LabResult, Options};
use crate::report::Progress;
use crate::result::Report;

/// Measures everything.
///
/// # Errors
/// The error of the first failed experiment.
pub fn run(options: &Options, report: &mut Report) -> LabResult {
    let progress = Progress::new(talk::STEPS, options.verbosity);
    if options.wants_x86("talk", [talk::ID], report) {
        talk::measure(options, report, &progress)?;
    }
    Ok(())
}

/// The separately measurable parts.
pub const PARTS: &[&str] = &["talk"];
