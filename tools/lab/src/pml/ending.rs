//! The guest time that is lost when dirty logging ends and the huge leaves come back. They are
//! refaulted one by one, as in KVM before 2022, or collapsed in place.
//!
//! ```text
//! slice   on: every huge leaf is split | the guest writes | off | a second; gaps are counted
//!                                        dwell                  window
//! ```
//! The guest is `gaps`. It writes to random pages and adds up the gaps: the time between two writes
//! beyond the usual. So it counts the time lost to faults, exits and waiting. Its rate would say
//! less: a guest's rate differs by a tenth from second to second here, ten times the loss
//! (docs/speed-pml.md). The gaps of a slice without logging are subtracted from each slice. The
//! null is another slice without logging.
//!
//! One core is left for the thread that ends the logging. It takes processor time whatever the way
//! of ending, and a VMM's host has more cores than a VM has vCPUs.

use super::ending_loss::{over, within_noise};
use crate::experiment::{LabError, Options, vcpus};
use crate::fixture::resident;
use crate::report::Progress;
use crate::result::{Better, Measurement, Report};
use crate::session::{Session, image, on};
use crate::stats::{Summary, measures};
use lacuna_addr::Level;
use lacuna_machine::{DirtyTracking as _, MemorySlot, MemorySlots as _};
use lacuna_soft::{HugeLeaves, HugePages, Initially, Logging, Recovery, Vm, VmBuilder};
use std::time::{Duration, Instant};

/// The number of steps that [`measure`] reports as progress.
pub const STEPS: u64 = 1;

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

/// Sizes, times and rounds.
struct Size {
    mib: u64,
    rounds: usize,
    /// The time in which the guest writes to logged pages.
    dwell: Duration,
    /// The counted time after the end of logging.
    window: Duration,
}

impl Size {
    fn of(options: &Options) -> Self {
        let (mib, rounds, window) = match options.quick {
            true => (512, 2, Duration::from_millis(400)),
            false => (4096, 31, Duration::from_secs(1)),
        };
        Self {
            mib,
            rounds,
            dwell: Duration::from_millis(200),
            window,
        }
    }
}

/// The figures of a slice: milliseconds of a vCPU in gaps; milliseconds of the call; percent of the
/// huge leaves that existed when it returned, and a window later; the number of split leaves.
type Slice = [f64; 5];
const GONE: usize = 0;
const CALL: usize = 1;
const AT_ONCE: usize = 2;
const LATER: usize = 3;
const SPLIT: usize = 4;

/// `pml.disable_*` and `pml.recovery_percent`.
pub fn measure(
    options: &Options,
    report: &mut Report,
    progress: &Progress,
) -> Result<(), LabError> {
    progress.step("ending logging")?;
    let size = Size::of(options);
    let builder = VmBuilder {
        huge: HugePages::Always,
        command_line: "huge=1 tick_us=20000 seconds=1000000".into(),
        ..resident(size.mib, vcpus_beside_one())
    };
    let runs = on(&builder, &image(builder.arch, "gaps")?, |session| {
        session.guest.prepared()?;
        session.guest.run_for(size.window)?;
        measures(ARMS.len(), size.rounds, |arm| {
            slice(session, &size, ARMS[arm])
        })
    })?;
    record(report, &size, &runs);
    Ok(())
}

fn slice(session: &Session<'_, Vm>, size: &Size, how: Option<Recovery>) -> Result<Slice, LabError> {
    let vm = session.vm;
    let guest = &session.guest;
    let before = huge_leaves(vm);
    if how.is_some() {
        for MemorySlot { id, .. } in vm.memory_slots() {
            vm.set_logging(id, EAGER)?;
        }
        let left = huge_leaves(vm);
        if left > 0.0 {
            return Err(LabError::Guest(format!(
                "{left} huge leaves were not split"
            )));
        }
    }
    guest.run_for(size.dwell)?;
    let first = guest.count()?;
    let began = Instant::now();
    for MemorySlot { id, .. } in how.iter().flat_map(|_| vm.memory_slots()) {
        vm.mmu().end_logging_as(id, how.expect("one of some"))?;
    }
    let call = began.elapsed();
    let at_once = huge_leaves(vm);
    guest.run_for(size.window.saturating_sub(first.at.elapsed()))?;
    let gone = guest.count()?.workers - first.workers;
    Ok([
        gone as f64 / 1e6 / vcpus_beside_one() as f64,
        1e3 * call.as_secs_f64(),
        100.0 * at_once / before,
        100.0 * huge_leaves(vm) / before,
        before,
    ])
}

/// As many vCPUs as leave a core for one thread.
fn vcpus_beside_one() -> usize {
    (vcpus() - 1).max(1)
}

fn huge_leaves(vm: &Vm) -> f64 {
    vm.mmu().counts().of(Level::L2M) as f64
}

fn record(report: &mut Report, size: &Size, runs: &[[Vec<f64>; 5]]) {
    let of = |arm: usize, what: usize| Summary::of(&runs[arm][what]);
    // Timers and other programs cause gaps without logging, too. They are subtracted.
    let lost = |arm: usize| {
        let pairs = runs[NONE][GONE].iter().zip(&runs[arm][GONE]);
        Summary::of(&pairs.map(|(none, gone)| gone - none).collect::<Vec<_>>())
    };
    let [null, drop, in_place] = [NULL, DROP, IN_PLACE].map(lost);
    let new = |name: &str, unit, better, summary| {
        Measurement::new(format!("pml.{name}"), unit, better, summary)
            .param("mib", size.mib)
            .param("vcpus", vcpus_beside_one() as u64)
            .param("window_ms", size.window.as_millis() as u64)
    };
    let lower = Better::Lower;
    report.push(
        new(
            "disable_ratio",
            "x",
            Better::Higher,
            over(drop, in_place, null),
        )
        .bar(5.0)
        .reference(REFERENCE, SOURCE)
        .param("in_place_is_noise", within_noise(in_place, null))
        .arm("drop_lost_ms", drop)
        .arm("in_place_lost_ms", in_place)
        .arm("null_lost_ms", null)
        .arm("gone_without_ms", of(NONE, GONE)),
    );
    for (name, lost) in [("null", null), ("drop", drop), ("in_place", in_place)] {
        let id = format!("disable_lost_ms.{name}");
        report.push(new(&id, "ms", lower, lost));
    }
    for (name, arm) in [("drop", DROP), ("in_place", IN_PLACE)] {
        report.push(new(
            &format!("disable_ms.{name}"),
            "ms",
            lower,
            of(arm, CALL),
        ));
    }
    report.push(
        new(
            "recovery_percent",
            "%",
            Better::Higher,
            of(IN_PLACE, AT_ONCE),
        )
        .bar(98.0)
        .param("huge_leaves_split", of(IN_PLACE, SPLIT).median)
        .arm("in_place_a_window_later", of(IN_PLACE, LATER))
        .arm("drop_at_once", of(DROP, AT_ONCE))
        .arm("drop_a_window_later", of(DROP, LATER)),
    );
}
