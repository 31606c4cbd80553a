//! `lacuna lab thp`: the gain of huge pages, and the cost of their invalidation.
//!
//! | id | what is compared |
//! |---|---|
//! | `thp.call.elsewhere` | a whole notifier call for 2 MiB, page loop / Lacuna's; no vCPU waits |
//! | `thp.call.holding` | the same for a block that a running vCPU holds |
//! | `thp.call.shootdown_us.STATE` | the shoot-down in it, the same for both |
//! | `thp.total_us.STATE.PAGES` | Lacuna's whole call, vCPUs idle or using the block |
//! | `thp.neighbour_loss_percent` | CPU time that a vCPU loses if the next block is invalidated |
//! | `thp.random_read_ratio` | random reads a second, 2 MiB / 4 KiB TLB entries |
//! | `thp.pressure_ratio` | accesses under memory pressure, huge pages / none |
//! | `thp.kept_percent` | the share of resident memory that stays in huge pages meanwhile |
//! | `thp.gib.map`, `thp.gib.call` | faults and the call for 1 GiB, in pages of 2 MiB / 1 GiB |
//! | `thp.kvm.small_vs_huge.CASE` | the time to take 2 MiB from a guest on `/dev/kvm` |
//! | `thp.kvm.slots_growth_512.SIZE` | the same, 512 slots / 1 slot |
//!
//! Arms differ in the host's policy ([`HugePages`](lacuna::memory::HugePages)) or in the rmap walk
//! strategy, and in nothing else: the guest image and its command line are the same. In every arm
//! the guest maps its memory by 2 MiB pages (`huge=1`). With AArch64 guests the stage-2 tables have
//! the format of VMSAv8-64. The calls and the neighbour depend on the architecture by this format
//! alone; reads and pressure also depend on the guest's processor.
//!
//! Work on tables alone is measured by the benches of `engine/mmu`: `thp.range_vs_page.*` and
//! `thp.slots_growth_512` by `invalidate`, `thp.first_touch_*` by `fault`.

pub use call::first_look;

mod call;
mod guests;
mod kvm;
mod neighbour;
pub(crate) mod scene;

use crate::experiment::{LabError, LabResult, Options, skip_if_busy};
use crate::gib::{self, Step};
use crate::result::Report;
use crate::stats::Summary;
use std::time::{Duration, Instant};

/// Measures everything, in the order of the table above.
///
/// # Errors
/// The error of the first failed experiment. Results that this machine cannot measure are skipped.
pub fn run(options: &Options, report: &mut Report) -> LabResult {
    options.begin(guests::STEPS + 5);
    report.say(
        "thp: the host backs guest memory by 2 MiB pages where it can. The cost of invalidating a \
         range depends on the leaves that are mapped there, not on the length of the range. A \
         vCPU keeps its translations of the memory next to the range.",
    );
    if options.wants("call") {
        options.step("whole notifier calls")?;
        call::measure(options, report)?;
    }
    if options.wants("neighbour") {
        options.step("a vCPU next to a range that is invalidated")?;
        neighbour::measure(options, report)?;
    }
    if options.wants("reads") {
        options.step("random reads")?;
        guests::reads(options, report)?;
    }
    if options.wants("pressure") {
        guests::pressure(options, report)?;
    }
    if options.wants("gib") {
        options.step("pages of 1 GiB")?;
        gib::measure(options, report, "thp", &[Step::Map, Step::Call])?;
    }
    if options.wants_x86("kvm", kvm::ids(), report) {
        options.step("discards on /dev/kvm")?;
        let done = kvm::measure(options, report);
        skip_if_busy(report, kvm::ids(), done)?;
    }
    Ok(())
}

/// The separately measurable parts.
pub const PARTS: &[&str] = &["call", "neighbour", "reads", "pressure", "gib", "kvm"];

/// The longest time of a slice.
const SLICE: Duration = Duration::from_secs(60);

/// The medians of `calls` calls that count. A call that returns `None` does not.
fn medians<const N: usize>(
    calls: usize,
    mut call: impl FnMut() -> LabResult<Option<[f64; N]>>,
) -> LabResult<[f64; N]> {
    let deadline = Instant::now() + SLICE;
    let mut took = [const { Vec::new() }; N];
    while took[0].len() < calls {
        if Instant::now() > deadline {
            let text = format!("a slice of {calls} calls took more than {SLICE:?}");
            return Err(LabError::Busy(text));
        }
        let figures = call()?.into_iter().flatten();
        took.iter_mut()
            .zip(figures)
            .for_each(|(all, one)| all.push(one));
    }
    Ok(took.map(|took| Summary::of(&took).median))
}
