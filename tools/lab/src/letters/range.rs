//! The experiment in the cover letter of the series of 2012: single durations of
//! `__mmu_notifier_invalidate_range_start` for a huge page while the host swaps out a guest's
//! memory, page by page (before) and by range (after).

use super::Size;
use crate::experiment::{LabError, LabResult, Options, cores};
use crate::fixture::builder;
use crate::report::align;
use crate::result::{Better, Measurement, Report};
use crate::session::{Session, image, on};
use crate::stalls::{add_stalls, since};
use crate::stats::{Summary, paired, quantile, rounds};
use crate::thp::scene::{Block, call};
use lacuna::memory::HugePages;
use lacuna::soft::{Stalls, Vm, VmBuilder};
use lacuna::{Arch, MemorySlots as _};
use lacuna_soft::RmapWalk;
use serde_json::json;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

pub const STEPS: u64 = 1;
pub const ID: &str = "letters.range.call_ratio";

/// The memory in MiB; the letter does not say its own.
const MIB: [u64; 2] = [2048, 1024];
const ARMS: [(&str, RmapWalk); 2] = [
    ("before", RmapWalk::PageLoop),
    ("after", RmapWalk::PerLevel),
];
/// The letter's calls in microseconds, before and after.
const PUBLISHED: [[f64; 10]; 2] = [
    [
        19.852, 28.033, 19.066, 44.715, 31.613, 20.659, 19.979, 20.416, 20.632, 22.316,
    ],
    [
        4.089, 4.096, 3.560, 3.376, 3.772, 3.353, 3.332, 3.332, 3.332, 3.337,
    ],
];
/// Rounds of two slices of each arm, besides the one that is not counted.
const ROUNDS: usize = 5;
/// The fewest calls of a slice, and its longest time.
const CALLS: usize = 10;
const LIMIT: Duration = Duration::from_secs(60);
/// The time between two calls, and between two wake-ups of the host's other thread.
const PAUSE: Duration = Duration::from_millis(1);

/// One core is left to the threads of the host that are timed.
fn vcpus() -> usize {
    cores().saturating_sub(1).clamp(1, 16)
}

/// What one arm has measured in all of its slices.
#[derive(Default)]
struct Arm {
    /// Microseconds of each call.
    calls: Vec<f64>,
    /// How late a sleeping thread of the host woke up each time, in microseconds.
    late: Vec<f64>,
    /// Each vCPU's waits for pages.
    stalls: Vec<Stalls>,
}

/// `letters.range.call_ratio`.
pub fn measure(options: &Options, report: &mut Report) -> LabResult {
    options.step("range: calls for huge pages, before and after")?;
    let size = Size::of(options, MIB, 32);
    report.say(format!(
        "letters.range: {size}, by huge pages; the guest accesses its memory by Zipf's law, so \
         the host swaps all the time. Each millisecond a thread of the host invalidates a huge \
         page that the guest has mapped, and times the call. Before and after take turns in one \
         VM. Different from the letter: our own guest and processor; reclaim itself always works \
         by range, so the timed calls are calls beside it; the letter does not give its memory, \
         nor how it measured that its host was more responsive. Here that is how late a thread \
         wakes up that sleeps {PAUSE:?}, and how long vCPUs wait for pages.",
    ));
    let (ratio, arms) = run(options, size)?;
    report.detail(table(&arms));
    let published = PUBLISHED.map(|calls| Summary::of(&calls).median);
    let mut result = Measurement::new(ID, "x", Better::Higher, ratio)
        .reference(
            published[0] / published[1],
            "v3, 2012: the medians of the letter's lists",
        )
        .param("vcpus", vcpus());
    for ((name, _), arm) in ARMS.iter().zip(&arms) {
        let [calls, late] = [&arm.calls, &arm.late].map(|us| [0.5, 0.99].map(|q| quantile(us, q)));
        result = result.arm(
            name,
            json!({"calls": arm.calls.len(), "first_us": &arm.calls[..CALLS],
                   "p50_us": calls[0], "p99_us": calls[1],
                   "late_p50_us": late[0], "late_p99_us": late[1],
                   "stall_p99_ns": stall_ns(arm, 0.99)}),
        );
    }
    report.push(size.with_params(result));
    Ok(())
}

/// The ratio of the medians by rounds, before / after, and all calls.
fn run(options: &Options, size: Size) -> LabResult<(Summary, [Arm; 2])> {
    let [memory, resident] = size.memory;
    let builder = VmBuilder {
        huge: HugePages::Always,
        command_line: "huge=1 skew=99 seconds=1000000".into(),
        ..builder(memory, resident, vcpus())
    };
    let count = if options.quick { 1 } else { ROUNDS };
    let slice = size.time / (4 * (count as u32 + 1));
    on(&builder, &image(Arch::X86_64, "zipf")?, |session| {
        session.guest.prepared()?;
        let blocks = blocks(session.vm);
        let mut arms: [Arm; 2] = Default::default();
        let medians = rounds(ARMS.len(), count, |arm| {
            let at = arms[arm].calls.len();
            calls(session, &blocks, ARMS[arm].1, slice, &mut arms[arm])?;
            Ok(Summary::of(&arms[arm].calls[at..]).median)
        })?;
        Ok((paired(&medians[1], &medians[0]), arms))
    })
}

/// All blocks of the guest's largest slot.
fn blocks(vm: &Vm) -> Vec<Block> {
    let slots = vm.memory_slots().into_iter().map(|slot| slot.gfns);
    let largest = slots.max_by_key(|gfns| gfns.pages()).expect("memory");
    Block::all(vm, largest).collect()
}

/// A slice of one arm.
fn calls(
    session: &Session<'_, Vm>,
    blocks: &[Block],
    walk: RmapWalk,
    time: Duration,
    arm: &mut Arm,
) -> LabResult {
    let before = session.vm.stalls();
    let over = AtomicBool::new(false);
    let calls = thread::scope(|scope| {
        let late = scope.spawn(|| lateness(&over));
        let calls = timed(session, blocks, walk, time);
        over.store(true, Ordering::Relaxed);
        arm.late.extend(late.join().expect("it only sleeps"));
        calls
    })?;
    arm.calls.extend(calls);
    add_stalls(&mut arm.stalls, &since(&before, &session.vm.stalls()));
    Ok(())
}

/// The microseconds of calls for `time`, each for a random block that one huge page maps.
fn timed(
    session: &Session<'_, Vm>,
    blocks: &[Block],
    walk: RmapWalk,
    time: Duration,
) -> LabResult<Vec<f64>> {
    let (start, mut took) = (Instant::now(), Vec::new());
    while took.len() < CALLS || start.elapsed() < time {
        if start.elapsed() > LIMIT {
            let text = format!("the guest had few huge pages for {LIMIT:?}");
            return Err(LabError::Busy(text));
        }
        let block = blocks[fastrand::usize(..blocks.len())];
        let call = call(session.vm, walk, block);
        if call.leaves == 1 {
            took.push((call.walk + call.shootdown).as_nanos() as f64 / 1e3);
        }
        session.guest.run_for(PAUSE)?;
    }
    Ok(took)
}

/// How late this thread wakes up each time, in microseconds, until it is `over`.
fn lateness(over: &AtomicBool) -> Vec<f64> {
    let mut late = Vec::new();
    while !over.load(Ordering::Relaxed) {
        let start = Instant::now();
        thread::sleep(PAUSE);
        late.push(start.elapsed().saturating_sub(PAUSE).as_nanos() as f64 / 1e3);
    }
    late
}

/// The wait for a page of the vCPU that waits longest.
fn stall_ns(arm: &Arm, quantile: f64) -> u64 {
    let stalls = arm.stalls.iter().map(|stalls| stalls.quantile_ns(quantile));
    stalls.max().unwrap_or_default()
}

/// The letter's lists beside ours, then what they show.
fn table(arms: &[Arm; 2]) -> String {
    let header = [
        "us a call",
        "letter, before",
        "after",
        "ours, before",
        "after",
    ];
    let mut rows = vec![header.map(str::to_owned)];
    let us = |us: f64| format!("{us:.3}");
    let mut row = |name: &str, theirs: Option<[f64; 2]>, ours: [f64; 2]| {
        let [a, b] = theirs.map_or_else(Default::default, |theirs| theirs.map(us));
        let [c, d] = ours.map(us);
        rows.push([name.to_owned(), a, b, c, d]);
    };
    for call in 0..CALLS {
        row(
            "",
            Some(PUBLISHED.map(|calls| calls[call])),
            arms.each_ref().map(|arm| arm.calls[call]),
        );
    }
    let of = |of: fn(&Arm) -> &Vec<f64>, q: f64| arms.each_ref().map(|arm| quantile(of(arm), q));
    for (name, q) in [("median", 0.5), ("p99", 0.99)] {
        let theirs = (q == 0.5).then(|| PUBLISHED.map(|calls| Summary::of(&calls).median));
        row(name, theirs, of(|arm| &arm.calls, q));
    }
    row(
        "a thread wakes late, median",
        None,
        of(|arm| &arm.late, 0.5),
    );
    row("a thread wakes late, p99", None, of(|arm| &arm.late, 0.99));
    let stalls = arms.each_ref().map(|arm| stall_ns(arm, 0.99) as f64 / 1e3);
    row("a vCPU waits for a page, p99", None, stalls);
    align(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::needs_guests;
    use lacuna_skip::test;

    /// The letter's calls are beside ours, and the host was swapping.
    #[test]
    fn the_letters_calls_are_beside_ours() {
        needs_guests();
        let report = super::super::tests::quick("range");
        let table = &report.details[0];
        for figure in ["19.852", "3.337", "median", "p99"] {
            assert!(table.contains(figure), "{figure}: {table}");
        }
        let [result] = &report.results[..] else {
            panic!("{:?}", report.results);
        };
        for (arm, _) in ARMS {
            let arm = &result.arms[arm];
            assert!(arm["calls"].as_u64() >= Some(CALLS as u64), "{arm}");
            assert!(arm["stall_p99_ns"].as_u64() > Some(0), "no swap: {arm}");
        }
    }
}
