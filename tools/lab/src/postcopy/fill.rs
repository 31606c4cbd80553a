//! Demands beside a background fill that brings in all pages in order, as fast as they arrive.

use super::arms::{Arm, OnMissing, Pushes, Rate, Runs, Scene};
use super::push::Pace;
use super::{about, prefix, with_params};
use crate::experiment::{LabError, Options, skip_if_busy};
use crate::report::Progress;
use crate::result::{Better, Measurement, Report};
use lacuna_guest::status::Kind;
use lacuna_soft::{Apf, MemoryKind};
use std::time::Duration;

/// How many pages are pushed at a time.
struct Variant {
    /// The end of the ids.
    id: &'static str,
    /// The most pushed pages in flight.
    window: u64,
    /// The guest's memory. It has more pages than arrive in a round.
    memory_mib: u64,
}

/// The first keeps to the number of asynchronous faults that a vCPU may have in flight. In the
/// second, the processor limits the fill, and not the latency.
const VARIANTS: [Variant; 2] = [
    Variant {
        id: "1ms",
        window: 64,
        memory_mib: 1024,
    },
    Variant {
        id: "1ms_window256",
        window: 256,
        memory_mib: 2048,
    },
];

/// The number of steps that [`measure`] reports as progress.
pub const STEPS: u64 = VARIANTS.len() as u64;

/// One faulter; its vCPU exits and waits, so each stall is a demand.
const DEMAND: Arm = Arm {
    paused: &[Kind::Worker],
    pushes: Pushes::No,
    ..Arm::new("demand", OnMissing::Exit, Apf::Off)
};
/// [`DEMAND`] once more: the null.
const NULL: Arm = Arm {
    name: "null",
    ..DEMAND
};
const FILL: Arm = Arm {
    name: "fill",
    paused: &[Kind::Worker, Kind::Faulter],
    pushes: Pushes::Yes,
    ..DEMAND
};
const BESIDE: Arm = Arm {
    name: "beside",
    pushes: Pushes::Yes,
    ..DEMAND
};

const ARMS: [Arm; 4] = [DEMAND, NULL, FILL, BESIDE];

fn ids(kind: MemoryKind, variant: &str) -> [String; 2] {
    ["demand_p99_ratio", "fill_kept_percent"]
        .map(|name| format!("{}.{name}.{variant}", prefix(kind)))
}

fn scene(kind: MemoryKind, variant: &Variant, options: &Options) -> Scene {
    Scene {
        arch: options.arch,
        kind,
        memory_mib: variant.memory_mib,
        processes: [1, 1],
        latency: Duration::from_millis(1),
        push: Pace::Full,
        window: variant.window,
        slice: Duration::from_millis(if options.quick { 100 } else { 300 }),
        settle: Duration::from_millis(30),
    }
}

/// Measures all results of a kind of memory.
pub fn measure(
    kind: MemoryKind,
    options: &Options,
    report: &mut Report,
    progress: &Progress,
) -> Result<(), LabError> {
    for variant in &VARIANTS {
        let window = variant.window;
        let title = format!("{}, a peer 1ms away, {window} pages pushed", about(kind));
        progress.step(format!("demands beside a fill: {title}"))?;
        let scene = scene(kind, variant, options);
        let done = one(&scene, variant.id, &title, options, report);
        skip_if_busy(report, ids(kind, variant.id), done)?;
    }
    Ok(())
}

fn one(
    scene: &Scene,
    variant: &str,
    title: &str,
    options: &Options,
    report: &mut Report,
) -> Result<(), LabError> {
    let runs = scene.measure(&ARMS, if options.quick { 2 } else { 9 })?;
    report.detail(runs.table(title));
    let results = results(scene, variant, &runs)?;
    results.into_iter().for_each(|result| report.push(result));
    Ok(())
}

fn results(scene: &Scene, variant: &str, runs: &Runs) -> Result<[Measurement; 2], LabError> {
    let [p99_id, kept_id] = ids(scene.kind, variant);
    let p99 = runs.p99_ratio(&DEMAND, &BESIDE)?;
    let null = runs.p99_ratio(&DEMAND, &NULL)?;
    let kept = runs.ratio(&FILL, &BESIDE, Rate::Pushed)?.scaled(100.0);
    let mut p99 = Measurement::new(p99_id, "x", Better::Lower, p99)
        .arm("demand", runs.arm(&DEMAND, Rate::Demanded))
        .arm("beside", runs.arm(&BESIDE, Rate::Demanded))
        .arm("null", null);
    let mut kept = Measurement::new(kept_id, "%", Better::Higher, kept)
        .arm("fill", runs.arm(&FILL, Rate::Pushed))
        .arm("beside", runs.arm(&BESIDE, Rate::Pushed));
    if variant == VARIANTS[0].id {
        (p99, kept) = (p99.bar(3.0), kept.bar(50.0));
    }
    Ok([p99, kept].map(|result| with_params(result, scene)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{eventually, needs_guests};
    use lacuna_skip::test;

    /// Demands and a slow fill, alone and together.
    #[test]
    fn demands_and_a_fill_run_beside_each_other() {
        needs_guests();
        let kind = MemoryKind::Budget;
        let scene = Scene {
            arch: lacuna_machine::Arch::X86_64,
            kind,
            memory_mib: 48,
            processes: [1, 1],
            latency: Duration::from_millis(1),
            push: Pace::Rate(1000),
            window: 64,
            slice: Duration::from_millis(100),
            settle: Duration::from_millis(30),
        };
        let results = eventually(|| {
            let runs = scene.measure(&ARMS, 1).unwrap();
            let some = |arm: &Arm, rate| runs.rate(arm, rate).median > 0.0;
            let pushed = [FILL, BESIDE].iter().all(|arm| some(arm, Rate::Pushed));
            if !pushed || some(&FILL, Rate::Faulters) {
                return Err(runs.table("fill or beside pushed no page, or fill has accesses"));
            }
            match results(&scene, VARIANTS[0].id, &runs) {
                Err(LabError::Busy(why)) => Err(why),
                done => Ok(done.unwrap()),
            }
        });
        let bars = results.each_ref().map(|result| result.bar);
        assert_eq!(bars, [Some(3.0), Some(50.0)]);
        assert_eq!(results[0].id, "postcopy.pool.demand_p99_ratio.1ms");
    }
}
