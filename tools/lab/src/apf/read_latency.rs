//! The read latency of the disk under a swap file. It decides how much asynchronous faults can gain
//! there.
//!
//! The reads are a swap file's: 4 KiB at random places of an unnamed file, past the page cache. One
//! is in flight at a time, and no guest runs.

use crate::experiment::{LabError, LabResult};
use crate::report::time;
use crate::result::Measurement;
use crate::stats::quantile;
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

/// The read times of one page, in nanoseconds: the median, and the time that 99 % do not exceed.
pub struct ReadLatency {
    p50: u64,
    p99: u64,
}

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

    /// For people.
    pub fn text(&self) -> String {
        format!("{} (p50; p99: {})", time(self.p50), time(self.p99))
    }

    /// `result` with its p50 and p99.
    pub fn with_params(&self, result: Measurement) -> Measurement {
        result
            .param("swap_read_p50_ns", self.p50)
            .param("swap_read_p99_ns", self.p99)
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
    let mut times = Vec::new();
    for _ in 0..READS {
        let at = fastrand::u64(..PAGES) * PAGE_SIZE as u64;
        let start = Instant::now();
        file.read_exact_at(&mut cluster[..PAGE_SIZE], at)?;
        times.push(start.elapsed().as_nanos() as f64);
    }
    let [p50, p99] = [0.5, 0.99].map(|share| quantile(&times, share) as u64);
    Ok(Some(ReadLatency { p50, p99 }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_of_a_disk_is_read_in_some_time() {
        let dir = tempfile::tempdir().unwrap();
        if let Some(ReadLatency { p50, p99 }) = ReadLatency::measure(dir.path()).unwrap() {
            assert!(0 < p50 && p50 <= p99, "{p50} {p99}");
        }
    }
}
