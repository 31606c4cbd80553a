//! What one harvest costs: taking the marks, arming the pages again, and the shoot-down.

#[path = "harvest_bed.rs"]
mod bed;

use crate::experiment::{LabError, Options};
use crate::report::Progress;
use crate::result::{Better, Measurement, Report};
use crate::stats::{Summary, measures};
use bed::{Bed, Harvested};
use lacuna_soft::{Backup, Delivery, Detection, RingSize};

pub const STEPS: u64 = 2;

/// Pages of 1000 that are dirty, their name, and how often that is harvested in a slice.
const SHARES: [(u64, &str, u32); 4] = [(1, "0.1", 8), (10, "1", 4), (100, "10", 1), (1000, "100", 1)];
/// Harvests of nothing, in a slice.
const EMPTY: u32 = 32;

/// The arms; the second is the null.
const ARMS: [Detection; 3] = [Detection::WriteProtect, Detection::WriteProtect, Detection::Pml];

pub fn measure(options: &Options, report: &mut Report, progress: &Progress) -> Result<(), LabError> {
    let gib: u64 = if options.quick { 1 } else { 8 };
    let repeats = if options.quick { 2 } else { 6 };
    let size = RingSize::from_bytes(RingSize::BYTES_MAX).expect("a size of its own");
    let ring = Delivery::Ring { size, backup: Backup::None };
    for (name, delivery) in [("", Delivery::Bitmap), ("_ring", ring)] {
        progress.step("harvests");
        let pages = gib << 18;
        let runs = Bed::with(pages, delivery, |bed| {
            measures(ARMS.len(), repeats, |arm| slice(bed, pages, ARMS[arm]))
        })?;
        for (arm, detection) in [(0, "wp"), (1, "null"), (2, "pml")] {
            for (i, (share, label, _)) in SHARES.into_iter().enumerate() {
                let ns = Summary::of(&runs[arm][i]);
                eprintln!("{detection}{name} {label}%: {:.1} ns [{:.1} {:.1}] {:.3} ms, {:.1} harvests",
                   ns.median, ns.low, ns.high, ns.median * (pages * share / 1000) as f64 / 1e6, runs[arm][i+5][0]);
            }
            eprintln!("{detection}{name} empty: {:.4} ms", Summary::of(&runs[arm][4]).median);
        }
    }
    let _ = (report, Better::Lower, Measurement::new("a.b","x",Better::Lower,Summary::of(&[1.0])));
    Ok(())
}

/// Nanoseconds a dirty page for each of the shares; milliseconds with nothing dirty; harvests
fn slice(bed: &mut Bed, pages: u64, detection: Detection) -> Result<[f64; 9], LabError> {
    bed.detect_by(detection)?;
    let mut found = [0.0; 9];
    for (i, (share, _, times)) in SHARES.into_iter().enumerate() {
        let mut all = Harvested::default();
        for _ in 0..times {
            let one = bed.dirty(pages * share / 1000)?;
            all.time += one.time;
            all.pages += one.pages;
            all.harvests += one.harvests;
        }
        found[i] = all.time.as_nanos() as f64 / all.pages as f64;
        found[i + 5] = f64::from(all.harvests) / f64::from(times);
    }
    let mut none = Harvested::default();
    for _ in 0..EMPTY {
        bed.harvest(&mut none)?;
    }
    found[4] = none.time.as_secs_f64() * 1e3 / f64::from(EMPTY);
    Ok(found)
}
