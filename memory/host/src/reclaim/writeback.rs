//! Write-out: a cluster of dirty pages is written to neighbouring swap entries.
//!
//! The write uses a private copy, made while the page was unmapped everywhere. If a fault takes the
//! page back and the guest writes to it, that changes the frame, not the copy. So after the write
//! the swap entry holds the page as it was at the copy. If the guest has written to the page since,
//! the dirty mark is set, and the entry is stale.

use crate::core::Core;
use crate::counters::Counters;
use crate::error::{Failure, HostError};
use crate::reclaim::round::{CLUSTER, Victim};
use crate::region::Region;
use lacuna_addr::Pfn;
use lacuna_frames::{FrameState, PageState};
use lacuna_swap::{Page, Run, SwapEntry, SwapError, SwapSpace, WriteFailed};
use lacuna_sync::lock;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A write in flight. Its frames stay isolated and its entries taken until it completes.
pub(crate) struct WriteBatch {
    first: SwapEntry,
    /// In entry order; `None` where the page was taken back before the write began.
    victims: Vec<Option<Victim>>,
    /// The copies of all of a reclaim batch's pages, and where this write's copies begin.
    pages: Arc<Vec<Page>>,
    from: usize,
}

impl WriteBatch {
    /// Whether it contains a page of `region`.
    pub fn concerns(&self, region: &Region) -> bool {
        let mut victims = self.victims.iter().flatten();
        victims.any(|victim| std::ptr::eq(&*victim.region, region))
    }
}

/// The most buffers kept for later batches. A new buffer would cost page faults of the host's
/// kernel.
const SPARE: usize = 2;

impl Core {
    /// Gives the dirty `victims` adjacent swap entries; `pages` has their bytes. Victims without an
    /// entry stay with their owners, and the error says why.
    pub fn prepare_write(
        &self,
        mut victims: Vec<Victim>,
        pages: Vec<Page>,
    ) -> (Vec<WriteBatch>, Result<(), HostError>) {
        let pages = Arc::new(pages);
        let mut from = 0;
        let mut batches = Vec::new();
        while !victims.is_empty() {
            let Some(run) = self.take_entries(victims.len().min(CLUSTER) as u32) else {
                victims.drain(..).for_each(|victim| self.keep_dirty(victim));
                let full = self.swap_full(lock(&self.entries).why_full());
                return (batches, Err(full));
            };
            // Record the checksums before any page's word names the entry.
            let copies = &pages[from..from + run.count as usize];
            let checksums: Vec<u32> = copies.iter().map(Page::checksum).collect();
            lock(&self.entries).seal(run.first, &checksums);
            let rest = victims.split_off(run.count as usize);
            let entries = (0..run.count).map(|i| run.first.plus(i));
            let started = victims
                .into_iter()
                .zip(entries)
                .map(|(v, entry)| self.send_to(v, entry));
            let victims_now: Vec<_> = started.collect();
            let written = victims_now.iter().flatten().count();
            self.writing.fetch_add(written, Ordering::Relaxed);
            batches.push(WriteBatch {
                first: run.first,
                victims: victims_now,
                pages: pages.clone(),
                from,
            });
            from += run.count as usize;
            victims = rest;
        }
        self.keep_buffer(pages);
        (batches, Ok(()))
    }

    /// A buffer for the copies of a reclaim batch; it grows as needed.
    pub fn take_buffer(&self) -> Vec<Page> {
        lock(&self.buffers).pop().unwrap_or_default()
    }

    /// Keeps a buffer for the next batch, once the last write from it is over.
    fn keep_buffer(&self, pages: Arc<Vec<Page>>) {
        let Some(buffer) = Arc::into_inner(pages) else {
            return;
        };
        let mut buffers = lock(&self.buffers);
        if buffers.len() < SPARE && !buffer.is_empty() {
            buffers.push(buffer);
        }
    }

    /// Takes adjacent entries. If none is free, first frees entries of resident pages.
    fn take_entries(&self, count: u32) -> Option<Run> {
        let run = lock(&self.entries).take(count);
        if run.is_none() && self.shed_entries() > 0 {
            return lock(&self.entries).take(count);
        }
        run
    }

    /// Frees the swap entries of some resident pages, because the device needs the room for pages
    /// without a frame. The pages count as dirty from now on. Returns the number of freed entries.
    fn shed_entries(&self) -> usize {
        let mut shed = 0;
        for index in 0..self.frames.total() {
            let frame = Pfn::new(index as u32);
            let desc = self.frames.desc(frame);
            if desc.state() != FrameState::Used {
                continue;
            }
            let Some(page) = desc.isolate() else { continue };
            let region = self.regions.find(page);
            let word = region.as_ref().and_then(|region| region.word(page));
            if let Some(word) = word.filter(|word| word.load().entry().is_some()) {
                desc.mark_dirty();
                if let Some(entry) = word
                    .advance(PageState::without_entry)
                    .ok()
                    .and_then(|s| s.entry())
                {
                    self.free_entry(entry);
                    shed += 1;
                }
            }
            desc.publish();
            if shed == 2 * CLUSTER {
                break;
            }
        }
        shed
    }

    /// Moves one page to Writeback; `None` if a fault has taken it back.
    fn send_to(&self, victim: Victim, entry: SwapEntry) -> Option<Victim> {
        match victim.word().advance(|state| state.write_started(entry)) {
            Ok(before) => {
                if let Some(old) = before.entry() {
                    self.free_entry(old);
                }
                Some(victim)
            }
            Err(_) => {
                self.keep_dirty(victim);
                None
            }
        }
    }

    /// Writes the batch to the device. The executor chooses the thread.
    pub fn write(&self, batch: &WriteBatch) -> Result<(), WriteFailed> {
        let pages = &batch.pages[batch.from..batch.from + batch.victims.len()];
        self.store.write(batch.first, pages)
    }

    /// Completes a write: each page leaves its frame, unless a fault has taken it back.
    pub fn complete_write(&self, batch: WriteBatch, result: Result<(), WriteFailed>) {
        let done = match &result {
            Ok(()) => batch.victims.len(),
            Err(failed) => failed.done,
        };
        self.keep_buffer(batch.pages);
        self.note_write(batch.first, &result);
        let mut freed = Vec::with_capacity(batch.victims.len());
        let mut finished = 0;
        for (i, victim) in batch.victims.into_iter().enumerate() {
            let entry = batch.first.plus(i as u32);
            let Some(victim) = victim else {
                self.free_entry(entry);
                continue;
            };
            finished += 1;
            if i >= done {
                self.unwrite(victim, entry);
                continue;
            }
            Counters::add(&self.stats.swapped_out, 1);
            match victim.word().advance(PageState::written) {
                Ok(_) => freed.push(victim),
                // A fault took the page back. The entry stays valid until the page is written.
                Err(_) => self.keep(victim),
            }
        }
        // Release: a thread that no longer counts the write counts its completion (`in_flight`).
        self.writing.fetch_sub(finished, Ordering::Release);
        self.swapped_out_now
            .fetch_add(freed.len() as i64, Ordering::Relaxed);
        self.release(freed);
        self.settled.bump();
    }

    /// Undoes the choice of a page after a failed write: the page is resident, and the entry is
    /// free.
    fn unwrite(&self, victim: Victim, entry: SwapEntry) {
        self.frames.desc(victim.frame).mark_dirty();
        let moved = victim.word().advance(PageState::without_entry);
        debug_assert!(moved.is_ok(), "only its reclaimer moves an isolated page");
        self.free_entry(entry);
        self.keep(victim);
    }

    fn note_write(&self, first: SwapEntry, result: &Result<(), WriteFailed>) {
        let Err(failed) = result else {
            Counters::add(&self.stats.write_clusters, 1);
            *lock(&self.failure) = None;
            lock(&self.entries).has_room_at(first);
            return;
        };
        Counters::add(&self.stats.write_failures, 1);
        let reason = match &failed.error {
            error @ (SwapError::Io(_) | SwapError::Damaged) => {
                return self.note_failure(HostError::SwapWrite {
                    device: self.device.clone(),
                    reason: error.to_string(),
                });
            }
            SwapError::Full(reason) => reason,
            SwapError::Ends(reason) => {
                let end = first.plus(failed.done as u32);
                if lock(&self.entries).ends_at(end, reason) == SwapSpace::Left {
                    return self.note_reason(self.swap_full(reason));
                }
                reason
            }
        };
        let error = self.swap_full(reason);
        if self.shed_entries() > 0 {
            // Resident pages have lost their entries, so there is room.
            self.note_reason(error);
        } else {
            self.note_failure(error);
        }
    }

    /// Records a failed write-out.
    fn note_failure(&self, error: HostError) {
        self.record(error, 1);
    }

    /// Records why the device had no room. That is not a failure yet; the reason is for an error
    /// that may follow.
    pub fn note_reason(&self, error: HostError) {
        self.record(error, 0);
    }

    fn record(&self, error: HostError, failures: usize) {
        let mut failure = lock(&self.failure);
        let before = failure.as_ref().map_or(0, |failure| failure.count);
        let count = before + failures;
        *failure = Some(Failure { error, count });
    }

    fn swap_full(&self, reason: &str) -> HostError {
        HostError::SwapFull {
            device: self.device.clone(),
            reason: reason.into(),
        }
    }
}
