//! The same image under `/dev/kvm`: there KVM is the host side of asynchronous faults, so this
//! guest's reading of the ABI is not only our own.
//!
//! One vCPU with a worker and a faulter. KVM cannot be told to stop in the middle of a run, so
//! *on* and *off* are two VMs, one after the other, each with the worker alone in turns; the
//! figure is a share of that, and does not compare the two VMs with each other. *Off* is not a
//! vCPU that sleeps through: KVM halts it while a worker thread of its own fetches the page, and
//! the guest's timer tick breaks that halt, so that a slice that is over still ends.
//!
//! What is measured is the mechanism, on hosts too that emulate every instruction of the guest's
//! kernel (`kvm_pvm`: about 1 us each). So worker and faulter are threads of one process, which
//! saves changes of CR3; the tick is as long as the slice, which is all it is for here; and the
//! faulter, while it is paused, looks rarely whether that is over, since each look slows the
//! worker that is measured alone. All are in the results. Slices are short and many, because such
//! hosts have bad moments of a second or more.

use super::SLICE_US;
use super::slices::{Arm, Pace, Role, Runs, take_turns};
use crate::experiment::{LabError, Options};
use crate::report::Progress;
use crate::result::{Better, Measurement, Report};
use crate::session::{Guest, LastWords, Session, image};
use crate::stats::{Rounds, Summary};
use lacuna_addr::PageCount;
use lacuna_guest::status::{Apf as Counters, Kind};
use lacuna_kvm::{Apf, CpuModel, Delivery, FirstTouch, LatencySetting, Tracker, VmBuilder};
use lacuna_machine::Ending;
use serde_json::json;
use std::time::Duration;

/// How many steps of progress it has.
pub const STEPS: u64 = 2;

const FAULTS: &str = "apf.kvm.faults";
const FAULTS_BAR: f64 = 1000.0;
const MEMORY_MIB: u64 = 64;
const RESIDENT_MIB: u64 = 16;
/// The guest's timer tick, in microseconds.
const TICK_US: u64 = SLICE_US;
/// How often a thread that is paused looks whether that is over, in milliseconds.
const LOOK_MS: u64 = 50;

/// A page's latency with its word in the id and the share that is promised.
const LATENCIES: [(u64, &str, f64); 2] = [(1, "1ms", 85.0), (5, "5ms", 95.0)];

fn id(word: &str) -> String {
    format!("apf.kvm.task_share_percent.{word}")
}

fn pace(options: &Options, apf: Apf) -> Pace {
    let rounds = match (options.quick, apf) {
        (true, _) => 2,
        (false, Apf::On) => 24,
        (false, Apf::Off) => 4,
    };
    Pace {
        rounds: Rounds::Count(rounds),
        slice: Duration::from_millis(100),
        settle: Duration::from_millis(LOOK_MS + 10),
    }
}

/// `apf.kvm.*`; skipped where there is no `/dev/kvm` to use.
pub fn measure(
    options: &Options,
    report: &mut Report,
    progress: &Progress,
) -> Result<(), LabError> {
    let all = LATENCIES.map(|(_, word, _)| id(word));
    if let Err(why) = lacuna_kvm::available() {
        let all = all.into_iter().chain([FAULTS.to_owned()]);
        all.for_each(|id| report.skip(id, &why));
        return Ok(());
    }
    progress.step("/dev/kvm, with asynchronous faults")?;
    let on = shares(options, Apf::On, Arm::On)?;
    progress.step("/dev/kvm, without")?;
    let off = shares(options, Apf::Off, Arm::Off)?;
    for ((latency, on), off) in LATENCIES.iter().zip(&on.runs).zip(&off.runs) {
        let &(_, word, bar) = latency;
        report.detail(on.table(&format!("/dev/kvm, {word} a page, with")));
        report.detail(off.table(&format!("/dev/kvm, {word} a page, without")));
        let share = on.ratio(Arm::Alone, Arm::On, Role::Workers)?.scaled(100.0);
        let without = off
            .ratio(Arm::Alone, Arm::Off, Role::Workers)?
            .scaled(100.0);
        report.say(format!(
            "/dev/kvm, {word} a page: beside a faulter (another thread of its process, tick \
             {TICK_US} us), a worker keeps {:.0} % of its speed with asynchronous faults, {:.0} % \
             without.",
            share.median, without.median,
        ));
        let result = Measurement::new(id(word), "%", Better::Higher, share).bar(bar);
        report.push(
            with_params(result, pace(options, Apf::On))
                .arm("alone", on.arm(Arm::Alone, Role::Workers))
                .arm("on", on.arm(Arm::On, Role::Workers))
                .arm("share_percent_off", without),
        );
    }
    report.push(faults(on.counters));
    Ok(())
}

/// The faults that were completed. None counts unless every token that was announced came back.
fn faults(counters: Counters) -> Measurement {
    let Counters {
        not_present,
        ready,
        wake_all,
        dummies,
        idle,
        lost,
    } = counters;
    let matched = if not_present == ready && lost == 0 {
        not_present
    } else {
        0
    };
    let result = Measurement::new(
        FAULTS,
        "faults",
        Better::Higher,
        Summary::of(&[f64::from(matched)]),
    );
    result.bar(FAULTS_BAR).arm(
        "guest",
        json!({"not_present": not_present, "ready": ready, "wake_all": wake_all,
               "ready_before_wait": dummies, "hit_idle": idle, "lost": lost}),
    )
}

/// The command line of `bm`.
fn words() -> String {
    format!(
        "workers=1 faulters=1 processes=0 look_ms={LOOK_MS} populate=1 seconds=1000000 \
         slice_us={SLICE_US} tick_us={TICK_US}"
    )
}

struct Shares {
    /// One for each of [`LATENCIES`].
    runs: Vec<Runs>,
    /// What the guest had counted when nothing was on its way any more.
    counters: Counters,
}

fn shares(options: &Options, apf: Apf, arm: Arm) -> Result<Shares, LabError> {
    let builder = VmBuilder {
        memory: PageCount::from_bytes(MEMORY_MIB << 20),
        resident: PageCount::from_bytes(RESIDENT_MIB << 20),
        vcpus: 1,
        latency: LatencySetting::default(),
        first_touch: FirstTouch::Immediate,
        apf,
        delivery: Delivery::Bitmap,
        tracker: Tracker::default(),
        cpu: CpuModel::default(),
        command_line: words(),
    };
    on_kvm(&builder, |session| {
        session.guest.prepared()?;
        let run = |(ms, _, _)| {
            builder.latency.set(Duration::from_millis(ms));
            take_turns(session, &[Arm::Alone, arm], pace(options, apf))
        };
        let runs = LATENCIES.into_iter().map(run).collect::<Result<_, _>>()?;
        session.guest.pause(&[Kind::Faulter])?;
        session.guest.run_for(Duration::from_millis(100))?;
        let counters = session.guest.status()?.apf;
        Ok(Shares { runs, counters })
    })
}

/// Starts a VM of `builder` with `bm`, carries out `experiment` while it runs, and ends it.
fn on_kvm<T>(
    builder: &VmBuilder,
    experiment: impl FnOnce(&Session<'_>) -> Result<T, LabError>,
) -> Result<T, LabError> {
    let words = LastWords::default();
    let (mut experiment, mut result) = (Some(experiment), None);
    let outcome = builder.run(&image("bm")?, words.console(), |now| {
        let Some(guest) = Guest::attach(now.vm, now.devices) else {
            return;
        };
        if let Some(experiment) = experiment.take() {
            result = Some(experiment(&Session { guest, vm: None }));
            now.devices.end(Ending::Stopped, now.vm);
        }
    })?;
    words.settle(result, &outcome.ending)
}

fn with_params(result: Measurement, pace: Pace) -> Measurement {
    result
        .param("memory_mib", MEMORY_MIB)
        .param("resident_mib", RESIDENT_MIB)
        .param("vcpus", 1)
        .param("workers", 1)
        .param("faulters", 1)
        .param("guest_slice_us", SLICE_US)
        .param("guest_tick_us", TICK_US)
        .param("guest_processes", 1)
        .param("guest_look_ms", LOOK_MS)
        .param("slice_ms", super::ms(pace.slice))
        .param("settle_ms", super::ms(pace.settle))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_count_only_when_every_token_came_back() {
        let counters = |ready, lost| Counters {
            not_present: 2000,
            ready,
            wake_all: 1,
            dummies: 3,
            idle: 0,
            lost,
        };
        assert_eq!(faults(counters(2000, 0)).value, 2000.0);
        assert_eq!(faults(counters(2000, 0)).met, Some(true));
        assert_eq!(faults(counters(1999, 0)).met, Some(false));
        assert_eq!(faults(counters(2000, 1)).met, Some(false));
    }
}
