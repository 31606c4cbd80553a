//! Pages a second: queues, exits, and exits with async faults.
//!
//! On soft an exit is the return of a function. `.exitcost` charges every page what its exit costs
//! on hardware ([`crate::exit_cost`]), in both arms: a vCPU that sleeps in a queue has left the
//! guest too. An exit to the VMM costs more, because the thread also returns from the kernel.

use super::wake_up::wake_up_us;
use super::{prefix, work};
use crate::demand_paging::{By, DemandPaging, Fixture, MOST_AT_ONCE, unavailable};
use crate::exit_cost::{self, EXIT_NS, VMM_EXIT_NS};
use crate::experiment::{LabError, LabResult, Options};
use crate::first_look::{Found, Row};
use crate::report::short;
use crate::result::{Better, Measurement, Report};
use crate::stats::{Rounds, Summary, paired, rounds};
use lacuna::memory::MemoryKind;
use lacuna::{Arch, Backend, Vm};
use std::thread;

/// Numbers of vCPUs, and thousand pages a second in the 2023 series: through one userfaultfd, and
/// by exits.
pub const SERIES: [(usize, f64, f64); 9] = [
    (1, 150.0, 340.0),
    (2, 191.0, 477.0),
    (4, 210.0, 809.0),
    (8, 155.0, 1239.0),
    (16, 130.0, 1595.0),
    (32, 108.0, 2299.0),
    (64, 86.0, 3482.0),
    (128, 62.0, 4134.0),
    (256, 36.0, 4012.0),
];
/// The measured rows of [`SERIES`].
const ROWS: usize = 5;
/// Where [`SERIES`] is from.
pub const SOURCE: &str = "KVM_CAP_MEM_FAULT_NOWAIT, kvm list, 2023-02-15; KVM, 256 cores";

/// The number of steps that [`measure`] and [`measure_huge`] report as progress.
pub const STEPS: u64 = 2 * ROWS as u64 - 1 + FEW.len() as u64;
/// The number of steps that [`measure_kvm`] reports.
pub const KVM_STEPS: u64 = 2 * FEW.len() as u64;

/// Numbers of vCPUs for which runs of pages, huge pages and `/dev/kvm` are measured.
const FEW: [usize; 2] = [1, 2];

const EXITS: usize = 0;
const NULL: usize = 1;
const ONE_READER: usize = 2;

/// The least ratios with each exit charged, for one vCPU and for two: the published ones, and five
/// for the pool, for which none was published.
const LINUX_BARS: [f64; 2] = [2.3, 2.5];
const POOL_BAR: f64 = 5.0;

/// `base`, whose pages are provided by `by`.
fn way(base: &DemandPaging, by: By) -> DemandPaging {
    let base = base.clone();
    DemandPaging { by, ..base }
}

fn queue(base: &DemandPaging, readers: usize) -> DemandPaging {
    DemandPaging {
        readers,
        ..way(base, By::Queue)
    }
}

fn queue_each(base: &DemandPaging) -> DemandPaging {
    DemandPaging {
        queue_each: true,
        ..way(base, By::Queue)
    }
}

/// Exits twice, for the null, and a queue with one reader.
fn against_one_reader(base: &DemandPaging) -> Vec<DemandPaging> {
    let exits = way(base, By::Exits);
    vec![exits.clone(), exits, queue(base, 1)]
}

/// All arms; the second is the null.
fn arms(base: &DemandPaging) -> Vec<DemandPaging> {
    let mut arms = against_one_reader(base);
    let mut more = vec![2, base.guest.vcpus];
    more.retain(|readers| *readers > 1);
    more.dedup();
    arms.extend(more.into_iter().map(|readers| queue(base, readers)));
    arms.extend([queue_each(base), way(base, By::Tokens)]);
    arms
}

/// Measures `exit_vs_queue.*` and `exit_vs_best_queue.*`.
pub fn measure(kind: MemoryKind, options: &Options, report: &mut Report) -> LabResult {
    let (pages, counts) = match options.quick {
        true => (2048, &SERIES[..2]),
        false => (8192, &SERIES[..ROWS]),
    };
    let (mut table, mut wakes) = (String::new(), Vec::new());
    for &(vcpus, without, with) in counts {
        options.step(format!("missing pages, {vcpus} vCPUs, own shares"))?;
        let base = work(options.arch, kind, vcpus, pages);
        let runs = Runs::measure(arms(&base), times(options))?;
        for result in runs.results() {
            report.push(result.reference(with / without, SOURCE));
        }
        table.push_str(&runs.row());
        wakes.extend(runs.wake_up_us);
    }
    let first = work(options.arch, kind, 1, pages);
    match wake_up(&first, &wakes) {
        Some(result) => report.push(result),
        None => report.skip(wake_up_id(&first), "this machine has one core"),
    }
    for &(vcpus, ..) in &counts[1..] {
        options.step(format!("missing pages, {vcpus} vCPUs, the same share"))?;
        let mut same = first.clone();
        (same.guest.vcpus, same.guest.overlap) = (vcpus, true);
        push_against(&same, times(options), report)?;
    }
    // Runs of the pool's pages were never measured.
    for &vcpus in FEW.iter().filter(|_| kind == MemoryKind::Linux) {
        options.step(format!("missing pages, {vcpus} vCPUs, 512 at once"))?;
        push_against(&batched(kind, vcpus, options), times(options), report)?;
    }
    report.detail(format!(
        "{}: pages a second, each vCPU its own share\n{table}",
        prefix(&first),
    ));
    Ok(())
}

/// Measures `paging.hugetlb.exit_vs_queue.*`: memory in huge pages, each provided as a whole.
pub fn measure_huge(options: &Options, report: &mut Report) -> LabResult {
    for vcpus in FEW {
        options.step(format!("missing huge pages, {vcpus} vCPUs"))?;
        let base = batched(MemoryKind::Hugetlbfs, vcpus, options);
        match unavailable(&base) {
            Some(why) => report.skip(id(&base, "exit_vs_queue"), why),
            None => push_against(&base, times(options), report)?,
        }
    }
    Ok(())
}

fn batched(kind: MemoryKind, vcpus: usize, options: &Options) -> DemandPaging {
    let pages = if options.quick { 8192 } else { 65536 };
    DemandPaging {
        batch: MOST_AT_ONCE,
        ..work(options.arch, kind, vcpus, pages)
    }
}

fn push_against(base: &DemandPaging, rounds: usize, report: &mut Report) -> LabResult {
    let runs = Runs::measure(against_one_reader(base), rounds)?;
    report.push(runs.against(id(base, "exit_vs_queue"), ONE_READER));
    Ok(())
}

fn times(options: &Options) -> usize {
    if options.quick { 2 } else { 9 }
}

/// The guests of `paging.kvm.*`: single pages, and runs of pages.
fn kvm_work(vcpus: usize, options: &Options) -> [DemandPaging; 2] {
    let pages = if options.quick { 512 } else { 8192 };
    let mut single = work(Arch::X86_64, MemoryKind::Linux, vcpus, pages);
    single.guest.backend = Backend::Kvm;
    let mut batch = single.clone();
    (batch.guest.bytes.0, batch.batch) = (8 * single.guest.bytes.0, MOST_AT_ONCE);
    [single, batch]
}

/// The ids of [`measure_kvm`].
pub fn kvm_ids(options: &Options) -> impl Iterator<Item = String> {
    FEW.into_iter().flat_map(|vcpus| {
        let [single, batch] = kvm_work(vcpus, options);
        let [queue, source] = ["exit_vs_queue", "exit_vs_source"].map(|of| id(&single, of));
        [queue, source, id(&batch, "exit_vs_queue")]
    })
}

/// Measures `paging.kvm.*`; skipped without a usable `/dev/kvm`.
pub fn measure_kvm(options: &Options, report: &mut Report) -> LabResult {
    if let Err(why) = lacuna::kvm::available() {
        kvm_ids(options).for_each(|id| report.skip(id, &why));
        return Ok(());
    }
    // A VM takes some tenths of a second to boot here.
    let rounds = if options.quick { 1 } else { 9 };
    for vcpus in FEW {
        let [base, batch] = kvm_work(vcpus, options);
        options.step(format!("/dev/kvm, missing pages, {vcpus} vCPUs"))?;
        let mut arms = against_one_reader(&base);
        arms.push(way(&base, By::Source));
        let source = arms.len() - 1;
        if vcpus > 1 {
            arms.push(queue(&base, 2));
        }
        let runs = Runs::measure(arms, rounds)?;
        for (other, arm) in [("exit_vs_queue", ONE_READER), ("exit_vs_source", source)] {
            report.push(runs.against(id(&base, other), arm));
        }
        report.say(format!("/dev/kvm, missing pages a second, {}", runs.row()));
        options.step(format!("/dev/kvm, {vcpus} vCPUs, 512 pages at once"))?;
        push_against(&batch, rounds, report)?;
    }
    Ok(())
}

fn id(work: &DemandPaging, measure: &str) -> String {
    let kind_of = match (work.guest.overlap, work.batch) {
        (true, _) => "_same",
        (false, 1) => "",
        // The id says it.
        (false, _) if work.guest.memory_kind == MemoryKind::Hugetlbfs => "",
        (false, _) => "_batch",
    };
    format!(
        "{}.{measure}.{}vcpu{kind_of}",
        prefix(work),
        work.guest.vcpus
    )
}

fn wake_up_id(work: &DemandPaging) -> String {
    format!("{}.wake_up_us", prefix(work))
}

/// `paging.wake_up_us`: it decides most of the cost of a queue. `None`: this machine has one core.
fn wake_up(work: &DemandPaging, wakes: &[f64]) -> Option<Measurement> {
    if wakes.is_empty() {
        return None;
    }
    let what = "from the wake-up call until a thread on an idle core runs";
    let result = Measurement::new(wake_up_id(work), "us", Better::Lower, Summary::of(wakes));
    Some(result.param("what", what))
}

fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// `rate` if each page had cost the exit of its arm: the exit takes time of a vCPU's thread, and at
/// most as many threads run as there are cores.
pub fn charged(rate: f64, arm: &DemandPaging) -> f64 {
    let exit_ns = match arm.by {
        By::Exits | By::Tokens => VMM_EXIT_NS,
        By::Queue | By::Source => EXIT_NS,
    };
    1.0 / (1.0 / rate + exit_ns / 1e9 / arm.guest.vcpus.min(cores()) as f64)
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
    arms: Vec<DemandPaging>,
    /// In the order of the arms.
    rates: Vec<Vec<f64>>,
    /// In microseconds; empty on a machine with one core.
    wake_up_us: Vec<f64>,
}

impl Runs {
    /// Measures `arms` in turns. The second is the null of the first.
    fn measure(arms: Vec<DemandPaging>, times: impl Into<Rounds>) -> LabResult<Self> {
        match arms[EXITS].guest.backend {
            Backend::Soft => Self::of(&Fixture::soft(&arms[EXITS])?, arms, times),
            Backend::Kvm => Self::of(&Fixture::kvm(&arms[EXITS]), arms, times),
        }
    }

    fn of<V: Vm<Error: Into<LabError>>>(
        fixture: &Fixture<V>,
        arms: Vec<DemandPaging>,
        times: impl Into<Rounds>,
    ) -> LabResult<Self> {
        let wakes = usize::from(cores() > 1);
        // One more turn of each round wakes an idle thread: the cost of a queue depends on that
        // time, and the time drifts on a machine.
        let mut rates = rounds(arms.len() + wakes, times, |arm| match arms.get(arm) {
            Some(arm) => fixture.rate(arm),
            None => wake_up_us(),
        })?;
        Ok(Self {
            wake_up_us: rates.split_off(arms.len()).into_iter().flatten().collect(),
            arms,
            rates,
        })
    }

    /// The median of arm number `arm`, for people.
    fn rate(&self, arm: usize) -> String {
        short(Summary::of(&self.rates[arm]).median)
    }

    fn raw(&self, arm: usize) -> Vec<f64> {
        self.rates[arm].clone()
    }

    /// The rates of arm number `arm` with its exits charged.
    fn charged(&self, arm: usize) -> Vec<f64> {
        let charged = |&rate| charged(rate, &self.arms[arm]);
        self.rates[arm].iter().map(charged).collect()
    }

    /// Exits against arm number `queue`, by `rates` of each.
    fn compared(&self, id: String, queue: usize, rates: impl Fn(usize) -> Vec<f64>) -> Measurement {
        let [exits, null, of_queue] = [EXITS, NULL, queue].map(rates);
        Measurement::new(id, "x", Better::Higher, paired(&of_queue, &exits))
            .param("pages", self.arms[queue].pages())
            .param("at_once", self.arms[queue].batch)
            .param("queue", self.arms[queue].way())
            .arm("null", paired(&exits, &null))
    }

    /// Exits against arm number `queue`, with the rates of all arms.
    fn against(&self, id: String, queue: usize) -> Measurement {
        let others = self.arms.iter().zip(&self.rates).skip(NULL);
        let result = self.compared(id, queue, |arm| self.raw(arm));
        others.fold(result, |result, (arm, rates)| {
            result.arm(&arm.way(), Summary::of(rates))
        })
    }

    /// The shared queue whose median is the highest.
    fn best_queue(&self) -> usize {
        let median = |arm: &usize| Summary::of(&self.rates[*arm]).median;
        let is_shared = |arm: &DemandPaging| arm.by == By::Queue && !arm.queue_each;
        let queues = (0..self.arms.len()).filter(|&arm| is_shared(&self.arms[arm]));
        let best = queues.max_by(|a, b| median(a).total_cmp(&median(b)));
        best.expect("there is a queue")
    }

    /// The results of one number of vCPUs: against one reader, and against the best queue.
    fn results(&self) -> [Measurement; 3] {
        let base = &self.arms[EXITS];
        let id = |measure| id(base, measure);
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
        if let Some(bar) = bar(base.guest.memory_kind, base.guest.vcpus) {
            with_cost = with_cost.bar(bar);
        }
        [
            self.against(id("exit_vs_queue"), ONE_READER),
            self.compared(id("exit_vs_best_queue"), best, |arm| self.raw(arm)),
            with_cost,
        ]
    }

    /// A row of a table for people: the rates of all arms.
    fn row(&self) -> String {
        let rates = (NULL..self.arms.len()).map(|arm| (self.arms[arm].way(), self.rate(arm)));
        let rates: Vec<_> = rates.map(|(way, rate)| format!("{way} {rate}")).collect();
        format!(
            "{} vCPUs: {}\n",
            self.arms[EXITS].guest.vcpus,
            rates.join(", ")
        )
    }
}

/// The row of the first look: one vCPU, exits against the best queue, each exit charged. Linux
/// memory where this host has it.
pub fn first_look(options: &Options, rounds: Rounds) -> LabResult<Found> {
    let mut base = work(options.arch, MemoryKind::Linux, 1, 2048);
    if unavailable(&base).is_some() {
        base.guest.memory_kind = MemoryKind::Budget;
    }
    let mut arms = against_one_reader(&base);
    arms.push(queue(&base, 2));
    let runs = Runs::measure(arms, rounds)?;
    let best = runs.best_queue();
    let rate = |arm| format!("{}/s", short(Summary::of(&runs.charged(arm)).median));
    let row = Row {
        system: "missing memory, 2023",
        what: "pages a second, exits charged; without, the best queue",
        without: rate(best),
        with: rate(EXITS),
        ratio: paired(&runs.charged(best), &runs.charged(EXITS)),
        null: paired(&runs.charged(EXITS), &runs.charged(NULL)),
        published: "2.3x (kvm list, 1 vCPU)",
    };
    let [_, best, with_cost] = runs.results();
    let mut results = vec![best, with_cost];
    results.extend(wake_up(&base, &runs.wake_up_us));
    Ok(Found { row, results })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base(kind: MemoryKind, vcpus: usize) -> DemandPaging {
        work(Arch::X86_64, kind, vcpus, 64)
    }

    #[test]
    fn each_number_of_readers_is_one_arm() {
        let names = |vcpus| {
            let arms = arms(&base(MemoryKind::Linux, vcpus)).into_iter();
            arms.map(|arm| arm.way()).collect::<Vec<_>>()
        };
        let [one, two, eight] = [1, 2, 8].map(|readers| format!("queue_{readers}_readers"));
        let some = ["exits", "exits", &one, &two, "queue_each", "exits_apf"];
        assert_eq!(names(1), some);
        assert_eq!(names(2), some);
        assert_eq!(names(8)[ONE_READER..5], [one, two, eight]);
    }

    #[test]
    fn exits_are_compared_with_one_reader_and_with_the_best() {
        let rates = [100.0, 100.0, 10.0, 25.0, 20.0, 90.0, 50.0];
        let runs = Runs {
            arms: arms(&base(MemoryKind::Budget, 4)),
            rates: rates.map(|rate| vec![rate; 6]).into(),
            wake_up_us: vec![20.0; 6],
        };
        let [one, best, with_cost] = runs.results();
        assert_eq!(one.id, "paging.pool.exit_vs_queue.4vcpu");
        assert_eq!(best.id, "paging.pool.exit_vs_best_queue.4vcpu");
        assert_eq!(with_cost.id, format!("{}.exitcost", best.id));
        assert!((one.value - 10.0).abs() < 1e-9 && (best.value - 4.0).abs() < 1e-9);
        assert!(with_cost.simulated && with_cost.value < 4.0);
        assert_eq!(best.params["queue"], "queue_2_readers");
        assert_eq!(one.arms.len(), 7, "{:?}", one.arms.keys());
        let row = "4 vCPUs: exits 100, queue_1_readers 10, queue_2_readers 25, queue_4_readers 20, \
                   queue_each 90, exits_apf 50\n";
        assert_eq!(runs.row(), row);
        let mut same = base(MemoryKind::Linux, 4);
        same.guest.overlap = true;
        assert_eq!(
            id(&same, "exit_vs_queue"),
            "paging.exit_vs_queue.4vcpu_same"
        );
    }

    /// Every page has an exit in both arms, and one to the VMM costs more.
    #[test]
    fn both_arms_are_charged_their_exits() {
        let fast = 1e9 / VMM_EXIT_NS;
        let base = base(MemoryKind::Linux, 1);
        let [exits, one, each] = [way(&base, By::Exits), queue(&base, 1), queue_each(&base)];
        assert!((charged(fast, &exits) / fast - 0.5).abs() < 1e-9);
        let slow = 1e9 / EXIT_NS;
        assert!((charged(slow, &one) / slow - 0.5).abs() < 1e-9);
        assert!(charged(slow, &exits) < charged(slow, &each));
        let bars = [1, 2, 4].map(|vcpus| bar(MemoryKind::Linux, vcpus));
        assert_eq!(bars, [Some(2.3), Some(2.5), None]);
        assert_eq!(bar(MemoryKind::Budget, 2), Some(5.0));
    }
}
