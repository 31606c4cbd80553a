//! A computing process beside faulting processes: the speed of each in each arm.

use super::arms::{Arm, OnMissing, Rate, Runs, Scene};
use super::push::Pace;
use super::{about, prefix, with_params};
use crate::experiment::{LabError, Options, skip_if_busy};
use crate::report::Progress;
use crate::result::{Better, Measurement, Report};
use crate::stats::Summary;
use lacuna_guest::status::Kind;
use lacuna_soft::{Apf, MemoryKind};
use std::time::Duration;

/// The peer's distances.
const DISTANCES: [Distance; 3] = [
    Distance {
        id: "100us",
        latency: Duration::from_micros(100),
    },
    Distance {
        id: "1ms",
        latency: Duration::from_millis(1),
    },
    Distance {
        id: "5ms",
        latency: Duration::from_millis(5),
    },
];

/// The peer's distance, and its word in ids.
#[derive(Clone, Copy, Debug)]
struct Distance {
    id: &'static str,
    latency: Duration,
}

/// The number of steps that [`measure`] reports as progress.
pub const STEPS: u64 = DISTANCES.len() as u64 + 1;

/// Pushed pages a second in all arms: few against the memory, so that nearly all pages that a
/// faulter touches are missing.
const PUSH: u64 = 1000;

/// The worker alone. Its loss in the other arms is due to faults.
const ALONE: Arm = Arm {
    paused: &[Kind::Faulter],
    ..Arm::new("alone", OnMissing::Wait, Apf::Off)
};
const NEITHER: Arm = Arm::new("neither", OnMissing::Wait, Apf::Off);
const EXITS: Arm = Arm::new("exits", OnMissing::Exit, Apf::Off);
/// [`EXITS`] once more: the null.
const NULL: Arm = Arm::new("null", OnMissing::Exit, Apf::Off);
const ASYNC: Arm = Arm::new("async", OnMissing::Wait, Apf::On);
const BOTH: Arm = Arm::new("both", OnMissing::Exit, Apf::On);

const ARMS: [Arm; 6] = [EXITS, NULL, NEITHER, ASYNC, BOTH, ALONE];
const CROWD: [Arm; 3] = [EXITS, NULL, BOTH];

/// The faulters of `crowd_ratio`.
const MANY: usize = 4;

/// A result of each distance: its name in ids, its unit and its bar.
struct Measure {
    name: &'static str,
    unit: &'static str,
    bar: Option<f64>,
}

const WORKER: Measure = Measure {
    name: "worker_ratio",
    unit: "x",
    bar: Some(1.8),
};
const MEMORY: Measure = Measure {
    name: "memory_ratio",
    unit: "x",
    bar: Some(1.5),
};
const PAGES: Measure = Measure {
    name: "pages_kept_percent",
    unit: "%",
    bar: Some(90.0),
};
const SHARE: Measure = Measure {
    name: "worker_kept_percent",
    unit: "%",
    bar: Some(90.0),
};
const CROWDED: Measure = Measure {
    name: "crowd_ratio",
    unit: "x",
    bar: None,
};

/// The distance with bars.
const WITH_BARS: &str = "1ms";

fn scene(kind: MemoryKind, distance: Distance, faulters: usize, options: &Options) -> Scene {
    Scene {
        arch: options.arch,
        kind,
        memory_mib: 256,
        processes: [1, faulters],
        latency: distance.latency,
        push: Pace::Rate(PUSH),
        window: 64,
        slice: Duration::from_millis(if options.quick { 60 } else { 120 }),
        settle: Duration::from_millis(30),
    }
}

fn id(kind: MemoryKind, measure: &Measure, distance: Distance) -> String {
    format!("{}.{}.{}", prefix(kind), measure.name, distance.id)
}

/// Measures all results of a kind of memory.
pub fn measure(
    kind: MemoryKind,
    options: &Options,
    report: &mut Report,
    progress: &Progress,
) -> Result<(), LabError> {
    let distances = match options.quick {
        true => &DISTANCES[1..2],
        false => &DISTANCES[..],
    };
    for &distance in distances {
        let title = format!("{}, a peer {} away", about(kind), distance.id);
        progress.step(format!("one faulter: {title}"))?;
        let ids = [WORKER, MEMORY, PAGES, SHARE].map(|measure| id(kind, &measure, distance));
        let done = one_faulter(kind, distance, &title, options, report);
        skip_if_busy(report, ids, done)?;
    }
    let distance = DISTANCES[1];
    let title = format!("{}, a peer {} away", about(kind), distance.id);
    progress.step(format!("{MANY} faulters: {title}"))?;
    let done = four_faulters(kind, distance, &title, options, report);
    skip_if_busy(report, [id(kind, &CROWDED, distance)], done)
}

fn one_faulter(
    kind: MemoryKind,
    distance: Distance,
    title: &str,
    options: &Options,
    report: &mut Report,
) -> Result<(), LabError> {
    let scene = scene(kind, distance, 1, options);
    let runs = scene.measure(&ARMS, if options.quick { 2 } else { 15 })?;
    report.detail(runs.table(title));
    // Compute all results before the first report: on a busy machine all are skipped.
    let results = results(kind, distance, &scene, &runs)?;
    let [alone, exits, both] = [ALONE, EXITS, BOTH].map(|arm| runs.rate(&arm, Rate::Workers));
    let percent = |rate: Summary| 100.0 * rate.median / alone.median;
    report.say(format!(
        "{title}: the worker has {:.0} % of its speed alone with exits, and {:.0} % with both.",
        percent(exits),
        percent(both),
    ));
    results.into_iter().for_each(|result| report.push(result));
    Ok(())
}

/// The results of one faulter.
fn results(
    kind: MemoryKind,
    distance: Distance,
    scene: &Scene,
    runs: &Runs,
) -> Result<[Measurement; 4], LabError> {
    let result = |measure: &Measure, (base, rate): (&Arm, Rate), arms: &[Arm]| {
        let scale = if measure.unit == "%" { 100.0 } else { 1.0 };
        let ratio = runs.ratio(base, &BOTH, rate)?.scaled(scale);
        let found = Measurement::new(
            id(kind, measure, distance),
            measure.unit,
            Better::Higher,
            ratio,
        );
        let mut found = with_params(found, scene);
        if let (Some(bar), WITH_BARS) = (measure.bar, distance.id) {
            found = found.bar(bar);
        }
        for arm in arms {
            found = found.arm(arm.name, runs.arm(arm, rate));
        }
        Ok::<_, LabError>(found.arm("null", runs.ratio(&EXITS, &NULL, rate)?))
    };
    let arms = [ALONE, NEITHER, EXITS, ASYNC, BOTH];
    Ok([
        result(&WORKER, (&EXITS, Rate::Workers), &arms)?,
        result(&MEMORY, (&EXITS, Rate::Faulters), &arms[1..])?,
        result(&PAGES, (&EXITS, Rate::Demanded), &arms[1..])?,
        result(&SHARE, (&ASYNC, Rate::Workers), &arms)?,
    ])
}

/// Several faulters: with async faults, each has a page in flight.
fn four_faulters(
    kind: MemoryKind,
    distance: Distance,
    title: &str,
    options: &Options,
    report: &mut Report,
) -> Result<(), LabError> {
    let scene = scene(kind, distance, MANY, options);
    let runs = scene.measure(&CROWD, if options.quick { 2 } else { 9 })?;
    let rate = Rate::Faulters;
    let ratio = runs.ratio(&EXITS, &BOTH, rate)?;
    let id = id(kind, &CROWDED, distance);
    let found = Measurement::new(id, CROWDED.unit, Better::Higher, ratio);
    let found = with_params(found, &scene)
        .arm("exits", runs.arm(&EXITS, rate))
        .arm("both", runs.arm(&BOTH, rate))
        .arm("null", runs.ratio(&EXITS, &NULL, rate)?);
    report.detail(runs.table(&format!("{MANY} faulters, {title}")));
    report.push(found);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{eventually, needs_guests};
    use crate::report::Verbosity;
    use lacuna_skip::test;

    /// Every arm runs: with exits or without, notified or not, a faulter gets pages and the worker
    /// computes; alone, no page is demanded for long.
    fn every_arm_runs(kind: MemoryKind) {
        needs_guests();
        if let Some(why) = super::super::unavailable(kind) {
            lacuna_skip::skip_test(why.to_string());
        }
        let options = Options {
            arch: lacuna_machine::Arch::X86_64,
            quick: true,
            lacuna: "lacuna".into(),
            swap_dir: std::env::temp_dir(),
            verbosity: Verbosity::Quiet,
            parts: Vec::new(),
        };
        let mut scene = scene(kind, DISTANCES[1], 2, &options);
        scene.memory_mib = 48;
        scene.slice = Duration::from_millis(150);
        // What each arm has still to show: that the rate is more than 0, or that it is 0.
        let mut unseen = vec![(ALONE, Rate::Workers, true), (ALONE, Rate::Faulters, false)];
        for arm in [EXITS, NULL, NEITHER, ASYNC, BOTH] {
            let rates = [Rate::Workers, Rate::Faulters, Rate::Demanded, Rate::Pushed];
            unseen.extend(rates.map(|rate| (arm, rate, true)));
        }
        eventually(|| {
            let runs = scene.measure(&ARMS, 1).unwrap();
            unseen.retain(|(arm, rate, some)| (runs.rate(arm, *rate).median > 0.0) != *some);
            match unseen.is_empty() {
                true => Ok(()),
                false => Err(format!("(arm, rate, whether more than 0): {unseen:?}")),
            }
        });
    }

    #[test]
    fn every_arm_runs_on_linux_memory() {
        every_arm_runs(MemoryKind::Linux);
    }

    #[test]
    fn every_arm_runs_on_the_pool() {
        every_arm_runs(MemoryKind::Budget);
    }
}
