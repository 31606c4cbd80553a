//! One vCPU keeps touching a range, and the host keeps invalidating it: the loss of a vCPU that
//! works in the next block.

use super::scene::{OTHERS, Scene, Work, call, work};
use crate::cores::pin;
use crate::experiment::{LabError, LabResult, Options, cores};
use crate::result::{Better, Measurement, Report};
use crate::stats::{Summary, paired, rounds};
use lacuna::memory::HugePages;
use lacuna::soft::Vcpu;
use lacuna_soft::RmapWalk;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Invalidations a second.
const RATE: u32 = 1000;
/// The worker's piece stays in a core's caches. One run takes some 20 ms.
const WORK: Work = Work {
    bytes: 256 << 10,
    step: 64,
    passes: 300,
};
/// Runs of the worker in a slice.
const RUNS: u32 = 5;

const ID: &str = "thp.neighbour_loss_percent";

/// The invalidating thread: its order, and its count.
#[derive(Default)]
struct Taking {
    on: AtomicBool,
    /// The number of leaves taken. The range is one leaf.
    done: AtomicU64,
}

impl Taking {
    /// Takes the touched range [`RATE`] times a second while `on` is set, until the other end of
    /// `over` is dropped. It takes the range only if the vCPU has touched it since the last time:
    /// otherwise nothing is mapped.
    fn run(&self, scene: &Scene, over: &Receiver<()>) {
        pin(OTHERS);
        let (mut next, mut touched) = (Instant::now(), 0);
        let mut left = Duration::ZERO;
        while over.recv_timeout(left) == Err(RecvTimeoutError::Timeout) {
            next += Duration::from_secs(1) / RATE;
            let faults = scene.faults();
            if self.on.load(Ordering::Acquire) && faults > touched {
                touched = faults;
                let leaves = call(&scene.vm, RmapWalk::PerLevel, scene.touched).leaves;
                self.done.fetch_add(leaves, Ordering::Relaxed);
            }
            // A thread that cannot keep up does not make up for the missed calls.
            next = next.max(Instant::now());
            left = next.saturating_duration_since(Instant::now());
        }
    }
}

/// `thp.neighbour_loss_percent`.
pub fn measure(options: &Options, report: &mut Report) -> LabResult {
    if cores() < 2 {
        report.skip(ID, "this machine has one core");
        return Ok(());
    }
    let (scene, mut worker, mut toucher) = Scene::new(options.arch, HugePages::Always, WORK)?;
    let (taking, mut taken) = (Taking::default(), Vec::new());
    let repeats = if options.quick { 2 } else { 31 };
    let runs = thread::scope(|scope| {
        // Dropped after an error or a panic, too.
        let (_running, over) = channel();
        let (scene, taking) = (&scene, &taking);
        scope.spawn(move || taking.run(scene, &over));
        scene.beside(&mut toucher, || {
            // The second arm is the null.
            rounds(3, repeats, |arm| {
                slice(&mut worker, taking, (arm == 2).then_some(&mut taken))
            })
        })
    })?;
    let (done, faults) = (taking.done.load(Ordering::Relaxed), scene.faults());
    let per_s = Summary::of(&taken).median;
    if faults < done {
        let text = format!(
            "the range was invalidated {done} times, but the vCPU had only {faults} faults"
        );
        return Err(LabError::Guest(text));
    }
    if per_s < f64::from(RATE) / 2.0 {
        let why = format!("the range was invalidated {per_s:.0} times a second instead of {RATE}");
        report.skip(ID, LabError::Busy(why));
        return Ok(());
    }
    report.push(
        Measurement::new(ID, "%", Better::Lower, loss(&runs[0], &runs[2]))
            .bar(2.0)
            .param("wanted_per_s", RATE)
            .param("range", "one 2 MiB page, touched again each time")
            .param("faults", faults)
            .param("taken", done)
            .arm("taken_per_s", Summary::of(&taken))
            .arm("still_ms", Summary::of(&runs[0]))
            .arm("taken_ms", Summary::of(&runs[2]))
            .arm("null_percent", loss(&runs[0], &runs[1])),
    );
    Ok(())
}

/// How much more `b` costs than `a`, in percent.
fn loss(a: &[f64], b: &[f64]) -> Summary {
    paired(a, b).map(|ratio| 100.0 * (ratio - 1.0))
}

/// The CPU time of the worker's median run, in milliseconds. With `taken` the host takes the range
/// meanwhile, and the number of times a second is added to `taken`.
fn slice(worker: &mut Vcpu, taking: &Taking, taken: Option<&mut Vec<f64>>) -> LabResult<f64> {
    taking.on.store(taken.is_some(), Ordering::Release);
    // The first run is not counted, because the last invalidation of the other arm may still be
    // under way.
    work(worker)?;
    let (start, before) = (Instant::now(), taking.done.load(Ordering::Relaxed));
    let runs = (0..RUNS).map(|_| Ok(work(worker)?.as_secs_f64() * 1e3));
    let runs = runs.collect::<LabResult<Vec<f64>>>()?;
    if let Some(taken) = taken {
        let done = taking.done.load(Ordering::Relaxed) - before;
        taken.push(done as f64 / start.elapsed().as_secs_f64());
    }
    Ok(Summary::of(&runs).median)
}
