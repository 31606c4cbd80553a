//! The cost of the host kernel's own page fault: the denominator of `fault.soft_vs_host`.
//!
//! A thread touches anonymous 4 KiB pages one by one. Zeroing is included. The cost is CPU time of
//! the thread, so other programs on the machine do not count:
//!
//! ```text
//! hot    map 2048 pages ─ touch ─ unmap ─ again  the kernel gets back the frames it just freed:
//!                                                frames and tables stay in the caches
//! cold   flush ─ touch 256 pages of a fresh map ─ flush ─ touch the next 256 ...
//! ```
//!
//! Mapping and unmapping are not timed. The page-table pages under the area exist before the clock
//! starts, as in our own arm.

use std::hint::black_box;
use std::io;

use memmap2::{Advice, MmapMut};
use rustix::time::{ClockId, clock_gettime};

const PAGE: usize = 4096;
/// Pages of one hot map. 8 MiB stay in a last-level cache. In both arms, the work once for each map
/// is small against the faults.
pub const HOT_PAGES: usize = 2048;
/// Pages touched between two flushes: enough that reading the clock does not count.
const COLD_PAGES: usize = 256;
/// More than one thread's share of the last-level cache on all measured machines.
const FLUSH_BYTES: usize = 64 << 20;

/// CPU time this thread has used, in nanoseconds.
pub fn thread_cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let [seconds, ns] = [time.tv_sec, time.tv_nsec].map(|part| u64::try_from(part).unwrap_or(0));
    seconds * 1_000_000_000 + ns
}

/// A buffer larger than the caches. Reading all of it evicts everything else from them.
pub struct CacheFlush(Vec<u64>);

impl Default for CacheFlush {
    fn default() -> Self {
        // Not zero: a zeroed allocation would be one shared page, which does not fill the caches.
        Self(vec![1; FLUSH_BYTES / size_of::<u64>()])
    }
}

impl CacheFlush {
    /// Empties the caches of everything else.
    pub fn run(&self) {
        black_box(
            self.0
                .iter()
                .fold(0, |sum: u64, word| sum.wrapping_add(*word)),
        );
    }
}

/// The CPU time of a fault of the host kernel with warm caches, in nanoseconds: one slice of at
/// least `faults` faults, for [`crate::stats::compare`].
///
/// # Errors
/// Anonymous memory could not be mapped.
pub fn hot_fault_ns(faults: usize) -> io::Result<f64> {
    let maps = faults.div_ceil(HOT_PAGES).max(1);
    let mut spent = 0;
    for _ in 0..maps {
        let mut area = small_pages(HOT_PAGES)?;
        spent += touch(&mut area, 0..HOT_PAGES);
    }
    Ok(spent as f64 / (maps * HOT_PAGES) as f64)
}

/// As [`hot_fault_ns`] with cold caches: `flush` runs between batches of faults.
///
/// # Errors
/// Anonymous memory could not be mapped.
pub fn cold_fault_ns(faults: usize, flush: &CacheFlush) -> io::Result<f64> {
    let batches = faults.div_ceil(COLD_PAGES).max(1);
    let mut area = small_pages(batches * COLD_PAGES)?;
    let mut spent = 0;
    for batch in 0..batches {
        flush.run();
        spent += touch(&mut area, batch * COLD_PAGES..(batch + 1) * COLD_PAGES);
    }
    Ok(spent as f64 / (batches * COLD_PAGES) as f64)
}

/// Anonymous memory without huge pages, with one more page at each end. Those two are touched, so
/// that the tables between them exist.
fn small_pages(pages: usize) -> io::Result<MmapMut> {
    let mut area = MmapMut::map_anon((pages + 2) * PAGE)?;
    match area.advise(Advice::NoHugePage) {
        // A kernel built without huge pages does not know the advice, and does not need it.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {}
        other => other?,
    }
    area[0] = 1;
    area[(pages + 1) * PAGE] = 1;
    Ok(area)
}

/// Touches `pages` of `area`, counted behind its guard page, and returns the CPU time it took.
fn touch(area: &mut MmapMut, pages: std::ops::Range<usize>) -> u64 {
    let start = thread_cpu_ns();
    for page in pages {
        area[(page + 1) * PAGE] = 1;
    }
    black_box(area.as_ptr());
    thread_cpu_ns() - start
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Minor faults of this thread so far (`proc(5)`, field 10 of `stat`).
    fn minor_faults() -> usize {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        let after_name = stat.rsplit_once(')').unwrap().1;
        after_name
            .split_whitespace()
            .nth(7)
            .unwrap()
            .parse()
            .unwrap()
    }

    /// Each timed touch is one fault: no page is huge, and none is touched twice.
    #[test]
    fn every_timed_page_is_one_fault() {
        let flush = CacheFlush::default();
        for (pages, is_cold) in [(2 * HOT_PAGES, false), (2 * COLD_PAGES, true)] {
            let before = minor_faults();
            let cost = match is_cold {
                true => cold_fault_ns(pages, &flush),
                false => hot_fault_ns(pages),
            };
            let faults = minor_faults() - before;
            assert!(
                (pages..pages + 100).contains(&faults),
                "{faults} for {pages}"
            );
            assert!(cost.unwrap() > 0.0);
        }
    }
}
