//! `lacuna lab pml`: the cost of knowing which pages a running guest writes.
//!
//! | id | what is compared |
//! |---|---|
//! | `pml.score_percent.ARM.SET` | transactions a second, with logging / without |
//! | `pml.ns_per_dirty_page.ARM.SET` | CPU time of a dirtied page, less the time without logging |
//! | `pml.cost_ratio.SET` | the same, write protection / PML |
//! | `pml.kvm.exit_ns` | an exit to the VMM on this host's KVM |
//! | `pml.always_on_loss_percent` | PML on while no slot logs / PML off |
//! | `pml.disable_ratio` | guest time lost when logging ends, refault / collapse in place |
//! | `pml.disable_lost_ms.*`, `pml.disable_ms.*` | the same in milliseconds; the call alone |
//! | `pml.recovery_percent` | huge leaves after the collapse in place / before logging |
//! | `pml.harvest_ns_per_dirty_page.ARM.PERCENT` | a harvest of 8 GiB, for each dirty page |
//! | `pml.harvest_empty_us.ARM` | a harvest that finds no page |
//! | `pml.gib.on`, `pml.gib.off` | logging of 1 GiB begins and ends, in pages of 2 MiB / 1 GiB |
//! | `pml.kvm.score_percent.WAY`, `pml.kvm.ns_per_dirty_page.WAY` | as above, on `/dev/kvm` |
//!
//! ARM is `wp` or `pml` with a bitmap, `wp_ring` or `pml_ring` with a ring for each vCPU. SET is
//! `raw` or `exitcost`. In `exitcost` each exit is charged its cost on hardware, and the figure is
//! marked as simulated. In `exitcost_here` each is charged the cost of an exit on this host's KVM.
//! A dirtied page also has the set `refill`: the refill of the TLB after a harvest counts, an exit
//! does not. The set `large` has more pages than the TLB has entries. With AArch64 guests, too, an
//! exit is charged what it costs on x86-64.

#[cfg(test)]
pub(crate) use kvm::is_lacking;
pub use page::first_look;

mod churn;
mod ending;
mod harvest;
mod kvm;
pub(crate) mod monitor;
mod page;
mod score;

use crate::dirty_log::DirtyLog;
use crate::experiment::{LabResult, Options};
use crate::gib::{self, Step};
use crate::options::{Recorder, options_of};
use crate::result::Report;
use lacuna::{Arch, PAGE_SIZE};

/// Measures everything.
///
/// # Errors
/// The error of the first failed experiment. Results that this machine cannot measure are skipped.
pub fn run(options: &Options, report: &mut Report) -> LabResult {
    let steps = score::STEPS + 3 + harvest::STEPS + kvm::STEPS;
    options.begin(steps);
    if options.wants("score") {
        score::measure(options, report)?;
    }
    if options.wants("page") {
        options.step("costs of a dirtied page")?;
        page::measure(options, report)?;
    }
    if options.wants("ending") {
        options.step("ending logging")?;
        ending::measure(options, report)?;
    }
    if options.wants("harvest") {
        harvest::measure(options, report)?;
    }
    if options.wants("gib") {
        options.step("logging of pages of 1 GiB")?;
        gib::measure(options, report, "pml", &[Step::LogOn, Step::LogOff])?;
    }
    if options.wants_x86("kvm", kvm::all_ids(), report) {
        kvm::measure(options, report)?;
    }
    Ok(())
}

/// The separately measurable parts.
pub const PARTS: &[&str] = &["score", "page", "ending", "harvest", "gib", "kvm"];

/// The preset of the parts `page` and `harvest`: one vCPU on soft with so many pages.
fn one_vcpu(arch: Arch, pages: u64, delivery: Recorder) -> DirtyLog {
    let bytes = pages * PAGE_SIZE as u64;
    let mut options: DirtyLog = options_of(&format!("--bytes {bytes} --random"));
    options.guest.arch = arch;
    options.delivery = delivery;
    options
}
