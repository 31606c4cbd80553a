//! Linux memory that is filled from outside ([`External`](lacuna_source::External)): by another
//! process, or by threads of the VMM that read the userfaultfd.
//!
//! ```text
//! fault on an Empty page: Missing(ticket), as with any page source
//!   Host::wait_touching   a vCPU's thread, offline, touches the page and sleeps in the kernel
//!   Host::start, wait     a thread of the region's pool touches it
//!   the handler copies a page there ─► the load succeeds ─► word InPlace, the ticket is done
//! ```
//! The touch is outside of guest code and holds no lock. It ends early if its thread has to stop,
//! if the ticket is done, if the handler is gone, and if the region is removed ([`Toucher`]). If a
//! thread waits longer than the handler's patience, the handler is gone too.
//!
//! The handler may put a page in place before any fault, and no word records that. Then the touch
//! finds the page and does not sleep.
//!
//! The memory is private, or in huge pages of hugetlbfs. The handler fills a huge page as a whole
//! (`units`), and the first page of a unit is touched.
//!
//! # Fills of this side
//! The VMM may provide pages, and a discard fills zeros. Such a fill wakes no thread (DONTWAKE). It
//! then wakes the threads that sleep for its page, if any thread touches. A thread counts itself
//! before it touches; a fill reads the count afterwards. So the fill sees the thread, or the thread
//! sees the page.
//!
//! # Discard
//! A discarded page is removed from the userfaultfd: from then on it is zeros, by Linux alone. The
//! handler gets no event, and its own late copy fails (ENOENT). Otherwise that copy would bring the
//! old content back.

use crate::core::Core;
use crate::counters::Counters;
use crate::error::{HostError, LostPage};
use crate::host::Host;
use crate::region::Region;
use crate::settled::TICK;
use crate::ticket::Ticket;
use lacuna_frames::PageNo;
use lacuna_linux::{FillHandler, Touch, Touching};
use lacuna_source::Answer;
use lacuna_sys::{Touched, Toucher};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

impl Host {
    /// As [`Host::wait_until`], for a thread that other threads interrupt by `toucher` after they
    /// have set `stop`. If the page is missing and filled from outside
    /// ([`PageSource::external`](crate::PageSource::external)), the thread touches it and sleeps in
    /// the kernel's queue.
    ///
    /// # Panics
    /// As [`Host::start`].
    pub fn wait_touching(
        &self,
        ticket: &Ticket,
        stop: &AtomicBool,
        toucher: &Arc<Toucher>,
    ) -> Result<(), HostError> {
        let own = self.core.regions.owns(ticket.region());
        assert!(own, "another host's ticket");
        match ticket.region().outside() {
            Some(outside) => Ok(self.core.touch_until(ticket, outside, toucher, stop)?),
            None => self.wait_until(ticket, stop),
        }
    }
}

impl Region {
    /// The handler that fills the region from outside.
    pub fn outside(&self) -> Option<&Arc<FillHandler>> {
        self.linux.as_ref()?.outside.as_ref()
    }
}

impl Touch for Core {
    fn touch(&self, page: PageNo, handler: &Arc<FillHandler>, toucher: &Arc<Toucher>) {
        if let Some(ticket) = self.ticket_with(page) {
            // A lost page is found when it is resolved again.
            let _ = self.touch_until(&ticket, handler, toucher, &handler.over);
        }
    }
}

impl Core {
    /// Requests the page of `ticket`, which the caller has started: a thread touches it. If no
    /// thread can, the page is lost.
    pub fn ask_outside(&self, ticket: &Ticket) -> bool {
        let Some(outside) = ticket.region().outside() else {
            return false;
        };
        if let Err(error) = outside.start(ticket.number()) {
            let reason = format!(
                "no thread can be started that waits for the page: {error}; let this process have \
                 more threads (ulimit -u) or more memory"
            );
            if self.answer(ticket.number(), Err((&*reason).into())) == Answer::Taken {
                outside.external().asked().failed();
            }
        }
        true
    }

    /// Waits for the page of `ticket`, or until `stop` is set.
    fn touch_until(
        &self,
        ticket: &Ticket,
        outside: &Arc<FillHandler>,
        toucher: &Arc<Toucher>,
        stop: &AtomicBool,
    ) -> Result<(), LostPage> {
        let region = ticket.region();
        let index = region.index_of(ticket.number());
        let linux = region.linux.as_ref().expect("filled from outside");
        let asked = outside.external().asked();
        let patience = outside.external().patience();
        // A time beyond the clock's range is never reached.
        let deadline = patience.and_then(|patience| Instant::now().checked_add(patience));
        patience
            .into_iter()
            .for_each(|patience| outside.time(patience));
        let is_late = || deadline.is_some_and(|at| at <= Instant::now());
        loop {
            if let Some(result) = ticket.result() {
                return result;
            }
            if stop.load(Ordering::Acquire) {
                return Ok(());
            }
            if is_late() {
                let patience = patience.unwrap_or_default();
                let reason = format!("it has not filled a page within {patience:?}");
                outside.external().end(&reason);
            }
            if let Some(reason) = outside.external().gone() {
                if self.frames.pool.is_present(linux.pfn(index)) {
                    let _ = self.arrived(ticket);
                } else if self.answer(ticket.number(), Err((&*reason).into())) == Answer::Taken {
                    asked.failed();
                    return ticket.result().unwrap_or(Ok(()));
                }
                continue;
            }
            let is_over = || {
                ticket.is_done()
                    || stop.load(Ordering::Relaxed)
                    || outside.is_over()
                    || outside.external().gone().is_some()
                    || is_late()
            };
            let inside = outside.enter(Touching {
                toucher: Arc::clone(toucher),
                deadline,
            });
            // SAFETY: the address is in the pool's mapping, which lives as long as `self`. A
            // removal of the region gives it a new mapping, but first waits for this thread.
            let touched = unsafe { toucher.touch(linux.hva(index), is_over) };
            drop(inside);
            if touched == Touched::Present && self.arrived(ticket) {
                asked.provided();
                return Ok(());
            }
        }
    }

    /// Completes `ticket`, whose page is in place; true if this thread has completed it. If another
    /// thread is completing it, this thread waits a moment.
    fn arrived(&self, ticket: &Ticket) -> bool {
        // If the handler has poisoned the page, for example, there are zeros.
        if let Some(reason) = self.reason_of_new_loss(ticket.number()) {
            let _ = self.answer(ticket.number(), Err(reason.into()));
            return false;
        }
        if !ticket.answer() {
            let _ = ticket.sleep(TICK);
            return false;
        }
        // Counted before the ticket is removed: see `in_flight`.
        self.completing.fetch_add(1, Ordering::Relaxed);
        Counters::add(&self.stats.provided, ticket.region().unit());
        self.settle(ticket, Ok(()));
        self.completing.fetch_sub(1, Ordering::Release);
        true
    }
}
