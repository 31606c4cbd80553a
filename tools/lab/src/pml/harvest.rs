//! The cost of a harvest for each dirty page: taking the marks, re-arming the pages, and the
//! shoot-down.
//!
//! ```text
//! writer         writes pages | all written, or its ring is full | writes the rest
//! this thread                 | harvest, timed                   |
//! ```
//! The writer is a thread in place of a vCPU. A ring has at most 65 536 entries, so at 10 and 100 %
//! of 8 GiB it is harvested whenever it is full, as after a vCPU's exit with a full ring: 4 and 33
//! times. The figure is the sum.

use super::harvest_fixture::{Fixture, Harvested};
use crate::experiment::{LabError, Options};
use crate::report::Progress;
use crate::result::{Better, Measurement, Report};
use crate::stats::{Summary, measures};
use lacuna_soft::{Backup, Delivery, Detection, RingSize};

/// The number of steps that [`measure`] reports as progress.
pub const STEPS: u64 = 2;

/// The dirty shares: the name in an id, dirty pages of 1000, and the repetitions in a slice.
const SHARES: [(&str, u64, u32); 4] = [
    ("0.1", 1, 8),
    ("1", 10, 4),
    ("10", 100, 1),
    ("100", 1000, 1),
];
/// Harvests that find no page, in a slice.
const EMPTY: u32 = 32;

/// The arms; the second is the null.
const ARMS: [(&str, Detection); 3] = [
    ("wp", Detection::WriteProtect),
    ("null", Detection::WriteProtect),
    ("pml", Detection::Pml),
];
const NULL: usize = 1;

/// The figures of a slice. For each share: nanoseconds for each page, nanoseconds of CPU time for
/// each page, and the number of harvests. Then the same for one harvest that finds no page, in all.
const PER_SHARE: usize = 3;
type Slice = [f64; PER_SHARE * (SHARES.len() + 1)];
const TIME: usize = 0;
const CPU: usize = 1;
const HARVESTS: usize = 2;

/// `pml.harvest_*`.
pub fn measure(
    options: &Options,
    report: &mut Report,
    progress: &Progress,
) -> Result<(), LabError> {
    let gib: u64 = if options.quick { 1 } else { 8 };
    let repeats = if options.quick { 1 } else { 8 };
    let pages = gib << 18;
    let size = RingSize::from_bytes(RingSize::BYTES_MAX).expect("a ring's size");
    let backup = Backup::None;
    let rings = Delivery::Ring { size, backup };
    for (suffix, delivery) in [("", Delivery::Bitmap), ("_ring", rings)] {
        progress.step(if suffix.is_empty() {
            "harvests of a bitmap"
        } else {
            "harvests of a ring"
        })?;
        let runs = Fixture::with(pages, delivery, |fixture| {
            measures(ARMS.len(), repeats, |arm| {
                slice(fixture, pages, ARMS[arm].1)
            })
        })?;
        record(report, gib, suffix, &runs);
    }
    Ok(())
}

fn slice(fixture: &mut Fixture, pages: u64, detection: Detection) -> Result<Slice, LabError> {
    fixture.detect_by(detection)?;
    let mut found = Slice::default();
    for (i, (_, share, times)) in SHARES.into_iter().enumerate() {
        let mut all = Harvested::default();
        for _ in 0..times {
            fixture.dirty(pages * share / 1000, &mut all)?;
        }
        let per_page = |ns: u128| ns as f64 / all.pages as f64;
        let at = i * PER_SHARE;
        found[at + TIME] = per_page(all.time.as_nanos());
        found[at + CPU] = per_page(u128::from(all.cpu_ns));
        found[at + HARVESTS] = f64::from(all.harvests) / f64::from(times);
    }
    let mut nothing = Harvested::default();
    for _ in 0..EMPTY {
        fixture.harvest(&mut nothing)?;
    }
    let at = SHARES.len() * PER_SHARE;
    found[at + TIME] = nothing.time.as_nanos() as f64 / f64::from(EMPTY);
    found[at + CPU] = nothing.cpu_ns as f64 / f64::from(EMPTY);
    found[at + HARVESTS] = 1.0;
    Ok(found)
}

fn record(
    report: &mut Report,
    gib: u64,
    suffix: &str,
    runs: &[[Vec<f64>; size_of::<Slice>() / 8]],
) {
    let of =
        |arm: usize, share: usize, what: usize| Summary::of(&runs[arm][share * PER_SHARE + what]);
    for (arm, (name, _)) in ARMS.into_iter().enumerate().filter(|(arm, _)| *arm != NULL) {
        for (i, (label, share, _)) in SHARES.into_iter().enumerate() {
            let id = format!("pml.harvest_ns_per_dirty_page.{name}{suffix}.{label}");
            let dirty = (gib << 18) * share / 1000;
            let whole = of(arm, i, TIME).scaled(dirty as f64 / 1e6);
            let mut result = Measurement::new(id, "ns", Better::Lower, of(arm, i, TIME))
                .param("gib", gib)
                .param("dirty_pages", dirty)
                .param("harvests", of(arm, i, HARVESTS).median)
                .arm("whole_ms", whole)
                .arm("cpu_ns", of(arm, i, CPU));
            if ARMS[arm].1 == ARMS[NULL].1 {
                result = result.arm("null", of(NULL, i, TIME));
            }
            report.push(result);
        }
        let id = format!("pml.harvest_empty_us.{name}{suffix}");
        let empty = |what| of(arm, SHARES.len(), what).scaled(1e-3);
        report.push(
            Measurement::new(id, "us", Better::Lower, empty(TIME))
                .param("gib", gib)
                .arm("cpu_us", empty(CPU)),
        );
    }
}
