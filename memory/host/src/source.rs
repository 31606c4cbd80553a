//! Page sources: where the pages of a region come from that were never provided.
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
//! One answer counts. Every later one, and one that comes after the region or the host is gone, is
//! [`Answer::Late`] and changes nothing.
//!
//! The frame is taken at the fault, as for a read from swap. So an answer never waits for memory,
//! and pages in flight are bounded by what vCPUs wait for.
//!
//! A provided page is dirty: reclaim writes it to swap, and swap brings it back. The source is not
//! asked again, so it may forget a page that it has provided.

use crate::error::LostPage;
use crate::host::{Core, lock};
use crate::pool::Page;
use crate::residency::{PageNo, PageState, PageWord};
use crate::stats::Counters;
use crate::ticket::Ticket;
use lacuna_addr::BackingAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

/// A region's page source: a peer, a snapshot file, an external handler. The host calls it with no
/// lock held, from several threads at once.
pub trait PageSource: Send + Sync {
    /// Its name in error messages, such as `snapshot in /var/lib/vm`.
    fn describe(&self) -> String;

    /// Asks for a page, at most once for each page. The source answers `request` now or later, on
    /// any thread. It does not wait here: the caller may be a vCPU that goes on.
    fn fetch(&self, request: PageRequest);
}

/// A page that a source was asked for. A clone is the same request. The request fails when its last
/// clone is dropped without an answer, so a source that ends loses no ticket.
#[derive(Clone)]
pub struct PageRequest(Arc<Asked>);

struct Asked {
    /// Weak, because the source of a region of the host keeps the request.
    core: Weak<Core>,
    page: PageNo,
}

/// What an answer has come to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Answer {
    /// It counts: the ticket is done.
    Taken,
    /// It changes nothing: the page was answered before, or its region or host is gone.
    Late,
}

impl PageRequest {
    /// The page's address.
    pub fn page(&self) -> BackingAddr {
        self.0.page.addr()
    }

    /// Provides the page's content. Callbacks of the ticket run on this thread
    /// ([`Ticket::on_done`]), so the caller holds no lock.
    pub fn provide(&self, content: &Page) -> Answer {
        self.0.answer(Ok(content))
    }

    /// The page cannot be provided: it is lost. As [`PageRequest::provide`] otherwise.
    pub fn fail(&self, reason: &str) -> Answer {
        self.0.answer(Err(reason))
    }
}

impl std::fmt::Debug for PageRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PageRequest({})", self.page())
    }
}

impl Asked {
    fn answer(&self, content: Result<&Page, &str>) -> Answer {
        match self.core.upgrade() {
            Some(core) => core.answer(self.page, content),
            None => Answer::Late,
        }
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        // Late, unless no clone was answered.
        let _ = self.answer(Err("it dropped the request"));
    }
}

impl Core {
    /// Asks the region's source for the page of a ticket that the caller has started.
    pub fn ask_source(self: &Arc<Self>, ticket: &Ticket) {
        let asked = Asked {
            core: Arc::downgrade(self),
            page: ticket.number(),
        };
        let source = ticket.region().source.as_ref();
        let source = source.expect("only a region with a source has a page in Fetching");
        source.fetch(PageRequest(Arc::new(asked)));
    }

    /// Whether `ticket` is for a page that its source has not provided yet.
    pub fn is_missing(&self, ticket: &Ticket) -> bool {
        let word = ticket.region().word(ticket.number());
        matches!(word.map(PageWord::load), Some(PageState::Fetching { .. }))
    }

    fn answer(&self, page: PageNo, content: Result<&Page, &str>) -> Answer {
        let ticket = lock(&self.tickets).get(&page).cloned();
        // A page that was provided and swapped out may be in flight again, from swap.
        let ticket = ticket.filter(|ticket| self.is_missing(ticket));
        let Some(ticket) = ticket.filter(Ticket::answer) else {
            return Answer::Late;
        };
        // Counted before the ticket is gone: see `in_flight`.
        self.completing.fetch_add(1, Ordering::Relaxed);
        let result = match content {
            Ok(content) => {
                // SAFETY: the page word says Fetching, so nothing maps or evicts the frame, and
                // this thread alone has won `Ticket::answer`.
                let frame = unsafe { self.frames.pool.exclusive(ticket.frame()) };
                frame.0.copy_from_slice(&content.0);
                Counters::add(&self.stats.provided, 1);
                Ok(())
            }
            Err(reason) => Err(self.lost_by_source(&ticket, reason)),
        };
        self.settle(&ticket, result);
        self.completing.fetch_sub(1, Ordering::Release);
        Answer::Taken
    }

    /// Fails the fetch of a page whose region is being removed, unless an answer is in progress.
    pub fn cancel_fetch(&self, page: PageNo) {
        let _ = self.answer(page, Err("its region was removed"));
    }

    fn lost_by_source(&self, ticket: &Ticket, reason: &str) -> LostPage {
        let source = ticket.region().source.as_ref();
        let source = source.map_or_else(String::new, |source| source.describe());
        let reason: Arc<str> = format!("{source} does not provide it: {reason}").into();
        self.note_lost(ticket.number(), reason.clone());
        LostPage {
            page: ticket.number().addr(),
            reason,
        }
    }
}
