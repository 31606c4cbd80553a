//! Pages a second: queues, exits, and exits with async faults.

use super::fixture::{Arm, Fixture, Share, Work, prefix, unavailable_for};
use super::{MOST_AT_ONCE, SERIES, SOURCE};
use crate::experiment::{LabError, Options};
use crate::report::{Progress, align, short};
use crate::result::{Better, Measurement, Report};
use crate::stats::{Summary, paired, rounds};
use lacuna_soft::MemoryKind;

/// How many of the numbers of vCPUs in [`SERIES`] are measured, from the first on.
const COUNTS: usize = 5;

/// The number of steps that [`measure`] reports as progress.
pub const STEPS: u64 = 2 * COUNTS as u64 - 1 + BATCHED.len() as u64;

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

const EXITS: usize = 0;
const NULL: usize = 1;
const ONE_READER: usize = 2;

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
        false => (8192, &SERIES[..COUNTS]),
    };
    let plain = |vcpus| Work {
        arch: options.arch,
        vcpus,
        pages,
        share: Share::Own,
        batch: 1,
    };
    let mut table = vec![HEADS.map(str::to_owned)];
    for &(vcpus, without, with) in counts {
        progress.step(format!("missing pages, {vcpus} vCPUs, own shares"))?;
        let (work, arms) = (plain(vcpus), arms(vcpus));
        let rates = measure_arms(kind, work, &arms, options)?;
        let found = told(kind, work, &arms, &rates);
        for mut result in found {
            if result.id.contains("vs_queue") {
                result = result.reference(with / without, SOURCE);
            }
            report.push(result);
        }
        table.push(row(vcpus, &arms, &rates));
    }
    let mut against_one_reader = |words: &str, work: Work| {
        progress.step(format!("missing pages, {} vCPUs, {words}", work.vcpus))?;
        let arms = [Arm::Exits, Arm::Exits, Arm::Queue(1)];
        let rates = measure_arms(kind, work, &arms, options)?;
        let found = told(kind, work, &arms, &rates);
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
        let work = Work {
            arch: options.arch,
            vcpus,
            pages: if options.quick { 8192 } else { 65536 },
            share: Share::Own,
            batch: MOST_AT_ONCE,
        };
        if let Some(why) = unavailable_for(kind, work) {
            report.skip(format!("{}.exit_vs_queue.{vcpus}vcpu", prefix(kind)), why);
            continue;
        }
        let arms = [Arm::Exits, Arm::Exits, Arm::Queue(1)];
        let rates = measure_arms(kind, work, &arms, options)?;
        let found = told(kind, work, &arms, &rates);
        found.into_iter().for_each(|result| report.push(result));
    }
    Ok(())
}

fn measure_arms(
    kind: MemoryKind,
    work: Work,
    arms: &[Arm],
    options: &Options,
) -> Result<Vec<Vec<f64>>, LabError> {
    let fixture = Fixture::new(kind, work)?;
    let times = if options.quick { 2 } else { 9 };
    rounds(arms.len(), times, |arm| fixture.rate(arms[arm]))
}

/// The results of one number of vCPUs.
fn told(kind: MemoryKind, work: Work, arms: &[Arm], rates: &[Vec<f64>]) -> Vec<Measurement> {
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
    let against = |name: &str, queue: usize| {
        let ratio = paired(&rates[queue], &rates[EXITS]);
        let result = Measurement::new(id(name), "x", Better::Higher, ratio);
        let result = result
            .param("pages", work.pages)
            .param("at_once", work.batch)
            .param("queue", arms[queue].name());
        result.arm("null", paired(&rates[EXITS], &rates[NULL]))
    };
    let mut one = against("exit_vs_queue", ONE_READER);
    let single = work.share == Share::Own && work.batch == 1;
    if kind == MemoryKind::Linux && single && work.vcpus <= 2 {
        one = one.bar(5.0);
    }
    for (arm, rates) in arms.iter().zip(rates).skip(NULL) {
        one = one.arm(&arm.name(), Summary::of(rates));
    }
    if !single {
        return vec![one];
    }
    vec![one, against("exit_vs_best_queue", best_queue(arms, rates))]
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
        let work = Work {
            arch: Arch::X86_64,
            vcpus: 4,
            pages: 64,
            share: Share::Own,
            batch: 1,
        };
        let arms = arms(4);
        let rates: Vec<_> = [100.0, 100.0, 10.0, 25.0, 20.0, 90.0, 50.0]
            .map(|r| vec![r; 6])
            .into();
        let found = told(MemoryKind::Budget, work, &arms, &rates);
        let values: Vec<_> = found.iter().map(|r| (r.id.as_str(), r.value)).collect();
        assert_eq!(
            values,
            [
                ("paging.pool.exit_vs_queue.4vcpu", 10.0),
                ("paging.pool.exit_vs_best_queue.4vcpu", 4.0)
            ]
        );
        assert_eq!(found[1].params["queue"], "queue_2_readers");
        assert_eq!(found[0].arms.len(), 7, "{:?}", found[0].arms.keys());
        let cells = row(4, &arms, &rates);
        assert_eq!(cells, ["4", "10", "25", "20", "90", "100", "50"]);
        let same = Work {
            share: Share::Same,
            ..work
        };
        let found = told(MemoryKind::Budget, same, &arms[..3], &rates[..3]);
        let ids: Vec<_> = found.iter().map(|r| r.id.as_str()).collect();
        assert_eq!(ids, ["paging.pool.exit_vs_queue.4vcpu_same"]);
    }
}
