//! `lacuna lab letters`: published experiments at their own size and in their own layout, with the
//! published figures beside ours.
//!
//! | part | experiment |
//! |---|---|
//! | `talk` | x86 async page faults, KVM Forum 2010 |
//!
//! A part says what differs from the original, and why.

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
