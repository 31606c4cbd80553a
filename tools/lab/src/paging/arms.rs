//! Pages a second: queues, exits, and exits with async faults.

use super::fixture::{Arm, Fixture, Share, Work, prefix};
use super::{SERIES, SOURCE};
use crate::experiment::{LabError, Options};
use crate::report::{Progress, align, short};
use crate::result::{Better, Measurement, Report};
use crate::stats::{Summary, paired, rounds};
use lacuna_soft::MemoryKind;

/// How many of the numbers of vCPUs in [`SERIES`] are measured, from the first on.
const COUNTS: usize = 5;

/// The number of steps that [`measure`] reports as progress.
pub const STEPS: u64 = 2 * COUNTS as u64 - 1;

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
    let mut table = vec![
        [
            "vCPUs",
            "1 reader",
            "2 readers",
            "a reader each",
            "a queue each",
            "exits",
            "with apf",
        ]
        .map(str::to_owned),
    ];
    for &(vcpus, without, with) in counts {
        progress.step(format!("missing pages, {vcpus} vCPUs, own shares"))?;
        let work = Work {
            vcpus,
            pages,
            share: Share::Own,
        };
        let arms = arms(vcpus);
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
    for &(vcpus, ..) in &counts[1..] {
        progress.step(format!("missing pages, {vcpus} vCPUs, the same share"))?;
        let share = Share::Same;
        let work = Work {
            vcpus,
            pages,
            share,
        };
        let arms = [Arm::Exits, Arm::Exits, Arm::Queue(1)];
        let rates = measure_arms(kind, work, &arms, options)?;
        told(kind, work, &arms, &rates)
            .into_iter()
            .for_each(|result| report.push(result));
    }
    report.detail(format!(
        "{}: pages a second, each vCPU its own share\n{}",
        prefix(kind),
        align(&table)
    ));
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
        let same = match work.share {
            Share::Own => "",
            Share::Same => "_same",
        };
        format!("{}.{measure}.{}vcpu{same}", prefix(kind), work.vcpus)
    };
    let against = |name: &str, queue: usize| {
        let ratio = paired(&rates[queue], &rates[EXITS]);
        let result = Measurement::new(id(name), "x", Better::Higher, ratio);
        let result = result
            .param("pages", work.pages)
            .param("queue", arms[queue].name());
        result.arm("null", paired(&rates[EXITS], &rates[NULL]))
    };
    let mut one = against("exit_vs_queue", ONE_READER);
    if kind == MemoryKind::Linux && work.share == Share::Own && work.vcpus <= 2 {
        one = one.bar(5.0);
    }
    for (arm, rates) in arms.iter().zip(rates).skip(NULL) {
        one = one.arm(&arm.name(), Summary::of(rates));
    }
    if work.share == Share::Same {
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
            vcpus: 4,
            pages: 64,
            share: Share::Own,
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
