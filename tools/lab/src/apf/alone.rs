//! A memory-bound program alone. No other process gains from asynchronous faults, so the time of
//! the program shows their cost.
//!
//! `membound` has twice as much memory as is resident. It writes every page, reads all pages back
//! in another order, and computes a little on each; again and again. The unit of time is one such
//! round and not a slice: writes fault more often than reads, so only whole rounds are alike.
//!
//! How much the program computes on a page is not given but searched for ([`calibrate`]): without
//! asynchronous faults it shall wait for 30 % of its time.

use crate::experiment::{LabResult, Options};
use crate::fixture::{builder, with_size};
use crate::result::{Measurement, Report};
use crate::session::{Session, image, on};
use crate::slices::{Arm, Gain, OFF_NULL_ON, Role, Runs, turns};
use crate::stalls::{add_stalls, since};
use lacuna::soft::{ApfStats, Stalls, Vm, VmBuilder};
use lacuna::{Apf, Arch, PageCount};
use lacuna_guest::status::{Kind, Status};
use std::time::{Duration, Instant};

/// The largest ratio of the arm64 series' cover letter: 40.8 s to 40.3 s.
pub const BAR: f64 = 1.012;
/// The wanted share of the time that the program waits for pages.
const SHARE: f64 = 0.30;
/// The largest deviation from it in the cover letter's experiment, and in `lacuna lab apf`.
pub const TOLERANCE: f64 = 0.02;
const WIDE_TOLERANCE: f64 = 0.03;
/// The number of tries of the search for the work.
const TRIES: usize = 6;
/// The longest time of a round. It takes a few seconds, and a minute or more in a guest of 4 GiB.
const ROUND_LIMIT: Duration = Duration::from_secs(1800);
/// More rounds than any experiment waits for.
pub const ROUNDS: u64 = 1_000_000;

/// The ratio of times.
pub const TIME: Gain = Gain::new(Arm::OFF, Arm::ON, Role::Time);

/// Follows `membound` from one round to the next.
pub struct Program<'a> {
    session: &'a Session<'a, Vm>,
    /// Steps of a round.
    steps: u64,
    /// The counter's value at the end of the current round.
    next: u64,
    began: Instant,
    stalls: Vec<Stalls>,
}

/// A finished round.
pub struct Round {
    pub seconds: f64,
    /// The share of the vCPUs' time in which they waited.
    share: f64,
    /// Each vCPU's stalls in it.
    stalls: Vec<Stalls>,
}

impl<'a> Program<'a> {
    /// Waits for the beginning of the program. The first round of [`Program::next`] has begun
    /// before this call.
    pub fn start(session: &'a Session<'a, Vm>) -> LabResult<Self> {
        let begun = |status: &Status| {
            let (counter, goal) = progress(status)?;
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
    pub fn next(&mut self, apf: Apf) -> LabResult<Round> {
        self.session.set_apf(apf);
        let next = self.next;
        let over = |status: &Status| (progress(status)?.0 >= next).then_some(());
        self.session.guest.run_until(ROUND_LIMIT, over)?;
        self.next += self.steps;
        let (now, after) = (Instant::now(), self.session.vm.stalls());
        let stalls = since(&self.stalls, &after);
        self.stalls = after;
        let seconds = (now - std::mem::replace(&mut self.began, now)).as_secs_f64();
        let stalled: u64 = stalls.iter().map(Stalls::total_ns).sum();
        Ok(Round {
            seconds,
            share: stalled as f64 / 1e9 / (seconds * stalls.len() as f64),
            stalls,
        })
    }
}

/// Counter and goal of the process that touches memory.
fn progress(status: &Status) -> Option<(u64, Option<u64>)> {
    let mut threads = status.threads.iter();
    let program = threads.find(|thread| thread.kind == Kind::Faulter)?;
    Some((program.counter, program.goal))
}

/// The result of the search.
#[derive(Clone, Copy, Debug)]
pub struct Calibrated {
    /// Steps of computing on each page.
    pub work: u32,
    /// The share of the time that the program then waited.
    pub share: f64,
}

impl Calibrated {
    fn off(&self) -> f64 {
        (self.share - SHARE).abs()
    }

    /// `result` with both.
    pub fn with_params(&self, result: Measurement) -> Measurement {
        result
            .param("work", self.work)
            .param("swap_in_share_percent", 100.0 * self.share)
    }

    /// Why it does not suit the experiment.
    pub fn refused(&self, tolerance: f64) -> Option<String> {
        let percent = 100.0 * self.share;
        (self.off() > tolerance).then(|| {
            format!("no work was found: alone, it waited {percent:.1} % of its time, not 30 %")
        })
    }
}

/// Sets the work of the guest and returns it. The swap device has its latency when `begin` has been
/// called; each try begins with that.
///
/// One round of a small guest does not show the share: the page order of a round decides how many
/// of its accesses find no page, and neighbouring rounds differ by a third.
pub fn calibrate(
    program: &mut Program<'_>,
    Search { first, rounds }: Search,
    begin: impl Fn(),
) -> LabResult<Calibrated> {
    let guest = program.session.guest;
    // The first round touches fresh memory, which should not wait. The second begins with pages of
    // the first in swap.
    guest.set(1)?;
    program.next(Apf::Off)?;
    program.next(Apf::Off)?;
    let mut work = first;
    let mut best: Option<Calibrated> = None;
    for _ in 0..TRIES {
        guest.set(work)?;
        begin();
        let (mut seconds, mut stalled) = (0.0, 0.0);
        for _ in 0..rounds {
            let round = program.next(Apf::Off)?;
            seconds += round.seconds;
            stalled += round.seconds * round.share;
        }
        let share = stalled / seconds;
        let found = Calibrated { work, share };
        if best.is_none_or(|best| found.off() < best.off()) {
            best = Some(found);
        }
        if found.off() < TOLERANCE / 2.0 {
            break;
        }
        work = better(work, share);
    }
    let best = best.expect("at least one try");
    guest.set(best.work)?;
    Ok(best)
}

/// How the work is searched for.
pub struct Search {
    /// The work of the first try.
    pub first: u32,
    /// The rounds of a try.
    pub rounds: usize,
}

impl Search {
    /// For a guest of a few MiB.
    pub const fn small(options: &Options) -> Self {
        Self {
            first: 100_000,
            rounds: if options.quick { 2 } else { 4 },
        }
    }
}

/// The work with which the share becomes [`SHARE`]: the waits stay, and the rest is proportional to
/// the work.
fn better(work: u32, share: f64) -> u32 {
    let share = share.clamp(0.001, 0.999);
    let factor = share / (1.0 - share) * (1.0 - SHARE) / SHARE;
    (f64::from(work) * factor).clamp(1.0, f64::from(u32::MAX)) as u32
}

/// The rounds of the program.
pub struct Run {
    /// Its work, and the share of its waits in the rounds without asynchronous faults.
    pub calibrated: Calibrated,
    pub runs: Runs,
    /// Seconds of all rounds with asynchronous faults, and the counts of these faults.
    pub on_seconds: f64,
    pub faults: ApfStats,
}

/// Lets the arms take turns, round by round of the program. `begin` is as in [`turns`].
pub fn run(
    builder: &VmBuilder,
    options: &Options,
    rounds: usize,
    begin: impl Fn(u64),
) -> LabResult<Run> {
    on(builder, &image(options.arch, "membound")?, |session| {
        let mut program = Program::start(session)?;
        let mut calibrated = calibrate(&mut program, Search::small(options), || begin(0))?;
        assert_eq!(faults(session.vm).swap_in.number, 0, "no such faults yet");
        let mut on_seconds = 0.0;
        let runs = turns(&OFF_NULL_ON, rounds, begin, |arm, stalls| {
            let round = program.next(arm.apf.unwrap_or(Apf::On))?;
            add_stalls(stalls, &round.stalls);
            if arm == Arm::ON {
                on_seconds += round.seconds;
            }
            Ok([round.seconds, round.share])
        })?;
        calibrated.share = runs.rate(Arm::OFF, Role::Waits).median;
        Ok(Run {
            calibrated,
            runs,
            on_seconds,
            faults: faults(session.vm),
        })
    })
}

/// The sum over all vCPUs.
pub fn faults(vm: &Vm) -> ApfStats {
    let mut sum = ApfStats::default();
    vm.apf_stats().iter().for_each(|stats| sum.merge(stats));
    sum
}

impl Run {
    /// [`TIME`] as a result.
    pub fn result(&self, id: &str, builder: &VmBuilder) -> LabResult<Measurement> {
        let result = with_size(self.runs.result(id, TIME)?, builder);
        Ok(self.calibrated.with_params(result))
    }
}

/// The result of `lacuna lab apf`.
pub const ID: &str = "apf.memory_alone_time_ratio";

/// A VM for it. It is small, so a round takes about a second and the experiment has many rounds.
///
/// Guests of both architectures have as much memory for their programs. The memory below a kernel
/// is never used again after the boot: 1 MiB on x86-64, and the 2 MiB of the device tree on
/// AArch64.
fn membound(arch: Arch, rounds: u64) -> VmBuilder {
    let memory = if arch == Arch::Arm64 { 5 } else { 4 };
    let [memory, resident] = [memory, 2].map(|mib| PageCount::from_bytes(mib << 20));
    VmBuilder {
        arch,
        apf: Apf::On,
        command_line: format!("rounds={rounds}"),
        ..builder(memory, resident, 1)
    }
}

/// `apf.memory_alone_time_ratio`.
pub fn measure(options: &Options, report: &mut Report) -> LabResult {
    let builder = membound(options.arch, ROUNDS);
    let (rounds, us) = if options.quick { (2, 500) } else { (12, 1000) };
    let run = run(&builder, options, rounds, |_| {
        builder.latency.set(Duration::from_micros(us));
    })?;
    if let Some(why) = run.calibrated.refused(WIDE_TOLERANCE) {
        report.skip(ID, why);
        return Ok(());
    }
    report.detail(format!(
        "memory-bound program alone: stalls p50 / p99 / p99.9\n{}",
        run.runs.stalls_table()
    ));
    let result = run.result(ID, &builder)?;
    report.push(result.param("injected_latency_us", us).bar(BAR));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use lacuna_skip::test;

    /// If all pages of a guest are resident, it waits for none, and there is nothing to measure.
    #[test]
    fn each_round_of_either_guest_waits_for_pages() {
        crate::fixture::needs_guests();
        let swapped_in = |arch, rounds: u64| {
            let builder = VmBuilder {
                seed: Some(1),
                ..membound(arch, rounds)
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

    /// Waits of 3 s and work of 7 s: 30 %.
    #[test]
    fn the_next_try_has_the_wanted_share() {
        for computing in [0.5, 7.0, 100.0] {
            let (waits, work) = (3.0, 1_000_000);
            let next = better(work, waits / (waits + computing));
            let computing = computing * f64::from(next) / f64::from(work);
            let share = waits / (waits + computing);
            assert!((share - SHARE).abs() < 1e-4, "{share}");
        }
    }

    #[test]
    fn a_share_beside_the_tolerance_is_refused() {
        for (share, refused) in [(0.27, true), (0.285, false), (0.319, false), (0.33, true)] {
            let found = Calibrated { work: 1, share };
            assert_eq!(found.refused(TOLERANCE).is_some(), refused, "{share}");
        }
    }
}
