//! The guest time that is lost when dirty logging ends and the huge leaves come back. They are
//! refaulted one by one, as in KVM before 2022, or collapsed in place.
//!
//! ```text
//! slice   on: every huge leaf is split | the guest writes | off | a second; gaps are counted
//!                                        dwell                  window
//! ```
//! The guest is `gaps`. It writes to random pages and adds up the gaps: the time between two writes
//! beyond the usual. So it counts the time lost to faults, exits and waiting. A guest's rate
//! differs by ten times the loss from second to second here (docs/speed-pml.md). The gaps of a
//! slice without logging are subtracted; the null is another slice without logging.
//!
//! One core is left for the thread that ends the logging.

use crate::experiment::{LabError, LabResult, Options, vcpus};
use crate::fixture::resident;
use crate::result::{Better, Measurement, Report};
use crate::session::{Session, image, on};
use crate::stats::{Summary, measures};
use lacuna::MemorySlots as _;
use lacuna::dirty::{HugeLeaves, Initially, Logging, set_logging_everywhere};
use lacuna::memory::{HugePages, MemorySlot};
use lacuna::soft::{Vm, VmBuilder};
use lacuna_addr::Level;
use lacuna_soft::Recovery;
use std::time::{Duration, Instant};

/// Splits every huge leaf at once, so that both ways of ending begin alike.
const EAGER: Logging = Logging::On {
    initially: Initially::Clean,
    huge: HugeLeaves::Eager,
};

/// A published ratio: the kernel's `dirty_log_perf_test`, 96 vCPUs with 1 GiB each.
const REFERENCE: f64 = 45.7 / 1.95;
const SOURCE: &str = "in-place promotion when dirty logging is disabled, Gardon, kvm list, 2021: \
                      the call's time, 45.7 s / 1.95 s";

/// The arms, by the way in which logging ends. In the first two no slot logs.
const ARMS: [Option<Recovery>; 4] = [None, None, Some(Recovery::Refault), Some(Recovery::InPlace)];
const NONE: usize = 0;
const NULL: usize = 1;
const DROP: usize = 2;
const IN_PLACE: usize = 3;

/// The time in which the guest writes to logged pages.
const DWELL: Duration = Duration::from_millis(200);

/// The figures of a slice: milliseconds of a vCPU in gaps; milliseconds of the call; percent of the
/// huge leaves that existed when it returned, and a window later; the number of split leaves.
type Slice = [f64; 5];
const GONE: usize = 0;
const CALL: usize = 1;
const AT_ONCE: usize = 2;
const LATER: usize = 3;
const SPLIT: usize = 4;

/// `pml.disable_*` and `pml.recovery_percent`.
pub fn measure(options: &Options, report: &mut Report) -> LabResult {
    // The window is the counted time after the end of logging.
    let (mib, rounds, window) = match options.quick {
        true => (512, 2, Duration::from_millis(400)),
        false => (4096, 31, Duration::from_secs(1)),
    };
    let builder = VmBuilder {
        arch: options.arch,
        huge: HugePages::Always,
        command_line: "huge=1 tick_us=20000 seconds=1000000".into(),
        ..resident(mib, vcpus_beside_one())
    };
    let runs = on(&builder, &image(builder.arch, "gaps")?, |session| {
        session.guest.prepared()?;
        session.guest.run_for(window)?;
        measures(ARMS.len(), rounds, |arm| slice(session, window, ARMS[arm]))
    })?;
    record(report, mib, window, &runs);
    Ok(())
}

fn slice(session: &Session<'_, Vm>, window: Duration, how: Option<Recovery>) -> LabResult<Slice> {
    let Session { vm, guest, .. } = session;
    let huge_leaves = || vm.mmu().counts().of(Level::L2M) as f64;
    let before = huge_leaves();
    if how.is_some() {
        set_logging_everywhere(*vm, EAGER)?;
        let left = huge_leaves();
        if left > 0.0 {
            let text = format!("{left} huge leaves were not split");
            return Err(LabError::Guest(text));
        }
    }
    guest.run_for(DWELL)?;
    let first = guest.count()?;
    let began = Instant::now();
    if let Some(how) = how {
        for MemorySlot { id, .. } in vm.memory_slots() {
            vm.mmu().end_logging_as(id, how)?;
        }
    }
    let call = began.elapsed();
    let at_once = huge_leaves();
    guest.run_for(window.saturating_sub(first.at.elapsed()))?;
    let gone = guest.count()?.workers - first.workers;
    Ok([
        gone as f64 / 1e6 / vcpus_beside_one() as f64,
        1e3 * call.as_secs_f64(),
        100.0 * at_once / before,
        100.0 * huge_leaves() / before,
        before,
    ])
}

/// As many vCPUs as leave a core for one thread.
fn vcpus_beside_one() -> usize {
    (vcpus() - 1).max(1)
}

fn record(report: &mut Report, mib: u64, window: Duration, runs: &[[Vec<f64>; 5]]) {
    let of = |arm: usize, what: usize| Summary::of(&runs[arm][what]);
    // Timers and other programs cause gaps without logging, too. They are subtracted.
    let lost = |arm: usize| {
        let pairs = runs[NONE][GONE].iter().zip(&runs[arm][GONE]);
        Summary::of(&pairs.map(|(none, gone)| gone - none).collect::<Vec<_>>())
    };
    let [null, drop, in_place] = [NULL, DROP, IN_PLACE].map(lost);
    let new = |name: &str, unit, better, summary| {
        Measurement::new(format!("pml.{name}"), unit, better, summary)
            .param("mib", mib)
            .param("vcpus", vcpus_beside_one() as u64)
            .param("window_ms", window.as_millis() as u64)
    };
    let (lower, higher) = (Better::Lower, Better::Higher);
    let ratio = over(drop, in_place, null);
    report.push(
        new("disable_ratio", "x", higher, ratio)
            .bar(5.0)
            .reference(REFERENCE, SOURCE)
            .param("in_place_is_noise", in_place.median <= noise(null))
            .arm("drop_lost_ms", drop)
            .arm("in_place_lost_ms", in_place)
            .arm("null_lost_ms", null)
            .arm("gone_without_ms", of(NONE, GONE)),
    );
    for (name, summary) in [
        ("lost_ms.null", null),
        ("lost_ms.drop", drop),
        ("lost_ms.in_place", in_place),
        ("ms.drop", of(DROP, CALL)),
        ("ms.in_place", of(IN_PLACE, CALL)),
    ] {
        report.push(new(&format!("disable_{name}"), "ms", lower, summary));
    }
    report.push(
        new("recovery_percent", "%", higher, of(IN_PLACE, AT_ONCE))
            .bar(98.0)
            .param("huge_leaves_split", of(IN_PLACE, SPLIT).median)
            .arm("in_place_a_window_later", of(IN_PLACE, LATER))
            .arm("drop_at_once", of(DROP, AT_ONCE))
            .arm("drop_a_window_later", of(DROP, LATER)),
    );
}

/// The noise: the null's largest distance from zero.
fn noise(null: Summary) -> f64 {
    null.low.abs().max(null.high.abs())
}

/// The loss `great` over `small`. If `small` is within the noise, the noise is the divisor. So the
/// ratio claims no more than was shown, and there is no division by something near zero. The ends
/// of the ratio are the opposite ends of the two intervals.
///
/// # Panics
/// If `small` and `null` are both exactly zero, which no measurement is.
fn over(great: Summary, small: Summary, null: Summary) -> Summary {
    let floor = noise(null);
    let by = |small: f64| small.max(floor);
    assert!(by(small.low) > 0.0, "a loss or noise is above zero");
    // The lower end has the larger divisor if the dividend is a loss, and the smaller one if it is
    // a gain.
    let low = (great.low / by(small.high)).min(great.low / by(small.low));
    let high = (great.high / by(small.low)).max(great.high / by(small.high));
    Summary {
        median: great.median / by(small.median),
        low,
        high,
        runs: great.runs.min(small.runs),
        // Both intervals have to hold.
        coverage: (great.coverage + small.coverage - 1.0).max(0.0),
        spread: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_divide_end_against_end_and_noise_is_the_least_divisor() {
        let summary = |low, median, high| Summary {
            median,
            low,
            high,
            runs: 10,
            coverage: 0.98,
            spread: None,
        };
        let null = summary(-2.0, 0.0, 1.0);
        let ends = |ratio: Summary| (ratio.low, ratio.median, ratio.high);
        let ratio = over(summary(40.0, 50.0, 60.0), summary(4.0, 5.0, 8.0), null);
        assert_eq!(ends(ratio), (5.0, 10.0, 15.0));
        assert!((ratio.coverage - 0.96).abs() < 1e-12);
        let ratio = over(summary(40.0, 50.0, 60.0), summary(-3.0, -1.0, 4.0), null);
        assert_eq!(ends(ratio), (10.0, 25.0, 30.0));
        // A gain is no great loss.
        let ratio = over(summary(-8.0, 1.0, 9.0), summary(1.0, 2.0, 4.0), null);
        assert!(ratio.low <= -4.0 && ratio.high >= 4.5);
    }
}
