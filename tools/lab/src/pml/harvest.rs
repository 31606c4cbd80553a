//! The cost of a harvest for each dirty page: taking the marks, and re-arming the pages.
//!
//! ```text
//! vCPU's thread  writes pages | all written, or its ring is full | writes the rest
//! this thread                 | harvest, timed                   |
//! ```
//! The vCPU runs on another core, as a guest's would. It has left guest mode when the harvest
//! begins, so the shoot-down waits for no vCPU. A ring has at most 65 536 entries, so at 10 and 100
//! % of 8 GiB it is harvested whenever it is full: 4 and 33 times. The figure is the sum.

use super::churn::rings;
use super::rig::{Rig, Then, Writes};
use crate::base::pin;
use crate::experiment::LabError;
use crate::experiment::Options;
use crate::fixture::builder;
use crate::native::thread_cpu_ns;
use crate::report::Progress;
use crate::result::{Better, Measurement, Report};
use crate::stats::{Summary, measures};
use lacuna::dirty::{Delivery, Detection};
use lacuna::{Gpa, GuestMemory, PAGE_SIZE, PageCount};
use lacuna_addr::Level;
use std::thread;
use std::time::Instant;

/// The number of steps that [`measure`] reports as progress.
pub const STEPS: u64 = 2;

/// The address of the slot that logs: memory beyond 3 GiB continues here.
const FIRST: u64 = 4 << 30;
const LOW: u64 = 3 << 30;
/// Frames beyond the slot's pages, for the memory below it and because reclaim keeps some free.
const SPARE: u64 = 1 << 14;

/// The dirty shares: the name in an id, dirty pages of 1000, and the repetitions in a slice. The
/// last is a harvest that finds no page.
const SHARES: [(&str, u64, u32); 5] = [
    ("0.1", 1, 8),
    ("1", 10, 4),
    ("10", 100, 1),
    ("100", 1000, 1),
    ("empty", 0, 32),
];

/// The arms; the second is the null.
const ARMS: [(&str, Detection); 3] = [
    ("wp", Detection::WriteProtect),
    ("null", Detection::WriteProtect),
    ("pml", Detection::Pml),
];
const NULL: usize = 1;

/// The figures of a slice. For each share: nanoseconds for each page, nanoseconds of CPU time for
/// each page, and the number of harvests; in the last share for each harvest.
const PER_SHARE: usize = 3;
type Slice = [f64; PER_SHARE * SHARES.len()];
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
    for (suffix, delivery) in [("", Delivery::Bitmap), ("_ring", rings())] {
        progress.step(format!("harvests{suffix}"))?;
        let mut slots = Harvests::new(gib << 18, delivery)?;
        let runs = measures(ARMS.len(), repeats, |arm| slots.slice(ARMS[arm].1))?;
        record(report, gib, suffix, &slots, &runs);
    }
    Ok(())
}

/// The cost of some harvests.
#[derive(Default)]
struct Harvested {
    ns: u128,
    /// The CPU time of the harvesting thread in that.
    cpu_ns: u64,
    /// More than one if a ring was full.
    harvests: u32,
    /// The number of pages that they found.
    pages: u64,
}

/// A guest with a slot of many pages. It writes a thousandth of them up to an exit.
struct Harvests {
    rig: Rig,
    thousandth: u64,
}

impl Harvests {
    fn new(pages: u64, delivery: Delivery) -> Result<Self, LabError> {
        let memory = PageCount::new(pages + LOW / PAGE_SIZE as u64);
        let builder = builder(memory, PageCount::new(pages + SPARE), 1);
        let thousandth = pages / 1000;
        let writes = Writes {
            first: FIRST,
            pages,
            stride: PAGE_SIZE as u64,
            count: thousandth,
            leaves: Level::L2M,
            then: Then::Continue,
        };
        let rig = Rig::new(&builder, writes, delivery)?;
        // In the order of addresses, so that neighbouring pages have neighbouring frames, as after
        // a guest's boot.
        for page in 0..pages {
            let at = Gpa::new(FIRST + page * PAGE_SIZE as u64).expect("a small address");
            GuestMemory::write(&*rig.vm, at, &[1])?;
        }
        Ok(Self { rig, thousandth })
    }

    fn slice(&mut self, detection: Detection) -> Result<Slice, LabError> {
        self.rig.watch(Some(detection))?;
        // Every page is written and harvested once, so no state of the other detection is left.
        self.dirty(1001, &mut Harvested::default())?;
        let mut found = Slice::default();
        for (found, (_, share, times)) in found.chunks_mut(PER_SHARE).zip(SHARES) {
            let mut all = Harvested::default();
            for _ in 0..times {
                let before = all.pages;
                self.dirty(share, &mut all)?;
                let (pages, written) = (all.pages - before, share * self.thousandth);
                if pages != written {
                    let text = format!("{written} pages were written, and {pages} harvested");
                    return Err(LabError::Guest(text));
                }
            }
            let each = if share == 0 {
                u64::from(times)
            } else {
                all.pages
            };
            found[TIME] = all.ns as f64 / each as f64;
            found[CPU] = all.cpu_ns as f64 / each as f64;
            found[HARVESTS] = f64::from(all.harvests) / f64::from(times);
        }
        Ok(found)
    }

    /// Writes to `share` thousandths of the pages and harvests them, once or whenever the ring is
    /// full.
    fn dirty(&mut self, share: u64, all: &mut Harvested) -> Result<(), LabError> {
        let mut left = share;
        loop {
            let rig = &mut self.rig;
            let writing = || {
                pin(1);
                while left > 0 && !rig.fills_ring()? {
                    left -= 1;
                }
                Ok::<_, LabError>(())
            };
            thread::scope(|scope| {
                let joined = scope.spawn(writing).join();
                joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })?;
            let (began, cpu) = (Instant::now(), thread_cpu_ns());
            let pages = self.rig.harvest()?;
            all.ns += began.elapsed().as_nanos();
            all.cpu_ns += thread_cpu_ns() - cpu;
            all.harvests += 1;
            all.pages += pages;
            if left == 0 {
                return Ok(());
            }
        }
    }
}

fn record(
    report: &mut Report,
    gib: u64,
    suffix: &str,
    slots: &Harvests,
    runs: &[[Vec<f64>; size_of::<Slice>() / 8]],
) {
    for (arm, (name, detection)) in ARMS.into_iter().enumerate().filter(|(arm, _)| *arm != NULL) {
        for (i, (label, share, _)) in SHARES.into_iter().enumerate() {
            let of = |arm: usize, what: usize| Summary::of(&runs[arm][i * PER_SHARE + what]);
            let lower = Better::Lower;
            if share == 0 {
                let id = format!("pml.harvest_empty_us.{name}{suffix}");
                let empty = |what| of(arm, what).scaled(1e-3);
                let result = Measurement::new(id, "us", lower, empty(TIME)).param("gib", gib);
                report.push(result.arm("cpu_us", empty(CPU)));
                continue;
            }
            let id = format!("pml.harvest_ns_per_dirty_page.{name}{suffix}.{label}");
            let dirty = slots.thousandth * share;
            let mut result = Measurement::new(id, "ns", lower, of(arm, TIME))
                .param("gib", gib)
                .param("dirty_pages", dirty)
                .param("harvests", of(arm, HARVESTS).median)
                .arm("whole_ms", of(arm, TIME).scaled(dirty as f64 / 1e6))
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
        for delivery in [Delivery::Bitmap, rings()] {
            let mut slots = Harvests::new(1 << 17, delivery).unwrap();
            for detection in [Detection::WriteProtect, Detection::Pml] {
                let found = slots.slice(detection).unwrap();
                let harvests = |share: usize| found[share * PER_SHARE + HARVESTS];
                assert_eq!((harvests(0), harvests(4)), (1.0, 1.0));
                assert_eq!(harvests(3) > 1.0, delivery != Delivery::Bitmap);
            }
        }
    }
}
