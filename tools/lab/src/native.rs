//! The cost of the host kernel's own page fault: the denominator of `fault.soft_vs_host`.
//!
//! A thread touches anonymous 4 KiB pages one by one. Zeroing is included. The cost is CPU time of
//! the thread, so other programs on the machine do not count:
//!
//! ```text
//! hot    map 2048 pages ─ touch ─ unmap ─ again          the kernel gets back the frames it just
//!                                                        freed: frames and tables stay in caches
//! cold   map 256 pages ─ flush ─ touch ─ unmap ─ again
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
pub const COLD_PAGES: usize = 256;
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

/// The CPU time of a fault of the host kernel, in nanoseconds, with warm caches or with `flush`
/// before each batch: one slice of at least `faults` faults.
///
/// # Errors
/// Anonymous memory could not be mapped.
pub fn fault_ns(faults: usize, flush: Option<&CacheFlush>) -> io::Result<f64> {
    let batch = if flush.is_some() {
        COLD_PAGES
    } else {
        HOT_PAGES
    };
    let batches = faults.div_ceil(batch).max(1);
    let mut spent = 0;
    for _ in 0..batches {
        let mut area = small_pages(batch)?;
        flush.into_iter().for_each(CacheFlush::run);
        let start = thread_cpu_ns();
        area.iter_mut()
            .skip(PAGE)
            .step_by(PAGE)
            .take(batch)
            .for_each(|byte| *byte = 1);
        black_box(area.as_ptr());
        spent += thread_cpu_ns() - start;
    }
    Ok(spent as f64 / (batches * batch) as f64)
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
        for (pages, flush) in [(2 * HOT_PAGES, None), (2 * COLD_PAGES, Some(&flush))] {
            let before = minor_faults();
            let cost = fault_ns(pages, flush);
            let faults = minor_faults() - before;
            assert!(
                (pages..pages + 100).contains(&faults),
                "{faults} for {pages}"
            );
            assert!(cost.unwrap() > 0.0);
        }
    }
}
