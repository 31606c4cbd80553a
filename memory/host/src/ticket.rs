//! Tickets: one for each page in flight.
//!
//! The fault that gives the page a frame creates the ticket; every later fault on the page gets the
//! same ticket. A ticket says which page will be in which frame, and which threads wait for it. The
//! page word says what completes it (`Reading`: swap; `Fetching`: the region's page source;
//! `PagingIn`: Linux).
//! `flight` has the states.
//!
//! Pages that are filled together share the first page's ticket, which gathers their content.

use crate::error::LostPage;
use crate::flight::Flight;
use crate::region::Region;
use lacuna_addr::{BackingAddr, PAGE_SIZE, Pfn};
use lacuna_frames::{BLOCK, PageNo};
use lacuna_source::{Gathered, Gathering};
use lacuna_sync::{Condvar, Mutex, MutexGuard, lock_order};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

type Callback = Box<dyn FnOnce() + Send>;

/// A page in flight. A clone is the same ticket.
#[derive(Clone)]
pub struct Ticket(Arc<Inner>);

struct Inner {
    page: PageNo,
    region: Arc<Region>,
    frame: Pfn,
    flight: Flight,
    done: Mutex<Outcome, lock_order::TicketResult>,
    wake: Condvar,
}

#[derive(Default)]
struct Outcome {
    result: Option<Result<(), LostPage>>,
    callbacks: Vec<Callback>,
    /// The arrived pages of a unit.
    unit: Gathering,
}

impl Ticket {
    pub(crate) fn new(page: PageNo, region: Arc<Region>, frame: Pfn) -> Self {
        Self(Arc::new(Inner {
            page,
            region,
            frame,
            flight: Flight::new(),
            done: Mutex::default(),
            wake: Condvar::new(),
        }))
    }

    /// The address of its page, or of its unit's first page.
    pub fn page(&self) -> BackingAddr {
        self.0.page.addr()
    }

    /// Whether the page is resident or lost. To find out which, resolve it again.
    pub fn is_done(&self) -> bool {
        self.0.flight.is_done()
    }

    /// Whether a thread carries out the read, or the source has the request.
    pub fn is_started(&self) -> bool {
        self.0.flight.is_started()
    }

    /// Whether both are the same ticket.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Calls `callback` when the ticket is done: at once if it is done already, otherwise on the
    /// completing thread, which holds no lock. The callback is short and does not wait.
    pub fn on_done(&self, callback: impl FnOnce() + Send + 'static) {
        let mut done = self.lock();
        if done.result.is_none() {
            done.callbacks.push(Box::new(callback));
            return;
        }
        drop(done);
        callback();
    }

    pub(crate) fn number(&self) -> PageNo {
        self.0.page
    }

    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.0.region
    }

    pub(crate) fn frame(&self) -> Pfn {
        self.0.frame
    }

    /// Takes the duty to carry out the read, or to ask the source. True for one caller only.
    #[must_use]
    pub(crate) fn claim(&self) -> bool {
        self.0.flight.start()
    }

    /// Takes the right to complete a fetch. True for one caller only.
    #[must_use]
    pub(crate) fn answer(&self) -> bool {
        self.0.flight.answer()
    }

    /// Keeps the content of page number `at` of the ticket's unit, until all pages have arrived.
    pub(crate) fn gather(&self, at: usize, content: &[u8; PAGE_SIZE]) -> Gathered {
        self.lock().unit.add((at, BLOCK), content)
    }

    /// Whether some pages of the ticket's unit have arrived, and others have not.
    pub(crate) fn has_parts(&self) -> bool {
        matches!(self.lock().unit, Gathering::Some(_))
    }

    /// Whether page number `at` of the ticket's unit has arrived.
    pub(crate) fn has_gathered(&self, at: usize) -> bool {
        self.lock().unit.has(at)
    }

    pub(crate) fn complete(&self, result: Result<(), LostPage>) {
        let mut done = self.lock();
        done.result = Some(result);
        let unit = std::mem::replace(&mut done.unit, Gathering::Over);
        self.0.flight.finish();
        let callbacks = std::mem::take(&mut done.callbacks);
        drop(done);
        drop(unit);
        self.0.wake.notify_all();
        for callback in callbacks {
            callback();
        }
    }

    /// The result, once the ticket is done.
    pub(crate) fn result(&self) -> Option<Result<(), LostPage>> {
        self.lock().result.clone()
    }

    /// Sleeps until the ticket is done, at most for `patience`.
    pub(crate) fn sleep(&self, patience: Duration) -> Option<Result<(), LostPage>> {
        let waited = self
            .0
            .wake
            .wait_timeout_while(self.lock(), patience, |done| done.result.is_none());
        let done = waited.unwrap_or_else(PoisonError::into_inner);
        done.result.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Outcome> {
        self.0.done.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Ticket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ticket")
            .field("page", &self.page())
            .field("done", &self.is_done())
            .finish()
    }
}
