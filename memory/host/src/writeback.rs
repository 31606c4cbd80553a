//! Write-out: a cluster of dirty pages on their way to neighbouring slots.
//!
//! The bytes that are written are a private copy, taken while the page was unmapped everywhere: a guest
//! that takes its page back and writes to it changes the frame, never what reaches the slot. So after
//! the write the slot holds what the page was when it was last clean, and the page's dirty mark says
//! whether that still counts.

use crate::error::{HostError, SwapError, WriteFailed};
use crate::frames::BATCH;
use crate::host::{Core, lock};
use crate::pool::Page;
use crate::reclaim::Victim;
use crate::residency::PageState;
use crate::stats::Counters;
use crate::swap::Slot;
use std::sync::atomic::Ordering;

/// Most pages of one write: 128 KiB.
pub(crate) const CLUSTER: usize = BATCH;

/// A write in flight. Its frames stay isolated and its slots taken until it completes.
pub(crate) struct WriteBatch {
    first: Slot,
    /// In slot order; `None` where the page was taken back before the write began.
    victims: Vec<Option<Victim>>,
    pages: Vec<Page>,
}

impl Core {
    /// Gives the dirty `victims`, whose bytes are `pages`, slots in a row. What does not fit is returned
    /// to its owners; then the error says so.
    pub fn prepare_write(
        &self,
        mut victims: Vec<Victim>,
        mut pages: Vec<Page>,
    ) -> (Vec<WriteBatch>, Result<(), HostError>) {
        let mut batches = Vec::new();
        while !victims.is_empty() {
            let Some(run) = lock(&self.slots).take(victims.len().min(CLUSTER) as u32) else {
                victims.drain(..).for_each(|victim| self.keep_dirty(victim));
                return (batches, Err(self.swap_full("every slot is in use")));
            };
            let rest = victims.split_off(run.count as usize);
            let rest_pages = pages.split_off(run.count as usize);
            let slots = (0..run.count).map(|i| run.first.plus(i));
            let started = victims
                .into_iter()
                .zip(slots)
                .map(|(v, slot)| self.send_to(v, slot));
            let victims_now: Vec<_> = started.collect();
            let written = victims_now.iter().flatten().count();
            self.writing.fetch_add(written, Ordering::Relaxed);
            batches.push(WriteBatch {
                first: run.first,
                victims: victims_now,
                pages,
            });
            (victims, pages) = (rest, rest_pages);
        }
        (batches, Ok(()))
    }

    /// Moves one page to Writeback; `None` if its owner was quicker.
    fn send_to(&self, victim: Victim, slot: Slot) -> Option<Victim> {
        match victim.word().advance(|state| state.write_started(slot)) {
            Ok(before) => {
                if let Some(old) = before.slot() {
                    self.free_slot(old);
                }
                Some(victim)
            }
            Err(_) => {
                self.keep_dirty(victim);
                None
            }
        }
    }

    /// The device's part, on whatever thread the executor likes.
    pub fn write(&self, batch: &WriteBatch) -> Result<(), WriteFailed> {
        self.store.write(batch.first, &batch.pages)
    }

    /// The write is over: each page leaves its frame, unless its owner took it back.
    pub fn complete_write(&self, batch: WriteBatch, result: Result<(), WriteFailed>) {
        let done = match &result {
            Ok(()) => batch.victims.len(),
            Err(failed) => failed.done,
        };
        self.note_write(batch.first, &result);
        let mut freed = Vec::with_capacity(batch.victims.len());
        let mut finished = 0;
        for (i, victim) in batch.victims.into_iter().enumerate() {
            let slot = batch.first.plus(i as u32);
            let Some(victim) = victim else {
                self.free_slot(slot);
                continue;
            };
            finished += 1;
            if i >= done {
                self.unwrite(victim, slot);
                continue;
            }
            Counters::add(&self.stats.swapped_out, 1);
            match victim.word().advance(PageState::written) {
                Ok(_) => freed.push(victim),
                // Taken back. The slot stays: it is right for as long as nobody writes to the page.
                Err(_) => self.keep(victim),
            }
        }
        self.writing.fetch_sub(finished, Ordering::Relaxed);
        self.release(freed);
        self.settled.bump();
    }

    /// The slot holds nothing: the page goes on as if it had never been chosen.
    fn unwrite(&self, victim: Victim, slot: Slot) {
        self.frames.desc(victim.frame).mark_dirty();
        let moved = victim.word().advance(PageState::without_slot);
        debug_assert!(moved.is_ok(), "only its reclaimer moves an isolated page");
        self.free_slot(slot);
        self.keep(victim);
    }

    fn note_write(&self, first: Slot, result: &Result<(), WriteFailed>) {
        let Err(failed) = result else {
            Counters::add(&self.stats.write_clusters, 1);
            *lock(&self.failure) = None;
            return;
        };
        Counters::add(&self.stats.write_failures, 1);
        let error = match &failed.error {
            SwapError::Full(reason) => self.swap_full(reason),
            SwapError::Ends(reason) => {
                lock(&self.slots).shrink_to(first.plus(failed.done as u32));
                self.swap_full(reason)
            }
            SwapError::Io(reason) => HostError::SwapWrite {
                device: self.device.clone(),
                reason: reason.clone(),
            },
        };
        *lock(&self.failure) = Some(error);
    }

    fn swap_full(&self, reason: &str) -> HostError {
        HostError::SwapFull {
            device: self.device.clone(),
            reason: reason.into(),
        }
    }
}
