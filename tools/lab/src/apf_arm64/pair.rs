//! The memory-bound thread beside the CPU-bound process, on each vCPU.

use super::calibrate::{self, calibrate};
use super::{Form, MEMORY_MIB, SLICE_US, TICK_US, disk, membound};
use crate::apf::alone::Rounds as Program;
use crate::apf::slices::{Arm, Pace, Role, Runs, take_turns_with};
use crate::experiment::{LabError, Options};
use crate::report::short;
use crate::result::{Better, Measurement, Report};
use crate::session::{image, on};
use crate::stats::{Rounds, Summary};
use lacuna_guest::status::Kind;
use std::time::Duration;

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

const ARMS: [Arm; 3] = [Arm::Off, Arm::OffAgain, Arm::On];

fn pace(vcpus: usize, options: &Options) -> Pace {
    let (rounds, slice) = match (options.quick, vcpus) {
        (true, _) => (6, 1000),
        (false, 1) => (9, 3000),
        (false, _) => (6, 2000),
    };
    Pace {
        rounds: Rounds::Count(rounds),
        slice: Duration::from_millis(slice),
        settle: Duration::from_millis(100),
    }
}

/// The ids of the results of a number of vCPUs.
pub fn ids(form: &Form, vcpus: usize) -> [String; 2] {
    ["cpu_bound_ratio", "memory_bound_ratio"]
        .map(|name| format!("apf_arm64.{name}.{}.{vcpus}vcpu", form.id))
}

/// `apf_arm64.cpu_bound_ratio` and `apf_arm64.memory_bound_ratio` with this form.
pub fn measure(
    form: &Form,
    vcpus: usize,
    options: &Options,
    report: &mut Report,
) -> Result<(), LabError> {
    let pace = pace(vcpus, options);
    let builder = membound(form, vcpus, "nop=1", options);
    let latency = &builder.latency;
    let image = image(options.arch, "membound")?;
    let (found, runs) = on(&builder, &image, |session| {
        let guest = &session.guest;
        guest.pause(&[Kind::Worker])?;
        let mut program = Program::start(session)?;
        let found = calibrate(&mut program, guest, latency, vcpus, options)?;
        let mut slices = 0;
        // A round has two slices of each arm. The uncounted slices at the beginning are one more
        // round.
        let begin = || {
            disk::begin(latency, slices / (2 * ARMS.len() as u64));
            slices += 1;
        };
        Ok((found, take_turns_with(session, &ARMS, pace, begin)?))
    })?;
    if let Some(why) = found.refused() {
        ids(form, vcpus)
            .into_iter()
            .for_each(|id| report.skip(id, &why));
        return Ok(());
    }
    let results =
        results(form, vcpus, &runs)?.map(|result| with_params(result, found, vcpus, pace));
    report.detail(table(form, vcpus, &runs));
    say(form, vcpus, found, &results, report);
    results.into_iter().for_each(|result| report.push(result));
    Ok(())
}

fn results(form: &Form, vcpus: usize, runs: &Runs) -> Result<[Measurement; 2], LabError> {
    let ratio = |role| {
        let ratio = runs.ratio(Arm::Off, Arm::On, role)?;
        let null = runs.ratio(Arm::Off, Arm::OffAgain, role)?;
        Ok::<_, LabError>((ratio, null))
    };
    let result = |id: String, role, (ratio, null): (Summary, Summary)| {
        Measurement::new(id, "x", Better::Higher, ratio)
            .arm("off", runs.arm(Arm::Off, role))
            .arm("on", runs.arm(Arm::On, role))
            .arm("null", null)
    };
    let [cpu, memory] = ids(form, vcpus);
    let cpu = result(cpu, Role::Workers, ratio(Role::Workers)?);
    let memory = result(memory, Role::Faulters, ratio(Role::Faulters)?);
    Ok([if vcpus == 1 { with_bar(cpu) } else { cpu }, memory])
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

fn with_params(
    result: Measurement,
    found: calibrate::Found,
    vcpus: usize,
    pace: Pace,
) -> Measurement {
    result
        .param("memory_mib", MEMORY_MIB * vcpus as u64)
        .param("resident_mib", MEMORY_MIB / 2 * vcpus as u64)
        .param("vcpus", vcpus)
        .param("memory_bound_threads", vcpus)
        .param("cpu_bound_processes", vcpus)
        .param("work", found.work)
        .param("swap_in_share_percent_alone", 100.0 * found.share)
        .param("swap_in", disk::ABOUT)
        .param("swap_in_seed", disk::SEED)
        .param("guest_slice_us", SLICE_US)
        .param("guest_tick_us", TICK_US)
        .param("slice_ms", crate::apf::ms(pace.slice))
        .param("settle_ms", crate::apf::ms(pace.settle))
}

/// A ratio as the letter states it: 1.178 is +17.8 %.
fn gain_percent(ratio: f64) -> f64 {
    100.0 * (ratio - 1.0)
}

/// Blocks of the CPU-bound processes a minute.
fn blocks(rate: Summary) -> String {
    short(rate.median * 60.0 / BLOCK)
}

fn table(form: &Form, vcpus: usize, runs: &Runs) -> String {
    let title = format!("{}, {vcpus} vCPUs, steps", form.about);
    let mut text = runs.table(&title);
    for arm in [Arm::Off, Arm::On] {
        let blocks = blocks(runs.rate(arm, Role::Workers));
        let pages = short(runs.rate(arm, Role::Faulters).median * 60.0);
        let name = arm.name();
        text.push_str(&format!(
            "  {name:<4}  a minute: {blocks} blocks (CPU-bound), {pages} pages (memory-bound)\n"
        ));
    }
    text
}

fn say(
    form: &Form,
    vcpus: usize,
    found: calibrate::Found,
    [cpu, memory]: &[Measurement; 2],
    report: &mut Report,
) {
    report.say(format!(
        "{}, {vcpus} vCPUs: alone and without asynchronous faults, the memory-bound thread waits \
         {:.1} % of its time (work {}). Beside each other, asynchronous faults change the progress \
         of the CPU-bound process by {:+.1} % (the letter: {:+.1} %), and of the memory-bound \
         thread by {:+.1} %.",
        form.about,
        100.0 * found.share,
        found.work,
        gain_percent(cpu.value),
        gain_percent(LETTER),
        gain_percent(memory.value),
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The median is measured against the letter's ratio, the worse end against its own bar.
    #[test]
    fn both_bars_decide() {
        for (low, median, met) in [(1.11, 1.18, true), (1.11, 1.17, false), (1.09, 1.30, false)] {
            let ratio = Summary {
                median,
                low,
                high: 1.4,
                runs: 9,
                coverage: 0.96,
            };
            let result = Measurement::new("a.b", "x", Better::Higher, ratio);
            assert_eq!(with_bar(result).met, Some(met), "{low} {median}");
        }
    }
}
