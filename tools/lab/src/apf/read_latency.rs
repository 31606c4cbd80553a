//! The read latency of the disk under a swap file. It decides how much asynchronous faults can gain
//! there.
//!
//! The reads are a swap file's: 4 KiB at random places of an unnamed file, past the page cache. One
//! is in flight at a time, and no guest runs.

use crate::experiment::{LabError, LabResult};
use crate::report::time;
use crate::result::Measurement;
use hdrhistogram::Histogram;
use lacuna::PAGE_SIZE;
use memmap2::MmapMut;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::Instant;

/// Large enough that a disk's own cache of the last writes matters little.
const PAGES: u64 = 8192;
/// Pages of one write.
const CLUSTER: usize = 64;
const READS: u64 = 1000;

/// Read times of one page.
pub struct ReadLatency(Histogram<u64>);

impl ReadLatency {
    /// Measures it in `dir`. `None` if the file system has no direct I/O: the reads would be reads
    /// of the page cache.
    ///
    /// # Errors
    /// The file cannot be made, written or read.
    pub fn measure(dir: &Path) -> LabResult<Option<Self>> {
        let what = format!("measure reads of a swap file in {}", dir.display());
        measure(dir).map_err(LabError::io(what))
    }

    /// The time, in nanoseconds, that a share `quantile` (0 to 1) of the reads does not exceed.
    fn quantile_ns(&self, quantile: f64) -> u64 {
        self.0.value_at_quantile(quantile)
    }

    /// For people.
    pub fn text(&self) -> String {
        let [p50, p99] = [0.5, 0.99].map(|quantile| time(self.quantile_ns(quantile)));
        format!("{p50} (p50; p99: {p99})")
    }

    /// `result` with its p50 and p99.
    pub fn with_params(&self, result: Measurement) -> Measurement {
        result
            .param("swap_read_p50_ns", self.quantile_ns(0.5))
            .param("swap_read_p99_ns", self.quantile_ns(0.99))
    }
}

fn measure(dir: &Path) -> io::Result<Option<ReadLatency>> {
    let file = tempfile::tempfile_in(dir)?;
    let flags = fcntl_getfl(&file)?;
    match fcntl_setfl(&file, flags | OFlags::DIRECT) {
        Err(Errno::INVAL) => return Ok(None),
        other => other?,
    }
    // Direct I/O needs aligned memory.
    let mut cluster = MmapMut::map_anon(CLUSTER * PAGE_SIZE)?;
    for first in (0..PAGES).step_by(CLUSTER) {
        fastrand::fill(&mut cluster);
        file.write_all_at(&cluster, first * PAGE_SIZE as u64)?;
    }
    file.sync_all()?;
    let times = Histogram::new_with_bounds(100, 60_000_000_000, 2);
    let mut times = times.expect("constant bounds are valid");
    for _ in 0..READS {
        let at = fastrand::u64(..PAGES) * PAGE_SIZE as u64;
        let start = Instant::now();
        file.read_exact_at(&mut cluster[..PAGE_SIZE], at)?;
        let ns = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        times.saturating_record(ns);
    }
    Ok(Some(ReadLatency(times)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::Better;
    use crate::stats::Summary;

    #[test]
    fn the_median_read_is_in_the_result_and_in_the_text() {
        let mut times = Histogram::new_with_bounds(100, 60_000_000_000, 2).unwrap();
        times.record_n(30_000, 90).unwrap();
        times.record_n(200_000, 10).unwrap();
        let latency = ReadLatency(times);
        let ratio = Summary::example(1.0, 1.0, 1.0);
        let result = Measurement::new("a.b", "x", Better::Higher, ratio);
        let p50 = &latency.with_params(result).params["swap_read_p50_ns"];
        assert!(p50.as_u64().unwrap().abs_diff(30_000) < 500, "{p50}");
        assert!(latency.text().starts_with("30"), "{}", latency.text());
    }

    #[test]
    fn a_page_of_a_disk_is_read_in_some_time() {
        let dir = tempfile::tempdir().unwrap();
        if let Some(latency) = ReadLatency::measure(dir.path()).unwrap() {
            assert_eq!(latency.0.len(), READS);
        }
    }
}
