//! What the host counts.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of the cold paths, and of the fault paths of dropped vCPUs.
#[derive(Default)]
pub(crate) struct Counters {
    pub faults: FaultCounters,
    pub swapped_in: AtomicU64,
    pub provided: AtomicU64,
    /// Pages read from the swap device and accessed.
    pub read_back: AtomicU64,
    pub read_ahead: AtomicU64,
    pub read_ahead_used: AtomicU64,
    pub reads_started: AtomicU64,
    pub polled: AtomicU64,
    pub swapped_out: AtomicU64,
    pub write_clusters: AtomicU64,
    pub write_failures: AtomicU64,
    /// Frames that reclaim has freed.
    pub freed: AtomicU64,
    pub zero_dropped: AtomicU64,
    pub clean_dropped: AtomicU64,
    pub scanned: AtomicU64,
    pub young: AtomicU64,
    pub direct_reclaims: AtomicU64,
    /// Existing compound pages.
    pub huge_pages: AtomicU64,
    pub splits: AtomicU64,
    pub collapses: AtomicU64,
    pub collapse_failures: AtomicU64,
    pub linux_paged_out: AtomicU64,
    pub linux_paged_in: AtomicU64,
}

impl Counters {
    pub fn add(counter: &AtomicU64, count: u64) {
        counter.fetch_add(count, Ordering::Relaxed);
    }

    /// Counts a new compound page.
    pub fn add_compound(&self) {
        Self::add(&self.huge_pages, 1);
    }

    /// Counts a removed compound page.
    pub fn remove_compound(&self) {
        self.huge_pages.fetch_sub(1, Ordering::Relaxed);
    }

    /// Adds the counts of a dropped vCPU.
    pub fn absorb(&self, gone: &FaultCounters) {
        for (total, part) in self.faults.all().into_iter().zip(gone.all()) {
            Self::add(total, part.load(Ordering::Relaxed));
        }
    }
}

/// Faults by kind.
#[derive(Default)]
pub(crate) struct FaultCounters {
    pub zero_fill: AtomicU64,
    pub resident: AtomicU64,
    pub rescued: AtomicU64,
    pub swap_in: AtomicU64,
    pub shared_ticket: AtomicU64,
    pub huge_fill: AtomicU64,
    pub huge_fallback: AtomicU64,
    pub zeroing_ns: AtomicU64,
    pub missing: AtomicU64,
    pub provided: AtomicU64,
}

impl FaultCounters {
    /// Adds 1. Only the owning thread calls this.
    #[inline]
    pub fn bump(counter: &AtomicU64) {
        Self::add(counter, 1);
    }

    /// Adds `count`. Only the owning thread calls this.
    #[inline]
    pub fn add(counter: &AtomicU64, count: u64) {
        counter.store(counter.load(Ordering::Relaxed) + count, Ordering::Relaxed);
    }

    pub fn all(&self) -> [&AtomicU64; 10] {
        [
            &self.zero_fill,
            &self.resident,
            &self.rescued,
            &self.swap_in,
            &self.shared_ticket,
            &self.huge_fill,
            &self.huge_fallback,
            &self.zeroing_ns,
            &self.missing,
            &self.provided,
        ]
    }
}
