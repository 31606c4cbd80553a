//! Counters: the manager's work, and the use of its frames.

use crate::core::Core;
use crate::host::Host;
use lacuna_addr::PAGE_SIZE;
use lacuna_metrics::counters;
use lacuna_sync::lock;
use std::sync::atomic::{AtomicU64, Ordering};

counters! {
    /// A reading of all counters, at about one moment.
    pub struct HostStats as "lacuna_host" {
        /// Frames of the budget.
        gauge budget,
        /// Frames that now hold a page of a region, in transit included.
        gauge resident,
        /// The most frames in use so far, per-CPU page caches included.
        gauge in_use_peak,
        /// Frames of the swap store: compressed pages, charged to the budget.
        gauge store,
        /// Pages being written out, and requested pages that are not back yet, also before their
        /// read has begun. At 0, no thread of the swap device works on the host.
        gauge in_flight,
        /// Entries of the swap device in use, including entries of clean resident pages.
        gauge swap_entries,
        /// The most pages that the host's page cache may hold for the swap device: none for direct
        /// I/O, otherwise the entries in use.
        gauge page_cache,
        /// Faults that took a frame of zeros.
        counter faults_zero_fill,
        /// Faults that found the page resident.
        counter faults_resident,
        /// Faults that took back a page in eviction.
        counter faults_rescued,
        /// Faults that began a swap-in.
        counter faults_swap_in,
        /// Faults that found a swap-in in progress.
        counter faults_shared_ticket,
        /// Faults that found a page not yet provided by its source, and gave it a ticket.
        counter faults_missing,
        /// Pages that page sources and VMMs have provided.
        counter provided,
        /// Pages read from the swap device.
        counter swapped_in,
        /// Pages of these that no fault had asked for when they arrived: they were read beside
        /// another page.
        counter read_ahead,
        /// Pages of these that were accessed before reclaim evicted them.
        counter read_ahead_used,
        /// Reads begun for callers that do not wait, in real time.
        counter reads_started,
        /// Arrivals that `Host::poll` handled and due completions that it delivered, in real time.
        counter polled,
        /// Pages written to the swap device.
        counter swapped_out,
        /// Write operations that the swap pages took.
        counter write_clusters,
        /// Write operations that failed, wholly or in part.
        counter write_failures,
        /// Pages evicted as all zeros, unwritten.
        counter zero_dropped,
        /// Pages evicted as clean, unwritten.
        counter clean_dropped,
        /// Frames that the clock hand passed.
        counter scanned,
        /// Pages that the clock hand spared because they were accessed.
        counter young,
        /// Direct reclaims by threads that found no free frame.
        counter direct_reclaims,
        /// Existing compound pages.
        gauge huge_pages,
        /// Faults that made a compound page.
        counter huge_faults,
        /// Faults that would have made a compound page, but no block of frames was free, or too few
        /// frames.
        counter huge_fallbacks,
        /// Nanoseconds that the zeroing in `huge_faults` took: nearly all of their time.
        counter zeroing_ns,
        /// Compound pages that reclaim has split.
        counter splits,
        /// Blocks that were collapsed into compound pages.
        counter collapses,
        /// Collapses that failed: a fault took a page back, or no block of frames was free.
        counter collapse_failures,
        /// Pages of Linux memory that Linux has paged out for this host.
        counter linux_paged_out,
        /// Accesses by which this host has brought them back.
        counter linux_paged_in,
    }
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
            resident: (frames.total() as u64).saturating_sub(elsewhere),
            in_use_peak: (frames.total() - frames.free_min()) as u64,
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
            read_ahead: get(&counters.read_ahead),
            read_ahead_used: get(&counters.read_ahead_used),
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
            linux_paged_out: get(&counters.linux_paged_out),
            linux_paged_in: get(&counters.linux_paged_in),
        }
    }
}
