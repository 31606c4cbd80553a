//! Pages a second: queues, exits, and exits with async faults.
//!
//! On soft an exit is the return of a function. `.exitcost` charges every page what its exit costs
//! on hardware ([`crate::exit_cost`]), in both arms: a vCPU that sleeps in a queue has left the
//! guest too. An exit to the VMM costs more, because the thread also returns from the kernel.

use super::fixture::{Arm, Fixture, Share, Work, prefix, unavailable};
use super::wake_up::wake_up_us;
use super::{MOST_AT_ONCE, SERIES, SOURCE};
use crate::exit_cost::{self, EXIT_NS, VMM_EXIT_NS};
use crate::experiment::{LabError, LabResult, Options};
use crate::first_look::{Found, Row};
use crate::report::{Progress, align, short};
use crate::result::{Better, Measurement, Report};
use crate::stats::{Rounds, Summary, paired, rounds};
use lacuna::Vm;
use lacuna::memory::MemoryKind;
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
const AGAINST_ONE_READER: [Arm; 3] = [Arm::Exits, Arm::Exits, Arm::Queue(1)];

/// The least ratios with each exit charged, for one vCPU and for two: the published ones, and five
/// for the pool, for which none was published.
const LINUX_BARS: [f64; 2] = [2.3, 2.5];
const POOL_BAR: f64 = 5.0;

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
) -> LabResult {
    let (pages, counts) = match options.quick {
        true => (2048, &SERIES[..2]),
        false => (8192, &SERIES[..]),
    };
    let plain = |vcpus| Work::new(options.arch, vcpus, pages);
    let mut table = vec![HEADS.map(str::to_owned)];
    let mut wakes = Vec::new();
    for &(vcpus, without, with) in counts {
        progress.step(format!("missing pages, {vcpus} vCPUs, own shares"))?;
        let fixture = Fixture::new(kind, plain(vcpus))?;
        let runs = Runs::measure(&fixture, &arms(vcpus), times(options))?;
        for result in runs.results(kind) {
            report.push(result.reference(with / without, SOURCE));
        }
        table.push(runs.row());
        wakes.extend(runs.wake_up_us);
    }
    match wake_up(kind, &wakes) {
        Some(result) => report.push(result),
        None => report.skip(wake_up_id(kind), "this machine has one core"),
    }
    for &(vcpus, ..) in &counts[1..] {
        progress.step(format!("missing pages, {vcpus} vCPUs, the same share"))?;
        let share = Share::Same;
        let work = Work {
            share,
            ..plain(vcpus)
        };
        against_one_reader(kind, work, options, report)?;
    }
    // The pool's queue asks for single pages.
    for &vcpus in BATCHED.iter().filter(|_| kind == MemoryKind::Linux) {
        progress.step(format!("missing pages, {vcpus} vCPUs, 512 at once"))?;
        against_one_reader(kind, batched(vcpus, options), options, report)?;
    }
    report.detail(format!(
        "{}: pages a second, each vCPU its own share\n{}",
        prefix(kind),
        align(&table)
    ));
    Ok(())
}

/// Measures `paging.hugetlb.exit_vs_queue.*`: memory in huge pages, each provided as a whole.
pub fn measure_huge(options: &Options, report: &mut Report, progress: &Progress) -> LabResult {
    let kind = MemoryKind::Hugetlbfs;
    for vcpus in BATCHED {
        progress.step(format!("missing huge pages, {vcpus} vCPUs"))?;
        let work = batched(vcpus, options);
        match unavailable(kind, work) {
            Some(why) => report.skip(id(kind, work, "exit_vs_queue"), why),
            None => against_one_reader(kind, work, options, report)?,
        }
    }
    Ok(())
}

fn batched(vcpus: usize, options: &Options) -> Work {
    let pages = if options.quick { 8192 } else { 65536 };
    Work {
        batch: MOST_AT_ONCE,
        ..Work::new(options.arch, vcpus, pages)
    }
}

fn against_one_reader(
    kind: MemoryKind,
    work: Work,
    options: &Options,
    report: &mut Report,
) -> LabResult {
    let fixture = Fixture::new(kind, work)?;
    let runs = Runs::measure(&fixture, &AGAINST_ONE_READER, times(options))?;
    report.push(runs.against(id(kind, work, "exit_vs_queue"), ONE_READER));
    Ok(())
}

fn times(options: &Options) -> usize {
    if options.quick { 2 } else { 9 }
}

fn id(kind: MemoryKind, work: Work, measure: &str) -> String {
    let kind_of = match (work.share, work.batch) {
        (Share::Same, _) => "_same",
        (Share::Own, 1) => "",
        // The id says it.
        (Share::Own, _) if kind == MemoryKind::Hugetlbfs => "",
        (Share::Own, _) => "_batch",
    };
    format!("{}.{measure}.{}vcpu{kind_of}", prefix(kind), work.vcpus)
}

fn wake_up_id(kind: MemoryKind) -> String {
    format!("{}.wake_up_us", prefix(kind))
}

/// `paging.wake_up_us`: it decides most of the cost of a queue. `None`: this machine has one core.
fn wake_up(kind: MemoryKind, wakes: &[f64]) -> Option<Measurement> {
    if wakes.is_empty() {
        return None;
    }
    let what = "from the wake-up call until a thread on an idle core runs";
    let result = Measurement::new(wake_up_id(kind), "us", Better::Lower, Summary::of(wakes));
    Some(result.param("what", what))
}

fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
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

/// The least ratio with each exit charged.
fn bar(kind: MemoryKind, vcpus: usize) -> Option<f64> {
    match (kind, vcpus) {
        (MemoryKind::Budget, 1 | 2) => Some(POOL_BAR),
        (MemoryKind::Linux, 1 | 2) => Some(LINUX_BARS[vcpus - 1]),
        _ => None,
    }
}

/// Pages a second of each arm, and the wake-up time of an idle thread in the same rounds.
pub struct Runs {
    work: Work,
    arms: Vec<Arm>,
    /// In the order of the arms.
    rates: Vec<Vec<f64>>,
    /// In microseconds; empty on a machine with one core.
    wake_up_us: Vec<f64>,
}

impl Runs {
    /// Measures `arms` in turns, with VMs of `fixture`. The second is the null of the first.
    pub fn measure<V: Vm<Error: Into<LabError>>>(
        fixture: &Fixture<V>,
        arms: &[Arm],
        times: impl Into<Rounds>,
    ) -> LabResult<Self> {
        let wakes = usize::from(cores() > 1);
        // One more turn of each round wakes an idle thread: the cost of a queue depends on that
        // time, and the time drifts on a machine.
        let mut rates = rounds(arms.len() + wakes, times, |arm| match arms.get(arm) {
            Some(arm) => fixture.rate(*arm),
            None => wake_up_us(),
        })?;
        Ok(Self {
            work: fixture.work,
            arms: arms.to_vec(),
            wake_up_us: rates.split_off(arms.len()).into_iter().flatten().collect(),
            rates,
        })
    }

    /// The median of arm number `arm`, for people.
    pub fn rate(&self, arm: usize) -> String {
        short(Summary::of(&self.rates[arm]).median)
    }

    fn raw(&self, arm: usize) -> Vec<f64> {
        self.rates[arm].clone()
    }

    /// The rates of arm number `arm` with its exits charged.
    fn charged(&self, arm: usize) -> Vec<f64> {
        let charged = |&rate| charged(rate, self.arms[arm], self.work.vcpus);
        self.rates[arm].iter().map(charged).collect()
    }

    /// Exits against arm number `queue`, by `rates` of each.
    fn compared(&self, id: String, queue: usize, rates: impl Fn(usize) -> Vec<f64>) -> Measurement {
        let [exits, null, of_queue] = [EXITS, NULL, queue].map(rates);
        Measurement::new(id, "x", Better::Higher, paired(&of_queue, &exits))
            .param("pages", self.work.pages)
            .param("at_once", self.work.batch)
            .param("queue", self.arms[queue].name())
            .arm("null", paired(&exits, &null))
    }

    /// Exits against arm number `queue`, with the rates of all arms.
    pub fn against(&self, id: String, queue: usize) -> Measurement {
        let others = self.arms.iter().zip(&self.rates).skip(NULL);
        let result = self.compared(id, queue, |arm| self.raw(arm));
        others.fold(result, |result, (arm, rates)| {
            result.arm(&arm.name(), Summary::of(rates))
        })
    }

    /// The shared queue whose median is the highest.
    fn best_queue(&self) -> usize {
        let median = |arm: &usize| Summary::of(&self.rates[*arm]).median;
        let queues = (0..self.arms.len()).filter(|&arm| matches!(self.arms[arm], Arm::Queue(_)));
        let best = queues.max_by(|a, b| median(a).total_cmp(&median(b)));
        best.expect("there is a queue")
    }

    /// The results of one number of vCPUs: against one reader, and against the best queue.
    fn results(&self, kind: MemoryKind) -> [Measurement; 3] {
        let id = |measure| id(kind, self.work, measure);
        let best = self.best_queue();
        let of = |arm| Summary::of(&self.charged(arm));
        let with_cost = format!("{}.exitcost", id("exit_vs_best_queue"));
        let mut with_cost = self
            .compared(with_cost, best, |arm| self.charged(arm))
            .simulated()
            .param("exit_ns", EXIT_NS)
            .param("vmm_exit_ns", VMM_EXIT_NS)
            .param("exit_source", exit_cost::SOURCE)
            .arm("exits_per_s", of(EXITS))
            .arm("queue_per_s", of(best));
        if !self.wake_up_us.is_empty() {
            with_cost = with_cost.arm("wake_up_us", Summary::of(&self.wake_up_us));
        }
        if let Some(bar) = bar(kind, self.work.vcpus) {
            with_cost = with_cost.bar(bar);
        }
        [
            self.against(id("exit_vs_queue"), ONE_READER),
            self.compared(id("exit_vs_best_queue"), best, |arm| self.raw(arm)),
            with_cost,
        ]
    }

    fn row(&self) -> [String; 7] {
        let vcpus = self.work.vcpus;
        let rate = |arm: Arm| {
            let found = self.arms.iter().position(|known| *known == arm);
            found.map_or("-".into(), |arm| self.rate(arm))
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
}

/// The row of the first look: one vCPU, exits against the best queue, each exit charged. Linux
/// memory where this host has it.
pub fn first_look(options: &Options, rounds: Rounds) -> LabResult<Found> {
    let work = Work::new(options.arch, 1, 2048);
    let kind = match unavailable(MemoryKind::Linux, work) {
        None => MemoryKind::Linux,
        Some(_) => MemoryKind::Budget,
    };
    let arms = [Arm::Exits, Arm::Exits, Arm::Queue(1), Arm::Queue(2)];
    let runs = Runs::measure(&Fixture::new(kind, work)?, &arms, rounds)?;
    let best = runs.best_queue();
    let rate = |arm| format!("{}/s", short(Summary::of(&runs.charged(arm)).median));
    let row = Row {
        system: "missing memory, 2023",
        what: "pages a second, exits charged; without, the best queue",
        without: rate(best),
        with: rate(EXITS),
        ratio: paired(&runs.charged(best), &runs.charged(EXITS)),
        null: paired(&runs.charged(NULL), &runs.charged(EXITS)),
        published: "2.3x (kvm list, 1 vCPU)",
    };
    let [_, best, with_cost] = runs.results(kind);
    let mut results = vec![best, with_cost];
    results.extend(wake_up(kind, &runs.wake_up_us));
    Ok(Found { row, results })
}

#[cfg(test)]
mod tests {
    use super::*;
    use lacuna::Arch;

    #[test]
    fn each_number_of_readers_is_one_arm() {
        let [exits, queue] = [Arm::Exits, Arm::Queue(1)];
        let others = [Arm::Queue(2), Arm::QueueEach, Arm::ExitsTold];
        assert_eq!(arms(1), [&[exits, exits, queue], &others[..]].concat());
        assert_eq!(arms(8)[ONE_READER..5], [1, 2, 8].map(Arm::Queue));
    }

    #[test]
    fn exits_are_compared_with_one_reader_and_with_the_best() {
        let rates = [100.0, 100.0, 10.0, 25.0, 20.0, 90.0, 50.0];
        let runs = Runs {
            work: Work::new(Arch::X86_64, 4, 64),
            arms: arms(4),
            rates: rates.map(|rate| vec![rate; 6]).into(),
            wake_up_us: vec![20.0; 6],
        };
        let [one, best, with_cost] = runs.results(MemoryKind::Budget);
        assert_eq!(one.id, "paging.pool.exit_vs_queue.4vcpu");
        assert_eq!(best.id, "paging.pool.exit_vs_best_queue.4vcpu");
        assert_eq!(with_cost.id, format!("{}.exitcost", best.id));
        assert!((one.value - 10.0).abs() < 1e-9 && (best.value - 4.0).abs() < 1e-9);
        assert!(with_cost.simulated && with_cost.value < 4.0);
        assert_eq!(best.params["queue"], "queue_2_readers");
        assert_eq!(one.arms.len(), 7, "{:?}", one.arms.keys());
        assert_eq!(runs.row(), ["4", "10", "25", "20", "90", "100", "50"]);
        let share = Share::Same;
        let same = Work { share, ..runs.work };
        let same = id(MemoryKind::Linux, same, "exit_vs_queue");
        assert_eq!(same, "paging.exit_vs_queue.4vcpu_same");
    }

    /// Every page has an exit in both arms, and one to the VMM costs more.
    #[test]
    fn both_arms_are_charged_their_exits() {
        let fast = 1e9 / VMM_EXIT_NS;
        assert!((charged(fast, Arm::Exits, 1) / fast - 0.5).abs() < 1e-9);
        let slow = 1e9 / EXIT_NS;
        assert!((charged(slow, Arm::Queue(1), 1) / slow - 0.5).abs() < 1e-9);
        assert!(charged(slow, Arm::Exits, 1) < charged(slow, Arm::QueueEach, 1));
        let bars = [1, 2, 4].map(|vcpus| bar(MemoryKind::Linux, vcpus));
        assert_eq!(bars, [Some(2.3), Some(2.5), None]);
        assert_eq!(bar(MemoryKind::Budget, 2), Some(5.0));
    }
}
