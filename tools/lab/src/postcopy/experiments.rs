//! The experiments: their scenes, their arms, and their results.

use super::arms::Figure::{self, Demanded, Faulters, P99, Pushed, Workers};
use super::arms::{Arm, Runs, Scene};
use super::push::Pace;
use super::{about, prefix, with_params};
use crate::experiment::{LabResult, Options, skip_if_busy};
use crate::report::Progress;
use crate::result::{Better, Measurement, Report};
use lacuna::memory::MemoryKind;
use lacuna::{Apf, Arch};
use lacuna_guest::status::Kind;
use std::time::Duration;

/// What an experiment measures.
pub struct Experiment {
    pub part: &'static str,
    /// The end of its ids.
    suffix: &'static str,
    scene: Scene,
    /// The slice of a quick run.
    quick: Duration,
    rounds: usize,
    arms: &'static [Arm],
    rows: &'static [Row],
    /// Whether the bars of its rows hold.
    has_bars: bool,
    is_quick: bool,
}

/// A result: its name, its bar, and what is compared in two arms; the first is the base.
type Row = (&'static str, f64, Figure, [Arm; 2]);

/// The name of the null in results.
const NULL_NAME: &str = "null";

/// The worker alone. Its loss in the other arms is due to faults.
const ALONE: Arm = Arm {
    paused: &[Kind::Faulter],
    ..Arm::new("alone", false, Apf::Off)
};
const NEITHER: Arm = Arm::new("neither", false, Apf::Off);
const EXITS: Arm = Arm::new("exits", true, Apf::Off);
/// [`EXITS`] once more: the null.
const NULL: Arm = EXITS.named(NULL_NAME);
const ASYNC: Arm = Arm::new("async", false, Apf::On);
const BOTH: Arm = Arm::new("both", true, Apf::On);

/// One faulter; its vCPU exits and waits, so each stall is a demand.
const DEMAND: Arm = Arm {
    paused: &[Kind::Worker],
    pushes: false,
    ..EXITS.named("demand")
};
const DEMAND_NULL: Arm = DEMAND.named(NULL_NAME);
const FILL: Arm = Arm {
    paused: &[Kind::Worker, Kind::Faulter],
    pushes: true,
    ..DEMAND.named("fill")
};
const BESIDE: Arm = Arm {
    pushes: true,
    ..DEMAND.named("beside")
};

const SCENE: Scene = Scene {
    arch: Arch::X86_64,
    kind: MemoryKind::Linux,
    memory_mib: 256,
    processes: [1, 1],
    latency: Duration::from_millis(1),
    // Few against the memory, so that nearly all pages that a faulter touches are missing.
    push: Pace::Rate(1000),
    window: 64,
    slice: Duration::from_millis(120),
    settle: Duration::from_millis(30),
};

/// A computing process beside a faulting one.
const ONE_FAULTER: Experiment = Experiment {
    part: "worker",
    suffix: "1ms",
    scene: SCENE,
    quick: Duration::from_millis(60),
    rounds: 15,
    arms: &[EXITS, NULL, NEITHER, ASYNC, BOTH, ALONE],
    rows: &[
        ("worker_ratio", 1.8, Workers, [EXITS, BOTH]),
        ("memory_ratio", 1.5, Faulters, [EXITS, BOTH]),
        ("pages_kept_percent", 90.0, Demanded, [EXITS, BOTH]),
        ("worker_kept_percent", 90.0, Workers, [ASYNC, BOTH]),
    ],
    has_bars: true,
    is_quick: true,
};

/// The same with a peer at another distance, in microseconds.
const fn one_faulter(suffix: &'static str, us: u64) -> Experiment {
    Experiment {
        suffix,
        scene: Scene {
            latency: Duration::from_micros(us),
            ..SCENE
        },
        has_bars: false,
        is_quick: false,
        ..ONE_FAULTER
    }
}

/// Demands beside a background fill that brings in all pages in order, as fast as they arrive. It
/// keeps to the number of asynchronous faults that a vCPU may have in flight.
const FILL_64: Experiment = Experiment {
    part: "push",
    scene: Scene {
        push: Pace::Full,
        memory_mib: 1024,
        slice: Duration::from_millis(300),
        ..SCENE
    },
    // A quick fill still has time for several answers.
    quick: Duration::from_millis(100),
    rounds: 9,
    arms: &[DEMAND, DEMAND_NULL, FILL, BESIDE],
    rows: &[
        ("demand_p99_ratio", 3.0, P99, [DEMAND, BESIDE]),
        ("fill_kept_percent", 50.0, Pushed, [FILL, BESIDE]),
    ],
    ..ONE_FAULTER
};

/// All of them, in the order of the results.
pub const ALL: [Experiment; 6] = [
    one_faulter("100us", 100),
    ONE_FAULTER,
    one_faulter("5ms", 5000),
    // With async faults, each of several faulters has a page in flight.
    Experiment {
        scene: Scene {
            processes: [1, 4],
            ..SCENE
        },
        rounds: 9,
        arms: &[EXITS, NULL, BOTH],
        rows: &[("crowd_ratio", 1.8, Faulters, [EXITS, BOTH])],
        has_bars: false,
        ..ONE_FAULTER
    },
    FILL_64,
    // The processor limits the fill, and not the latency.
    Experiment {
        suffix: "1ms_window256",
        scene: Scene {
            window: 256,
            memory_mib: 2048,
            ..FILL_64.scene
        },
        has_bars: false,
        ..FILL_64
    },
];

impl Experiment {
    fn ids(&self, kind: MemoryKind) -> impl Iterator<Item = String> {
        let ids = self.rows.iter().map(|row| row.0);
        ids.map(move |name| format!("{}.{name}.{}", prefix(kind), self.suffix))
    }

    /// Measures its results, if it is wanted.
    pub fn measure(
        &self,
        kind: MemoryKind,
        options: &Options,
        report: &mut Report,
        progress: &Progress,
    ) -> LabResult {
        if !options.wants(self.part) || (options.quick && !self.is_quick) {
            return Ok(());
        }
        let away = self.suffix.split('_').next().unwrap_or_default();
        let peer = format!("{}, a peer {away} away", about(kind));
        let title = match (self.part, self.scene.processes) {
            ("push", _) => format!("{peer}, {} pages pushed", self.scene.window),
            (_, [_, 1]) => peer,
            (_, [_, many]) => format!("{many} faulters, {peer}"),
        };
        progress.step(title.clone())?;
        let slice = if options.quick {
            self.quick
        } else {
            self.scene.slice
        };
        let scene = Scene {
            arch: options.arch,
            kind,
            slice,
            ..self.scene
        };
        let rounds = if options.quick { 2 } else { self.rounds };
        let done = scene.measure(self.arms, rounds).and_then(|runs| {
            report.detail(runs.table(&title));
            // Compute all results before the first report: on a busy machine all are skipped.
            let results = self.results(&scene, &runs)?;
            if self.arms.contains(&ALONE) {
                report.say(speed_of_worker(&title, &runs));
            }
            results.into_iter().for_each(|result| report.push(result));
            Ok(())
        });
        skip_if_busy(report, self.ids(kind), done)
    }

    fn results(&self, scene: &Scene, runs: &Runs) -> LabResult<Vec<Measurement>> {
        let result = |(&(name, bar, figure, [base, arm]), id): (&Row, String)| {
            let (unit, scale) = match name.ends_with("_percent") {
                true => ("%", 100.0),
                false => ("x", 1.0),
            };
            let (better, rate) = match figure {
                P99 => (Better::Lower, Demanded),
                rate => (Better::Higher, rate),
            };
            let ratio = runs.ratio(&base, &arm, figure)?.scaled(scale);
            let mut found = with_params(Measurement::new(id, unit, better, ratio), scene);
            if self.has_bars {
                found = found.bar(bar);
            }
            for arm in self.arms.iter().filter(|arm| arm.counts(figure)) {
                found = match arm.name {
                    // It is the first arm once more.
                    NULL_NAME => found.arm(NULL_NAME, runs.ratio(&self.arms[0], arm, figure)?),
                    name => found.arm(name, runs.arm(arm, rate)),
                };
            }
            Ok(found)
        };
        let rows = self.rows.iter().zip(self.ids(scene.kind));
        rows.map(result).collect()
    }
}

fn speed_of_worker(title: &str, runs: &Runs) -> String {
    let speed = |arm| runs.figure(&arm, Workers).median;
    let percent = |arm| 100.0 * speed(arm) / speed(ALONE);
    format!(
        "{title}: the worker has {:.0} % of its speed alone with exits, and {:.0} % with both.",
        percent(EXITS),
        percent(BOTH),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::LabError;
    use crate::fixture::{eventually, needs_guests};
    use lacuna_skip::test;

    fn small(kind: MemoryKind, faulters: usize) -> Scene {
        Scene {
            kind,
            memory_mib: 48,
            processes: [1, faulters],
            slice: Duration::from_millis(150),
            ..SCENE
        }
    }

    /// Every arm runs: with exits or without, notified or not, a faulter gets pages and the worker
    /// computes; alone, no page is demanded for long.
    fn every_arm_runs(kind: MemoryKind) {
        needs_guests();
        if let Some(why) = super::super::unavailable(kind) {
            lacuna_skip::skip_test(why.to_string());
        }
        // What each arm has still to show: that the rate is more than 0, or that it is 0.
        let mut unseen = vec![(ALONE, Workers, true), (ALONE, Faulters, false)];
        for arm in [EXITS, NULL, NEITHER, ASYNC, BOTH] {
            let rates = [Workers, Faulters, Demanded, Pushed];
            unseen.extend(rates.map(|rate| (arm, rate, true)));
        }
        eventually(|| {
            let runs = small(kind, 2).measure(ONE_FAULTER.arms, 1).unwrap();
            unseen.retain(|(arm, rate, some)| (runs.figure(arm, *rate).median > 0.0) != *some);
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

    /// Demands and a slow fill, alone and together.
    #[test]
    fn demands_and_a_fill_run_beside_each_other() {
        needs_guests();
        let scene = small(MemoryKind::Budget, 1);
        let results = eventually(|| {
            let runs = scene.measure(FILL_64.arms, 1).unwrap();
            let some = |arm: &Arm, rate| runs.figure(arm, rate).median > 0.0;
            let pushed = [FILL, BESIDE].iter().all(|arm| some(arm, Pushed));
            if !pushed || some(&FILL, Faulters) {
                return Err(runs.table("fill or beside pushed no page, or fill has accesses"));
            }
            match FILL_64.results(&scene, &runs) {
                Err(LabError::Busy(why)) => Err(why),
                done => Ok(done.unwrap()),
            }
        });
        let found = results
            .iter()
            .map(|result| (result.id.as_str(), result.bar));
        let [p99, kept] = ["demand_p99_ratio.1ms", "fill_kept_percent.1ms"]
            .map(|id| format!("postcopy.pool.{id}"));
        assert!(found.eq([(p99.as_str(), Some(3.0)), (kept.as_str(), Some(50.0))]));
    }
}
