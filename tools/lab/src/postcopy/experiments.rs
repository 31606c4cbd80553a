//! The experiments: their scenes, their arms, and their results.

use super::arms::{Arm, Figure, Rate, Runs, Scene};
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

/// A result: an arm against a base.
struct Row {
    name: &'static str,
    unit: &'static str,
    better: Better,
    bar: Option<f64>,
    figure: Figure,
    base: Arm,
    arm: Arm,
    /// The arms whose rates are beside it.
    others: &'static [Arm],
    null: Option<[Arm; 2]>,
}

/// The worker alone. Its loss in the other arms is due to faults.
const ALONE: Arm = Arm {
    paused: &[Kind::Faulter],
    ..Arm::new("alone", false, Apf::Off)
};
const NEITHER: Arm = Arm::new("neither", false, Apf::Off);
const EXITS: Arm = Arm::new("exits", true, Apf::Off);
/// [`EXITS`] once more: the null.
const NULL: Arm = EXITS.named("null");
const ASYNC: Arm = Arm::new("async", false, Apf::On);
const BOTH: Arm = Arm::new("both", true, Apf::On);

/// One faulter; its vCPU exits and waits, so each stall is a demand.
const DEMAND: Arm = Arm {
    paused: &[Kind::Worker],
    pushes: false,
    ..EXITS.named("demand")
};
const DEMAND_NULL: Arm = DEMAND.named("null");
const FILL: Arm = Arm {
    paused: &[Kind::Worker, Kind::Faulter],
    pushes: true,
    ..DEMAND.named("fill")
};
const BESIDE: Arm = Arm {
    pushes: true,
    ..DEMAND.named("beside")
};

/// A row of one faulter or several.
const WORKER: Row = Row {
    name: "worker_ratio",
    unit: "x",
    better: Better::Higher,
    bar: Some(1.8),
    figure: Figure::Rate(Rate::Workers),
    base: EXITS,
    arm: BOTH,
    others: &[ALONE, NEITHER, EXITS, ASYNC, BOTH],
    null: Some([EXITS, NULL]),
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
        WORKER,
        Row {
            name: "memory_ratio",
            bar: Some(1.5),
            figure: Figure::Rate(Rate::Faulters),
            others: &[NEITHER, EXITS, ASYNC, BOTH],
            ..WORKER
        },
        Row {
            name: "pages_kept_percent",
            unit: "%",
            bar: Some(90.0),
            figure: Figure::Rate(Rate::Demanded),
            others: &[NEITHER, EXITS, ASYNC, BOTH],
            ..WORKER
        },
        Row {
            name: "worker_kept_percent",
            unit: "%",
            bar: Some(90.0),
            base: ASYNC,
            ..WORKER
        },
    ],
    has_bars: true,
    is_quick: true,
};

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
        Row {
            name: "demand_p99_ratio",
            unit: "x",
            better: Better::Lower,
            bar: Some(3.0),
            figure: Figure::P99,
            base: DEMAND,
            arm: BESIDE,
            others: &[DEMAND, BESIDE],
            null: Some([DEMAND, DEMAND_NULL]),
        },
        Row {
            name: "fill_kept_percent",
            unit: "%",
            better: Better::Higher,
            bar: Some(50.0),
            figure: Figure::Rate(Rate::Pushed),
            base: FILL,
            arm: BESIDE,
            others: &[FILL, BESIDE],
            null: None,
        },
    ],
    ..ONE_FAULTER
};

/// All of them, in the order of the results.
pub const ALL: [Experiment; 6] = [
    Experiment {
        suffix: "100us",
        scene: Scene {
            latency: Duration::from_micros(100),
            ..SCENE
        },
        has_bars: false,
        is_quick: false,
        ..ONE_FAULTER
    },
    ONE_FAULTER,
    Experiment {
        suffix: "5ms",
        scene: Scene {
            latency: Duration::from_millis(5),
            ..SCENE
        },
        has_bars: false,
        is_quick: false,
        ..ONE_FAULTER
    },
    // With async faults, each of several faulters has a page in flight.
    Experiment {
        scene: Scene {
            processes: [1, 4],
            ..SCENE
        },
        rounds: 9,
        arms: &[EXITS, NULL, BOTH],
        rows: &[Row {
            name: "crowd_ratio",
            figure: Figure::Rate(Rate::Faulters),
            others: &[EXITS, BOTH],
            ..WORKER
        }],
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
        let ids = self.rows.iter().map(|row| row.name);
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
        let (what, title) = match (self.part, self.scene.processes) {
            ("push", _) => {
                let title = format!("{peer}, {} pages pushed", self.scene.window);
                ("demands beside a fill".into(), title)
            }
            (_, [_, 1]) => ("one faulter".into(), peer.clone()),
            (_, [_, many]) => (
                format!("{many} faulters"),
                format!("{many} faulters, {peer}"),
            ),
        };
        progress.step(format!(
            "{what}: {}",
            title.trim_start_matches(&format!("{what}, "))
        ))?;
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
        let result = |(row, id): (&Row, String)| {
            let scale = if row.unit == "%" { 100.0 } else { 1.0 };
            let ratio = runs.ratio(&row.base, &row.arm, row.figure)?.scaled(scale);
            let found = Measurement::new(id, row.unit, row.better, ratio);
            let mut found = with_params(found, scene);
            if let (Some(bar), true) = (row.bar, self.has_bars) {
                found = found.bar(bar);
            }
            let rate = match row.figure {
                Figure::Rate(rate) => rate,
                Figure::P99 => Rate::Demanded,
            };
            for arm in row.others {
                found = found.arm(arm.name, runs.arm(arm, rate));
            }
            match &row.null {
                Some([base, null]) => Ok(found.arm("null", runs.ratio(base, null, row.figure)?)),
                None => Ok(found),
            }
        };
        self.rows
            .iter()
            .zip(self.ids(scene.kind))
            .map(result)
            .collect()
    }
}

fn speed_of_worker(title: &str, runs: &Runs) -> String {
    let speed = |arm| runs.rate(&arm, Rate::Workers).median;
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
        let mut unseen = vec![(ALONE, Rate::Workers, true), (ALONE, Rate::Faulters, false)];
        for arm in [EXITS, NULL, NEITHER, ASYNC, BOTH] {
            let rates = [Rate::Workers, Rate::Faulters, Rate::Demanded, Rate::Pushed];
            unseen.extend(rates.map(|rate| (arm, rate, true)));
        }
        eventually(|| {
            let runs = small(kind, 2).measure(ONE_FAULTER.arms, 1).unwrap();
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

    /// Demands and a slow fill, alone and together.
    #[test]
    fn demands_and_a_fill_run_beside_each_other() {
        needs_guests();
        let scene = small(MemoryKind::Budget, 1);
        let results = eventually(|| {
            let runs = scene.measure(FILL_64.arms, 1).unwrap();
            let some = |arm: &Arm, rate| runs.rate(arm, rate).median > 0.0;
            let pushed = [FILL, BESIDE].iter().all(|arm| some(arm, Rate::Pushed));
            if !pushed || some(&FILL, Rate::Faulters) {
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
