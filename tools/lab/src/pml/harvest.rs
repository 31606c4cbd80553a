//! The cost of a harvest for each dirty page: taking the marks, and re-arming the pages. These are
//! iterations of `lacuna test dirty-log` ([`crate::dirty_log`]) with one vCPU and 8 GiB. The guest
//! writes a share of the pages and leaves out the others.
//!
//! ```text
//! vCPU's thread  writes pages | all written, or its ring is full | writes the rest
//! this thread                 | harvest, timed                   |
//! ```
//! The vCPU runs on another core, as a guest's would. It has left guest mode when the harvest
//! begins, so the shoot-down waits for no vCPU. A ring has at most 65 536 entries, so at 10 and 100
//! % of 8 GiB it is harvested whenever it is full: 4 and 33 times. The figure is the sum.

use super::one_vcpu;
use crate::cores::Cores;
use crate::dirty_log::{DirtyTest, Harvested};
use crate::experiment::Options;
use crate::experiment::{LabError, LabResult};
use crate::options::Recorder;
use crate::result::{Better, Measurement, Report};
use crate::stats::{Summary, measures};
use crate::sweeps::Sweep;
use crate::sweeps::program::Variant;
use lacuna::Arch;
use lacuna::dirty::Detection;
use lacuna::soft::Vm;

/// The number of steps that [`measure`] reports as progress.
pub const STEPS: u64 = 2;

/// The dirty shares: the name in an id, percent of the pages, and the repetitions in a slice. The
/// last is a harvest that finds no page.
const SHARES: [(&str, f64, u32); 5] = [
    ("0.1", 0.1, 8),
    ("1", 1.0, 4),
    ("10", 10.0, 1),
    ("100", 100.0, 1),
    ("empty", 0.0, 32),
];

/// The arms; the second is the null.
const ARMS: [(&str, Detection); 3] = [
    ("wp", Detection::WriteProtect),
    ("null", Detection::WriteProtect),
    ("pml", Detection::Pml),
];
const NULL: usize = 1;

/// The figures of a slice. For each share: nanoseconds for each page, nanoseconds of CPU time for
/// each page, the number of harvests, and the number of pages; in the last share for each harvest.
const PER_SHARE: usize = 4;
type Slice = [f64; PER_SHARE * SHARES.len()];
const TIME: usize = 0;
const CPU: usize = 1;
const HARVESTS: usize = 2;
const PAGES: usize = 3;

/// `pml.harvest_*`.
pub fn measure(options: &Options, report: &mut Report) -> LabResult {
    let gib: u64 = if options.quick { 1 } else { 8 };
    let repeats = if options.quick { 1 } else { 8 };
    for (suffix, delivery) in [("", Recorder::Bitmap), ("_ring", Recorder::Ring)] {
        options.step(format!("harvests{suffix}"))?;
        let mut test = populated(options.arch, gib << 18, delivery)?;
        let runs = measures(ARMS.len(), repeats, |arm| slice(&mut test, ARMS[arm].1))?;
        record(report, gib, suffix, &runs);
    }
    Ok(())
}

/// A VM whose pages were all written in the order of addresses, so that neighbouring pages have
/// neighbouring frames, as after a guest's boot.
fn populated(arch: Arch, pages: u64, delivery: Recorder) -> LabResult<DirtyTest<Vm>> {
    let mut options = one_vcpu(arch, pages, delivery);
    options.guest.pin = Some(Cores::allowed_at([1]));
    let variant = Variant {
        skips: true,
        ..Variant::default()
    };
    let mut test = DirtyTest::soft(&options, variant)?;
    test.sweeps.sweep(Sweep::POPULATE)?;
    Ok(test)
}

fn slice(test: &mut DirtyTest<Vm>, detection: Detection) -> LabResult<Slice> {
    test.watch(Some(detection))?;
    // Every page is written and harvested once, so no state of the other detection is left.
    dirty(test, 100.0, &mut Harvested::default())?;
    let mut found = Slice::default();
    for (found, (_, percent, times)) in found.chunks_mut(PER_SHARE).zip(SHARES) {
        let mut all = Harvested::default();
        for _ in 0..times {
            dirty(test, percent, &mut all)?;
        }
        let times = f64::from(times);
        let each = if percent == 0.0 {
            times
        } else {
            all.pages as f64
        };
        found[TIME] = (all.get + all.clear).as_nanos() as f64 / each;
        found[CPU] = all.cpu_ns as f64 / each;
        found[HARVESTS] = all.count as f64 / times;
        found[PAGES] = all.pages as f64 / times;
    }
    Ok(found)
}

/// Writes to `percent` of the pages and harvests them, once or whenever the ring is full.
fn dirty(test: &mut DirtyTest<Vm>, percent: f64, all: &mut Harvested) -> LabResult {
    let before = all.pages;
    let written = if percent == 0.0 {
        test.harvest(all)?;
        0
    } else {
        let sweep = Sweep {
            write_percent: percent,
            random: true,
        };
        test.iterate(sweep, all)?.written
    };
    match all.pages - before {
        pages if pages == written => Ok(()),
        pages => Err(LabError::Guest(format!(
            "{written} pages were written, and {pages} harvested"
        ))),
    }
}

fn record(
    report: &mut Report,
    gib: u64,
    suffix: &str,
    runs: &[[Vec<f64>; size_of::<Slice>() / 8]],
) {
    for (arm, (name, detection)) in ARMS.into_iter().enumerate().filter(|(arm, _)| *arm != NULL) {
        for (i, (label, percent, _)) in SHARES.into_iter().enumerate() {
            let of = |arm: usize, what: usize| Summary::of(&runs[arm][i * PER_SHARE + what]);
            let lower = Better::Lower;
            if percent == 0.0 {
                let id = format!("pml.harvest_empty_us.{name}{suffix}");
                let empty = |what| of(arm, what).scaled(1e-3);
                let result = Measurement::new(id, "us", lower, empty(TIME)).param("gib", gib);
                report.push(result.arm("cpu_us", empty(CPU)));
                continue;
            }
            let id = format!("pml.harvest_ns_per_dirty_page.{name}{suffix}.{label}");
            let dirty = of(arm, PAGES).median;
            let mut result = Measurement::new(id, "ns", lower, of(arm, TIME))
                .param("gib", gib)
                .param("dirty_pages", dirty as u64)
                .param("harvests", of(arm, HARVESTS).median)
                .arm("whole_ms", of(arm, TIME).scaled(dirty / 1e6))
                .arm("cpu_ns", of(arm, CPU));
            if detection == ARMS[NULL].1 {
                result = result.arm("null", of(NULL, TIME));
            }
            report.push(result);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A slice is an error if a harvest finds more pages than were written, or fewer.
    #[test]
    fn what_is_written_is_harvested_by_every_detection_and_delivery() {
        for delivery in [Recorder::Bitmap, Recorder::Ring] {
            let mut test = populated(Arch::X86_64, 1 << 17, delivery).unwrap();
            for detection in [Detection::WriteProtect, Detection::Pml] {
                let found = slice(&mut test, detection).unwrap();
                let of = |share: usize, what: usize| found[share * PER_SHARE + what];
                assert_eq!((of(0, HARVESTS), of(4, HARVESTS)), (1.0, 1.0));
                assert_eq!(of(3, HARVESTS) > 1.0, delivery == Recorder::Ring);
                assert_eq!((of(3, PAGES), of(4, PAGES)), (f64::from(1 << 17), 0.0));
            }
        }
    }
}
