//! The experiments: their scenes, their arms, and their results.

use super::arms::{Runs, Scene};
use super::push::Speed;
use super::{about, prefix, with_params};
use crate::experiment::{LabResult, Options, skip_if_busy};
use crate::result::{Better, Measurement, Report};
use crate::slices::Role::{Demanded, Faulters, P99, Pushed, Workers};
use crate::slices::{Arm, Gain, PROCESSES, Pace, Role};
use crate::stats::Rounds;
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
    /// Milliseconds of a slice of a quick run.
    quick_ms: u64,
    arms: &'static [Arm],
    rows: &'static [Row],
    /// Whether the bars of its rows hold.
    has_bars: bool,
    is_quick: bool,
}

/// A result: its name, its bar, and what is compared.
type Row = (&'static str, f64, Gain);

/// The name of the null in results.
const NULL_NAME: &str = "null";

/// The worker alone. Its loss in the other arms is due to faults.
const ALONE: Arm = Arm {
    paused: &[Kind::Faulter],
    ..arm("alone", false, Apf::Off)
};
const NEITHER: Arm = arm("neither", false, Apf::Off);
const EXITS: Arm = arm("exits", true, Apf::Off);
/// [`EXITS`] once more: the null.
const NULL: Arm = EXITS.named(NULL_NAME);
const ASYNC: Arm = arm("async", false, Apf::On);
const BOTH: Arm = arm("both", true, Apf::On);

/// An arm in which all processes run and pages are pushed.
const fn arm(name: &'static str, exits: bool, apf: Apf) -> Arm {
    Arm {
        exits,
        pushes: true,
        ..Arm::new(name, &[], Some(apf))
    }
}

/// Whether something is counted for `role` in `arm`.
fn counts(arm: &Arm, role: Role) -> bool {
    match role {
        Workers => !arm.paused.contains(&Kind::Worker),
        Pushed => arm.pushes,
        _ => !arm.paused.contains(&Kind::Faulter),
    }
}

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
    push: Speed::Rate(1000),
    window: 64,
    pace: pace(15, 120),
};

const fn pace(rounds: usize, slice_ms: u64) -> Pace {
    Pace {
        rounds: Rounds::Count(rounds),
        slice: Duration::from_millis(slice_ms),
        settle: Duration::from_millis(30),
    }
}

/// A computing process beside a faulting one.
const ONE_FAULTER: Experiment = Experiment {
    part: "worker",
    suffix: "1ms",
    scene: SCENE,
    quick_ms: 60,
    arms: &[EXITS, NULL, NEITHER, ASYNC, BOTH, ALONE],
    rows: &[
        ("worker_ratio", 1.8, Gain::new(EXITS, BOTH, Workers)),
        ("memory_ratio", 1.5, Gain::new(EXITS, BOTH, Faulters)),
        ("pages_kept_percent", 90.0, Gain::new(EXITS, BOTH, Demanded)),
        ("worker_kept_percent", 90.0, Gain::new(ASYNC, BOTH, Workers)),
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
        push: Speed::Full,
        memory_mib: 1024,
        pace: pace(9, 300),
        ..SCENE
    },
    // A quick fill still has time for several answers.
    quick_ms: 100,
    arms: &[DEMAND, DEMAND_NULL, FILL, BESIDE],
    rows: &[
        ("demand_p99_ratio", 3.0, Gain::new(DEMAND, BESIDE, P99)),
        ("fill_kept_percent", 50.0, Gain::new(FILL, BESIDE, Pushed)),
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
            pace: pace(9, 120),
            ..SCENE
        },
        arms: &[EXITS, NULL, BOTH],
        rows: &[("crowd_ratio", 1.8, Gain::new(EXITS, BOTH, Faulters))],
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
    pub fn measure(&self, kind: MemoryKind, options: &Options, report: &mut Report) -> LabResult {
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
        options.step(title.clone())?;
        let scene = Scene {
            arch: options.arch,
            kind,
            pace: match options.quick {
                true => pace(2, self.quick_ms),
                false => self.scene.pace,
            },
            ..self.scene
        };
        let done = scene.measure(self.arms).and_then(|runs| {
            report.detail(table(&runs, &title));
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
        let result = |(&(name, bar, gain), id): (&Row, String)| {
            let (unit, scale) = match name.ends_with("_percent") {
                true => ("%", 100.0),
                false => ("x", 1.0),
            };
            let (better, rate) = match gain.role {
                P99 => (Better::Lower, Demanded),
                rate => (Better::Higher, rate),
            };
            let ratio = runs.ratio(gain)?.scaled(scale);
            let mut found = with_params(Measurement::new(id, unit, better, ratio), scene);
            if self.has_bars {
                found = found.bar(bar);
            }
            for &arm in self.arms.iter().filter(|arm| counts(arm, gain.role)) {
                found = match arm.name {
                    // It is the first arm once more.
                    NULL_NAME => {
                        let null = Gain::new(self.arms[0], arm, gain.role);
                        found.arm(NULL_NAME, runs.ratio(null)?)
                    }
                    name => found.arm(name, runs.arm(arm, rate)),
                };
            }
            Ok(found)
        };
        let rows = self.rows.iter().zip(self.ids(scene.kind));
        rows.map(result).collect()
    }
}

fn table(runs: &Runs, title: &str) -> String {
    let [workers, faulters] = PROCESSES;
    runs.table(title, &[workers, faulters, "demanded/s", "pushed/s"])
}

fn speed_of_worker(title: &str, runs: &Runs) -> String {
    let speed = |arm| runs.rate(arm, Workers).median;
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
            pace: pace(1, 150),
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
            let runs = small(kind, 2).measure(ONE_FAULTER.arms).unwrap();
            unseen.retain(|(arm, rate, some)| (runs.rate(*arm, *rate).median > 0.0) != *some);
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
            let runs = scene.measure(FILL_64.arms).unwrap();
            let some = |arm: &Arm, rate| runs.rate(*arm, rate).median > 0.0;
            let pushed = [FILL, BESIDE].iter().all(|arm| some(arm, Pushed));
            if !pushed || some(&FILL, Faulters) {
                return Err(table(
                    &runs,
                    "fill or beside pushed no page, or fill has accesses",
                ));
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
