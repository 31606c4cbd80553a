//! `lacuna lab pml`: what it costs to know which pages a running guest writes.
//!
//! | id | what is compared |
//! |---|---|
//! | `pml.score_percent.ARM.SET` | transactions a second, watched / not |
//! | `pml.ns_per_dirty_page.ARM.SET` | CPU time a dirtied page, above no logging |
//! | `pml.cost_ratio.SET` | the same, write protection / PML |
//! | `pml.always_on_loss_percent` | PML on and no slot that logs / PML off |
//! | `pml.disable_ratio` | guest time lost when logging ends, dropping / in place |
//! | `pml.disable_lost_ms.*`, `pml.disable_ms.*` | the same in milliseconds; the call alone |
//! | `pml.recovery_percent` | huge leaves after logging in place / before |
//! | `pml.harvest_ns_per_dirty_page.ARM.PERCENT` | a harvest, by dirty pages of 8 GiB |
//! | `pml.harvest_empty_us.ARM` | a harvest of nothing |
//! | `pml.kvm.score_percent.WAY`, `pml.kvm.ns_per_dirty_page.WAY` | as above, on `/dev/kvm` |
//!
//! ARM is `wp` or `pml` with a bitmap, `wp_ring` or `pml_ring` with a ring for each vCPU. SET is
//! `raw`, or `exitcost`: each exit charged as hardware's, and the figure marked as simulated.

pub use score_page::first_look;

mod ending;
mod ending_loss;
mod harvest;
mod harvest_fixture;
mod kvm;
mod score;
mod score_always;
mod score_charge;
mod score_guest;
mod score_page;

use crate::experiment::{LabError, Options};
use crate::report::Progress;
use crate::result::Report;

/// Measures everything.
///
/// # Errors
/// The first experiment that could not be carried out. What this machine lacks is skipped.
pub fn run(options: &Options, report: &mut Report) -> Result<(), LabError> {
    let steps = score::STEPS + 1 + ending::STEPS + harvest::STEPS + kvm::STEPS;
    let progress = Progress::new(steps, options.verbosity);
    if options.wants("score") {
        score::measure(options, report, &progress)?;
    }
    if options.wants("page") {
        progress.step("costs of a dirtied page")?;
        score_page::measure(options, report)?;
    }
    if options.wants("ending") {
        ending::measure(options, report, &progress)?;
    }
    if options.wants("harvest") {
        harvest::measure(options, report, &progress)?;
    }
    if options.wants("kvm") {
        kvm::measure(options, report, &progress)?;
    }
    Ok(())
}

/// What can be measured alone.
pub const PARTS: &[&str] = &["score", "page", "ending", "harvest", "kvm"];
