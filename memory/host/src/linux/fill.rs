//! Fills pages of Linux memory: with the VMM's bytes, with a source's answer, or with zeros.
//!
//! Two threads may fill one page at once. The kernel lets one of them put its page in place, and
//! the other gets `EEXIST`. The content in place counts: its thread gets [`Answer::Taken`].

use super::units::{Run, not_filled};
use crate::core::Core;
use crate::counters::{Counters, FaultCounters};
use crate::error::{HostError, LostPage};
use crate::per_cpu_pages::PerCpuPages;
use crate::resolve::{Frame, Resolution};
use crate::settled::TICK;
use crate::ticket::Ticket;
use lacuna_addr::PAGE_SIZE;
use lacuna_frames::{FramePtr, PageNo, PageState, PageWord};
use lacuna_linux::{LinuxMemory, Placed, User};
use lacuna_source::Answer;
use lacuna_sync::lock;
use std::slice::from_ref;
use std::sync::atomic::Ordering;

impl Core {
    /// A fault on a page that is in place, was never there, or is paged out.
    #[cold]
    pub fn resolve_linux(
        &self,
        page: PageNo,
        state: PageState,
        cache: &mut PerCpuPages,
    ) -> Option<Resolution> {
        let region = cache.region();
        let linux = region.linux.as_ref()?;
        let frame = region.linux_frame(page)?;
        match state {
            PageState::InPlace => {
                FaultCounters::bump(&cache.shared.count.resident);
                let level = region.level_of(page);
                Some(Resolution::Ready(Frame { pfn: frame, level }))
            }
            PageState::PagedOut => self.begin_page_in(page, cache),
            PageState::PagingIn => self.join(page, cache).map(Resolution::Pending),
            PageState::Empty if region.origin.is_some() && region.has_units() => {
                self.resolve_in_unit(page, cache)
            }
            PageState::Empty | PageState::Zero if region.has_units() => {
                self.zeros_for_unit(page, state, cache)
            }
            PageState::Empty if region.origin.is_some() => {
                let fetching = PageState::Fetching { frame };
                let ticket =
                    self.put_in_flight(page, PageState::Empty, fetching, cache.region())?;
                FaultCounters::bump(&cache.shared.count.missing);
                Some(Resolution::Missing(ticket))
            }
            PageState::Empty | PageState::Zero => {
                let _user = linux.enter();
                let word = region.word(page)?;
                if word.load() != state {
                    return None;
                }
                if let Err(errno) = linux.fill_with_zeros(region.index_of(page)) {
                    return Some(Resolution::Lost(not_filled(linux, page, errno)));
                }
                if word.change(state, PageState::InPlace).is_ok() {
                    linux.note_in_place(1);
                    FaultCounters::bump(&cache.shared.count.zero_fill);
                }
                None
            }
            _ => Some(Resolution::Busy),
        }
    }

    /// As [`Core::provide`], for a page of Linux memory; `cache` has found its region.
    pub fn provide_linux(
        &self,
        page: PageNo,
        content: &[u8; PAGE_SIZE],
        cache: &PerCpuPages,
    ) -> Result<Answer, HostError> {
        let region = cache.region();
        let (Some(linux), Some(word)) = (&region.linux, region.word(page)) else {
            return Ok(Answer::Late);
        };
        if linux.unit() > 1 {
            let taken = self.provide_part(page, from_ref(content), (cache, linux))?;
            return Ok(match taken {
                0 => Answer::Late,
                _ => Answer::Taken,
            });
        }
        let (user, state) = self.enter_after_discards(linux, word);
        match state {
            PageState::Empty => {}
            // If another thread is answering now, its content counts.
            PageState::Fetching { .. } => {
                drop(user);
                return Ok(self.answer(page, Ok(content)));
            }
            PageState::Gone | PageState::Lost => return Err(self.lost_page(page).into()),
            _ => return Ok(Answer::Late),
        }
        let filled = linux.fill(region.index_of(page), from_ref(content));
        let filled = filled.map_err(|errno| not_filled(linux, page, errno))?;
        let answer = self.note_filled(page, word, filled, linux);
        if answer == Answer::Taken {
            FaultCounters::bump(&cache.shared.count.provided);
        }
        Ok(answer)
    }

    /// Makes this thread a user of the region at a moment when no thread discards the page of
    /// `word`, and returns the page's state then: a page may be missing after a discard. A thread
    /// that discards waits for users, so this thread is none while it waits.
    pub(super) fn enter_after_discards<'a>(
        &self,
        linux: &'a LinuxMemory,
        word: &PageWord,
    ) -> (User<'a>, PageState) {
        loop {
            let user = linux.enter();
            match word.load() {
                PageState::Discarding => drop(user),
                state => return (user, state),
            }
            self.settled.wait_past(self.settled.generation(), TICK);
        }
    }

    /// Records a fill of `page`, whose word said Empty: the page is in place, unless it is no
    /// longer wanted. The caller is a user of the region, and counts the page if it is taken.
    pub(super) fn note_filled(
        &self,
        page: PageNo,
        word: &PageWord,
        filled: Placed,
        linux: &LinuxMemory,
    ) -> Answer {
        match word.change(PageState::Empty, PageState::InPlace) {
            Ok(()) => linux.note_in_place(1),
            // Meanwhile a fault has made a ticket. The page is in place.
            Err(PageState::Fetching { .. }) => self.arrived_without_answer(page),
            Err(PageState::InPlace) => {}
            // The page was discarded, or its source has failed: the content does not count.
            Err(_) => return Answer::Late,
        }
        match filled {
            Placed::Here => Answer::Taken,
            Placed::Before => Answer::Late,
        }
    }

    /// Puts the empty pages at `first`, up to the first page that is not empty, in place by one
    /// system call. The run is empty where that is not possible. In memory in units the run has all
    /// of `pages`, and there is a call for each unit.
    pub fn provide_run(
        &self,
        first: PageNo,
        pages: &[[u8; PAGE_SIZE]],
        cache: &mut PerCpuPages,
    ) -> Result<Run, HostError> {
        let mut run = Run::default();
        if cache.find(first).is_none() {
            return Ok(run);
        }
        let region = cache.region();
        if region.has_units() && region.origin.is_some() {
            return self.provide_units(first, pages, cache);
        }
        let Some(linux) = &region.linux else {
            return Ok(run);
        };
        let index = region.index_of(first);
        // The region's next part needs another run.
        let Some((part, uffd)) = linux.uffds(index..index + pages.len() as u64).next() else {
            return Ok(run);
        };
        let len = (part.end - part.start) as usize;
        let words = || (0..len).map_while(|i| region.word(first.plus(i)));
        let _user = linux.enter();
        let empty = words()
            .take_while(|word| word.load() == PageState::Empty)
            .count();
        let to = linux.hva(index);
        run.len = match uffd.place(&pages[..empty], to, linux.waiters()) {
            Ok(()) => empty,
            // The caller tries the next page alone.
            Err(partial) => partial.done,
        };
        linux.wake_touching(index..index + run.len as u64);
        for (i, word) in words().take(run.len).enumerate() {
            let answer = self.note_filled(first.plus(i), word, Placed::Here, linux);
            run.taken += usize::from(answer == Answer::Taken);
        }
        FaultCounters::add(&cache.shared.count.provided, run.taken as u64);
        Ok(run)
    }

    /// Completes a fetch whose page another thread has put in place. If a thread is answering, does
    /// nothing: that thread finds the page in place, and completes the fetch.
    pub(super) fn arrived_without_answer(&self, page: PageNo) {
        let ticket = lock(&self.tickets).get(&page).cloned();
        let ticket = ticket.filter(|ticket| self.is_missing(ticket));
        if let Some(ticket) = ticket.filter(Ticket::answer) {
            self.completing.fetch_add(1, Ordering::Relaxed);
            self.settle(&ticket, Ok(()));
            self.completing.fetch_sub(1, Ordering::Release);
        }
    }

    /// Fills the page or unit of `ticket`; the caller has won [`Ticket::answer`].
    pub fn fill_in_place(
        &self,
        ticket: &Ticket,
        linux: &LinuxMemory,
        content: &[[u8; PAGE_SIZE]],
    ) -> (Answer, Result<(), LostPage>) {
        let page = ticket.number();
        // The page word says Fetching, so no thread takes the page away before it is settled.
        match linux.fill(ticket.region().index_of(page), content) {
            Ok(Placed::Here) => {
                Counters::add(&self.stats.provided, content.len() as u64);
                (Answer::Taken, Ok(()))
            }
            Ok(Placed::Before) => (Answer::Late, Ok(())),
            Err(errno) => {
                let lost = not_filled(linux, page, errno);
                self.note_lost(page, &lost);
                (Answer::Taken, Err(lost))
            }
        }
    }

    /// As [`Core::settle`], for a page of Linux memory.
    pub fn settle_linux(&self, ticket: &Ticket, linux: &LinuxMemory, result: Result<(), LostPage>) {
        let page = ticket.number();
        let Some(word) = ticket.region().word(page) else {
            return;
        };
        // A thread that takes the page away waits for users: the unit's other words follow before.
        let user = linux.enter();
        // Word and ticket change under one lock, as in `put_in_flight`: afterwards the page may be
        // missing again, and have a new ticket.
        let mut tickets = lock(&self.tickets);
        let moved = match &result {
            Ok(()) => word.advance(PageState::arrived_in_place),
            Err(_) => word.advance(PageState::arrival_failed),
        };
        debug_assert!(moved.is_ok(), "only the caller completes this ticket");
        tickets.remove(&page);
        drop(tickets);
        let is_lost = result.is_err();
        match is_lost {
            false => linux.note_in_place(1),
            // A page word that says Lost allows no access. An access past the words must not read
            // zeros.
            true => linux.poison(ticket.region().index_of(page)),
        }
        if linux.unit() > 1 {
            self.follow(ticket.region(), page, &result);
        }
        drop(user);
        ticket.complete(result);
        if let (true, Some(outside)) = (is_lost, &linux.outside) {
            outside.interrupt();
        }
        self.settled.bump();
    }

    /// Runs `copy` on a page of Linux memory while no other thread can take the page away. `None`
    /// if it is not in place, or if the kernel may have taken it away. Then the copied bytes do not
    /// count, and the caller calls [`Core::settle_losses`] before it tries again.
    pub fn while_in_place(&self, page: PageNo, copy: impl FnOnce(FramePtr<'_>)) -> Option<()> {
        let region = self.regions.find(page)?;
        let linux = region.linux.as_ref()?;
        let word = region.word(page)?;
        let _user = linux.enter();
        if word.load() != PageState::InPlace {
            return None;
        }
        copy(self.frames.pool.frame(linux.pfn(region.index_of(page))));
        // In this order: the words of settled losses say Lost.
        let whole = self.losses_are_settled() && word.load() == PageState::InPlace;
        whole.then_some(())
    }
}
