//! A region's page source, which provides the missing pages.
//!
//! ```text
//! fault on an Empty page
//!   no source: a frame of zeros ------------------------------------------------> Ready
//!   a source:  page word Fetching, a frame, a ticket ---------------------------> Missing(ticket)
//!                |
//!   Host::start, Host::wait: the source is asked, once a page
//!                |
//!                |-- provide(bytes): copied into the frame, page word Resident, ticket done
//!                |-- fail(reason), or the request is dropped: page word Lost, ticket done
//!                |-- the region is removed: page word Lost, then Gone, ticket done
//!                '-- no answer: the ticket stays in flight, and reclaim leaves the frame alone
//! ```
//! One answer counts. Every later answer, and an answer after the region or the host was dropped,
//! is [`Answer::Late`] and changes nothing.
//!
//! The frame is taken at the fault, as for a read from swap. So an answer never waits for memory,
//! and the vCPUs' waits bound the number of pages in flight.
//!
//! A provided page is dirty: reclaim writes it to swap, and swap brings it back. The source gets no
//! second request, so it may forget a provided page.

use crate::core::Core;
use crate::counters::Counters;
use crate::error::LostPage;
use crate::origin::Origin;
use crate::ticket::Ticket;
use lacuna_addr::PAGE_SIZE;
use lacuna_frames::{PageNo, PageState, PageWord};
use lacuna_source::{Answer, Failure, PageRequester, UnitContent};
use lacuna_sync::lock;
use std::slice::from_ref;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

/// Takes the answers. Weak, because the source of a region of the host keeps the requests.
struct Answers(Weak<Core>);

impl PageRequester for Answers {
    fn answer(&self, key: u64, content: Result<&[u8; PAGE_SIZE], Failure<'_>>) -> Answer {
        match self.0.upgrade() {
            Some(core) => core.answer(PageNo::new(key), content),
            None => Answer::Late,
        }
    }
}

impl Core {
    /// Takes the answers of the regions' sources.
    pub fn answers(self: &Arc<Self>) -> Arc<dyn PageRequester> {
        Arc::new(Answers(Arc::downgrade(self)))
    }

    /// Requests the page of a ticket from the region's source; the caller has started the ticket.
    pub fn ask_source(&self, ticket: &Ticket) {
        if self.ask_outside(ticket) {
            return;
        }
        let (region, page) = (ticket.region(), ticket.number());
        let origin = region.origin.as_ref();
        let origin = origin.expect("only a region with a source has a page in Fetching");
        // A unit has its first page's ticket. A lost page of the unit, or the VMM, may complete the
        // ticket before all pages are requested.
        for at in 0..region.unit() {
            if at != 0 && ticket.is_done() {
                break;
            }
            // The VMM has provided it.
            if region.has_units() && ticket.has_gathered(at as usize) {
                continue;
            }
            origin.fetch(region.index_of(page) + at, page.plus(at as usize));
        }
    }

    /// Whether `ticket` is for a page that its source has not provided yet.
    pub fn is_missing(&self, ticket: &Ticket) -> bool {
        let word = ticket.region().word(ticket.number());
        matches!(word.map(PageWord::load), Some(PageState::Fetching { .. }))
    }

    pub fn answer(&self, page: PageNo, content: Result<&[u8; PAGE_SIZE], Failure<'_>>) -> Answer {
        // A provided and swapped-out page may be in flight again, from swap.
        let ticket = self.ticket_with(page);
        let ticket = ticket.filter(|ticket| self.is_missing(ticket));
        if let Some(ticket) = ticket.as_ref().filter(|t| t.region().has_units()) {
            return self.answer_in_unit(ticket, page, content);
        }
        let Some(ticket) = ticket.filter(Ticket::answer) else {
            return Answer::Late;
        };
        // Counted before the ticket is removed: see `in_flight`.
        self.completing.fetch_add(1, Ordering::Relaxed);
        let (answer, result) = match (content, &ticket.region().linux) {
            (Ok(content), None) => {
                // SAFETY: the page word says Fetching, so nothing maps or evicts the frame, and
                // this thread alone has won `Ticket::answer`.
                let frame = unsafe { self.frames.pool.exclusive(ticket.frame()) };
                frame.0.copy_from_slice(content);
                Counters::add(&self.stats.provided, 1);
                (Answer::Taken, Ok(()))
            }
            (Ok(content), Some(linux)) => self.fill_in_place(&ticket, linux, from_ref(content)),
            (Err(failure), _) => (Answer::Taken, Err(self.lost_by_source(&ticket, failure))),
        };
        self.settle(&ticket, result);
        self.completing.fetch_sub(1, Ordering::Release);
        answer
    }

    /// The ticket that `page` completes: its own, or its unit's.
    pub fn ticket_with(&self, page: PageNo) -> Option<Ticket> {
        let tickets = lock(&self.tickets);
        let of_unit = || {
            let ticket = tickets.get(&page.block_start());
            ticket.filter(|ticket| ticket.region().has_units())
        };
        tickets.get(&page).or_else(of_unit).cloned()
    }

    /// Fails the fetch of a page of a region under removal, unless an answer is in progress.
    pub fn cancel_fetch(&self, page: PageNo) {
        let reason = Failure::from("its region was removed");
        let ticket = self.ticket_with(page);
        let _ = match ticket.filter(|ticket| ticket.region().has_units()) {
            None => self.answer(page, Err(reason)),
            Some(ticket) => self.complete_unit(&ticket, UnitContent::Fails(reason)),
        };
    }

    pub fn lost_by_source(&self, ticket: &Ticket, failure: Failure<'_>) -> LostPage {
        let origin = ticket.region().origin.as_ref();
        let source = origin.map_or_else(String::new, Origin::describe);
        let page = ticket.number();
        let lost = LostPage {
            page: page.addr(),
            reason: format!("{source} does not provide it: {failure}").into(),
            kind: failure.kind,
        };
        self.note_lost(page, &lost);
        lost
    }
}
