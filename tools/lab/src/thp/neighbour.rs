//! One vCPU keeps touching a range, and the host keeps invalidating it. The lab measures the time
//! of such an invalidation, and the loss of a vCPU that works in the next block.

use super::fixture::{BLOCK, Fixture};
use super::scene::{Scene, Toucher, Worker};
use super::spread::Spread;
use crate::base::pin;
use crate::experiment::{LabError, Options, skip_if_busy};
use crate::result::{Better, Measurement, Report};
use crate::stats::{Summary, paired, rounds};
use lacuna_addr::Level;
use lacuna_soft::{HugePages, RmapWalk};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Invalidations a second.
const RATE: u32 = 1000;
/// Passes of the worker through its memory in one run: some 20 ms.
const PASSES: u32 = 300;
/// Runs of the worker in a slice.
const RUNS: u32 = 5;
/// Cores: the worker has one for itself.
pub(super) const WORKER: usize = 0;
pub(super) const OTHERS: usize = 1;

/// The longest time that a vCPU may take to touch its range again.
const TOUCH: Duration = Duration::from_secs(10);
/// The longest time of a slice.
const SLICE: Duration = Duration::from_secs(60);

const ID: &str = "thp.neighbour_loss_percent";

fn repeats(options: &Options) -> usize {
    if options.quick { 2 } else { 31 }
}

/// The invalidating thread: its orders, and its count.
#[derive(Default)]
struct Taking {
    on: AtomicBool,
    over: AtomicBool,
    /// The number of leaves taken. The range is one leaf.
    done: AtomicU64,
}

impl Taking {
    /// Takes the scene's range [`RATE`] times a second while `on` is set, until `over` is. It takes
    /// the range only if the vCPU has touched it since the last time: otherwise nothing is mapped.
    fn run(&self, scene: &Scene) {
        pin(OTHERS);
        let (mut next, mut touched) = (Instant::now(), 0);
        while !self.over.load(Ordering::Acquire) {
            next += Duration::from_secs(1) / RATE;
            let faults = scene.faults();
            if self.on.load(Ordering::Acquire) && faults > touched {
                touched = faults;
                let leaves = scene.take().leaves;
                self.done.fetch_add(leaves, Ordering::Relaxed);
            }
            match next.checked_duration_since(Instant::now()) {
                Some(left) => thread::sleep(left),
                // The thread cannot keep up. It does not make up for the missed calls.
                None => next = Instant::now(),
            }
        }
    }
}

/// Ends the threads of a scene when it is dropped, also after an error or a panic.
struct End<'a>(&'a Scene, &'a Taking);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.1.over.store(true, Ordering::Release);
        self.0.end();
    }
}

pub(super) fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Joins a thread; a panic there continues here. Code that pins itself to a core runs in such a
/// thread, so the calling thread stays unpinned.
pub(super) fn joined<T>(thread: thread::ScopedJoinHandle<'_, T>) -> T {
    thread
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// `thp.neighbour_loss_percent`.
pub fn measure(options: &Options, report: &mut Report) -> Result<(), LabError> {
    if cores() < 2 {
        report.skip(ID, "this machine has one core");
        return Ok(());
    }
    let (scene, mut worker, mut toucher) = Scene::new(HugePages::Always, PASSES)?;
    let taking = Taking::default();
    let mut taken = Vec::new();
    let runs = thread::scope(|scope| {
        let end = End(&scene, &taking);
        scope.spawn(|| taking.run(&scene));
        let touching = scope.spawn(|| {
            pin(OTHERS);
            toucher.touch()
        });
        let measuring = scope.spawn(|| {
            pin(WORKER);
            // The second arm is the null.
            rounds(3, repeats(options), |arm| {
                slice(&mut worker, &taking, (arm == 2).then_some(&mut taken))
            })
        });
        let runs = joined(measuring);
        drop(end);
        // If the toucher failed, that is the cause of other errors.
        joined(touching).and(runs)
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
        let why = format!(
            "the range was invalidated {per_s:.0} times a second instead of {RATE}: leave this \
             machine's processors to the lab"
        );
        report.skip(ID, why);
        return Ok(());
    }
    let loss = minus_one(paired(&runs[0], &runs[2]));
    report.push(
        Measurement::new(ID, "%", Better::Lower, loss)
            .bar(2.0)
            .param("wanted_per_s", RATE)
            .param("range", "one 2 MiB page, touched again each time")
            .param("faults", faults)
            .param("taken", done)
            .arm("taken_per_s", Summary::of(&taken))
            .arm("still_ms", Summary::of(&runs[0]))
            .arm("taken_ms", Summary::of(&runs[2]))
            .arm("null_percent", minus_one(paired(&runs[0], &runs[1]))),
    );
    Ok(())
}

/// A ratio of costs as a loss in percent.
fn minus_one(ratio: Summary) -> Summary {
    let percent = |ratio: f64| 100.0 * (ratio - 1.0);
    Summary {
        median: percent(ratio.median),
        low: percent(ratio.low),
        high: percent(ratio.high),
        ..ratio
    }
}

/// The CPU time of the worker's median run, in milliseconds. With `taken` the host takes the range
/// meanwhile, and the number of times a second is added to `taken`.
fn slice(
    worker: &mut Worker,
    taking: &Taking,
    taken: Option<&mut Vec<f64>>,
) -> Result<f64, LabError> {
    taking.on.store(taken.is_some(), Ordering::Release);
    // The first run is not counted, because the last invalidation of the other arm may still be
    // under way.
    worker.work()?;
    let (start, before) = (Instant::now(), taking.done.load(Ordering::Relaxed));
    let runs = (0..RUNS).map(|_| Ok(worker.work()?.as_secs_f64() * 1e3));
    let runs = runs.collect::<Result<Vec<f64>, LabError>>()?;
    if let Some(taken) = taken {
        let done = taking.done.load(Ordering::Relaxed) - before;
        taken.push(done as f64 / start.elapsed().as_secs_f64());
    }
    Ok(Summary::of(&runs).median)
}

/// `thp.total_us`: a whole invalidation of 2 MiB, with its shoot-down.
pub fn total(options: &Options, report: &mut Report) -> Result<(), LabError> {
    let calls = if options.quick { 50 } else { 300 };
    for (word, huge, level) in [
        ("huge", HugePages::Always, Level::L2M),
        ("small", HugePages::Never, Level::L4K),
    ] {
        let id = |state: &str| format!("thp.total_us.{state}.{word}");
        let mut spread = Spread::default();
        let runs = idle(huge, level, calls, repeats(options), &mut spread)?;
        report.push(results_of(id("idle"), level, &runs, &spread));
        if cores() < 2 {
            report.skip(id("running"), "this machine has one core");
            continue;
        }
        let mut spread = Spread::default();
        let runs = running(huge, level, calls, repeats(options), &mut spread);
        let done = runs.map(|runs| report.push(results_of(id("running"), level, &runs, &spread)));
        skip_if_busy(report, [id("running")], done)?;
    }
    Ok(())
}

fn results_of(id: String, level: Level, runs: &[f64], spread: &Spread) -> Measurement {
    let mut all = serde_json::Value::from(Summary::of(runs));
    all["histogram_ns"] = spread.buckets();
    for (name, quantile) in [("p50_ns", 0.5), ("p99_ns", 0.99), ("p999_ns", 0.999)] {
        all[name] = spread.quantile_ns(quantile).into();
    }
    Measurement::new(id, "us", Better::Lower, Summary::of(runs))
        .param("bytes", 2 << 20)
        .param("leaves", BLOCK / level.pages())
        .param("calls", spread.count())
        .arm("whole", all)
}

/// The medians of slices in microseconds, while no vCPU runs.
fn idle(
    huge: HugePages,
    level: Level,
    calls: u64,
    repeats: usize,
    spread: &mut Spread,
) -> Result<Vec<f64>, LabError> {
    let mut fixture = Fixture::new(1, 1, huge)?;
    let range = fixture.range(1);
    let runs = rounds(1, repeats, |_| {
        let mut slice = Vec::new();
        for _ in 0..calls {
            fixture.fault_in(1, level)?;
            let start = Instant::now();
            let steps = fixture.mmu().invalidate_as(RmapWalk::PerLevel, range);
            let spent = start.elapsed();
            assert_eq!(steps.leaves, BLOCK / level.pages(), "every leaf was there");
            spread.record(spent);
            slice.push(spent.as_secs_f64() * 1e6);
        }
        Ok::<_, LabError>(Summary::of(&slice).median)
    })?;
    Ok(runs.into_iter().flatten().collect())
}

/// Waits until the vCPU has done `what`.
///
/// # Errors
/// [`LabError::Busy`]: the vCPU's thread does not get a processor.
pub(super) fn wait_until(what: impl Fn() -> bool) -> Result<(), LabError> {
    let deadline = Instant::now() + TOUCH;
    while !what() {
        if Instant::now() > deadline {
            return Err(LabError::Busy(format!(
                "a vCPU did not touch its range again within {TOUCH:?}"
            )));
        }
        thread::sleep(Duration::from_micros(20));
    }
    Ok(())
}

/// Takes all of the scene's range, `pages` leaves, `calls` times; the median in microseconds.
fn take_whole(scene: &Scene, pages: u64, calls: u64, spread: &mut Spread) -> Result<f64, LabError> {
    let deadline = Instant::now() + SLICE;
    let mut slice = Vec::new();
    while (slice.len() as u64) < calls {
        if Instant::now() > deadline {
            let text = format!("a slice of {calls} invalidations took more than {SLICE:?}");
            return Err(LabError::Busy(text));
        }
        if let Some(spent) = take_once(scene, pages)? {
            spread.record(spent);
            slice.push(spent.as_secs_f64() * 1e6);
        }
    }
    Ok(Summary::of(&slice).median)
}

/// Takes the scene's range, and waits until the vCPU has touched all of it again. Returns the time
/// of the call; `None` if not every leaf was there, because such a call does not count.
fn take_once(scene: &Scene, pages: u64) -> Result<Option<Duration>, LabError> {
    let before = scene.faults();
    let taken = scene.take();
    if taken.leaves == pages {
        // Each page faults once more.
        wait_until(|| scene.faults() >= before + pages)?;
        return Ok(Some(taken.spent));
    }
    // A fault is counted before its leaf is installed, and this call came in between. The number of
    // faults to come is unknown, so wait for the leaves themselves. The next call does not count
    // either: this thread has just read the table entries.
    wait_until(|| scene.is_mapped())?;
    let before = scene.faults();
    let leaves = scene.take().leaves;
    if leaves != pages {
        let text = format!("an invalidation removed {leaves} leaves of {pages}");
        return Err(LabError::Guest(text));
    }
    wait_until(|| scene.faults() >= before + pages)?;
    Ok(None)
}

/// As [`idle`], while a vCPU uses the range.
fn running(
    huge: HugePages,
    level: Level,
    calls: u64,
    repeats: usize,
    spread: &mut Spread,
) -> Result<Vec<f64>, LabError> {
    let (scene, _worker, mut toucher): (_, _, Toucher) = Scene::new(huge, 1)?;
    let taking = Taking::default();
    let pages = BLOCK / level.pages();
    let runs = thread::scope(|scope| {
        let end = End(&scene, &taking);
        let touching = scope.spawn(|| {
            pin(OTHERS);
            toucher.touch()
        });
        let measuring = scope.spawn(|| {
            pin(WORKER);
            rounds(1, repeats, |_| take_whole(&scene, pages, calls, spread))
        });
        let runs = joined(measuring);
        drop(end);
        joined(touching).and(runs)
    })?;
    Ok(runs.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The toucher begins late, so the first calls find no leaf, or not all of them.
    #[test]
    fn a_range_that_is_not_touched_yet_is_waited_for() {
        for (huge, pages) in [(HugePages::Always, 1), (HugePages::Never, BLOCK)] {
            let (scene, _worker, mut toucher) = Scene::new(huge, 1).unwrap();
            let (taking, mut spread) = (Taking::default(), Spread::default());
            thread::scope(|scope| {
                let _end = End(&scene, &taking);
                scope.spawn(|| {
                    thread::sleep(Duration::from_millis(50));
                    toucher.touch()
                });
                take_whole(&scene, pages, 3, &mut spread).unwrap();
            });
            assert_eq!(spread.count(), 3);
        }
    }

    #[test]
    fn leaves_of_another_size_are_an_error() {
        let (scene, _worker, mut toucher) = Scene::new(HugePages::Never, 1).unwrap();
        let taking = Taking::default();
        thread::scope(|scope| {
            let _end = End(&scene, &taking);
            scope.spawn(|| toucher.touch());
            let error = take_whole(&scene, 1, 3, &mut Spread::default()).unwrap_err();
            assert!(error.to_string().contains("512 leaves of 1"), "{error}");
        });
    }
}
