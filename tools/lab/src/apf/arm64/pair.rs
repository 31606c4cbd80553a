//! The memory-bound thread beside the CPU-bound process, on each vCPU.

use super::{APART, Guests, MEMORY_MIB, membound};
use crate::apf::alone::{Program, TOLERANCE, calibrate};
use crate::apf::slices::{Arm, Gain, OFF_NULL_ON, Pace, Role, Runs, take_turns};
use crate::experiment::{LabResult, Options};
use crate::report::short;
use crate::result::{Measurement, Report};
use crate::session::{image, on};
use lacuna_guest::status::Kind;

/// The numbers of vCPUs; the bars are for one, as in the letter.
pub const VCPUS: [usize; 3] = [1, 2, 4];

/// The measured numbers of vCPUs.
pub fn counts(options: &Options) -> &'static [usize] {
    if options.quick { &VCPUS[..1] } else { &VCPUS }
}

/// Steps of the CPU-bound process in a block.
const BLOCK: f64 = 1024.0;
/// The letter's ratio, which is the bar for the median.
const LETTER: f64 = 1.178;
/// The bar for the worse end of the interval.
const WORSE_END: f64 = 1.10;

/// The ids of the results of a number of vCPUs.
pub fn ids(guests: &Guests, vcpus: usize) -> [String; 2] {
    ["cpu_bound_ratio", "memory_bound_ratio"]
        .map(|name| format!("apf_arm64.{name}.{}.{vcpus}vcpu", guests.form))
}

/// `apf_arm64.cpu_bound_ratio` and `apf_arm64.memory_bound_ratio` with this form.
pub fn measure(guests: &Guests, vcpus: usize, options: &Options, report: &mut Report) -> LabResult {
    let pace = match (options.quick, vcpus) {
        (true, _) => Pace::new(6, 1000, 100),
        (false, 1) => Pace::new(9, 3000, 100),
        (false, _) => Pace::new(6, 2000, 100),
    };
    let builder = membound(guests, vcpus, "nop=1", options);
    let begin = |round| builder.latency.begin(round * APART);
    let image = image(options.arch, "membound")?;
    let (found, runs) = on(&builder, &image, |session| {
        session.guest.pause(&[Kind::Worker])?;
        let mut program = Program::start(session)?;
        let found = calibrate(&mut program, options, || begin(0))?;
        Ok((found, take_turns(session, &OFF_NULL_ON, pace, begin)?))
    })?;
    let ids = ids(guests, vcpus);
    if let Some(why) = found.refused(TOLERANCE) {
        ids.into_iter().for_each(|id| report.skip(id, &why));
        return Ok(());
    }
    let [cpu, memory] = ids;
    let (cpu, memory) = (
        runs.result(cpu, Gain::WORKERS)?,
        runs.result(memory, Gain::FAULTERS)?,
    );
    report.detail(table(guests, vcpus, &runs));
    let gain_percent = |ratio: f64| 100.0 * (ratio - 1.0);
    report.say(format!(
        "{}, {vcpus} vCPUs: alone and without asynchronous faults, the memory-bound thread waits \
         {:.1} % of its time (work {}). Beside each other, asynchronous faults change the progress \
         of the CPU-bound process by {:+.1} % (the letter: {:+.1} %), and of the memory-bound \
         thread by {:+.1} %.",
        guests.about,
        100.0 * found.share,
        found.work,
        gain_percent(cpu.value),
        gain_percent(LETTER),
        gain_percent(memory.value),
    ));
    for result in [if vcpus == 1 { with_bar(cpu) } else { cpu }, memory] {
        let result = super::with_params(pace.with_params(result));
        report.push(
            result
                .param("memory_mib", MEMORY_MIB * vcpus as u64)
                .param("resident_mib", MEMORY_MIB / 2 * vcpus as u64)
                .param("vcpus", vcpus)
                .param("memory_bound_threads", vcpus)
                .param("cpu_bound_processes", vcpus)
                .param("work", found.work)
                .param("swap_in_share_percent_alone", 100.0 * found.share),
        );
    }
    Ok(())
}

/// The bars of the CPU-bound process: the letter's ratio for the median, and another for the worse
/// end.
fn with_bar(result: Measurement) -> Measurement {
    let median = result.value >= LETTER;
    let mut result = result.reference(LETTER, "RFCv2, 2020-05-08").bar(WORSE_END);
    result.wanted = Some(LETTER);
    result.met = result.met.map(|met| met && median);
    result
}

fn table(guests: &Guests, vcpus: usize, runs: &Runs) -> String {
    let title = format!("{}, {vcpus} vCPUs, steps", guests.about);
    let mut text = runs.table(&title);
    for arm in [Arm::OFF, Arm::ON] {
        let a_minute = |role| runs.rate(arm, role).median * 60.0;
        text.push_str(&format!(
            "  {:<4}  a minute: {} blocks (CPU-bound), {} pages (memory-bound)\n",
            arm.name,
            short(a_minute(Role::Workers) / BLOCK),
            short(a_minute(Role::Faulters)),
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::Better;
    use crate::stats::Summary;

    /// The median is measured against the letter's ratio, the worse end against its own bar.
    #[test]
    fn both_bars_decide() {
        for (low, median, met) in [(1.11, 1.18, true), (1.11, 1.17, false), (1.09, 1.30, false)] {
            let ratio = Summary::example(low, median, 1.4);
            let result = Measurement::new("a.b", "x", Better::Higher, ratio);
            assert_eq!(with_bar(result).met, Some(met), "{low} {median}");
        }
    }
}
