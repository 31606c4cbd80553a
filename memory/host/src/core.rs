//! The state that all parts of the host share. The parts add their methods to it.

use crate::counters::Counters;
use crate::error::{Failure, LostPage};
use crate::linux::loss_list::Losses;
use crate::read_ahead_window::ReadAheadWindow;
use crate::reclaim::samples::SampledSplits;
use crate::region::Regions;
use crate::settled::Settled;
use crate::shared_cache::{MAX_PINNED, SharedCache};
use crate::switches::Switches;
use crate::ticket::Ticket;
use lacuna_addr::PageCount;
use lacuna_frames::{BATCH, Frames, PageNo};
use lacuna_linux::LinuxAddresses;
use lacuna_swap::{Page, SwapEntry, SwapMap, SwapStore};
use lacuna_sync::{Clock, Mutex, lock, lock_order};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize};
use std::thread::Thread;

/// Frames that must exist in addition to the vCPUs' frames: a cluster that is being written out,
/// and the swap store's reserve.
const BASE_FRAMES: u64 = 64;
/// The frames that one more vCPU can keep from all others: its pinned pages and a full per-CPU page
/// cache.
const FRAMES_PER_VCPU: u64 = (MAX_PINNED + BATCH) as u64;

/// The state that the executor's threads share with all others.
pub(crate) struct Core {
    pub frames: Arc<Frames>,
    /// The used parts of the addresses for Linux memory.
    pub linux: LinuxAddresses,
    /// The pages of Linux memory that shall be in place at most; `u64::MAX`: any number.
    pub linux_limit: AtomicU64,
    /// Pages of Linux memory that the kernel has taken away.
    pub losses: Losses,
    pub regions: Regions,
    pub settings: Switches,
    pub store: Box<dyn SwapStore>,
    pub device: String,
    pub entries: Mutex<SwapMap, lock_order::SwapEntries>,
    /// Pages in flight, from swap or from a source, by page.
    pub tickets: Mutex<BTreeMap<PageNo, Ticket>, lock_order::Tickets>,
    pub read_ahead: ReadAheadWindow,
    pub lost: Mutex<BTreeMap<PageNo, LostPage>, lock_order::LostPages>,
    pub caches: Mutex<Vec<Arc<SharedCache>>, lock_order::PageCaches>,
    /// The clock hand: the next window of frames that reclaim looks at.
    pub hand: AtomicUsize,
    /// The compound page in use that will be split next.
    pub sampled_splits: Mutex<SampledSplits, lock_order::SampledSplit>,
    /// Held while a collapse changes page words to Collapsed and then the block word to Compound. A
    /// fault that sees a state in between waits for this lock.
    pub collapsing: Mutex<(), lock_order::Collapsing>,
    /// Where background collapse looks next.
    pub collapser: Mutex<PageNo, lock_order::CollapseHand>,
    /// Buffers for pages in write-out.
    pub buffers: Mutex<Vec<Vec<Page>>, lock_order::WriteBuffers>,
    /// Pages being written out.
    pub writing: AtomicUsize,
    /// Completions that a thread is delivering.
    pub completing: AtomicUsize,
    /// Pages only in swap.
    pub swapped_out_now: AtomicI64,
    /// Whether the simulated latency of the device has ended.
    pub at_once: AtomicBool,
    pub settled: Settled,
    pub stats: Counters,
    pub clock: Arc<dyn Clock>,
    /// The failure of the last write-out; `None` after a successful one.
    pub failure: Mutex<Option<Failure>, lock_order::WriteFailure>,
    pub background: Mutex<Option<Thread>, lock_order::BackgroundThread>,
}

/// The smallest budget in which `vcpus` vCPUs make progress, whatever their guests do.
pub(crate) const fn minimum_budget(vcpus: usize) -> PageCount {
    PageCount::new(BASE_FRAMES.saturating_add(FRAMES_PER_VCPU.saturating_mul(vcpus as u64)))
}

impl Core {
    pub fn register(&self, cache: &Arc<SharedCache>) {
        let mut caches = lock(&self.caches);
        caches.push(cache.clone());
        self.promise_to(caches.len());
    }

    fn promise_to(&self, vcpus: usize) {
        let minimum = minimum_budget(vcpus).get();
        self.frames.promise(minimum as usize);
    }

    pub fn unregister(&self, cache: &Arc<SharedCache>) {
        let mut caches = lock(&self.caches);
        caches.retain(|other| !Arc::ptr_eq(other, cache));
        self.promise_to(caches.len());
        // Under the lock, so that `Core::stats` counts this cache's faults exactly once.
        self.stats.absorb(&cache.count);
    }

    pub fn with_caches<T>(&self, read: impl FnOnce(&[Arc<SharedCache>]) -> T) -> T {
        read(&lock(&self.caches))
    }

    /// The pages on which an instruction in progress has faulted, ascending.
    pub fn pinned_pages(&self) -> Vec<PageNo> {
        let mut pinned = Vec::new();
        self.with_caches(|caches| caches.iter().for_each(|cache| cache.gather(&mut pinned)));
        pinned.sort_unstable();
        pinned
    }

    /// Frees a swap entry. Its content is no longer needed, and no write to it is in flight.
    pub fn free_entry(&self, entry: SwapEntry) {
        // Discard first: once the entry is free, another thread may write to it.
        self.store.discard(entry);
        lock(&self.entries).free(entry);
    }

    pub fn lost_page(&self, page: PageNo) -> LostPage {
        let lost = lock(&self.lost).get(&page).cloned();
        lost.unwrap_or_else(|| {
            let reason = self.reason_of_loss(page);
            LostPage::new(page.addr(), reason.unwrap_or("no region holds it"))
        })
    }

    /// Records that the page is lost, and why.
    pub fn note_lost(&self, page: PageNo, lost: &LostPage) {
        let lost = LostPage {
            page: page.addr(),
            ..lost.clone()
        };
        lock(&self.lost).insert(page, lost);
    }
}
