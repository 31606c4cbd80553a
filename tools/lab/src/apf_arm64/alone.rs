//! The memory-bound thread alone, round by round: asynchronous faults cannot help it, so its time
//! shows their cost. This file also prints the cover letter's block of statistics for such a run.

use super::calibrate::{self, calibrate, share};
use super::{Form, MEMORY_MIB, SLICE_US, TICK_US, disk, membound};
use crate::apf::alone::Rounds as Program;
use crate::experiment::{LabError, Options};
use crate::report::{figure, time};
use crate::result::{Better, Measurement, Report};
use crate::session::{image, on};
use crate::stalls::{add_stalls, stalls_json, stalls_text};
use crate::stats::{Summary, measures, paired};
use lacuna_soft::{Apf, ApfStats, Stalls, Vm};
use serde_json::{Value, json};

/// The largest ratio of the letter: 40.8 s to 40.3 s.
const BAR: f64 = 1.012;

/// The arms; the second is the null.
const ARMS: [(&str, Apf); 3] = [("off", Apf::Off), ("null", Apf::Off), ("on", Apf::On)];
const OFF: usize = 0;
const NULL: usize = 1;
const ON: usize = 2;

struct Run {
    found: calibrate::Found,
    /// Each arm's rounds: seconds of the program, and the share of them that the vCPU waited.
    rounds: Vec<[Vec<f64>; 2]>,
    stalls: Vec<Vec<Stalls>>,
    /// Seconds of all rounds with asynchronous faults, and the counts of these faults.
    on_seconds: f64,
    faults: ApfStats,
}

/// `apf_arm64.alone_time_ratio` with this form.
pub fn measure(form: &Form, options: &Options, report: &mut Report) -> Result<(), LabError> {
    let builder = membound(form, 1, "", options);
    let latency = &builder.latency;
    let count = if options.quick { 2 } else { 8 };
    let run = on(&builder, &image(options.arch, "membound")?, |session| {
        let mut program = Program::start(session)?;
        let found = calibrate(&mut program, &session.guest, latency, 1, options)?;
        let before = stats(session.vm);
        let (mut turns, mut on_seconds) = (0, 0.0);
        let mut stalls = vec![Vec::new(); ARMS.len()];
        let rounds = measures(ARMS.len(), count, |arm| {
            // A round of the experiment has two turns of each arm.
            disk::begin(latency, turns / (2 * ARMS.len() as u64));
            turns += 1;
            let round = program.next(ARMS[arm].1)?;
            add_stalls(&mut stalls[arm], &round.stalls_before, &round.stalls_after);
            if arm == ON {
                on_seconds += round.seconds();
            }
            Ok::<_, LabError>([round.seconds(), share(&round, 1)])
        })?;
        assert_eq!(before.swap_in.number, 0, "calibration has no such faults");
        Ok(Run {
            found,
            rounds,
            stalls,
            on_seconds,
            faults: stats(session.vm),
        })
    })?;
    record(form, &run, report);
    Ok(())
}

/// The sum over all vCPUs.
fn stats(vm: &Vm) -> ApfStats {
    let mut sum = ApfStats::default();
    vm.apf_stats().iter().for_each(|stats| sum.merge(stats));
    sum
}

fn record(form: &Form, run: &Run, report: &mut Report) {
    let id = format!("apf_arm64.alone_time_ratio.{}", form.id);
    let [seconds, share] = &run.rounds[OFF];
    let share = Summary::of(share).median;
    let measured = calibrate::Found { share, ..run.found };
    if let Some(why) = measured.refused() {
        return report.skip(id, why);
    }
    let [ratio, null] = [ON, NULL].map(|arm| paired(seconds, &run.rounds[arm][0]));
    report.say(format!(
        "{}, memory-bound thread alone: it waits {:.1} % of its time without asynchronous faults \
         (work {}). With them it takes {:.4} times as long (the letter: {BAR}), and swap-ins take \
         {:.0} % of that time (the letter: 30 %).{}",
        form.about,
        100.0 * share,
        run.found.work,
        ratio.median,
        swap_in_percent(run),
        if is_decided(&null) {
            ""
        } else {
            " The null's interval is wider than what is asked, so this is undecided."
        },
    ));
    report.detail(block(form, run));
    let arm = |arm: usize| {
        let mut value = Value::from(Summary::of(&run.rounds[arm][0]));
        value["stalls"] = stalls_json(&run.stalls[arm]);
        value
    };
    let result = Measurement::new(id, "x", Better::Lower, ratio)
        .reference(BAR, "RFCv2, 2020-05-08")
        .param("memory_mib", MEMORY_MIB)
        .param("resident_mib", MEMORY_MIB / 2)
        .param("vcpus", 1)
        .param("work", run.found.work)
        .param("swap_in_share_percent", 100.0 * share)
        .param("swap_in", disk::ABOUT)
        .param("swap_in_seed", disk::SEED)
        .param("guest_slice_us", SLICE_US)
        .param("guest_tick_us", TICK_US)
        .arm("off", arm(OFF))
        .arm("on", arm(ON))
        .arm("null", null)
        .arm("statistics", statistics(run));
    report.push(match is_decided(&null) {
        true => result.bar(BAR),
        false => result.undecided(BAR),
    });
}

/// Whether the null stays so close to 1 that a ratio beyond the bar would be seen.
fn is_decided(null: &Summary) -> bool {
    null.low > 2.0 - BAR && null.high < BAR
}

/// The time of swap-ins as the letter states it: a share of the time *with* asynchronous faults.
fn swap_in_percent(run: &Run) -> f64 {
    100.0 * run.faults.swap_in.total_ns as f64 / 1e9 / run.on_seconds
}

fn statistics(run: &Run) -> Value {
    let ApfStats { swap_in, taken, .. } = run.faults;
    json!({
        "faults": swap_in.number, "notified": taken,
        "application_seconds": run.on_seconds,
        "swap_in_seconds": swap_in.total_ns as f64 / 1e9,
        "swap_in_percent_of_application": swap_in_percent(run),
        "swap_in_min_ns": swap_in.min_ns, "swap_in_max_ns": swap_in.max_ns,
    })
}

/// The letter's block of statistics beside ours, and the stalls.
fn block(form: &Form, run: &Run) -> String {
    let swap_in = run.faults.swap_in;
    let total = swap_in.total_ns as f64 / 1e9;
    let share = swap_in_percent(run);
    let mut text = format!(
        "memory-bound thread alone, {}\n\
         \x20                                        the letter          here, all rounds with\n\
         \x20 asynchronous page faults                    7555  {:>20}\n\
         \x20 time of the application                   42.2 s  {:>18} s\n\
         \x20 time of swap-ins                    12.7 s (30 %)  {:>12} s ({share:.0} %)\n\
         \x20 shortest swap-in                         36.2 us  {:>20}\n\
         \x20 longest swap-in                          55.7 ms  {:>20}\n\
         \x20 stalls of the vCPU: p50 / p99 / p99.9\n",
        form.about,
        swap_in.number,
        figure(run.on_seconds),
        figure(total),
        time(swap_in.min_ns),
        time(swap_in.max_ns),
    );
    for ((name, _), stalls) in ARMS.iter().zip(&run.stalls) {
        text.push_str(&format!("    {name:<4}  {}\n", stalls_text(stalls)));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_null_wider_than_the_bar_decides_nothing() {
        let null = |low, high| Summary {
            median: 1.0,
            low,
            high,
            runs: 8,
            coverage: 0.96,
        };
        assert!(is_decided(&null(0.995, 1.005)));
        assert!(!is_decided(&null(0.995, 1.013)));
        assert!(!is_decided(&null(0.98, 1.005)));
    }
}
