//! The cost of a dirtied page, independent of any rate: iterations of `lacuna test dirty-log` with
//! one vCPU ([`crate::dirty_log`]). There is a VM for each arm, and a turn is one iteration.
//!
//! The clock covers the vCPU's thread inside `Vcpu::run`. The time of the arm without logging is
//! subtracted. The guest maps 4 KiB pages and loads CR3 before each sweep. So every write walks, in
//! every arm, and the difference is the cost of detection.
//!
//! `.refill` is the whole cost of a dirtied page: CR3 is not loaded, and only a harvest's flush
//! causes walks. So logging arms also pay for the TLB's refill. `.large` has four times as many
//! pages as the TLB has entries, so most writes miss the TLB anyway.

use super::churn::{Counted, DIRTIED, HARVESTS, counted, exits};
use super::one_vcpu;
use super::score::{SETS, Set};
use crate::dirty_log::{DirtyTest, Harvested, Recorder};
use crate::exit_cost::EXIT_NS;
use crate::experiment::{LabError, Options};
use crate::first_look::{Found, Row};
use crate::report::figure;
use crate::result::{Better, Measurement, Report};
use crate::stats::{Rounds, Summary, across_shifts, paired};
use crate::sweeps::Sweep;
use crate::sweeps::program::Variant;
use crate::turns::{round, shifts};
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
pub fn measure(options: &Options, report: &mut Report) -> Result<(), LabError> {
    let amount = match options.quick {
        true => (Rounds::Count(1), ROUND / 8),
        false => (Rounds::Count(16), ROUND),
    };
    for (suffix, delivery) in [("", Recorder::Bitmap), ("_ring", Recorder::Ring)] {
        let costs = |work| costs(&ARMS, amount, work, delivery);
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
pub fn first_look(_: &Options, rounds: Rounds) -> Result<Found, LabError> {
    let costs = costs(&LOOK_ARMS, (rounds, ROUND / 8), REFILL, Recorder::Bitmap)?;
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

/// Measures `arms` in turns of one iteration, with a VM for each, in so many rounds with so many
/// writes of an arm. The rounds are shared among all assignments of VMs to arms.
fn costs(
    arms: &[Arm],
    (rounds, writes): (Rounds, u64),
    work: Work,
    delivery: Recorder,
) -> Result<Costs, LabError> {
    // The first assignment finds the number of rounds; all others have as many.
    let mut rounds = rounds.split(arms.len());
    let mut counted = 0;
    let pages = work.0;
    let sweeps = (writes / pages).max(2);
    let vms = arms.iter().map(|_| vm(work, delivery));
    let mut tests = vms.collect::<Result<Vec<_>, _>>()?;
    let mut runs = vec![[const { Vec::new() }; 3]; arms.len()];
    for vms in shifts(arms.len()) {
        for (arm, vm) in arms.iter().zip(&vms) {
            tests[*vm].watch(arm.1)?;
            // The arm before may have left write-protected pages.
            tests[*vm].iterate(WRITES, &mut Harvested::default())?;
        }
        counted = rounds.repeat(|| {
            let found = one_round(&mut tests, arms, &vms, sweeps)?;
            for (all, one) in runs.iter_mut().flatten().zip(found.into_iter().flatten()) {
                all.push(one);
            }
            Ok(())
        })?;
        rounds = Rounds::Count(counted);
    }
    let none_ns = runs[NONE][0].clone();
    let above = |[ns, exits, dirtied]: &[Vec<f64>; 3]| {
        let raw = |run: usize| (ns[run] - none_ns[run]) * pages as f64 / dirtied[run];
        let charged = |run: usize| raw(run) + exits[run] * EXIT_NS / dirtied[run];
        let all = 0..ns.len();
        let [raw, charged] = [
            all.clone().map(raw).collect(),
            all.map(charged).collect::<Vec<_>>(),
        ];
        [raw, charged].map(|ns| across_shifts(&ns, counted))
    };
    Ok(Costs {
        pages,
        ns: runs.iter().map(above).collect(),
        none_ns: across_shifts(&none_ns, counted),
    })
}

/// A VM whose frames are warm.
fn vm((pages, reloads): Work, delivery: Recorder) -> Result<DirtyTest<Vm>, LabError> {
    let variant = Variant {
        reloads,
        ..Variant::default()
    };
    let mut test = DirtyTest::soft(&one_vcpu(pages, delivery), variant)?;
    // The first sweep allocates the frames, the second warms them.
    test.sweeps.sweep(WRITES)?;
    test.sweeps.sweep(WRITES)?;
    Ok(test)
}

/// For each arm: nanoseconds for each page of its median sweep, exits in a sweep, and pages dirtied
/// in a sweep.
fn one_round(
    tests: &mut [DirtyTest<Vm>],
    arms: &[Arm],
    vms: &[usize],
    sweeps: u64,
) -> Result<Vec<[f64; 3]>, LabError> {
    let counts = |test: &DirtyTest<Vm>| counted(&test.sweeps.vm.dirty_stats());
    let before: Vec<_> = vms.iter().map(|vm| counts(&tests[*vm])).collect();
    let mut times = vec![Vec::new(); vms.len()];
    let mut log = vec![Harvested::default(); vms.len()];
    round(vms.len(), sweeps as usize / 2, |arm, _| {
        let swept = tests[vms[arm]].iterate(WRITES, &mut log[arm])?;
        times[arm].push(swept.cpu_ns as f64 / swept.written as f64);
        Ok::<_, LabError>(())
    })?;
    let found = (0..vms.len()).map(|arm| {
        let (test, each) = (&tests[vms[arm]], times[arm].len() as f64);
        let now = counts(test);
        let mut counted: Counted = std::array::from_fn(|i| now[i] - before[arm][i]);
        (counted[DIRTIED], counted[HARVESTS]) = (log[arm].pages, log[arm].count);
        let exits = arms[arm].1.map_or(0, |how| exits(&counted, how, 1));
        let dirtied = match arms[arm].1 {
            Some(_) => log[arm].pages as f64 / each,
            None => test.sweeps.area.pages() as f64,
        };
        [
            Summary::of(&times[arm]).median,
            exits as f64 / each,
            dirtied,
        ]
    });
    Ok(found.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sweep writes each page once and has the exits of its detection.
    #[test]
    fn a_sweep_writes_every_page_once() {
        for delivery in [Recorder::Bitmap, Recorder::Ring] {
            let mut tests = [vm(ALL, delivery).unwrap()];
            let mut round = |watch| {
                tests[0].watch(watch).unwrap();
                let warm = tests[0].iterate(WRITES, &mut Harvested::default());
                assert_eq!(warm.unwrap().written, 2048);
                let found = one_round(&mut tests, &[("", watch)], &[0], 4).unwrap();
                (found[0], tests[0].sweeps.vm.dirty_stats())
            };
            let ([_, exits, dirtied], _) = round(None);
            assert_eq!((exits, dirtied), (0.0, 2048.0));
            let ([ns, exits, dirtied], _) = round(Some(Detection::WriteProtect));
            assert_eq!(dirtied, 2048.0);
            // The pages, and some page tables in which walks set A and D bits.
            assert!(ns > 0.0 && (2049.0..2110.0).contains(&exits), "{exits}");
            let ([_, exits, logged], before) = round(Some(Detection::Pml));
            assert_eq!(logged, 2048.0);
            assert!((2.0 + 4.0..10.0).contains(&exits), "{exits}");
            assert_eq!(round(None).1, before, "nothing is detected any more");
        }
    }
}
