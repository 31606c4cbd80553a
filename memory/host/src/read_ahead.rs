//! Read-ahead: a read from swap also brings swapped-out neighbours of its page.
//!
//! ```text
//! pages     . . x x F x . x     F: the fault; x: swapped out, in entries near F's
//! window           [F x . x]    aligned; its pages x are read too
//! ```
//! The neighbours get frames only while more frames are free than the low watermark. Each has a
//! ticket like any page in flight, which no thread waits for. When it arrives, it is resident and
//! not mapped: this is the swap cache. A later access is a fault on a resident page, and the guest
//! gets no event. Reclaim evicts a page that was not accessed at its next look, without a write.
//! `read_ahead_window` has the number of pages.

use crate::core::Core;
use crate::counters::Counters;
use crate::host::Host;
use crate::ticket::Ticket;
use lacuna_addr::{PageCount, Pfn};
use lacuna_frames::{Dirt, PageNo, PageState};
use lacuna_swap::Reads;
use lacuna_sync::lock;
use std::sync::atomic::Ordering;

impl Host {
    /// From now on a read from swap brings at most `pages` pages, its own page included: the
    /// largest power of two up to this number, and at most 512. With 1, as in a new host, it brings
    /// only its own page. A device that answers at once reads nothing ahead
    /// ([`Host::reads_at_once`]).
    pub fn set_read_ahead(&self, pages: PageCount) {
        let most = pages.get().clamp(1, 1 << 9) as u32;
        self.core.read_ahead.set_max(1 << most.ilog2());
    }
}

impl Core {
    /// Whether a read takes less time than reporting it to a guest.
    pub fn reads_at_once(&self) -> bool {
        let is_immediate = matches!(self.store.reads(), Reads::Immediate);
        is_immediate && self.store.latency_ns() == 0 && self.delay_ns() == 0
    }

    /// An access uses `page`, which was resident in `frame` a moment ago.
    #[inline]
    pub fn note_use(&self, page: PageNo, frame: Pfn) {
        if self.asked_for(page, frame) {
            Counters::add(&self.stats.read_ahead_used, 1);
            Counters::add(&self.stats.read_back, 1);
        }
    }

    /// A fault asks for `page`, which was in `frame` or on its way there a moment ago. Returns
    /// whether it is the first after the page's read-ahead.
    #[inline]
    pub fn asked_for(&self, page: PageNo, frame: Pfn) -> bool {
        let first = self.read_ahead.is_on() && self.frames.desc(frame).take_ahead(page);
        if first {
            self.read_ahead.hit();
        }
        first
    }

    /// Gives frames to neighbours of the page of `ticket`, whose read is about to begin, and claims
    /// their tickets.
    pub fn read_ahead(&self, ticket: &Ticket) -> Vec<Ticket> {
        // Linux reads its own memory, and the pages around it that it chooses.
        let is_linux = ticket.region().linux.is_some();
        if !self.read_ahead.is_on() || self.reads_at_once() || is_linux {
            return Vec::new();
        }
        let window = self.read_ahead.next(ticket.number());
        let neighbours = self.neighbours(ticket, window);
        let mut frames = Vec::new();
        if !neighbours.is_empty() {
            self.frames.take_spare(neighbours.len(), &mut frames);
        }
        let frames = frames.into_iter().map(Pfn::new);
        let begun = neighbours.into_iter().zip(frames);
        begun
            .filter_map(|((page, state), frame)| self.begin_ahead(ticket, page, state, frame))
            .collect()
    }

    /// The swapped-out pages in the aligned window around the page of `ticket`, those after it
    /// first. An entry that is far from the page's own would be another read of the device.
    fn neighbours(&self, ticket: &Ticket, window: u32) -> Vec<(PageNo, PageState)> {
        let page = ticket.number().get();
        let entry = self.entry_of(ticket).get();
        let first = page & !u64::from(window - 1);
        let after = page + 1..first + u64::from(window);
        let pages = after.chain((first..page).rev()).map(PageNo::new);
        let swapped_out = pages.filter_map(|page| {
            let state = ticket.region().word(page)?.load();
            match state {
                PageState::Swapped { entry: other } if other.get().abs_diff(entry) < window => {
                    Some((page, state))
                }
                _ => None,
            }
        });
        swapped_out.collect()
    }

    /// Begins to read `page` into `frame`. `None` if another thread has changed the page, or has
    /// begun its read.
    fn begin_ahead(
        &self,
        beside: &Ticket,
        page: PageNo,
        state: PageState,
        frame: Pfn,
    ) -> Option<Ticket> {
        let desc = self.frames.desc(frame);
        desc.prepare(page, Dirt::Clean);
        desc.mark_ahead();
        let region = beside.region();
        let Some(ticket) = self.put_in_flight(page, state, state.read_started(frame)?, region)
        else {
            self.frames.give([frame.index() as u32]);
            return None;
        };
        self.swapped_out_now.fetch_sub(1, Ordering::Relaxed);
        region.add_resident(1);
        ticket.claim().then_some(ticket)
    }

    /// Ends a failed read of a page that no fault has asked for: the page stays in swap, and the
    /// next fault reads it again. Returns whether it was such a page.
    pub fn give_up_ahead(&self, ticket: &Ticket) -> bool {
        let (page, frame) = (ticket.number(), ticket.frame());
        {
            // Under the lock, a fault cannot join the read, and the next read makes its ticket
            // after this one is removed.
            let mut tickets = lock(&self.tickets);
            if !self.frames.desc(frame).is_ahead() {
                return false;
            }
            tickets.remove(&page);
            let word = ticket.region().word(page);
            let moved = word.map(|word| word.advance(PageState::read_given_up));
            debug_assert!(moved.is_some_and(|moved| moved.is_ok()));
        }
        self.swapped_out_now.fetch_add(1, Ordering::Relaxed);
        ticket.region().add_resident(-1);
        self.frames.give([frame.index() as u32]);
        ticket.complete(Ok(()));
        self.settled.bump();
        true
    }
}
