//! One whole notifier call for 2 MiB, page by page against the range: the slots' index, the range
//! lock, the walk, the shoot-down and the end. The 2012 series timed this call.
//!
//! ```text
//! elsewhere   a vCPU runs, and does not use the block: the shoot-down waits for no vCPU
//! holding     a vCPU keeps touching the block: each call waits until its TLB is flushed
//! idle        no vCPU runs
//! ```
//! Another vCPU has touched the block of `elsewhere` and `idle`, and has left guest mode.
//!
//! Each call says whether it waited. A call of `holding` that did not wait is left out, and so is
//! any other call that did. The shoot-down is the same in all arms, so a long one makes any ratio
//! small. Its time is reported beside the ratio.

use super::medians;
use super::scene::{Call, PAGES, Scene, call, work};
use crate::experiment::{LabError, LabResult, Options, cores, skip_if_busy};
use crate::first_look::{Found, Row};
use crate::report::time;
use crate::result::{Better, Measurement, Report};
use crate::stats::{Rounds, Summary, measures, paired};
use lacuna::Arch;
use lacuna::memory::HugePages;
use lacuna::soft::Vcpu;
use lacuna_soft::RmapWalk;
use serde_json::{Value, json};

/// Lacuna's strategy, its null, and what KVM did before 2012.
const ARMS: [RmapWalk; 3] = [RmapWalk::PerLevel, RmapWalk::PerLevel, RmapWalk::PageLoop];
const RANGE: usize = 0;
const NULL: usize = 1;
const PAGE_LOOP: usize = 2;

/// The published ratio, and the bar where the shoot-down waits for no vCPU.
const BAR: f64 = 5.0;
const SOURCE: &str = "> 5x (KVM series v3, 2012)";

/// What runs beside the calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Beside {
    Elsewhere,
    Holding,
    Idle,
}

/// How the host backs the block: its policy, and the leaves of the block.
type Backed = (HugePages, u64);
const HUGE: Backed = (HugePages::Always, 1);
const SMALL: Backed = (HugePages::Never, 512);

/// The results: `call` compares all arms, `total_us` has the first alone.
const CASES: [(&str, Beside, Backed); 6] = [
    ("call.elsewhere", Beside::Elsewhere, HUGE),
    ("call.holding", Beside::Holding, HUGE),
    ("total_us.idle.huge", Beside::Idle, HUGE),
    ("total_us.idle.small", Beside::Idle, SMALL),
    ("total_us.running.huge", Beside::Holding, HUGE),
    ("total_us.running.small", Beside::Holding, SMALL),
];

/// The figures of a call: all of it, its walk, its shoot-down, in nanoseconds.
const WHOLE: usize = 0;
const WALK: usize = 1;
const SHOOTDOWN: usize = 2;

/// The result of [`compare`].
struct Compared {
    /// Of each arm, a figure for each round.
    arms: Vec<[Vec<f64>; 3]>,
    /// Calls that count; each waited for a vCPU, or none did.
    counted: u64,
    /// Uncounted calls.
    left_out: u64,
    slots: usize,
}

/// Measures `thp.call.*` and `thp.total_us.*`.
pub fn measure(options: &Options, report: &mut Report) -> LabResult {
    for (name, beside, backed) in CASES {
        let state = name.strip_prefix("call.");
        let mut ids = vec![format!("thp.{name}")];
        ids.extend(state.map(|state| format!("thp.call.shootdown_us.{state}")));
        let (arms, rounds) = match state {
            Some(_) => (&ARMS[..], 15),
            None => (&ARMS[..1], 31),
        };
        let (rounds, calls) = if options.quick {
            (2, 20)
        } else {
            (rounds, 200)
        };
        let done = compare(options.arch, beside, backed, arms, rounds.into(), calls).map(|found| {
            if let [call, shootdown] = &*ids {
                report.push(call_result(call, beside == Beside::Holding, &found));
                report.push(us(&found, shootdown, SHOOTDOWN));
            } else {
                let whole = us(&found, &ids[0], WHOLE).param("bytes", 2 << 20);
                report.push(
                    whole
                        .param("leaves", backed.1)
                        .param("calls", found.counted),
                );
            }
        });
        skip_if_busy(report, ids, done)?;
    }
    Ok(())
}

/// The row of the first look: the call that the series timed, while a vCPU uses other memory.
pub fn first_look(options: &Options, rounds: Rounds) -> LabResult<Found> {
    let found = compare(options.arch, Beside::Elsewhere, HUGE, &ARMS, rounds, 200)?;
    let spent = |arm: usize| time(Summary::of(&found.arms[arm][WHOLE]).median as u64);
    let row = Row {
        system: "huge pages, 2012",
        what: "a notifier call for 2 MiB, all of it; without, page by page",
        without: spent(PAGE_LOOP),
        with: spent(RANGE),
        ratio: over_range(&found, PAGE_LOOP),
        null: over_range(&found, NULL),
        published: SOURCE,
    };
    let results = vec![
        call_result("thp.call.elsewhere", false, &found),
        us(&found, "thp.call.shootdown_us.elsewhere", SHOOTDOWN),
    ];
    Ok(Found { row, results })
}

/// The time of a part of the call by range.
fn us(found: &Compared, id: &str, part: usize) -> Measurement {
    let us = Summary::of(&found.arms[RANGE][part]).scaled(1e-3);
    Measurement::new(id, "us", Better::Lower, us)
}

fn over_range(found: &Compared, arm: usize) -> Summary {
    paired(&found.arms[RANGE][WHOLE], &found.arms[arm][WHOLE])
}

fn compare(
    arch: Arch,
    beside: Beside,
    backed: Backed,
    arms: &[RmapWalk],
    rounds: Rounds,
    calls: usize,
) -> LabResult<Compared> {
    if beside != Beside::Idle && cores() < 2 {
        return Err(LabError::Busy("this machine has one core".into()));
    }
    let (scene, worker, mut toucher) = Scene::new(arch, backed.0, PAGES)?;
    let mut caller = Caller {
        scene: &scene,
        worker,
        beside,
        leaves: backed.1,
        calls: [0; 2],
    };
    let mut slices = || measures(arms.len(), rounds, |arm| caller.slice(arms[arm], calls));
    let runs = match beside {
        Beside::Idle => slices(),
        _ => scene.beside(&mut toucher, slices),
    }?;
    Ok(Compared {
        arms: runs,
        counted: caller.calls[1],
        left_out: caller.calls[0],
        slots: scene.slots(),
    })
}

/// Makes the calls.
struct Caller<'a> {
    scene: &'a Scene,
    worker: Vcpu,
    beside: Beside,
    leaves: u64,
    /// Uncounted calls, and calls that count.
    calls: [u64; 2],
}

impl Caller<'_> {
    /// The figures of the median call, as [`medians`].
    fn slice(&mut self, walk: RmapWalk, calls: usize) -> LabResult<[f64; 3]> {
        medians(calls, || {
            let call = self.call(walk)?;
            self.calls[usize::from(call.is_some())] += 1;
            let parts = |call: Call| [call.walk + call.shootdown, call.walk, call.shootdown];
            Ok(call.map(|call| parts(call).map(|part| part.as_nanos() as f64)))
        })
    }

    /// One call; `None` if it does not count.
    ///
    /// # Errors
    /// Leaves of another size: the figures would be about something else.
    fn call(&mut self, walk: RmapWalk) -> LabResult<Option<Call>> {
        let scene = self.scene;
        let is_held = self.beside == Beside::Holding;
        let before = scene.faults();
        let block = if is_held {
            scene.touched
        } else {
            work(&mut self.worker)?;
            scene.work
        };
        let call = call(&scene.vm, walk, block);
        if call.leaves > self.leaves || (call.leaves < self.leaves && !is_held) {
            return Err(LabError::Guest(format!(
                "an invalidation removed {} leaves of {}",
                call.leaves, self.leaves
            )));
        }
        // A call also waits for a vCPU that has not used its residency filter yet.
        let counts = call.leaves == self.leaves && call.waited == is_held;
        if is_held && call.leaves == self.leaves {
            scene.wait_faults(before + self.leaves)?;
        } else if is_held {
            // A fault is counted before its leaf is installed, and this call came in between.
            scene.wait_mapped()?;
        }
        Ok(counts.then_some(call))
    }
}

/// The shoot-down, in nanoseconds, from which on the ratio of whole calls is below [`BAR`].
fn longest_shootdown(found: &Compared) -> f64 {
    let [range, pages] = [RANGE, PAGE_LOOP].map(|arm| Summary::of(&found.arms[arm][WALK]).median);
    (pages - BAR * range) / (BAR - 1.0)
}

fn call_result(id: &str, is_held: bool, found: &Compared) -> Measurement {
    let parts = |arm: usize| {
        let part = |part: usize| Value::from(Summary::of(&found.arms[arm][part]));
        json!({"whole": part(WHOLE), "walk": part(WALK), "shootdown": part(SHOOTDOWN)})
    };
    let call = Measurement::new(id, "x", Better::Higher, over_range(found, PAGE_LOOP))
        .reference(BAR, SOURCE)
        .param("work", "one 2 MiB page")
        .param("slots", found.slots)
        .param("counted", found.counted)
        .param("waited_for_a_vcpu", if is_held { found.counted } else { 0 })
        .param("left_out", found.left_out)
        .param("below_5x_from_shootdown_ns", longest_shootdown(found))
        .arm("range_ns", parts(RANGE))
        .arm("page_by_page_ns", parts(PAGE_LOOP))
        .arm("null", over_range(found, NULL));
    if is_held { call } else { call.bar(BAR) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lacuna_skip::test;

    /// Each call of `holding` waits for the vCPU that uses the block, and no other call waits.
    #[test]
    fn calls_wait_for_the_vcpu_that_holds_the_block_alone() {
        if cores() < 2 {
            lacuna_skip::skip_test("this machine has one core");
        }
        for arch in [Arch::X86_64, Arch::Arm64] {
            for beside in [Beside::Elsewhere, Beside::Holding, Beside::Idle] {
                for backed in [HUGE, SMALL] {
                    let found = compare(arch, beside, backed, &ARMS, Rounds::Count(1), 3).unwrap();
                    assert_eq!(found.counted, 2 * 2 * 3 * 3, "{beside:?}");
                    let figures = found.arms.iter().flatten().flatten();
                    assert!(figures.copied().all(|figure| figure > 0.0));
                }
            }
        }
    }

    #[test]
    fn leaves_of_another_size_are_an_error() {
        let small = (HugePages::Never, 1);
        let error = compare(
            Arch::X86_64,
            Beside::Idle,
            small,
            &ARMS,
            Rounds::Count(1),
            3,
        );
        let error = error.err().expect("512 leaves").to_string();
        assert!(error.contains("512 leaves of 1"), "{error}");
    }

    #[test]
    fn a_long_shootdown_makes_the_ratio_small() {
        let took =
            |walk: f64, shootdown: f64| [walk + shootdown, walk, shootdown].map(|ns| vec![ns; 6]);
        let compared = |shootdown: f64| Compared {
            arms: [200.0, 200.0, 5800.0]
                .map(|walk| took(walk, shootdown))
                .into(),
            counted: 18,
            left_out: 0,
            slots: 1,
        };
        assert_eq!(longest_shootdown(&compared(50.0)), 1200.0);
        assert!((over_range(&compared(1200.0), PAGE_LOOP).median - BAR).abs() < 1e-9);
        let call = call_result("thp.a", false, &compared(50.0));
        assert_eq!((call.met, call.value), (Some(true), 5850.0 / 250.0));
        let call = call_result("thp.a", true, &compared(2200.0));
        assert_eq!(call.bar, None);
        assert_eq!(call.params["waited_for_a_vcpu"], 18);
    }
}
