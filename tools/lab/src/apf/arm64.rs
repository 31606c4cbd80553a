//! `lacuna lab apf-arm64`: the experiment in the cover letter of the arm64 series of 2020 (RFCv2).
//! It measures the gain of asynchronous page faults.
//!
//! Half of the guest's memory is resident. A memory-bound thread allocates all memory, accesses and
//! frees it. A CPU-bound process counts on the same vCPU.
//!
//! | id | what is compared |
//! |---|---|
//! | `apf_arm64.cpu_bound_ratio.FORM.Nvcpu` | blocks a minute of the CPU-bound process, on / off |
//! | `apf_arm64.memory_bound_ratio.FORM.Nvcpu` | pages a minute of the other thread, on / off |
//! | `apf_arm64.alone_time_ratio.FORM` | the time of the memory-bound thread alone, on / off |
//! | `apf_arm64.MEASURE.latency_1ms.FORM` | workers beside faulters, as in [`crate::apf`] |
//!
//! `FORM` is the contract between host and guest: `rfcv2` or `v4` of arm64 guests, `x86` of x86-64
//! guests (`--arch x86_64`), which run the same programs.
//!
//! ```text
//! latency    injected: each swap-in takes the next of a sequence with the letter's shortest,
//!            longest and mean time; all arms of a round begin at the same place in it
//! work       what the memory-bound thread computes on each page, chosen in the run: alone, and
//!            without asynchronous faults, it waits for pages 30 % of its time
//! arms       one guest in one VM; the mechanism is switched between slices
//! ```
//!
//! Figures are stated as in the letter. A gain is the progress with asynchronous faults over the
//! progress without, less one: 8,286,827,472 blocks a minute to 7,029,030,180 are +17.8 %. The
//! share of swap-ins is a share of the time *with* asynchronous faults, and with the memory-bound
//! thread alone: 12.7 s of 42.2 s are 30 %.

mod pair;

use super::device::{self, DEVICES, Guests};
use super::{SLICE_US, TICK_US, alone};
use crate::experiment::{LabResult, Options, skip_if_busy};
use crate::fixture::builder;
use crate::report::{Progress, figure, time};
use crate::result::{Measurement, Report};
use crate::stats::Summary;
use lacuna::memory::{LatencySetting, LogNormal};
use lacuna::soft::{ApfStats, VmBuilder};
use lacuna::{Apf, Arch, PageCount};
use serde_json::json;
use std::time::Duration;

const ARM64: [Guests; 2] = [
    Guests {
        form: "rfcv2",
        about: "arm64, RFCv2: both events are data aborts",
        word: "apf=abort",
        ..X86[0]
    },
    Guests {
        form: "v4",
        about: "arm64, v1 to v4: an SDEI event and an interrupt",
        word: "apf=sdei",
        ..X86[0]
    },
];
const X86: [Guests; 1] = [Guests {
    experiment: "apf_arm64",
    form: "x86",
    about: "x86-64: a page fault and an interrupt",
    word: "apf=int",
}];

/// Guest memory for each vCPU in MiB; half of it is resident. It is small, so that the memory-bound
/// thread goes through all of it in some seconds.
const MEMORY_MIB: u64 = 6;

/// The letter's shortest and longest swap-in, and the mean: 12.7 s for 7,555 of them. The deviation
/// is not published. With this one, 7,555 draws reach about as far as the letter's swap-ins.
const TIMES: LogNormal = LogNormal {
    shortest: Duration::from_nanos(36_200),
    longest: Duration::from_micros(55_700),
    mean: Duration::from_micros(1680),
    sigma: 1.0,
};
const ABOUT_TIMES: &str = "36.2 us to 55.7 ms (injected: log-normal, sigma 1, mean 1.68 ms)";
/// The seed of the sequence of swap-in times, and its length.
const SEED: u64 = 2020;
const NUMBER: usize = 1 << 16;
/// How many swap-ins lie between the places at which two rounds of an experiment begin.
const APART: u64 = 4096;

/// Measures everything, in the order of the table above.
///
/// # Errors
/// The error of the first failed experiment.
pub fn run(options: &Options, report: &mut Report) -> LabResult {
    let all: &[Guests] = match options.arch {
        Arch::Arm64 => &ARM64,
        _ => &X86,
    };
    let steps = all.len() * (pair::VCPUS.len() + 2);
    let progress = Progress::new(steps as u64, options.verbosity);
    report.say(format!(
        "apf-arm64: the experiment of the arm64 series' cover letter (RFCv2, 2020), with {} \
         guests. Half of the memory is resident. A memory-bound thread allocates, accesses and \
         frees all of it, and a CPU-bound process counts on the same vCPU. A swap-in takes \
         {ABOUT_TIMES}. The time slice is {} ms. On and off are the same guest in turns. As in the \
         letter, a gain is on / off - 1 (+17.8 % there), and swap-ins take a share of the time \
         with asynchronous faults of the memory-bound thread alone (12.7 s of 42.2 s there: 30 %).",
        options.arch,
        SLICE_US / 1000,
    ));
    for guests in all {
        if options.wants("pair") {
            for &vcpus in pair::counts(options) {
                progress.step(format!("{}, {vcpus} vCPUs: both threads", guests.form))?;
                let done = pair::measure(guests, vcpus, options, report);
                skip_if_busy(report, pair::ids(guests, vcpus), done)?;
            }
        }
        if options.wants("alone") {
            progress.step(format!("{}: the memory-bound thread alone", guests.form))?;
            measure_alone(guests, options, report)?;
        }
        if options.wants("share") {
            progress.step(format!(
                "{}: workers and faulters, 1 ms a page",
                guests.form
            ))?;
            let [device, ..] = &DEVICES;
            let done = device::measure(device, *guests, options, report);
            skip_if_busy(report, guests.ids(device), done)?;
        }
    }
    Ok(())
}

/// The separately measurable parts.
pub const PARTS: &[&str] = &["pair", "alone", "share"];

/// A VM for `membound` with a memory-bound thread for each vCPU, and with `more` words on the
/// command line. The guest runs until it is ended. Its swap-ins take no time until the sequence of
/// latencies begins, the same for all VMs of the experiment.
fn membound(guests: &Guests, vcpus: usize, more: &str, options: &Options) -> VmBuilder {
    let mib = MEMORY_MIB * vcpus as u64;
    let [memory, resident] = [mib, mib / 2].map(|mib| PageCount::from_bytes(mib << 20));
    VmBuilder {
        arch: options.arch,
        apf: Apf::On,
        latency: LatencySetting::sequence(&TIMES.sequence(SEED, NUMBER)),
        command_line: format!(
            "threads={vcpus} rounds={} {} slice_us={SLICE_US} tick_us={TICK_US} {more}",
            alone::ROUNDS,
            guests.word,
        ),
        ..builder(memory, resident, vcpus)
    }
}

/// `result` with the parameters of all VMs of [`membound`].
fn with_params(result: Measurement) -> Measurement {
    result
        .param("swap_in", ABOUT_TIMES)
        .param("swap_in_seed", SEED)
        .param("guest_slice_us", SLICE_US)
        .param("guest_tick_us", TICK_US)
}

/// `apf_arm64.alone_time_ratio` with this form.
fn measure_alone(guests: &Guests, options: &Options, report: &mut Report) -> LabResult {
    let id = format!("apf_arm64.alone_time_ratio.{}", guests.form);
    let builder = membound(guests, 1, "", options);
    let rounds = if options.quick { 2 } else { 8 };
    let run = alone::run(&builder, options, rounds, |round| {
        builder.latency.begin(round * APART);
    })?;
    if let Some(why) = run.calibrated.refused(alone::TOLERANCE) {
        report.skip(id, why);
        return Ok(());
    }
    let bar = alone::BAR;
    let decided = is_decided(&run.null);
    report.say(format!(
        "{}, memory-bound thread alone: it waits {:.1} % of its time without asynchronous faults \
         (work {}). With them it takes {:.4} times as long (the letter: {bar}), and swap-ins take \
         {:.0} % of that time (the letter: 30 %).{}",
        guests.about,
        100.0 * run.calibrated.share,
        run.calibrated.work,
        run.ratio.median,
        swap_in_percent(&run),
        match decided {
            true => "",
            false => " The null's interval is wider than what is asked, so this is undecided.",
        },
    ));
    report.detail(block(guests, &run));
    let ApfStats { swap_in, taken, .. } = run.faults;
    let statistics = json!({
        "faults": swap_in.number, "notified": taken,
        "application_seconds": run.on_seconds,
        "swap_in_seconds": swap_in.total_ns as f64 / 1e9,
        "swap_in_percent_of_application": swap_in_percent(&run),
        "swap_in_min_ns": swap_in.min_ns, "swap_in_max_ns": swap_in.max_ns,
    });
    let result = with_params(run.result(&id, &builder))
        .reference(bar, "RFCv2, 2020-05-08")
        .arm("statistics", statistics);
    report.push(match decided {
        true => result.bar(bar),
        false => result.undecided(bar),
    });
    Ok(())
}

/// Whether the null stays so close to 1 that a ratio beyond the bar would be seen.
fn is_decided(null: &Summary) -> bool {
    null.low > 2.0 - alone::BAR && null.high < alone::BAR
}

/// The time of swap-ins as the letter states it: a share of the time *with* asynchronous faults.
fn swap_in_percent(run: &alone::Run) -> f64 {
    100.0 * run.faults.swap_in.total_ns as f64 / 1e9 / run.on_seconds
}

/// The letter's block of statistics beside ours, and the stalls.
fn block(guests: &Guests, run: &alone::Run) -> String {
    let swap_in = run.faults.swap_in;
    format!(
        "memory-bound thread alone, {}\n\
         \x20                                        the letter          here, all rounds with\n\
         \x20 asynchronous page faults                    7555  {:>20}\n\
         \x20 time of the application                   42.2 s  {:>18} s\n\
         \x20 time of swap-ins                    12.7 s (30 %)  {:>12} s ({:.0} %)\n\
         \x20 shortest swap-in                         36.2 us  {:>20}\n\
         \x20 longest swap-in                          55.7 ms  {:>20}\n\
         \x20 stalls of the vCPU: p50 / p99 / p99.9\n{}",
        guests.about,
        swap_in.number,
        figure(run.on_seconds),
        figure(swap_in.total_ns as f64 / 1e9),
        swap_in_percent(run),
        time(swap_in.min_ns),
        time(swap_in.max_ns),
        run.runs.stalls_table(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_null_wider_than_the_bar_decides_nothing() {
        for (low, high, decided) in [
            (0.995, 1.005, true),
            (0.995, 1.013, false),
            (0.98, 1.005, false),
        ] {
            assert_eq!(is_decided(&Summary::example(low, 1.0, high)), decided);
        }
    }
}
