//! A memory-bound program alone. No other process gains from asynchronous faults, so the figure is
//! their cost.
//!
//! `membound` has twice as much memory as is resident. It writes every page, reads all pages back
//! in another order, and computes a little on each; again and again. The unit of time is one such
//! round and not a slice: writes fault more often than reads, so only whole rounds are alike.
//!
//! The swap latency is not given but searched for: without asynchronous faults the program shall
//! wait for 30 % of its time.

use crate::experiment::{LabError, Options};
use crate::fixture::builder;
use crate::result::{Better, Measurement, Report};
use crate::session::{Session, image, on};
use crate::stalls::{add_stalls, stalls_json, stalls_text};
use crate::stats::{Summary, measures, paired};
use lacuna_addr::PageCount;
use lacuna_guest::status::{Kind, Status};
use lacuna_machine::Arch;
use lacuna_soft::{Apf, LatencySetting, Stalls, Vm, VmBuilder};
use serde_json::Value;
use std::time::{Duration, Instant};

const ID: &str = "apf.memory_alone_time_ratio";
/// Guest memory on x86-64. It is small, so a round takes about a second and the experiment has many
/// rounds.
const MEMORY_MIB: u64 = 4;
const RESIDENT_MIB: u64 = 2;

/// Guests of both architectures have as much memory for their programs. The memory below a kernel
/// is never used again after the boot: 1 MiB on x86-64, and the 2 MiB of the device tree on
/// AArch64.
const fn memory_mib(arch: Arch) -> u64 {
    match arch {
        Arch::Arm64 => MEMORY_MIB + 1,
        _ => MEMORY_MIB,
    }
}
/// The wanted share of the time that the program waits for pages, and the largest deviation.
const SHARE: f64 = 0.30;
const TOLERANCE: f64 = 0.03;
/// The latency at which the search begins.
const FIRST_GUESS: Duration = Duration::from_micros(500);
/// The longest time of a round. It takes a few seconds.
const ROUND_LIMIT: Duration = Duration::from_secs(120);

/// The arms; the second is the null.
const ARMS: [(&str, Apf); 3] = [("off", Apf::Off), ("null", Apf::Off), ("on", Apf::On)];
const OFF: usize = 0;
const NULL: usize = 1;
const ON: usize = 2;

/// How much `membound` computes on each page. It decides which latency gives [`SHARE`]: about half
/// a millisecond, between a file's and the 1 ms of the other experiments.
const fn work(options: &Options) -> u64 {
    if options.quick { 15_000 } else { 40_000 }
}

/// A VM for `membound`.
fn membound(arch: Arch, command_line: String) -> VmBuilder {
    let sizes = [memory_mib(arch), RESIDENT_MIB];
    let [memory, resident] = sizes.map(|mib| PageCount::from_bytes(mib << 20));
    VmBuilder {
        arch,
        apf: Apf::On,
        command_line,
        ..builder(memory, resident, 1)
    }
}

/// `apf.memory_alone_time_ratio`.
pub fn measure(options: &Options, report: &mut Report) -> Result<(), LabError> {
    let words = format!("work={} rounds={ROUNDS}", work(options));
    let builder = membound(options.arch, words);
    let runs = if options.quick { 2 } else { 12 };
    let found = on(&builder, &image(options.arch, "membound")?, |session| {
        let mut rounds = Rounds::start(session)?;
        calibrate(&mut rounds, &builder.latency)?;
        let mut stalls = vec![Vec::new(); ARMS.len()];
        let runs = measures(ARMS.len(), runs, |arm| {
            let round = rounds.next(ARMS[arm].1)?;
            add_stalls(&mut stalls[arm], &round.stalls_before, &round.stalls_after);
            Ok::<_, LabError>([round.seconds(), round.stalled()])
        })?;
        Ok(Found { runs, stalls })
    })?;
    record(&found, &builder, work(options), report);
    Ok(())
}

/// More rounds than any experiment waits for.
pub(crate) const ROUNDS: u64 = 1_000_000;

struct Found {
    /// Each arm's rounds: their times and the stalls in them, in seconds.
    runs: Vec<[Vec<f64>; 2]>,
    stalls: Vec<Vec<Stalls>>,
}

impl Found {
    fn arm(&self, arm: usize) -> Value {
        let mut value = Value::from(Summary::of(&self.runs[arm][0]));
        value["stalls"] = stalls_json(&self.stalls[arm]);
        value
    }
}

fn record(found: &Found, builder: &VmBuilder, work: u64, report: &mut Report) {
    let [time, stalled] = &found.runs[OFF];
    let share = stalled.iter().sum::<f64>() / time.iter().sum::<f64>();
    let us = builder.latency.ns() / 1000;
    if (share - SHARE).abs() > TOLERANCE {
        let percent = 100.0 * share;
        let why = format!(
            "no latency was found: the program waited {percent:.0} % of its time, not 30 %"
        );
        report.skip(ID, why);
        return;
    }
    let ratio = paired(time, &found.runs[ON][0]);
    report.say(format!(
        "memory-bound program alone: without asynchronous faults it waits for pages {:.0} % of its \
         time, at {us} us a page (injected). With them it takes {:.3} times as long.",
        100.0 * share,
        ratio.median,
    ));
    let mut table = String::from("memory-bound program alone: stalls p50 / p99 / p99.9\n");
    for ((name, _), stalls) in ARMS.iter().zip(&found.stalls) {
        table.push_str(&format!("  {name:<4}  {}\n", stalls_text(stalls)));
    }
    report.detail(table);
    report.push(
        Measurement::new(ID, "x", Better::Lower, ratio)
            .bar(1.012)
            .param("memory_mib", memory_mib(builder.arch))
            .param("resident_mib", RESIDENT_MIB)
            .param("vcpus", 1)
            .param("work", work)
            .param("injected_latency_us", us)
            .param("swap_in_share_percent", 100.0 * share)
            .arm("off", found.arm(OFF))
            .arm("on", found.arm(ON))
            .arm("null", paired(time, &found.runs[NULL][0])),
    );
}

/// Changes `latency` until a round without asynchronous faults waits for [`SHARE`] of its time.
fn calibrate(rounds: &mut Rounds<'_>, latency: &LatencySetting) -> Result<(), LabError> {
    // The first round touches fresh memory, which should not wait.
    rounds.next(Apf::Off)?;
    latency.set(FIRST_GUESS);
    for _ in 0..4 {
        let round = rounds.next(Apf::Off)?;
        let (stalled, count) = (round.stalled(), round.stall_count());
        let share = stalled / round.seconds();
        if (share - SHARE).abs() < TOLERANCE / 6.0 || count == 0 {
            break;
        }
        let computing = round.seconds() - stalled;
        let wanted = computing * SHARE / (1.0 - SHARE);
        let seconds = latency.ns() as f64 / 1e9 + (wanted - stalled) / count as f64;
        latency.set(Duration::from_secs_f64(seconds.clamp(0.0, 1.0)));
    }
    Ok(())
}

/// Follows `membound` from one round to the next.
pub(crate) struct Rounds<'a> {
    session: &'a Session<'a, Vm>,
    /// Steps of a round.
    steps: u64,
    /// The counter's value at the end of the current round.
    next: u64,
    began: Instant,
    stalls: Vec<Stalls>,
}

/// A finished round.
pub(crate) struct Round {
    time: Duration,
    pub(crate) stalls_before: Vec<Stalls>,
    pub(crate) stalls_after: Vec<Stalls>,
}

impl<'a> Rounds<'a> {
    /// Waits for the beginning of the program. The first round of [`Rounds::next`] has begun before
    /// this call.
    pub(crate) fn start(session: &'a Session<'a, Vm>) -> Result<Self, LabError> {
        let begun = |status: &Status| {
            let (counter, goal) = status.threads.iter().find_map(program)?;
            Some((counter, goal?))
        };
        let (counter, goal) = session.guest.run_until(ROUND_LIMIT, begun)?;
        let steps = goal / ROUNDS;
        Ok(Self {
            session,
            steps,
            next: (counter / steps + 1) * steps,
            began: Instant::now(),
            stalls: session.vm.stalls(),
        })
    }

    /// Waits for the end of the round, whose faults are taken as `apf` says.
    pub(crate) fn next(&mut self, apf: Apf) -> Result<Round, LabError> {
        self.session.set_apf(apf);
        let next = self.next;
        let over = |status: &Status| {
            let (counter, _) = status.threads.iter().find_map(program)?;
            (counter >= next).then_some(())
        };
        self.session.guest.run_until(ROUND_LIMIT, over)?;
        self.next += self.steps;
        let now = Instant::now();
        let time = now - std::mem::replace(&mut self.began, now);
        let stalls_after = self.session.vm.stalls();
        let stalls_before = std::mem::replace(&mut self.stalls, stalls_after.clone());
        Ok(Round {
            time,
            stalls_before,
            stalls_after,
        })
    }
}

/// Counter and goal of the process that touches memory.
fn program(thread: &lacuna_guest::status::Thread) -> Option<(u64, Option<u64>)> {
    (thread.kind == Kind::Faulter).then_some((thread.counter, thread.goal))
}

impl Round {
    pub(crate) fn seconds(&self) -> f64 {
        self.time.as_secs_f64()
    }

    /// The seconds that the vCPU was stalled.
    pub(crate) fn stalled(&self) -> f64 {
        let total = |stalls: &[Stalls]| stalls.iter().map(Stalls::total_ns).sum::<u64>();
        (total(&self.stalls_after) - total(&self.stalls_before)) as f64 / 1e9
    }

    pub(crate) fn stall_count(&self) -> u64 {
        let count = |stalls: &[Stalls]| stalls.iter().map(Stalls::count).sum::<u64>();
        count(&self.stalls_after) - count(&self.stalls_before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lacuna_skip::test;

    /// If all pages of a guest are resident, it waits for none, and there is nothing to measure.
    #[test]
    fn each_round_of_either_guest_waits_for_pages() {
        if let Some(reason) = lacuna_guest::unavailable() {
            lacuna_skip::skip_test(reason);
        }
        let swapped_in = |arch, rounds: u64| {
            let builder = VmBuilder {
                seed: Some(1),
                ..membound(arch, format!("rounds={rounds}"))
            };
            let image = image(arch, "membound").unwrap();
            let run = builder.run_to_summary(&image, |_: &str| ());
            run.unwrap().host.swapped_in
        };
        let a_round =
            [Arch::X86_64, Arch::Arm64].map(|arch| (swapped_in(arch, 4) - swapped_in(arch, 2)) / 2);
        let [x86, arm64] = a_round;
        assert!(x86 > 100, "{a_round:?}");
        assert!(2 * arm64 > x86 && arm64 < 2 * x86, "{a_round:?}");
    }
}
