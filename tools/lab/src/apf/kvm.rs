//! Asynchronous page faults of `/dev/kvm`. KVM is the host side there, so the guest's code meets an
//! implementation of the ABI other than ours.
//!
//! The experiment is the soft backend's: the same guest image, the same slices, the same arms, over
//! the backend interface. One thing differs. KVM has no [`ApfSwitch`](lacuna::ApfSwitch):
//! it offers async page faults for the whole life of a VM. So each arm is a VM of its own, one
//! after the other, with the worker alone in turns. The figure is a share of the worker's speed
//! alone, and the VMs are not compared with each other.
//!
//! | part | arm | a missing page |
//! |---|---|---|
//! | `kvm` | on | is swapped out; KVM notifies the guest |
//! | | off | the same, and KVM halts the vCPU while a worker thread of the kernel fetches it |
//! | `source` | both | exits; the run loop accepts, and asks the source; the guest is notified |
//! | | exits alone | exits; the guest is offered no async page faults: its vCPU waits |
//! | | async faults alone | no exit: the backend asks the source and notifies the guest |
//!
//! The guest's timer tick ends KVM's halt, so a time slice of the guest still ends in time. A page
//! is missing from a source once, so that guest's memory is larger than what the faulter touches.
//!
//! The figure is for the mechanism, also on a host that emulates every instruction of the guest's
//! kernel (`kvm_pvm`: about 1 us each). Four choices keep the cost of emulation out of the figure.
//! All are in the results:
//! * The worker and the faulter are threads of one process, which saves changes of CR3.
//! * The tick is as long as the guest's time slice, because the tick only ends slices.
//! * A paused faulter looks rarely whether its pause is over: each look slows the worker that is
//!   measured alone.
//! * Slices are short and many, because such hosts are disturbed for a second or more at times.

use super::{SLICE_US, with_bm};
use crate::experiment::{LabError, LabResult, Options, skip_if_busy};
use crate::result::{Better, Measurement, Report};
use crate::session::{Measured, image, on};
use crate::slices::{Arm, Gain, PROCESSES, Pace, Role, Runs, take_turns};
use crate::stats::Summary;
use lacuna::kvm::VmBuilder;
use lacuna::memory::{LatencySetting, SlotFlags};
use lacuna::source::{Faults, Injected, Zeros};
use lacuna::{Apf, Arch, Builder, MemorySlots as _, PageCount, Vm};
use lacuna_guest::status::{Apf as Counters, Kind};
use serde_json::json;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The number of steps that [`measure`] reports as progress.
pub const STEPS: u64 = 2 + SOURCE_ARMS.len() as u64;

const FAULTS: &str = "apf.kvm.faults";
const FAULTS_BAR: f64 = 1000.0;
const SOURCE: &str = "apf.kvm.source_share_percent.1ms";
/// Guest memory whose pages are swapped out, and whose pages a source provides.
const MEMORY_MIB: u64 = 64;
const RESIDENT_MIB: u64 = 16;
const SOURCE_MIB: u64 = 256;
/// The guest's timer tick, in microseconds.
const TICK_US: u64 = SLICE_US;
/// How often a paused thread looks whether its pause is over, in milliseconds.
const LOOK_MS: u64 = 50;
/// How long announced tokens may take to return once the faulter is paused.
const COME_BACK: Duration = Duration::from_secs(60);

/// A page's latency in milliseconds, and the bar of the share.
const LATENCIES: [(u64, f64); 2] = [(1, 85.0), (5, 95.0)];
/// The latency of a source.
const SOURCE_MS: u64 = 1;

/// The arms with a source: whether the guest is offered async page faults, and the slots' flags.
const SOURCE_ARMS: [(&str, Apf, SlotFlags); 3] = [
    ("both", Apf::On, SlotFlags::EXIT_ON_MISSING),
    ("exits_alone", Apf::Off, SlotFlags::EXIT_ON_MISSING),
    ("async_alone", Apf::On, SlotFlags::empty()),
];

fn id(ms: u64) -> String {
    format!("apf.kvm.task_share_percent.{ms}ms")
}

/// `apf.kvm.*`; skipped without a usable `/dev/kvm`.
pub fn measure(options: &Options, report: &mut Report) -> LabResult {
    type Part = fn(&Options, &mut Report) -> LabResult;
    let shares = LATENCIES.map(|(ms, _)| id(ms));
    let parts: [(_, Vec<String>, Part); 2] = [
        ("kvm", [&shares[..], &[FAULTS.into()]].concat(), swapped),
        ("source", vec![SOURCE.into()], provided),
    ];
    for (part, ids, measure) in parts {
        if !options.wants_x86(part, ids.clone(), report) {
            continue;
        }
        match lacuna::kvm::available() {
            Ok(()) => {
                let done = measure(options, report);
                skip_if_busy(report, ids, done)?;
            }
            Err(why) => ids.into_iter().for_each(|id| report.skip(id, &why)),
        }
    }
    Ok(())
}

fn pace(options: &Options, apf: Apf) -> Pace {
    let rounds = match (options.quick, apf) {
        (true, _) => 2,
        (false, Apf::On) => 24,
        (false, Apf::Off) => 4,
    };
    Pace::new(rounds, 100, LOOK_MS + 10)
}

/// `result` with the parameters of all guests here.
fn with_kvm(result: Measurement, pace: Pace, sizes: [u64; 2]) -> Measurement {
    with_bm(result, pace, sizes, 1)
        .param("guest_tick_us", TICK_US)
        .param("guest_processes", 1)
        .param("guest_look_ms", LOOK_MS)
}

/// The command line of `bm`, with `more`.
fn words(more: &str) -> String {
    format!(
        "workers=1 faulters=1 processes=0 look_ms={LOOK_MS} {more} seconds=1000000 \
         slice_us={SLICE_US} tick_us={TICK_US}"
    )
}

/// The worker's share of its speed alone, in percent.
fn share(runs: &Runs, apf: Apf) -> LabResult<Summary> {
    let gain = Gain::new(Arm::ALONE, Arm::beside(apf), Role::Workers);
    Ok(runs.ratio(gain)?.scaled(100.0))
}

/// Part `kvm`: swapped-out pages, at each of [`LATENCIES`].
fn swapped(options: &Options, report: &mut Report) -> LabResult {
    let in_vm = |apf| {
        let sizes = [MEMORY_MIB, RESIDENT_MIB];
        let [memory, resident] = sizes.map(|mib| PageCount::from_bytes(mib << 20));
        let builder = VmBuilder {
            apf,
            command_line: words("populate=1"),
            ..VmBuilder::new(memory, resident)
        };
        shares(&builder, &builder.latency, apf, pace(options, apf))
    };
    options.step("/dev/kvm, with asynchronous faults")?;
    let (on, counters) = in_vm(Apf::On)?;
    options.step("/dev/kvm, without")?;
    let (off, _) = in_vm(Apf::Off)?;
    let results = LATENCIES.iter().zip(on.iter().zip(&off));
    let results = results.map(|((ms, bar), (on, off))| {
        let result = on.result(id(*ms), Gain::SHARE)?.bar(*bar);
        Ok::<_, LabError>((result, share(off, Apf::Off)?))
    });
    // All shares before the first result: on a busy machine all are skipped.
    let results = results.collect::<Result<Vec<_>, _>>()?;
    for (at, (result, without)) in results.into_iter().enumerate() {
        let title = format!("/dev/kvm, {} ms of injected latency", LATENCIES[at].0);
        report.detail(on[at].table(&format!("{title}, on"), &PROCESSES));
        report.detail(off[at].table(&format!("{title}, off"), &PROCESSES));
        let result = with_kvm(result, pace(options, Apf::On), [MEMORY_MIB, RESIDENT_MIB]);
        report.push(result.arm("share_percent_off", without));
    }
    report.push(faults(counters));
    Ok(())
}

/// The completed faults. None counts unless every announced token has returned.
fn faults(guest: Counters) -> Measurement {
    let matched = match guest.not_present == guest.ready && guest.lost == 0 {
        true => guest.not_present,
        false => 0,
    };
    let summary = Summary::of(&[f64::from(matched)]);
    let result = Measurement::new(FAULTS, "faults", Better::Higher, summary);
    result.bar(FAULTS_BAR).arm(
        "guest",
        json!({"not_present": guest.not_present, "ready": guest.ready, "lost": guest.lost,
               "wake_all": guest.wake_all, "ready_before_wait": guest.dummies,
               "hit_idle": guest.idle}),
    )
}

/// The worker alone, and beside the faulter, at each of [`LATENCIES`]; on any backend. Returns also
/// the guest's counters when no page was on its way any more, or after [`COME_BACK`].
fn shares<B: Builder>(
    builder: &B,
    latency: &LatencySetting,
    apf: Apf,
    pace: Pace,
) -> LabResult<(Vec<Runs>, Counters)>
where
    B::Vm: Measured,
    LabError: From<<B::Vm as Vm>::Error>,
{
    on(builder, &image(Arch::X86_64, "bm")?, |session| {
        session.guest.prepared()?;
        let run = |(ms, _)| {
            latency.set(Duration::from_millis(ms));
            take_turns(session, &[Arm::ALONE, Arm::beside(apf)], pace, |_| ())
        };
        let runs = LATENCIES.into_iter().map(run).collect::<Result<_, _>>()?;
        session.guest.pause(&[Kind::Faulter])?;
        let deadline = Instant::now() + COME_BACK;
        loop {
            session.guest.run_for(Duration::from_millis(100))?;
            let counters = session.guest.status()?.apf;
            // If a token is lost, this is no error: the result is that no fault counts.
            if counters.not_present == counters.ready || Instant::now() > deadline {
                return Ok((runs, counters));
            }
        }
    })
}

/// Part `source`.
fn provided(options: &Options, report: &mut Report) -> LabResult {
    let mut all = Vec::new();
    for (name, apf, flags) in SOURCE_ARMS {
        options.step(format!("/dev/kvm, pages from a source, {name}"))?;
        let memory = PageCount::from_bytes(SOURCE_MIB << 20);
        let link = Faults::latency(Duration::from_millis(SOURCE_MS));
        let source = Injected::new(Zeros, link).map_err(LabError::io("start a source"))?;
        let builder = VmBuilder {
            apf,
            source: Some(Arc::new(source)),
            command_line: words("populate=0"),
            ..VmBuilder::new(memory, memory)
        };
        let runs = on(&builder, &image(Arch::X86_64, "bm")?, |session| {
            session.guest.prepared()?;
            for slot in session.vm.memory_slots() {
                session.vm.set_slot_flags(slot.id, flags)?;
            }
            let arms = [Arm::ALONE, Arm::beside(apf)];
            take_turns(session, &arms, pace(options, Apf::On), |_| ())
        })?;
        let pages = runs.rate(Arm::beside(apf), Role::Faulters);
        all.push((name, share(&runs, apf)?, pages, runs));
    }
    let (_, both, ..) = all[0];
    let result =
        Measurement::new(SOURCE, "%", Better::Higher, both).param("injected_latency_ms", SOURCE_MS);
    let mut result = with_kvm(result, pace(options, Apf::On), [SOURCE_MIB; 2]);
    for (name, share, pages, runs) in all {
        let title = format!("/dev/kvm, a source {SOURCE_MS} ms (injected) away, {name}");
        report.detail(runs.table(&title, &PROCESSES));
        result = result
            .arm(&format!("share_percent_{name}"), share)
            .arm(&format!("faulter_{name}"), pages);
    }
    report.push(result);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{builder, eventually, needs_guests};
    use lacuna_skip::test;

    #[test]
    fn the_experiment_is_the_same_on_soft() {
        needs_guests();
        for apf in [Apf::On, Apf::Off] {
            let counters = eventually(|| {
                let [memory, resident] = [32, 8].map(|mib| PageCount::from_bytes(mib << 20));
                let builder = lacuna::soft::VmBuilder {
                    apf,
                    command_line: words("populate=1"),
                    ..builder(memory, resident, 1)
                };
                let pace = Pace::new(1, 50, LOOK_MS + 10);
                let (runs, counters) = shares(&builder, &builder.latency, apf, pace).unwrap();
                assert_eq!(runs.len(), LATENCIES.len());
                let rate = |runs: &Runs| runs.rate(Arm::beside(apf), Role::Faulters).median;
                let notified = apf == Apf::Off || counters.not_present > 0;
                match notified && runs.iter().all(|runs| rate(runs) > 0.0) {
                    true => Ok(counters),
                    false => Err(format!("no step of the faulter, or no event: {counters:?}")),
                }
            });
            assert_eq!(
                (counters.not_present > 0, counters.lost),
                (apf == Apf::On, 0)
            );
            // Nothing is on its way any more.
            assert_eq!(counters.not_present, counters.ready);
        }
    }

    #[test]
    fn faults_count_only_when_every_token_came_back() {
        for (ready, lost, value) in [(2000, 0, 2000.0), (1999, 0, 0.0), (2000, 1, 0.0)] {
            let counters = Counters {
                not_present: 2000,
                ready,
                wake_all: 1,
                dummies: 3,
                idle: 0,
                lost,
            };
            let result = faults(counters);
            assert_eq!((result.value, result.met), (value, Some(value > 0.0)));
        }
    }
}
