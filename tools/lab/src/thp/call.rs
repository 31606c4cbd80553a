//! One whole notifier call for 2 MiB, page by page against the range: the slots' index, the range
//! lock, the walk, the shoot-down and the end. The 2012 series timed this call.
//!
//! A vCPU runs beside every call. Two blocks of its VM are invalidated:
//!
//! ```text
//! elsewhere   the block was never touched by the vCPU: the shoot-down concerns no vCPU
//! holding     the vCPU keeps touching the block: each call waits until its TLB is flushed
//! ```
//! Each call says whether it waited. A call of `elsewhere` is left out if it waited, and a call of
//! `holding` if it did not. The shoot-down is the same in both arms, so a long one makes any ratio
//! small. Its time is printed beside the ratio.

use super::neighbour::{OTHERS, WORKER, cores, joined, wait_until};
use super::scene::{Call, Scene, Toucher, Untouched};
use crate::base::pin;
use crate::experiment::{LabError, Options, skip_if_busy};
use crate::first_look::{Found, Row};
use crate::native::thread_cpu_ns;
use crate::report::{align, time};
use crate::result::{Better, Measurement, Report};
use crate::stats::{Rounds, Summary, measures, paired};
use lacuna_soft::{HugePages, RmapWalk};
use serde_json::{Value, json};
use std::thread;
use std::time::{Duration, Instant};

/// Lacuna's strategy, its null, and what KVM did before 2012.
const ARMS: [RmapWalk; 3] = [RmapWalk::PerLevel, RmapWalk::PerLevel, RmapWalk::PageLoop];
const RANGE: usize = 0;
const NULL: usize = 1;
const PAGES: usize = 2;

/// The published ratio, and the bar where the shoot-down concerns no vCPU.
const BAR: f64 = 5.0;
const SOURCE: &str = "> 5x (KVM series v3, 2012)";

/// The longest time of a slice.
const SLICE: Duration = Duration::from_secs(60);

/// Which block of the VM is invalidated while a vCPU runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Vcpu {
    /// One that no vCPU uses.
    Elsewhere,
    /// The one that the vCPU touches.
    Holding,
}

impl Vcpu {
    const ALL: [Self; 2] = [Self::Elsewhere, Self::Holding];

    const fn word(self) -> &'static str {
        match self {
            Self::Elsewhere => "elsewhere",
            Self::Holding => "holding",
        }
    }

    fn ids(self) -> [String; 2] {
        ["thp.call", "thp.call.shootdown_us"].map(|id| format!("{id}.{}", self.word()))
    }
}

/// The runs of one arm, a figure for each round, in nanoseconds.
#[derive(Clone, Debug)]
struct Took {
    whole: Vec<f64>,
    walk: Vec<f64>,
    shootdown: Vec<f64>,
}

/// The result of [`compare`].
struct Compared {
    /// In the order of [`ARMS`].
    arms: Vec<Took>,
    /// Calls that count; each waited for a vCPU, or none did.
    counted: u64,
    /// Uncounted calls.
    left_out: u64,
    /// The share of the time that the vCPU's thread had a processor.
    vcpu_share: f64,
    slots: usize,
}

/// Measures `thp.call.*`.
pub fn measure(options: &Options, report: &mut Report) -> Result<(), LabError> {
    let (rounds, calls) = if options.quick { (2, 20) } else { (15, 200) };
    let heads = ["one call for 2 MiB", "walk", "shoot-down", "all", "ratio"];
    let mut table = vec![heads.map(str::to_owned)];
    for vcpu in Vcpu::ALL {
        if cores() < 2 {
            let skip = |id| report.skip(id, "this machine has one core");
            vcpu.ids().into_iter().for_each(skip);
            continue;
        }
        let found = compare(vcpu, rounds.into(), calls).map(|found| {
            results_of(vcpu, &found)
                .into_iter()
                .for_each(|result| report.push(result));
            table.extend(rows(vcpu, &found));
        });
        skip_if_busy(report, vcpu.ids(), found)?;
    }
    if table.len() > 1 {
        report.detail(align(&table));
    }
    Ok(())
}

/// The row of the first look: the call that the series timed, while a vCPU uses other memory.
pub fn first_look(_: &Options, rounds: Rounds) -> Result<Found, LabError> {
    let vcpu = Vcpu::Elsewhere;
    let found = compare(vcpu, rounds, 200)?;
    let spent = |arm: usize| time(Summary::of(&found.arms[arm].whole).median as u64);
    let row = Row {
        system: "huge pages, 2012",
        what: "a notifier call for 2 MiB, all of it; without, page by page",
        without: spent(PAGES),
        with: spent(RANGE),
        ratio: ratio(&found),
        null: null(&found),
        published: SOURCE,
    };
    let results = results_of(vcpu, &found).into();
    Ok(Found { row, results })
}

fn ratio(found: &Compared) -> Summary {
    paired(&found.arms[RANGE].whole, &found.arms[PAGES].whole)
}

fn null(found: &Compared) -> Summary {
    paired(&found.arms[RANGE].whole, &found.arms[NULL].whole)
}

/// Makes the vCPU's run return when it is dropped, also after an error or a panic.
struct End<'a>(&'a Scene);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

fn compare(vcpu: Vcpu, rounds: Rounds, calls: usize) -> Result<Compared, LabError> {
    let (scene, _worker, mut toucher): (_, _, Toucher) = Scene::new(HugePages::Always, 1)?;
    let (mut counted, mut left_out) = (0, 0);
    let (runs, vcpu_share) = thread::scope(|scope| {
        let end = End(&scene);
        let touching = scope.spawn(|| {
            pin(OTHERS);
            let (began, before) = (Instant::now(), thread_cpu_ns());
            let touched = toucher.touch();
            let cpu = (thread_cpu_ns() - before) as f64;
            touched.map(|()| cpu / began.elapsed().as_nanos() as f64)
        });
        let measuring = scope.spawn(|| {
            pin(WORKER);
            let mut caller = Caller::new(&scene, vcpu)?;
            let runs = measures(ARMS.len(), rounds, |arm| caller.slice(ARMS[arm], calls));
            (counted, left_out) = (caller.counted, caller.left_out);
            runs
        });
        let runs = joined(measuring);
        drop(end);
        // If the vCPU failed, that is the cause of other errors.
        let share = joined(touching)?;
        runs.map(|runs| (runs, share))
    })?;
    let arms = runs.into_iter().map(|[whole, walk, shootdown]| Took {
        whole,
        walk,
        shootdown,
    });
    Ok(Compared {
        arms: arms.collect(),
        counted,
        left_out,
        vcpu_share,
        slots: scene.slots(),
    })
}

/// Makes the calls.
struct Caller<'a> {
    scene: &'a Scene,
    vcpu: Vcpu,
    untouched: Untouched,
    counted: u64,
    left_out: u64,
}

impl<'a> Caller<'a> {
    fn new(scene: &'a Scene, vcpu: Vcpu) -> Result<Self, LabError> {
        Ok(Self {
            untouched: scene.untouched()?,
            scene,
            vcpu,
            counted: 0,
            left_out: 0,
        })
    }

    /// The medians of `calls` calls that count: the whole call, its walk, its shoot-down.
    fn slice(&mut self, walk: RmapWalk, calls: usize) -> Result<[f64; 3], LabError> {
        let deadline = Instant::now() + SLICE;
        let mut took: [Vec<f64>; 3] = Default::default();
        while took[0].len() < calls {
            if Instant::now() > deadline {
                let text = format!("a slice of {calls} calls took more than {SLICE:?}");
                return Err(LabError::Busy(text));
            }
            match self.call(walk)? {
                None => self.left_out += 1,
                Some(Call {
                    walk, shootdown, ..
                }) => {
                    self.counted += 1;
                    let parts = [walk + shootdown, walk, shootdown];
                    for (took, part) in took.iter_mut().zip(parts) {
                        took.push(part.as_nanos() as f64);
                    }
                }
            }
        }
        Ok(took.map(|took| Summary::of(&took).median))
    }

    /// One call; `None` if it does not count.
    fn call(&mut self, walk: RmapWalk) -> Result<Option<Call>, LabError> {
        let scene = self.scene;
        if self.vcpu == Vcpu::Elsewhere {
            self.untouched.map()?;
            let call = scene.call(walk, self.untouched.range());
            // A call also waits for a vCPU that has not used its residency filter yet.
            return Ok((call.leaves == 1 && !call.waited).then_some(call));
        }
        let before = scene.faults();
        let call = scene.call(walk, scene.range());
        if call.leaves == 1 {
            wait_until(|| scene.faults() > before)?;
            return Ok(call.waited.then_some(call));
        }
        // A fault is counted before its leaf is installed, and this call came in between.
        wait_until(|| scene.is_mapped())?;
        Ok(None)
    }
}

/// The shoot-down, in nanoseconds, from which on the ratio of whole calls is below [`BAR`].
fn longest_shootdown(found: &Compared) -> f64 {
    let [range, pages] = [RANGE, PAGES].map(|arm| Summary::of(&found.arms[arm].walk).median);
    (pages - BAR * range) / (BAR - 1.0)
}

fn results_of(vcpu: Vcpu, found: &Compared) -> [Measurement; 2] {
    let [call, shootdown] = vcpu.ids();
    let parts = |arm: usize| {
        let Took {
            whole,
            walk,
            shootdown,
        } = &found.arms[arm];
        let [whole, walk, shootdown] = [whole, walk, shootdown].map(|ns| Summary::of(ns));
        json!({"whole": Value::from(whole), "walk": Value::from(walk),
               "shootdown": Value::from(shootdown)})
    };
    let mut call = Measurement::new(call, "x", Better::Higher, ratio(found))
        .reference(BAR, SOURCE)
        .param("work", "one 2 MiB page")
        .param("slots", found.slots)
        .param("counted", found.counted)
        .param(
            "waited_for_a_vcpu",
            if vcpu == Vcpu::Holding {
                found.counted
            } else {
                0
            },
        )
        .param("left_out", found.left_out)
        .param("vcpu_share_percent", 100.0 * found.vcpu_share)
        .param("below_5x_from_shootdown_ns", longest_shootdown(found))
        .arm("range_ns", parts(RANGE))
        .arm("page_by_page_ns", parts(PAGES))
        .arm("null", null(found));
    if vcpu == Vcpu::Elsewhere {
        call = call.bar(BAR);
    }
    let us = Summary::of(&found.arms[RANGE].shootdown).scaled(1e-3);
    let shootdown = Measurement::new(shootdown, "us", Better::Lower, us);
    [call, shootdown]
}

fn rows(vcpu: Vcpu, found: &Compared) -> [[String; 5]; 3] {
    let row = |name: String, arm: usize, ratio: String| {
        let part = |ns: &[f64]| time(Summary::of(ns).median as u64);
        let Took {
            whole,
            walk,
            shootdown,
        } = &found.arms[arm];
        [name, part(walk), part(shootdown), part(whole), ratio]
    };
    let state = match vcpu {
        Vcpu::Elsewhere => "no vCPU holds it",
        Vcpu::Holding => "a vCPU holds it",
    };
    let ratio = crate::report::figure(ratio(found).median);
    let limit = time(longest_shootdown(found).max(0.0) as u64);
    [
        row(format!("{state}: page by page"), PAGES, String::new()),
        row(format!("{state}: range"), RANGE, ratio),
        [
            format!("{} calls; below 5 from a shoot-down of", found.counted),
            String::new(),
            limit,
            String::new(),
            String::new(),
        ],
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each call waits for a vCPU that uses the block, and no call waits for another vCPU.
    #[test]
    fn calls_wait_for_the_vcpu_that_holds_the_block_alone() {
        if cores() < 2 {
            lacuna_skip::skip_test("this machine has one core");
        }
        for vcpu in Vcpu::ALL {
            let (scene, _worker, mut toucher) = Scene::new(HugePages::Always, 1).unwrap();
            thread::scope(|scope| {
                let _end = End(&scene);
                scope.spawn(|| toucher.touch());
                let mut caller = Caller::new(&scene, vcpu).unwrap();
                for walk in ARMS {
                    let [whole, walk, shootdown] = caller.slice(walk, 3).unwrap();
                    assert!(whole > 0.0 && walk > 0.0 && shootdown > 0.0);
                }
                assert_eq!(caller.counted, 9);
            });
        }
    }

    #[test]
    fn a_long_shootdown_makes_the_ratio_small() {
        let took = |walk: f64, shootdown: f64| Took {
            whole: vec![walk + shootdown; 6],
            walk: vec![walk; 6],
            shootdown: vec![shootdown; 6],
        };
        let compared = |shootdown: f64| Compared {
            arms: vec![
                took(200.0, shootdown),
                took(200.0, shootdown),
                took(5800.0, shootdown),
            ],
            counted: 18,
            left_out: 0,
            vcpu_share: 1.0,
            slots: 1,
        };
        assert_eq!(longest_shootdown(&compared(50.0)), 1200.0);
        assert!((ratio(&compared(1200.0)).median - BAR).abs() < 1e-9);
        let [call, shootdown] = results_of(Vcpu::Elsewhere, &compared(50.0));
        assert_eq!((call.met, call.value), (Some(true), 5850.0 / 250.0));
        assert_eq!((shootdown.value, &*shootdown.unit), (0.05, "us"));
        let [call, _] = results_of(Vcpu::Holding, &compared(2200.0));
        assert_eq!(call.bar, None);
        assert_eq!(call.params["waited_for_a_vcpu"], 18);
        assert!(call.value < BAR);
    }
}
