//! Pages a second: queues, exits, and exits with async faults.
//!
//! On soft an exit is the return of a function. `.exitcost` charges every page what its exit costs
//! on hardware ([`crate::exit_cost`]), in both arms: a vCPU that sleeps in a queue has left the
//! guest too. An exit to the VMM costs more, because the thread also returns from the kernel.

use super::fixture::{Arm, Fixture, Share, Work, prefix, unavailable};
use super::wake_up::wake_up_us;
use super::{MOST_AT_ONCE, SERIES, SOURCE};
use crate::exit_cost::{self, EXIT_NS, VMM_EXIT_NS};
use crate::experiment::{LabError, Options};
use crate::first_look::{Found, Row};
use crate::report::{Progress, align, short};
use crate::result::{Better, Measurement, Report};
use crate::stats::{Rounds, Summary, paired, rounds};
use lacuna_machine::Vm;
use lacuna_soft::MemoryKind;
use std::thread;

/// The number of steps that [`measure`] reports as progress.
pub const STEPS: u64 = 2 * SERIES.len() as u64 - 1 + BATCHED.len() as u64;

/// Numbers of vCPUs for which runs of pages are measured.
const BATCHED: [usize; 2] = [1, 2];

/// The columns of the table.
const HEADS: [&str; 7] = [
    "vCPUs",
    "1 reader",
    "2 readers",
    "a reader each",
    "a queue each",
    "exits",
    "with apf",
];

pub const EXITS: usize = 0;
const NULL: usize = 1;
pub const ONE_READER: usize = 2;

/// The least ratios with each exit charged, for one vCPU and for two: the published ones, and five
/// for the pool, for which none was published.
const LINUX_BARS: [f64; 2] = [2.3, 2.5];
const POOL_BAR: f64 = 5.0;

/// Pages a second of each arm, and the wake-up time of an idle thread in the same rounds.
pub struct Rates {
    /// In the order of the arms.
    pub arms: Vec<Vec<f64>>,
    /// In microseconds; empty on a machine with one core.
    pub wake_up_us: Vec<f64>,
}

/// All arms for a number of vCPUs; the second is the null.
fn arms(vcpus: usize) -> Vec<Arm> {
    let mut readers = vec![1, 2, vcpus];
    readers.sort_unstable();
    readers.dedup();
    let mut arms = vec![Arm::Exits, Arm::Exits];
    arms.extend(readers.into_iter().map(Arm::Queue));
    arms.extend([Arm::QueueEach, Arm::ExitsTold]);
    arms
}

/// Measures `exit_vs_queue.*` and `exit_vs_best_queue.*`.
pub fn measure(
    kind: MemoryKind,
    options: &Options,
    report: &mut Report,
    progress: &Progress,
) -> Result<(), LabError> {
    let (pages, counts) = match options.quick {
        true => (2048, &SERIES[..2]),
        false => (8192, &SERIES[..]),
    };
    let plain = |vcpus| Work::new(options.arch, vcpus, pages);
    let mut table = vec![HEADS.map(str::to_owned)];
    let mut wakes = Vec::new();
    for &(vcpus, without, with) in counts {
        progress.step(format!("missing pages, {vcpus} vCPUs, own shares"))?;
        let (work, arms) = (plain(vcpus), arms(vcpus));
        let rates = measure_arms(kind, work, &arms, times(options))?;
        let found = results_of(kind, work, &arms, &rates);
        for result in found {
            report.push(result.reference(with / without, SOURCE));
        }
        table.push(row(vcpus, &arms, &rates.arms));
        wakes.extend(rates.wake_up_us);
    }
    push_wake_up(kind, &wakes, report);
    let mut against_one_reader = |words: &str, work: Work| {
        progress.step(format!("missing pages, {} vCPUs, {words}", work.vcpus))?;
        let arms = [Arm::Exits, Arm::Exits, Arm::Queue(1)];
        let rates = measure_arms(kind, work, &arms, times(options))?;
        let found = results_of(kind, work, &arms, &rates);
        found.into_iter().for_each(|result| report.push(result));
        Ok::<_, LabError>(())
    };
    for &(vcpus, ..) in &counts[1..] {
        let share = Share::Same;
        against_one_reader(
            "the same share",
            Work {
                share,
                ..plain(vcpus)
            },
        )?;
    }
    // The pool's queue asks for single pages.
    for &vcpus in BATCHED.iter().filter(|_| kind == MemoryKind::Linux) {
        let work = Work {
            pages: if options.quick { 8192 } else { 65536 },
            batch: MOST_AT_ONCE,
            ..plain(vcpus)
        };
        against_one_reader("512 at once", work)?;
    }
    report.detail(format!(
        "{}: pages a second, each vCPU its own share\n{}",
        prefix(kind),
        align(&table)
    ));
    Ok(())
}

/// Measures `paging.hugetlb.exit_vs_queue.*`: memory in huge pages, each provided as a whole.
pub fn measure_huge(
    options: &Options,
    report: &mut Report,
    progress: &Progress,
) -> Result<(), LabError> {
    let kind = MemoryKind::Hugetlbfs;
    for vcpus in BATCHED {
        progress.step(format!("missing huge pages, {vcpus} vCPUs"))?;
        let pages = if options.quick { 8192 } else { 65536 };
        let work = Work {
            batch: MOST_AT_ONCE,
            ..Work::new(options.arch, vcpus, pages)
        };
        if let Some(why) = unavailable(kind, work) {
            report.skip(format!("{}.exit_vs_queue.{vcpus}vcpu", prefix(kind)), why);
            continue;
        }
        let arms = [Arm::Exits, Arm::Exits, Arm::Queue(1)];
        let rates = measure_arms(kind, work, &arms, times(options))?;
        let found = results_of(kind, work, &arms, &rates);
        found.into_iter().for_each(|result| report.push(result));
    }
    Ok(())
}

fn measure_arms(
    kind: MemoryKind,
    work: Work,
    arms: &[Arm],
    times: impl Into<Rounds>,
) -> Result<Rates, LabError> {
    rates_of(&Fixture::new(kind, work)?, arms, times)
}

/// Measures `arms` in turns, with VMs of `fixture`.
pub fn rates_of<V: Vm<Error: Into<LabError>>>(
    fixture: &Fixture<V>,
    arms: &[Arm],
    times: impl Into<Rounds>,
) -> Result<Rates, LabError> {
    let wakes = usize::from(cores() > 1);
    // One more turn of each round wakes an idle thread: the cost of a queue depends on that time,
    // and the time drifts on a machine.
    let mut runs = rounds(arms.len() + wakes, times, |arm| match arms.get(arm) {
        Some(arm) => fixture.rate(*arm),
        None => wake_up_us(),
    })?;
    let wake_up_us = runs.split_off(arms.len()).into_iter().flatten().collect();
    Ok(Rates {
        arms: runs,
        wake_up_us,
    })
}

fn times(options: &Options) -> usize {
    if options.quick { 2 } else { 9 }
}

fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// `paging.wake_up_us`: it decides most of the cost of a queue.
fn push_wake_up(kind: MemoryKind, wakes: &[f64], report: &mut Report) {
    match wake_up(kind, wakes) {
        Some(result) => report.push(result),
        None => report.skip(wake_up_id(kind), "this machine has one core"),
    }
}

fn wake_up_id(kind: MemoryKind) -> String {
    format!("{}.wake_up_us", prefix(kind))
}

fn wake_up(kind: MemoryKind, wakes: &[f64]) -> Option<Measurement> {
    if wakes.is_empty() {
        return None;
    }
    let what = "from the wake-up call until a thread on an idle core runs";
    let result = Measurement::new(wake_up_id(kind), "us", Better::Lower, Summary::of(wakes));
    Some(result.param("what", what))
}

/// `rate` if each page had cost the exit of its arm: the exit takes time of a vCPU's thread, and at
/// most as many threads run as there are cores.
fn charged(rate: f64, arm: Arm, vcpus: usize) -> f64 {
    let exit_ns = match arm {
        Arm::Exits | Arm::ExitsTold => VMM_EXIT_NS,
        Arm::Queue(_) | Arm::QueueEach | Arm::Source => EXIT_NS,
    };
    1.0 / (1.0 / rate + exit_ns / 1e9 / vcpus.min(cores()) as f64)
}

/// The row of the first look: one vCPU, exits against the best queue, each exit charged. Linux
/// memory where this host has it.
///
/// # Errors
/// A VM could not be made, or its guest failed.
pub fn first_look(options: &Options, rounds: Rounds) -> Result<Found, LabError> {
    let work = Work::new(options.arch, 1, 2048);
    let kind = match unavailable(MemoryKind::Linux, work) {
        None => MemoryKind::Linux,
        Some(_) => MemoryKind::Budget,
    };
    let arms = [Arm::Exits, Arm::Exits, Arm::Queue(1), Arm::Queue(2)];
    let rates = measure_arms(kind, work, &arms, rounds)?;
    let best = best_queue(&arms, &rates.arms);
    let of = |arm: usize| exit_charged(&rates, &arms, arm, work.vcpus);
    let rate = |arm: usize| format!("{}/s", short(Summary::of(&of(arm)).median));
    let row = Row {
        system: "missing memory, 2023",
        what: "pages a second, exits charged; without, the best queue",
        without: rate(best),
        with: rate(EXITS),
        ratio: paired(&of(best), &of(EXITS)),
        null: paired(&of(NULL), &of(EXITS)),
        published: "2.3x (kvm list, 1 vCPU)",
    };
    let mut results = results_of(kind, work, &arms, &rates);
    results.retain(|result| result.id.contains("best"));
    results.extend(wake_up(kind, &rates.wake_up_us));
    Ok(Found { row, results })
}

/// The rates of an arm with its exits charged.
fn exit_charged(rates: &Rates, arms: &[Arm], arm: usize, vcpus: usize) -> Vec<f64> {
    let rates = rates.arms[arm].iter();
    rates.map(|&rate| charged(rate, arms[arm], vcpus)).collect()
}

/// Exits against arm number `queue`, with the rates of all arms.
pub fn against(id: String, work: Work, arms: &[Arm], rates: &Rates, queue: usize) -> Measurement {
    let of = |arm: usize| rates.arms[arm].clone();
    let result = compared(id, work, arms[queue], [EXITS, NULL, queue].map(of));
    let others = arms.iter().zip(&rates.arms).skip(NULL);
    others.fold(result, |result, (arm, rates)| {
        result.arm(&arm.name(), Summary::of(rates))
    })
}

/// The pages a second of `exits` over those of `queue`.
fn compared(id: String, work: Work, arm: Arm, [exits, null, queue]: [Vec<f64>; 3]) -> Measurement {
    Measurement::new(id, "x", Better::Higher, paired(&queue, &exits))
        .param("pages", work.pages)
        .param("at_once", work.batch)
        .param("queue", arm.name())
        .arm("null", paired(&exits, &null))
}

/// The results of one number of vCPUs.
fn results_of(kind: MemoryKind, work: Work, arms: &[Arm], rates: &Rates) -> Vec<Measurement> {
    let id = |measure: &str| {
        let kind_of = match (work.share, work.batch) {
            (Share::Same, _) => "_same",
            (Share::Own, 1) => "",
            // The id says it.
            (Share::Own, _) if kind == MemoryKind::Hugetlbfs => "",
            (Share::Own, _) => "_batch",
        };
        format!("{}.{measure}.{}vcpu{kind_of}", prefix(kind), work.vcpus)
    };
    let one = against(id("exit_vs_queue"), work, arms, rates, ONE_READER);
    if work.share != Share::Own || work.batch != 1 {
        return vec![one];
    }
    let best = best_queue(arms, &rates.arms);
    let result = |id: String, queue: usize, of: &dyn Fn(usize) -> Vec<f64>| {
        compared(id, work, arms[queue], [EXITS, NULL, queue].map(of))
    };
    let raw = |arm: usize| rates.arms[arm].clone();
    let of = |arm: usize| exit_charged(rates, arms, arm, work.vcpus);
    let with_cost = result(format!("{}.exitcost", id("exit_vs_best_queue")), best, &of)
        .simulated()
        .param("exit_ns", EXIT_NS)
        .param("vmm_exit_ns", VMM_EXIT_NS)
        .param("exit_source", exit_cost::SOURCE)
        .arm("exits_per_s", Summary::of(&of(EXITS)))
        .arm("queue_per_s", Summary::of(&of(best)));
    let with_cost = match rates.wake_up_us[..] {
        [] => with_cost,
        _ => with_cost.arm("wake_up_us", Summary::of(&rates.wake_up_us)),
    };
    let with_cost = bar(kind, work.vcpus)
        .into_iter()
        .fold(with_cost, Measurement::bar);
    vec![one, result(id("exit_vs_best_queue"), best, &raw), with_cost]
}

/// The least ratio with each exit charged.
fn bar(kind: MemoryKind, vcpus: usize) -> Option<f64> {
    match (kind, vcpus) {
        (MemoryKind::Budget, 1 | 2) => Some(POOL_BAR),
        (MemoryKind::Linux, 1 | 2) => Some(LINUX_BARS[vcpus - 1]),
        _ => None,
    }
}

/// The shared queue whose median is the highest.
fn best_queue(arms: &[Arm], rates: &[Vec<f64>]) -> usize {
    let median = |arm: &usize| Summary::of(&rates[*arm]).median;
    let queues = (0..arms.len()).filter(|&arm| matches!(arms[arm], Arm::Queue(_)));
    let best = queues.max_by(|a, b| median(a).total_cmp(&median(b)));
    best.expect("there is a queue")
}

fn row(vcpus: usize, arms: &[Arm], rates: &[Vec<f64>]) -> [String; 7] {
    let rate = |arm: Arm| {
        let found = arms.iter().position(|known| *known == arm);
        found.map_or("-".into(), |arm| short(Summary::of(&rates[arm]).median))
    };
    [
        vcpus.to_string(),
        rate(Arm::Queue(1)),
        rate(Arm::Queue(2)),
        rate(Arm::Queue(vcpus)),
        rate(Arm::QueueEach),
        rate(Arm::Exits),
        rate(Arm::ExitsTold),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use lacuna_machine::Arch;

    #[test]
    fn each_number_of_readers_is_one_arm() {
        assert_eq!(
            arms(1),
            [
                Arm::Exits,
                Arm::Exits,
                Arm::Queue(1),
                Arm::Queue(2),
                Arm::QueueEach,
                Arm::ExitsTold
            ]
        );
        assert_eq!(arms(8)[ONE_READER..5], [1, 2, 8].map(Arm::Queue));
    }

    #[test]
    fn exits_are_compared_with_one_reader_and_with_the_best() {
        let work = Work::new(Arch::X86_64, 4, 64);
        let arms = arms(4);
        let all: Vec<_> = [100.0, 100.0, 10.0, 25.0, 20.0, 90.0, 50.0]
            .map(|r| vec![r; 6])
            .into();
        let rates = |arms: Vec<Vec<f64>>| Rates {
            arms,
            wake_up_us: vec![20.0; 6],
        };
        let found = results_of(MemoryKind::Budget, work, &arms, &rates(all.clone()));
        let values: Vec<_> = found.iter().map(|r| (r.id.as_str(), r.value)).collect();
        assert_eq!(
            values[..2],
            [
                ("paging.pool.exit_vs_queue.4vcpu", 10.0),
                ("paging.pool.exit_vs_best_queue.4vcpu", 4.0)
            ]
        );
        assert_eq!(found[2].id, "paging.pool.exit_vs_best_queue.4vcpu.exitcost");
        assert!(found[2].simulated && found[2].value < 4.0);
        assert_eq!(found[1].params["queue"], "queue_2_readers");
        assert_eq!(found[0].arms.len(), 7, "{:?}", found[0].arms.keys());
        let cells = row(4, &arms, &all);
        assert_eq!(cells, ["4", "10", "25", "20", "90", "100", "50"]);
        let same = Work {
            share: Share::Same,
            ..work
        };
        let found = results_of(
            MemoryKind::Budget,
            same,
            &arms[..3],
            &rates(all[..3].to_vec()),
        );
        let ids: Vec<_> = found.iter().map(|r| r.id.as_str()).collect();
        assert_eq!(ids, ["paging.pool.exit_vs_queue.4vcpu_same"]);
    }

    /// Every page has an exit in both arms, and one to the VMM costs more.
    #[test]
    fn both_arms_are_charged_their_exits() {
        let fast = 1e9 / VMM_EXIT_NS;
        assert!((charged(fast, Arm::Exits, 1) / fast - 0.5).abs() < 1e-9);
        let slow = 1e9 / EXIT_NS;
        assert!((charged(slow, Arm::Queue(1), 1) / slow - 0.5).abs() < 1e-9);
        assert!(charged(slow, Arm::Exits, 1) < charged(slow, Arm::QueueEach, 1));
        assert_eq!(bar(MemoryKind::Linux, 1), Some(2.3));
        assert_eq!(bar(MemoryKind::Linux, 2), Some(2.5));
        assert_eq!(bar(MemoryKind::Budget, 2), Some(5.0));
        assert_eq!(bar(MemoryKind::Linux, 4), None);
    }
}
