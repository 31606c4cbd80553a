//! `lacuna lab thp`: what huge pages give, and what taking them back costs.
//!
//! | id | what is compared |
//! |---|---|
//! | `thp.range_vs_page.SLOTS` | reverse-map work of invalidating a 2 MiB page: page loop / ours |
//! | `thp.range_vs_page.SLOTS.WORK` | the same for 4 KiB pages and for 64 MiB |
//! | `thp.slots_growth_512` | ours, 512 slots / 1 slot |
//! | `thp.slot_steps_512` | nodes of the slots' index that ours looks at, exact |
//! | `thp.total_us.STATE.PAGES` | the whole invalidation of 2 MiB, vCPUs idle or using the range |
//! | `thp.neighbour_loss_percent` | CPU time that a vCPU loses whose neighbour's range is taken |
//! | `thp.first_touch_fault_ratio` | CPU time of faults, zeroing apart, 4 KiB / 2 MiB pages |
//! | `thp.first_touch_ratio` | the same with zeroing: the whole first touch |
//! | `thp.random_read_ratio` | random reads a second, 2 MiB / 4 KiB TLB entries |
//! | `thp.pressure_ratio` | accesses under memory pressure, huge pages / none |
//! | `thp.kept_percent` | how much of what is resident stays in huge pages meanwhile |
//!
//! Arms differ in the host's policy ([`HugePages`](lacuna_soft::HugePages)), or in the way ranges
//! are searched, and in nothing else: the same guest image, the same words on its command line.
//! Guests map their memory by 2 MiB pages in either arm (`huge=1`).

pub use range::first_look;

mod fixture;
mod neighbour;
mod pressure;
mod range;
mod reads;
mod scene;
mod spread;
mod touch;

use crate::experiment::{LabError, Options};
use crate::report::Progress;
use crate::result::Report;

/// Measures everything, in the order of the table above.
///
/// # Errors
/// The first experiment that could not be carried out. What this machine lacks is skipped.
pub fn run(options: &Options, report: &mut Report) -> Result<(), LabError> {
    let progress = Progress::new(range::STEPS + pressure::STEPS + 4, options.verbosity);
    report.say(
        "thp: guest memory in 2 MiB pages where the host has them. Taking a range from a guest \
         costs what is mapped there, not what the range is long; what a vCPU uses next to it \
         stays.",
    );
    if options.wants("range") {
        range::measure(options, report, &progress)?;
        progress.step("whole invalidations")?;
        neighbour::total(options, report)?;
    }
    if options.wants("neighbour") {
        progress.step("a vCPU next to a range that is taken")?;
        neighbour::measure(options, report)?;
    }
    if options.wants("touch") {
        progress.step("first touch")?;
        touch::measure(options, report)?;
    }
    if options.wants("reads") {
        progress.step("random reads")?;
        reads::measure(options, report)?;
    }
    if options.wants("pressure") {
        pressure::measure(options, report, &progress)?;
    }
    Ok(())
}

/// What can be measured alone.
pub const PARTS: &[&str] = &["range", "neighbour", "touch", "reads", "pressure"];
