//! Counters: the manager's work, and the use of its frames.

use crate::core::Core;
use crate::host::Host;
use lacuna_addr::PAGE_SIZE;
use lacuna_sync::lock;
use std::sync::atomic::{AtomicU64, Ordering};

/// A reading of all counters, at about one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HostStats {
    /// Frames of the budget.
    pub budget: u64,
    /// Frames that now hold a page of a region, in transit included.
    pub resident: u64,
    /// The most frames in use so far, per-CPU page caches included.
    pub in_use_peak: u64,
    /// Frames of the swap store: compressed pages, charged to the budget.
    pub store: u64,
    /// Pages being written out, and requested pages that are not back yet, also before their read
    /// has begun. At 0, no thread of the swap device works on the host.
    pub in_flight: u64,
    /// Entries of the swap device in use, including entries of clean resident pages.
    pub swap_entries: u64,
    /// The most pages that the host's page cache may hold for the swap device: none for direct I/O,
    /// otherwise the entries in use.
    pub page_cache: u64,
    /// Faults that took a frame of zeros.
    pub faults_zero_fill: u64,
    /// Faults that found the page resident.
    pub faults_resident: u64,
    /// Faults that took back a page in eviction.
    pub faults_rescued: u64,
    /// Faults that began a swap-in.
    pub faults_swap_in: u64,
    /// Faults that found a swap-in in progress.
    pub faults_shared_ticket: u64,
    /// Faults that found a page not yet provided by its source, and gave it a ticket.
    pub faults_missing: u64,
    /// Pages that page sources and VMMs have provided.
    pub provided: u64,
    /// Pages read from the swap device.
    pub swapped_in: u64,
    /// Reads begun for callers that do not wait, in real time.
    pub reads_started: u64,
    /// Arrivals that [`Host::poll`] handled and due completions that it delivered, in real time.
    pub polled: u64,
    /// Pages written to the swap device.
    pub swapped_out: u64,
    /// Write operations that the swap pages took.
    pub write_clusters: u64,
    /// Write operations that failed, wholly or in part.
    pub write_failures: u64,
    /// Pages evicted as all zeros, unwritten.
    pub zero_dropped: u64,
    /// Pages evicted as clean, unwritten.
    pub clean_dropped: u64,
    /// Frames that the clock hand passed.
    pub scanned: u64,
    /// Pages that the clock hand spared because they were accessed.
    pub young: u64,
    /// Direct reclaims by threads that found no free frame.
    pub direct_reclaims: u64,
    /// Existing compound pages.
    pub huge_pages: u64,
    /// Faults that made a compound page.
    pub huge_faults: u64,
    /// Faults that would have made a compound page, but no block of frames was free, or too few
    /// frames.
    pub huge_fallbacks: u64,
    /// Nanoseconds that the zeroing in `huge_faults` took: nearly all of their time.
    pub zeroing_ns: u64,
    /// Compound pages that reclaim has split.
    pub splits: u64,
    /// Blocks that were collapsed into compound pages.
    pub collapses: u64,
    /// Collapses that failed: a fault took a page back, or no block of frames was free.
    pub collapse_failures: u64,
}

impl HostStats {
    /// Bytes read from the swap device.
    pub const fn bytes_in(&self) -> u64 {
        self.swapped_in * PAGE_SIZE as u64
    }

    /// Bytes written to the swap device.
    pub const fn bytes_out(&self) -> u64 {
        self.swapped_out * PAGE_SIZE as u64
    }
}

impl Host {
    /// Reads every counter.
    pub fn stats(&self) -> HostStats {
        self.core.stats()
    }

    /// The bytes of the budget that the host's kernel backs with its huge pages; `None` if the
    /// kernel does not say.
    pub fn pool_huge_bytes(&self) -> Option<u64> {
        self.core.frames.pool.huge_bytes()
    }
}

impl Core {
    fn stats(&self) -> HostStats {
        let counters = &self.stats;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        // All under one lock: a dropped cache moves its counts from the list to the total.
        let (faults, cached) = self.with_caches(|caches| {
            let (mut faults, mut cached) = (counters.faults.all().map(get), 0);
            for cache in caches {
                cached += u64::from(cache.cached.load(Ordering::Relaxed));
                for (total, part) in faults.iter_mut().zip(cache.count.all()) {
                    *total += get(part);
                }
            }
            (faults, cached)
        });
        let [
            zero_fill,
            resident,
            rescued,
            swap_in,
            shared_ticket,
            huge,
            fallback,
            zeroing_ns,
            missing,
            provided,
        ] = faults;
        let frames = &self.frames;
        let entries = lock(&self.entries).used() as u64;
        let elsewhere = (frames.free_now() + frames.in_store()) as u64 + cached;
        HostStats {
            budget: frames.budget() as u64,
            resident: (frames.budget() as u64).saturating_sub(elsewhere),
            in_use_peak: (frames.budget() - frames.free_min()) as u64,
            store: frames.in_store() as u64,
            in_flight: self.in_flight() as u64,
            swap_entries: entries,
            page_cache: if self.store.is_cached() { entries } else { 0 },
            faults_zero_fill: zero_fill,
            faults_resident: resident,
            faults_rescued: rescued,
            faults_swap_in: swap_in,
            faults_shared_ticket: shared_ticket,
            faults_missing: missing,
            provided: provided + get(&counters.provided),
            swapped_in: get(&counters.swapped_in),
            reads_started: get(&counters.reads_started),
            polled: get(&counters.polled),
            swapped_out: get(&counters.swapped_out),
            write_clusters: get(&counters.write_clusters),
            write_failures: get(&counters.write_failures),
            zero_dropped: get(&counters.zero_dropped),
            clean_dropped: get(&counters.clean_dropped),
            scanned: get(&counters.scanned),
            young: get(&counters.young),
            direct_reclaims: get(&counters.direct_reclaims),
            huge_pages: get(&counters.huge_pages),
            huge_faults: huge,
            huge_fallbacks: fallback,
            zeroing_ns,
            splits: get(&counters.splits),
            collapses: get(&counters.collapses),
            collapse_failures: get(&counters.collapse_failures),
        }
    }
}
