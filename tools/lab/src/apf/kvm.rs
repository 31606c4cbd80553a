//! Asynchronous page faults of `/dev/kvm`. KVM is the host side there, so the guest's code meets an
//! implementation of the ABI other than ours.
//!
//! The experiment is the soft backend's: the same guest image, the same slices, the same arms, over
//! the backend interface. One thing differs. KVM has no [`ApfSwitch`](lacuna_machine::ApfSwitch):
//! it offers async page faults for the whole life of a VM. So *on* and *off* are two VMs, one after
//! the other, each with the worker alone in turns. The figure is a share of the worker's speed
//! alone, and the two VMs are not compared with each other.
//!
//! *Off* is not a vCPU that sleeps until the page is there. KVM halts the vCPU while a worker
//! thread of the kernel fetches the page. The guest's timer tick ends that halt, so a time slice of
//! the guest still ends in time.
//!
//! The figure is for the mechanism, also on a host that emulates every instruction of the guest's
//! kernel (`kvm_pvm`: about 1 us each). Four choices keep the cost of emulation out of the figure.
//! All are in the results:
//! * The worker and the faulter are threads of one process, which saves changes of CR3.
//! * The tick is as long as the guest's time slice, because the tick only ends slices.
//! * A paused faulter looks rarely whether its pause is over: each look slows the worker that is
//!   measured alone.
//! * Slices are short and many, because such hosts are disturbed for a second or more at times.

use super::SLICE_US;
use super::slices::{Arm, Pace, Role, Runs, take_turns};
use crate::experiment::{LabError, Options};
use crate::report::Progress;
use crate::result::{Better, Measurement, Report};
use crate::session::{Measured, image, on};
use crate::stats::{Rounds, Summary};
use lacuna_addr::PageCount;
use lacuna_guest::status::{Apf as Counters, Kind};
use lacuna_kvm::{LatencySetting, VmBuilder};
use lacuna_machine::{Apf, Arch, Builder, Vm};
use serde_json::json;
use std::time::{Duration, Instant};

/// The number of steps that [`measure`] reports as progress.
pub const STEPS: u64 = 2;

const FAULTS: &str = "apf.kvm.faults";
const FAULTS_BAR: f64 = 1000.0;
const MEMORY_MIB: u64 = 64;
const RESIDENT_MIB: u64 = 16;
/// The guest's timer tick, in microseconds.
const TICK_US: u64 = SLICE_US;
/// How often a paused thread looks whether its pause is over, in milliseconds.
const LOOK_MS: u64 = 50;
/// How long announced tokens may take to return once the faulter is paused.
const COME_BACK: Duration = Duration::from_secs(60);

/// A page's latency in milliseconds, its word in the id, and the bar of the share.
const LATENCIES: [(u64, &str, f64); 2] = [(1, "1ms", 85.0), (5, "5ms", 95.0)];

/// The ids of its results.
pub fn ids() -> impl Iterator<Item = String> {
    let shares = LATENCIES.map(|(_, word, _)| id(word));
    shares.into_iter().chain([FAULTS.to_owned()])
}

fn id(word: &str) -> String {
    format!("apf.kvm.task_share_percent.{word}")
}

pub(super) fn pace(options: &Options, apf: Apf) -> Pace {
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

/// `apf.kvm.*`; skipped without a usable `/dev/kvm`.
pub fn measure(
    options: &Options,
    report: &mut Report,
    progress: &Progress,
) -> Result<(), LabError> {
    if let Err(why) = lacuna_kvm::available() {
        ids().for_each(|id| report.skip(id, &why));
        return Ok(());
    }
    progress.step("/dev/kvm, with asynchronous faults")?;
    let on = shares_on_kvm(options, Apf::On)?;
    progress.step("/dev/kvm, without")?;
    let off = shares_on_kvm(options, Apf::Off)?;
    let share = |of: &Shares, beside| -> Result<Vec<Summary>, LabError> {
        let ratio = |runs: &Runs| runs.ratio(Arm::Alone, beside, Role::Workers);
        let ratios = of.runs.iter().map(ratio);
        ratios.map(|ratio| Ok(ratio?.scaled(100.0))).collect()
    };
    // All shares before the first result: on a busy machine all are skipped.
    let (with, without) = (share(&on, Arm::On)?, share(&off, Arm::Off)?);
    for (at, (ms, word, bar)) in LATENCIES.into_iter().enumerate() {
        let (runs, with, without) = (&on.runs[at], with[at], without[at]);
        report.detail(runs.table(&format!("/dev/kvm, {ms} ms of injected latency, on")));
        report.detail(off.runs[at].table(&format!("/dev/kvm, {ms} ms of injected latency, off")));
        report.say(format!(
            "/dev/kvm, {ms} ms of injected latency: beside a faulter, a worker keeps {:.0} % of \
             its speed with asynchronous faults, and {:.0} % without. Both are threads of one \
             process.",
            with.median, without.median,
        ));
        let result = Measurement::new(id(word), "%", Better::Higher, with).bar(bar);
        report.push(
            with_params(result, pace(options, Apf::On))
                .arm("alone", runs.arm(Arm::Alone, Role::Workers))
                .arm("on", runs.arm(Arm::On, Role::Workers))
                .arm("share_percent_off", without),
        );
    }
    report.push(faults(on.counters));
    Ok(())
}

/// The completed faults. None counts unless every announced token has returned.
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

/// The command line of `bm`, with `more`.
pub(super) fn words(more: &str) -> String {
    format!(
        "workers=1 faulters=1 processes=0 look_ms={LOOK_MS} {more} seconds=1000000 \
         slice_us={SLICE_US} tick_us={TICK_US}"
    )
}

struct Shares {
    /// One for each of [`LATENCIES`].
    runs: Vec<Runs>,
    /// The guest's counters when no page was on its way any more, or after [`COME_BACK`].
    counters: Counters,
}

fn shares_on_kvm(options: &Options, apf: Apf) -> Result<Shares, LabError> {
    let [memory, resident] = [MEMORY_MIB, RESIDENT_MIB].map(|mib| PageCount::from_bytes(mib << 20));
    let builder = VmBuilder {
        apf,
        command_line: words("populate=1"),
        ..VmBuilder::new(memory, resident)
    };
    shares(&builder, &builder.latency, apf, pace(options, apf))
}

/// The worker alone, and beside the faulter, at each of [`LATENCIES`]; on any backend.
fn shares<B: Builder>(
    builder: &B,
    latency: &LatencySetting,
    apf: Apf,
    pace: Pace,
) -> Result<Shares, LabError>
where
    B::Vm: Measured,
    LabError: From<<B::Vm as Vm>::Error>,
{
    let beside = match apf {
        Apf::On => Arm::On,
        Apf::Off => Arm::Off,
    };
    on(builder, &image(Arch::X86_64, "bm")?, |session| {
        session.guest.prepared()?;
        let run = |(ms, _, _)| {
            latency.set(Duration::from_millis(ms));
            take_turns(session, &[Arm::Alone, beside], pace)
        };
        let runs = LATENCIES.into_iter().map(run).collect::<Result<_, _>>()?;
        session.guest.pause(&[Kind::Faulter])?;
        let deadline = Instant::now() + COME_BACK;
        loop {
            session.guest.run_for(Duration::from_millis(100))?;
            let counters = session.guest.status()?.apf;
            // If a token is lost, this is no error: the result is that no fault counts.
            if counters.not_present == counters.ready || Instant::now() > deadline {
                return Ok(Shares { runs, counters });
            }
        }
    })
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
    use crate::fixture::{builder, eventually, needs_guests};
    use lacuna_skip::test;

    #[test]
    fn the_experiment_is_the_same_on_soft() {
        needs_guests();
        let pace = Pace {
            rounds: Rounds::Count(1),
            slice: Duration::from_millis(50),
            settle: Duration::from_millis(LOOK_MS + 10),
        };
        for (apf, beside) in [(Apf::On, Arm::On), (Apf::Off, Arm::Off)] {
            let counters = eventually(|| {
                let [memory, resident] = [32, 8].map(|mib| PageCount::from_bytes(mib << 20));
                let builder = lacuna_soft::VmBuilder {
                    apf,
                    command_line: words("populate=1"),
                    ..builder(memory, resident, 1)
                };
                let Shares { runs, counters } =
                    shares(&builder, &builder.latency, apf, pace).unwrap();
                assert_eq!(runs.len(), LATENCIES.len());
                let faulted = |runs: &Runs| runs.rate(beside, Role::Faulters).median > 0.0;
                let notified = apf == Apf::Off || counters.not_present > 0;
                match notified && runs.iter().all(faulted) {
                    true => Ok(counters),
                    false => Err(format!("no step of the faulter, or no event: {counters:?}")),
                }
            });
            let Counters {
                not_present,
                ready,
                lost,
                ..
            } = counters;
            assert_eq!((not_present > 0, lost), (apf == Apf::On, 0));
            assert_eq!(not_present, ready, "nothing is on its way any more");
        }
    }

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
