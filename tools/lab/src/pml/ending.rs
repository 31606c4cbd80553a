//! What a guest loses when the logging of its writes ends and its huge leaves come back: refaulted
//! one by one, as KVM had it before 2022, or put together in place.
//!
//! ```text
//! slice   logging on, every huge leaf split | the guest writes | off | one second      | a pause
//!                                             DWELL              ^     counted from here
//! ```
//! A slice of the arms `base` and `null` is the same without logging. What is lost is what the
//! guest did less in that second than in the second of `base`, of the same round.

use crate::experiment::{LabError, Options, vcpus};
use crate::report::Progress;
use crate::result::{Better, Measurement, Report};
use crate::session::{Session, on_soft};
use crate::stats::{Summary, measures};
use lacuna_addr::{Level, PageCount};
use lacuna_soft::{
    Apf, Dial, HugeLeaves, HugePages, Initially, Launch, Logging, Recovery, Swap, Vm,
};
use std::time::{Duration, Instant};

pub const STEPS: u64 = 1;

/// How long the guest writes into pages that are logged.
const DWELL: Duration = Duration::from_millis(300);
/// What is counted.
const SECOND: Duration = Duration::from_secs(1);
/// What follows it: time for the tables that are not needed any more.
const PAUSE: Duration = Duration::from_millis(100);

/// Every huge leaf is split at once, so that both arms end the same.
const EAGER: Logging = Logging::On {
    initially: Initially::Clean,
    huge: HugeLeaves::Eager,
};

const BASE: usize = 0;
const NULL: usize = 1;
const DROP: usize = 2;
const IN_PLACE: usize = 3;

pub fn measure(options: &Options, report: &mut Report, progress: &Progress) -> Result<(), LabError> {
    progress.step("ending logging");
    let mib: u64 = if options.quick { 512 } else { 4096 };
    let repeats = if options.quick { 1 } else { 10 };
    let memory = PageCount::from_bytes(mib << 20);
    let launch = Launch {
        memory,
        resident: PageCount::new(memory.get() + 8192),
        vcpus: vcpus(),
        huge: HugePages::Always,
        swap: Swap::Memory,
        latency: Dial::default(),
        apf: Apf::Off,
        seed: None,
        command_line: "huge=1 hot=0 seconds=1000000".into(),
    };
    let runs = on_soft(&launch, "churn", |session| {
        session.guest.prepared()?;
        session.guest.run_for(SECOND)?;
        measures(4, repeats, |arm| slice(session, arm))
    })?;
    let rate = |arm: usize| &runs[arm][0];
    for (name, arm) in [("null", NULL), ("drop", DROP), ("in_place", IN_PLACE)] {
        let lost: Vec<f64> = rate(BASE)
            .iter()
            .zip(rate(arm))
            .map(|(base, rate)| 1e3 * (1.0 - rate / base))
            .collect();
        eprintln!("{name}: lost ms {:?} {lost:.1?}", Summary::of(&lost));
        eprintln!("  call ms {:?}", runs[arm][1]);
        eprintln!("  recovered % {:?}", runs[arm][2]);
    }
    let _ = report;
    Ok(())
}

/// Steps a second in the second after the end; milliseconds that ending took; huge leaves after it,
/// percent of those before logging.
fn slice(session: &Session<'_>, arm: usize) -> Result<[f64; 3], LabError> {
    let vm = session.vm.expect("a soft VM");
    let huge = |vm: &Vm| vm.mmu().stage2().counts().of(Level::L2M) as f64;
    let before = huge(vm);
    if arm >= DROP {
        for id in vm.slots() {
            vm.set_logging(id, EAGER)?;
        }
    }
    session.guest.run_for(DWELL)?;
    let split = huge(vm);
    let from = session.guest.count()?;
    let began = Instant::now();
    if arm >= DROP {
        for id in vm.slots() {
            match arm {
                DROP => vm.mmu().end_logging_as(id, Recovery::Refault)?,
                _ => vm.set_logging(id, Logging::Off)?,
            }
        }
    }
    let call = began.elapsed();
    let at_once = huge(vm);
    session.guest.run_for(SECOND.saturating_sub(from.at.elapsed()))?;
    let to = session.guest.count()?;
    let after = huge(vm);
    session.guest.run_for(PAUSE)?;
    eprintln!("arm {arm}: huge {before} -> {split} -> {at_once} -> {after}");
    let [rate, _] = to.rates_since(&from);
    Ok([rate, call.as_secs_f64() * 1e3, 100.0 * after / before])
}
