//! First touch of much memory: the cost of its faults, and the cost of filling it with zeros.
//!
//! The faults are made in the MMU, without a guest around them. A guest's loop over 512 pages takes
//! longer than the one fault that it has in them.
//!
//! A fault includes the zeroing of its page. The fault ratio compares faults without it:
//! * 2 MiB pages: the host measures the zeroing itself. The rest is by the wall clock, so an
//!   interruption counts against the huge pages.
//! * 4 KiB pages: reading the clock would take as long as a fault. So another arm zeroes as many
//!   pages in the same way (one call for each page, through the caches), and its time is
//!   subtracted. Its memory is mapped as the host's frames are, by huge pages where the kernel has
//!   them. It is not the frames themselves, because the host keeps those.

use super::fixture::{BLOCK, Fixture};
use crate::experiment::{LabError, Options};
use crate::native::thread_cpu_ns;
use crate::result::{Better, Measurement, Report};
use crate::stats::{Summary, measures, paired};
use lacuna_addr::{Level, PAGE_SIZE};
use lacuna_soft::HugePages;
use memmap2::{Advice, MmapMut};
use std::hint::black_box;
use std::time::Instant;

/// The arms; the second is the null.
const HUGE: usize = 0;
const NULL: usize = 1;
const SMALL: usize = 2;
const ZERO: usize = 3;

/// `thp.first_touch_fault_ratio` and `thp.first_touch_ratio`.
pub fn measure(options: &Options, report: &mut Report) -> Result<(), LabError> {
    let mib: u64 = if options.quick { 128 } else { 1024 };
    let blocks = mib / 2;
    let mut huge = Fixture::new(1, blocks, HugePages::Always)?;
    let mut small = Fixture::new(1, blocks, HugePages::Never)?;
    let mut other = memory((mib << 20) as usize)?;
    let repeats = if options.quick { 2 } else { 31 };
    // Milliseconds of the whole touch, and of its faults where the zeroing is already subtracted.
    let runs = measures(4, repeats, |arm| match arm {
        ZERO => Ok::<_, LabError>([zero(&mut other), 0.0]),
        SMALL => touch_small(&mut small, blocks),
        _ => touch_huge(&mut huge, blocks),
    })?;
    let whole = |arm: usize| &runs[arm][0];
    let faults = |arm: usize| &runs[arm][1];
    let minus =
        |a: &[f64], b: &[f64]| -> Vec<f64> { a.iter().zip(b).map(|(a, b)| a - b).collect() };
    let small_faults = minus(whole(SMALL), whole(ZERO));
    let measured = |name: &str, summary| {
        Measurement::new(format!("thp.{name}"), "x", Better::Higher, summary).param("mib", mib)
    };
    report.push(
        measured(
            "first_touch_fault_ratio",
            paired(faults(HUGE), &small_faults),
        )
        .bar(50.0)
        .arm("huge_faults_ms", Summary::of(faults(HUGE)))
        .arm("small_faults_ms", Summary::of(&small_faults))
        .arm(
            "huge_zeroing_ms",
            Summary::of(&minus(whole(HUGE), faults(HUGE))),
        )
        .arm("small_zeroing_ms", Summary::of(whole(ZERO)))
        .arm("null", paired(faults(HUGE), faults(NULL))),
    );
    report.push(
        measured("first_touch_ratio", paired(whole(HUGE), whole(SMALL)))
            .arm("huge_ms", Summary::of(whole(HUGE)))
            .arm("small_ms", Summary::of(whole(SMALL)))
            .arm("null", paired(whole(HUGE), whole(NULL))),
    );
    Ok(())
}

/// Faults in a new backing. Returns the milliseconds of CPU time of the whole, and the milliseconds
/// by the wall clock without the zeroing.
fn touch_huge(fixture: &mut Fixture, blocks: u64) -> Result<[f64; 2], LabError> {
    fixture.renew()?;
    let (mut zeroing, mut rest) = (fixture.host().stats().zeroing_ns, 0);
    let before = thread_cpu_ns();
    for block in 0..blocks {
        let start = Instant::now();
        fixture.fault(block * BLOCK, Level::L2M)?;
        let spent = start.elapsed().as_nanos() as u64;
        let now = fixture.host().stats().zeroing_ns;
        rest += spent - (now - zeroing);
        zeroing = now;
    }
    let whole = (thread_cpu_ns() - before) as f64 / 1e6;
    Ok([whole, rest as f64 / 1e6])
}

/// Faults in a new backing. Returns the milliseconds of CPU time with the zeroing.
fn touch_small(fixture: &mut Fixture, blocks: u64) -> Result<[f64; 2], LabError> {
    fixture.renew()?;
    let before = thread_cpu_ns();
    fixture.fault_in(blocks, Level::L4K)?;
    Ok([(thread_cpu_ns() - before) as f64 / 1e6, 0.0])
}

/// Memory mapped as the host's frames are, and touched.
fn memory(bytes: usize) -> Result<MmapMut, LabError> {
    let mut memory = MmapMut::map_anon(bytes).map_err(|source| LabError::Io {
        what: "memory to fill with zeros".into(),
        source,
    })?;
    // A kernel without huge pages maps the frames by small ones, too.
    let _ = memory.advise(Advice::HugePage);
    memory.fill(1);
    Ok(memory)
}

/// Fills memory with zeros, page by page. Returns the milliseconds of CPU time.
fn zero(memory: &mut [u8]) -> f64 {
    let before = thread_cpu_ns();
    for page in memory.chunks_exact_mut(PAGE_SIZE) {
        black_box(page).fill(0);
    }
    (thread_cpu_ns() - before) as f64 / 1e6
}
