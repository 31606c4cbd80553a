//! Swap-in: from a ticket to a page.

use crate::core::Core;
use crate::counters::Counters;
use crate::error::{HostError, LostPage};
use crate::host::Host;
use crate::settled::NEVER;
use crate::ticket::Ticket;
use lacuna_frames::{Desc, PageNo, PageState, PageWord};
use lacuna_swap::{SwapEntry, SwapError};
use lacuna_sync::lock;
use std::sync::atomic::AtomicBool;
use tracing::{debug, trace};

impl Host {
    /// Passes the read to the executor, if it has not been passed yet. Does not wait for it; from
    /// compressed memory, the pages read ahead are decompressed here.
    ///
    /// # Panics
    /// If the ticket is another host's: its frame is not in this host's pool.
    pub fn start(&self, ticket: &Ticket) {
        self.check_own(ticket);
        // Read the word before the claim: while the ticket is not done, the word says what
        // completes it.
        let missing = self.core.is_missing(ticket);
        if ticket.claim() {
            let page = ticket.number().get();
            trace!(target: "lacuna::fault", page, missing, "read begins");
            match missing {
                true => self.io.request(&self.core, ticket),
                false => {
                    let ahead = self.core.read_ahead(ticket);
                    self.io.read(&self.core, ticket.clone(), ahead);
                }
            }
        }
    }

    /// Starts the read, and returns whether the page arrives within `ns` of now. In real time the
    /// calling thread polls for it, and holds no lock, as for [`Host::poll`]. In virtual time the
    /// executor knows the answer, and the page arrives when it is due.
    ///
    /// # Panics
    /// As [`Host::start`].
    pub fn arrives_within(&self, ticket: &Ticket, ns: u64) -> bool {
        self.start(ticket);
        let end = self.core.clock.now().after(ns);
        self.io.arrives_by(ticket, end)
    }

    /// Waits until the page has arrived; `Err` if it is lost. If the read has not begun, the
    /// calling thread carries it out: waking another thread would take longer than the read.
    ///
    /// A virtual executor delivers its completions up to this one early, in order. A seeded
    /// scheduler therefore calls [`Host::start`], and continues when [`Host::poll`] has completed
    /// the ticket.
    ///
    /// # Panics
    /// As [`Host::start`].
    pub fn wait(&self, ticket: &Ticket) -> Result<(), HostError> {
        self.wait_until(ticket, &NEVER)
    }

    /// As [`Host::wait`], but returns soon after `stop` is set, with the page still in flight. A
    /// vCPU uses it, because its VM may be stopped. If the calling thread carries out the read, it
    /// completes the read first, because the device writes into the page's frame.
    ///
    /// # Panics
    /// As [`Host::start`].
    pub fn wait_until(&self, ticket: &Ticket, stop: &AtomicBool) -> Result<(), HostError> {
        self.check_own(ticket);
        let missing = self.core.is_missing(ticket);
        if ticket.claim() {
            let page = ticket.number().get();
            trace!(target: "lacuna::fault", page, missing, "read begins, waits");
            match missing {
                true => self.io.request(&self.core, ticket),
                false => {
                    let ahead = self.core.read_ahead(ticket);
                    self.io.read_here(&self.core, ticket, ahead, stop);
                }
            }
        }
        Ok(self.io.wait(&self.core, ticket, stop)?)
    }

    /// As [`Host::wait_until`], for a missing page from the VMM: the source gets no request.
    ///
    /// # Panics
    /// As [`Host::start`].
    pub fn wait_provided(&self, ticket: &Ticket, stop: &AtomicBool) -> Result<(), HostError> {
        self.check_own(ticket);
        Ok(self.io.wait(&self.core, ticket, stop)?)
    }

    fn check_own(&self, ticket: &Ticket) {
        let own = self.core.regions.owns(ticket.region());
        assert!(own, "another host's ticket");
    }
}

impl Core {
    /// Carries out the read, on the thread that claimed the ticket.
    pub fn read(&self, ticket: &Ticket) -> Result<(), SwapError> {
        if let Some(linux) = &ticket.region().linux {
            self.touch_paged_out(ticket, linux);
            return Ok(());
        }
        // SAFETY: the page word says Reading, so nothing maps or evicts the frame, and this thread
        // alone has claimed the ticket.
        let page = unsafe { self.frames.pool.exclusive(ticket.frame()) };
        self.store.read(self.entry_of(ticket), page)
    }

    /// Whether the read bytes match the last write to the entry.
    fn check(&self, ticket: &Ticket) -> Result<(), SwapError> {
        // SAFETY: as in `read`, until the page word changes; the device no longer uses the frame.
        let page = unsafe { self.frames.pool.exclusive(ticket.frame()) };
        let written = lock(&self.entries).checksum(self.entry_of(ticket));
        if page.checksum() == written {
            Ok(())
        } else {
            Err(SwapError::Damaged)
        }
    }

    /// The swap entry of a page that is being read. It stays the same until the ticket is done.
    pub fn entry_of(&self, ticket: &Ticket) -> SwapEntry {
        let word = ticket.region().word(ticket.number());
        match word.map(PageWord::load) {
            Some(PageState::Reading { entry, .. }) => entry,
            other => unreachable!("{ticket:?} is read, but its page is {other:?}"),
        }
    }

    /// Completes a read from swap: the page becomes resident, or lost if the read has failed or its
    /// checksum is wrong.
    pub fn complete_read(&self, ticket: &Ticket, result: Result<(), SwapError>) {
        if ticket.region().linux.is_some() {
            return self.complete_page_in(ticket, result);
        }
        let result = result.and_then(|()| self.check(ticket));
        if result.is_err() && self.give_up_ahead(ticket) {
            return;
        }
        self.settle(ticket, result.map_err(|error| self.lost_in(ticket, &error)));
    }

    /// Makes the page resident or lost, and then completes its ticket. The caller carried out the
    /// read, or has won [`Ticket::answer`].
    pub fn settle(&self, ticket: &Ticket, result: Result<(), LostPage>) {
        match &result {
            Ok(()) => trace!(target: "lacuna::fault", page = ticket.number().get(), "page arrives"),
            Err(lost) => debug!(target: "lacuna::fault", %lost, "page is lost"),
        }
        if let Some(linux) = &ticket.region().linux {
            return self.settle_linux(ticket, linux, result);
        }
        let page = ticket.number();
        let desc = self.frames.desc(ticket.frame());
        let Some(word) = ticket.region().word(page) else {
            return;
        };
        let moved = {
            // Under the lock, because of this race: this thread finds a page read ahead; a fault
            // joins the read; the page arrives as one that no fault has asked for.
            let mut tickets = lock(&self.tickets);
            let moved = match &result {
                Ok(()) => {
                    self.note_arrival(word.load(), desc);
                    word.advance(PageState::arrived)
                }
                Err(_) => word.advance(PageState::arrival_failed),
            };
            tickets.remove(&page);
            moved
        };
        debug_assert!(moved.is_ok(), "only the caller completes this ticket");
        if result.is_ok() {
            desc.publish();
        } else {
            ticket.region().add_resident(-1);
            self.frames.give([ticket.frame().index() as u32]);
            if let Ok(Some(entry)) = moved.map(PageState::entry) {
                self.free_entry(entry);
            }
        }
        ticket.complete(result);
        self.settled.bump();
    }

    /// Counts a page in flight that is about to arrive. The caller excludes that a fault joins.
    fn note_arrival(&self, from: PageState, desc: &Desc) {
        let is_ahead = desc.is_ahead();
        // The faulting vCPU may need some time until it retries, so the hand spares the page for
        // one turn.
        if !is_ahead {
            desc.mark_recent();
        }
        if let PageState::Reading { .. } = from {
            let kind = match is_ahead {
                true => &self.stats.read_ahead,
                false => &self.stats.read_back,
            };
            Counters::add(kind, 1);
            Counters::add(&self.stats.swapped_in, 1);
        }
    }

    /// Completes an unstarted read, because its region is removed.
    pub fn cancel_read(&self, page: PageNo) {
        let ticket = lock(&self.tickets).get(&page).cloned();
        if let Some(ticket) = ticket.filter(Ticket::claim) {
            self.complete_read(&ticket, Err(SwapError::Io("its region was removed".into())));
        }
    }

    fn lost_in(&self, ticket: &Ticket, error: &SwapError) -> LostPage {
        let reason = format!(
            "cannot read it back: {}, swap entry {}: {error}",
            self.device,
            self.entry_of(ticket).get()
        );
        let lost = LostPage::new(ticket.number().addr(), reason);
        self.note_lost(ticket.number(), &lost);
        lost
    }
}
