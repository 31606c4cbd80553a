//! The experiment of the KVM Forum talk of 2010: 4 vCPUs, 2 GiB of guest memory in a memory group
//! of 512 MiB, 4 processes that count and 4 that touch random pages, for one minute. The guest's
//! counters at the end are the result.

use super::{Arms, Size, grouped, in_turns};
use crate::experiment::{LabResult, Options, cores};
use crate::fixture::builder;
use crate::report::align;
use crate::result::{Better, Measurement, Report};
use crate::session::{image, on};
use crate::stats::Summary;
use lacuna::memory::{LatencySetting, Swap};
use lacuna::soft::VmBuilder;
use lacuna::{Apf, Arch};
use lacuna_guest::status::{Kind, Status};
use serde_json::json;
use std::time::Duration;

pub const ID: &str = "letters.talk.worker_ratio";
/// One step for each run.
pub const STEPS: u64 = 2 * RUNS as u64;

/// The runs of each arm.
const RUNS: usize = 2;
const VCPUS: usize = 4;
/// What the talk's workers counted, without and with async page faults.
const PUBLISHED: [[u64; VCPUS]; 2] = [
    [
        30_619_912_622,
        33_951_339_266,
        31_577_780_093,
        33_603_607_972,
    ],
    [
        63_972_141_051,
        65_149_033_299,
        66_301_967_246,
        63_423_000_989,
    ],
];
/// The bar of `apf.worker_ratio`.
const BAR: f64 = 1.95;
/// The added time of a swap transfer: about a disk's.
const LATENCY: Duration = Duration::from_millis(1);

/// The longest time until all processes have begun.
const PREPARE: Duration = Duration::from_secs(300);

/// One minute of the guest.
struct Run {
    /// Steps of each worker.
    workers: Vec<u64>,
    /// Steps of all faulters: accessed pages.
    faulters: u64,
}

impl Run {
    fn total(&self) -> u64 {
        self.workers.iter().sum()
    }
}

/// The talk's memory and resident memory in MiB.
const MIB: [u64; 2] = [2048, 512];

/// `letters.talk.worker_ratio`.
pub fn measure(options: &Options, report: &mut Report) -> LabResult {
    let cores = cores();
    let size = Size::of(options, MIB, 64);
    let time = size.time;
    report.say(format!(
        "letters.talk: {VCPUS} vCPUs, {size}; {VCPUS} processes count and {VCPUS} touch random \
         pages, half of them to write, for {time:?} a run. Each run has a VM of its own. Its guest \
         is offered async page faults, or not. Different from the talk: our own guest kernel and \
         processor, so the counters are lower; swap is a file whose transfers take {} ms more; the \
         time begins when all memory has been touched.",
        LATENCY.as_millis(),
    ));
    let expected = with_free_waits(cores);
    if cores < VCPUS {
        report.say(format!(
            "{VCPUS} vCPUs share {cores} cores here. A vCPU that waits for a page leaves its core \
             to another one, so workers without async page faults get more than half of the cores: \
             the ratio would be {expected:.2} if a wait took no processor time."
        ));
    }
    let runs = in_turns(RUNS, |_, apf| {
        options.step(format!("talk: async page faults {apf:?}, {time:?}"))?;
        run(options, size, apf)
    })?;
    report.detail(table(&runs));
    let ratios: Vec<f64> = runs[0]
        .iter()
        .zip(&runs[1])
        .map(|(off, on)| on.total() as f64 / off.total() as f64)
        .collect();
    let counts = |runs: &[Run]| {
        let run = |run: &Run| json!({"workers": run.workers, "faulters": run.faulters});
        runs.iter().map(run).collect::<Vec<_>>()
    };
    let published = PUBLISHED.map(|arm| arm.iter().sum::<u64>() as f64);
    let result = Measurement::new(ID, "x", Better::Higher, Summary::of(&ratios))
        .reference(
            published[1] / published[0],
            "KVM Forum 2010, the sums of 4 workers",
        )
        .param("vcpus", VCPUS)
        .param("cores", cores)
        .param("with_free_waits", expected)
        .arm("off", counts(&runs[0]))
        .arm("on", counts(&runs[1]));
    let mut result = size.with_params(result);
    if cores >= VCPUS && !options.quick && options.scale == 1 {
        // Two pairs of runs have no 95 % interval.
        result = result.undecided(BAR);
    }
    report.push(result);
    Ok(())
}

fn run(options: &Options, size: Size, apf: Apf) -> LabResult<Run> {
    let [memory, resident] = size.memory;
    let builder = VmBuilder {
        apf,
        swap: Swap::File(options.swap_dir.clone()),
        latency: LatencySetting::new(LATENCY),
        command_line: format!(
            "workers={VCPUS} faulters={VCPUS} populate=1 seconds=1000000 slice_us=4000 tick_us=1000"
        ),
        ..builder(memory, resident, VCPUS)
    };
    on(&builder, &image(Arch::X86_64, "bm")?, |session| {
        let guest = &session.guest;
        let counters = |status: &Status| {
            let of = |kind| {
                let threads = status.threads.iter();
                let threads = threads.filter(move |thread| thread.kind == kind);
                threads.map(|thread| thread.counter).collect::<Vec<_>>()
            };
            [Kind::Worker, Kind::Faulter].map(of)
        };
        // A process has its kind from its first instructions on.
        guest.prepared()?;
        let before = guest.run_until(PREPARE, |status| {
            let counters = counters(status);
            let all = counters.iter().all(|kind| kind.len() == VCPUS);
            all.then_some(counters)
        })?;
        guest.run_for(size.time)?;
        let after = counters(&guest.status()?);
        let steps = |kind: usize| {
            let pairs = after[kind].iter().zip(&before[kind]);
            pairs.map(|(after, before)| after - before)
        };
        Ok(Run {
            workers: steps(0).collect(),
            faulters: steps(1).sum(),
        })
    })
}

/// The ratio where the vCPUs have `cores` cores, if waits and faults took no processor time.
/// Without async page faults a worker then has half of its vCPU's time, and nothing else needs a
/// core.
fn with_free_waits(cores: usize) -> f64 {
    let busy = |vcpus: usize| vcpus.min(cores) as f64;
    let all = 2_usize.pow(VCPUS as u32);
    let without: f64 = (0..all).map(|who| busy(who.count_ones() as usize)).sum();
    busy(VCPUS) * all as f64 / without
}

/// The talk's layout: each worker's counter and the sum, with the published ones.
fn table(runs: &Arms<Run>) -> String {
    let header = [
        "",
        "talk, without",
        "with",
        "ours, without",
        "with",
        "without",
        "with",
    ];
    let columns = [&runs[0][0], &runs[1][0], &runs[0][1], &runs[1][1]];
    let mut rows = vec![header.map(str::to_owned)];
    let mut row = |name: String, published: Option<[u64; 2]>, ours: [u64; 4]| {
        let [a, b] = published.map_or_else(Default::default, |published| published.map(grouped));
        let [c, d, e, f] = ours.map(grouped);
        rows.push([name, a, b, c, d, e, f]);
    };
    (0..VCPUS).for_each(|worker| {
        row(
            format!("worker {worker}"),
            Some(PUBLISHED.map(|arm| arm[worker])),
            columns.map(|run| run.workers[worker]),
        );
    });
    let published = PUBLISHED.map(|arm| arm.iter().sum());
    row("total".into(), Some(published), columns.map(Run::total));
    row(
        "pages touched".into(),
        None,
        columns.map(|run| run.faulters),
    );
    align(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::needs_guests;
    use lacuna_skip::test;

    #[test]
    fn the_expected_ratio_depends_on_the_cores() {
        assert_eq!(with_free_waits(4), 2.0);
        assert_eq!(with_free_waits(16), 2.0);
        assert!((with_free_waits(2) - 2.0 / 1.625).abs() < 1e-9);
        assert!((with_free_waits(1) - 16.0 / 15.0).abs() < 1e-9);
    }

    #[test]
    fn all_counters_are_in_the_table() {
        needs_guests();
        let report = super::super::tests::quick("talk");
        let table = &report.details[0];
        assert!(table.contains("129 752 639 953"), "{table}");
        let [result] = &report.results[..] else {
            panic!("{:?}", report.results);
        };
        for arm in ["off", "on"] {
            let runs = result.arms[arm].as_array().expect("runs");
            for run in runs {
                let workers = run["workers"].as_array().expect("counters");
                assert_eq!(workers.len(), VCPUS);
                assert!(run["faulters"].as_u64() > Some(0), "{run}");
            }
        }
    }
}
