//! The cost of a dirtied page, independent of any rate: iterations of `lacuna test dirty-log` with
//! one vCPU ([`crate::dirty_log`]). The arms take turns in one VM, on the same frames.
//!
//! The clock covers the vCPU's thread inside `Vcpu::run`. The time of the arm without logging is
//! subtracted. The guest flushes its TLB before each sweep, and an x86-64 guest maps 4 KiB pages.
//! So every write walks, in every arm, and the difference is the cost of detection.
//!
//! `.refill` is the whole cost of a dirtied page: the guest flushes nothing, and only a harvest's
//! flush causes walks. So logging arms also pay for the TLB's refill. `.large` has four times as
//! many pages as the TLB has entries, so most writes miss the TLB anyway.

use super::churn::{Counted, DIRTIED, HARVESTS, counted, exits};
use super::one_vcpu;
use super::score::{SETS, Set};
use crate::dirty_log::{DirtyTest, Harvested};
use crate::exit_cost::EXIT_NS;
use crate::experiment::{LabError, LabResult, Options};
use crate::first_look::{Found, Row};
use crate::options::Recorder;
use crate::report::figure;
use crate::result::{Better, Measurement, Report};
use crate::stats::{Rounds, Summary, measures, paired};
use crate::sweeps::Sweep;
use crate::sweeps::program::Variant;
use lacuna::Arch;
use lacuna::dirty::{Detection, DetectionChoice as _};
use lacuna::soft::Vm;

/// Writes every page, in an order without neighbours.
const WRITES: Sweep = Sweep {
    random: true,
    ..Sweep::POPULATE
};

/// The number of pages, and whether all writes walk, or those after a harvest's flush.
type Work = (u64, bool);
const ALL: Work = (2048, true);
const REFILL: Work = (2048, false);
const LARGE: Work = (16384, true);

/// An arm: its name, and what detects writes if slots log.
type Arm = (&'static str, Option<Detection>);

/// The arms; the second is the null.
const ARMS: [Arm; 4] = [
    ("none", None),
    ("null", None),
    ("wp", Some(Detection::WriteProtect)),
    ("pml", Some(Detection::Pml)),
];
const NONE: usize = 0;
const NULL: usize = 1;
const WP: usize = 2;
const PML: usize = 3;
/// The arms of the first look, where the null is write protection once more.
const LOOK_ARMS: [Arm; 4] = [ARMS[NONE], ("wp_again", ARMS[WP].1), ARMS[WP], ARMS[PML]];

/// Figures as measured, and with exits charged.
const RAW: usize = 0;
const CHARGED: usize = 1;

/// The costs of all arms.
struct Costs {
    pages: u64,
    /// For each arm, set and round: nanoseconds of a dirtied page, less the nanoseconds without
    /// logging.
    ns: Vec<[Vec<f64>; 2]>,
    none_ns: Vec<f64>,
}

/// `pml.ns_per_dirty_page` and `pml.cost_ratio`.
pub fn measure(options: &Options, report: &mut Report) -> LabResult {
    let amount = match options.quick {
        true => (Rounds::Count(1), ROUND / 8),
        false => (Rounds::Count(32), ROUND),
    };
    for (suffix, delivery) in [("", Recorder::Bitmap), ("_ring", Recorder::Ring)] {
        let costs = |work| costs(options.arch, &ARMS, amount, work, delivery);
        let all = costs(ALL)?;
        record(report, suffix, &SETS[RAW], RAW, &all);
        record(report, suffix, &SETS[CHARGED], CHARGED, &all);
        record(report, suffix, &Set::raw("refill"), RAW, &costs(REFILL)?);
        record(report, suffix, &Set::raw("large"), RAW, &costs(LARGE)?);
    }
    Ok(())
}

/// The results of `set`, whose figures have the index `at`.
fn record(report: &mut Report, suffix: &str, set: &Set, at: usize, costs: &Costs) {
    let of = |arm: usize| Summary::of(&costs.ns[arm][at]);
    for arm in [WP, PML] {
        let id = format!("pml.ns_per_dirty_page.{}{suffix}.{}", ARMS[arm].0, set.name);
        let result = Measurement::new(id, "ns", Better::Lower, of(arm))
            .param("pages", costs.pages)
            .arm("null_ns", of(NULL))
            .arm("write_without_logging_ns", Summary::of(&costs.none_ns));
        report.push(set.marked(result));
    }
    if suffix.is_empty() {
        let result = cost_ratio(set, at, costs);
        let has_bar = SETS.iter().any(|of| of.name == set.name);
        report.push(if has_bar { result.bar(3.0) } else { result });
    }
}

/// A dirtied page, write protection / PML.
fn cost_ratio(set: &Set, at: usize, costs: &Costs) -> Measurement {
    let of = |arm: usize| &costs.ns[arm][at];
    let id = format!("pml.cost_ratio.{}", set.name);
    let result = Measurement::new(id, "x", Better::Higher, paired(of(PML), of(WP)))
        .param("pages", costs.pages)
        .arm("wp_ns", Summary::of(of(WP)))
        .arm("pml_ns", Summary::of(of(PML)));
    set.marked(result)
}

/// The row of the first look: the costs of write protection and of PML, with the refill of the TLB
/// and without exits.
pub fn first_look(options: &Options, rounds: Rounds) -> LabResult<Found> {
    let amount = (rounds, ROUND / 8);
    let costs = costs(options.arch, &LOOK_ARMS, amount, REFILL, Recorder::Bitmap)?;
    let of = |arm: usize| &costs.ns[arm][RAW];
    let ns = |arm: usize| format!("{} ns", figure(Summary::of(of(arm)).median));
    let row = Row {
        system: "page-modification logging, 2015",
        what: "CPU time of a dirtied page, no exit charged; without, write protection",
        without: ns(WP),
        with: ns(PML),
        ratio: paired(of(PML), of(WP)),
        null: paired(of(NULL), of(WP)),
        published: "2.1x of the score lost (KVM series)",
    };
    let results = vec![cost_ratio(&Set::raw("refill"), RAW, &costs)];
    Ok(Found { row, results })
}

/// Writes of an arm in a round.
const ROUND: u64 = 1 << 18;

/// Measures `arms` in so many rounds with so many writes of an arm.
fn costs(
    arch: Arch,
    arms: &[Arm],
    (rounds, writes): (Rounds, u64),
    work: Work,
    delivery: Recorder,
) -> LabResult<Costs> {
    let pages = work.0;
    // A round has two slices of each arm.
    let sweeps = (writes / pages / 2).max(1);
    let mut test = vm(arch, work, delivery)?;
    let runs = measures(arms.len(), rounds, |arm| {
        slice(&mut test, arms[arm].1, sweeps)
    })?;
    let none_ns = runs[NONE][0].clone();
    let above = |[ns, exits]: &[Vec<f64>; 2]| {
        let raw = ns.iter().zip(&none_ns).map(|(ns, none)| ns - none);
        let charges = exits.iter().map(|exits| exits * EXIT_NS / pages as f64);
        let charged = raw.clone().zip(charges).map(|(raw, charge)| raw + charge);
        [raw.collect(), charged.collect()]
    };
    Ok(Costs {
        pages,
        ns: runs.iter().map(above).collect(),
        none_ns,
    })
}

/// A VM whose frames are warm.
fn vm(arch: Arch, (pages, flushes): Work, delivery: Recorder) -> LabResult<DirtyTest<Vm>> {
    let variant = Variant {
        flushes,
        ..Variant::default()
    };
    let mut test = DirtyTest::soft(&one_vcpu(arch, pages, delivery), variant)?;
    // The first sweep allocates the frames, the second warms them.
    test.sweeps.sweep(WRITES)?;
    test.sweeps.sweep(WRITES)?;
    Ok(test)
}

/// Nanoseconds for each page of the median sweep, and exits in a sweep.
fn slice(test: &mut DirtyTest<Vm>, watch: Option<Detection>, sweeps: u64) -> LabResult<[f64; 2]> {
    test.watch(watch)?;
    // The arm before may have left write-protected pages.
    test.iterate(WRITES, &mut Harvested::default())?;
    let counts = |test: &DirtyTest<Vm>| counted(&test.sweeps.vm.dirty_stats());
    let (before, mut log, mut times) = (counts(test), Harvested::default(), Vec::new());
    let pages = test.sweeps.area.pages();
    for _ in 0..sweeps {
        let swept = test.iterate(WRITES, &mut log)?;
        times.push(swept.cpu_ns as f64 / pages as f64);
    }
    let now = counts(test);
    let mut counted: Counted = std::array::from_fn(|i| now[i] - before[i]);
    (counted[DIRTIED], counted[HARVESTS]) = (log.pages, log.count);
    let exits = watch.map_or(0, |how| exits(&counted, how, 1));
    if watch.is_some() && log.pages != sweeps * pages {
        let text = format!(
            "{sweeps} sweeps of {pages} pages dirtied {} pages",
            log.pages
        );
        return Err(LabError::Guest(text));
    }
    Ok([Summary::of(&times).median, exits as f64 / sweeps as f64])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sweep writes each page once and has the exits of its detection.
    #[test]
    fn a_sweep_writes_every_page_once() {
        for (arch, delivery) in [
            (Arch::X86_64, Recorder::Bitmap),
            (Arch::X86_64, Recorder::Ring),
            (Arch::Arm64, Recorder::Bitmap),
        ] {
            let mut test = vm(arch, ALL, delivery).unwrap();
            let mut slice = |watch| {
                let found = slice(&mut test, watch, 8).unwrap();
                (found, test.sweeps.vm.dirty_stats())
            };
            assert_eq!(slice(None).0[1], 0.0);
            let ([ns, exits], _) = slice(Some(Detection::WriteProtect));
            // The pages, and some page tables in which walks set A and D bits.
            assert!(ns > 0.0 && (2049.0..2110.0).contains(&exits), "{exits}");
            let ([_, exits], before) = slice(Some(Detection::Pml));
            assert!((2.0 + 4.0..10.0).contains(&exits), "{exits}");
            assert_eq!(slice(None).1, before, "nothing is detected any more");
        }
    }
}
