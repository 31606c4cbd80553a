//! The pages of a guest that arrives before its memory.
//!
//! ```text
//! vCPU needs a page ─► the VM asks RemotePages ─┬─ awaited: `Want` ─► source ─► its answer
//!                                               └─ not awaited: zeros
//! ```
//! Pages that arrive before the guest are put in place, and later copies replace them. `Awaited`
//! frames then list the pages still at the source: those are missing again.
//!
//! A pushed page leaves the set of awaited pages after its content is in place. In the other order,
//! a vCPU could get zeros in between. The answer to a request may leave the set first: the VM makes
//! no second request while one is in flight.

use super::frame::Kind;
use super::frames::Frames;
use crate::{MigrateError, PageSet};
use lacuna_addr::PAGE_SIZE;
use lacuna_machine::{Answer, PageRequest, PageSource, SourcePage};
use lacuna_sync::{Condvar, Mutex, MutexGuard, lock_order};
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::sync::{Arc, PoisonError};

const ZERO_PAGE: [u8; PAGE_SIZE] = [0; PAGE_SIZE];

/// The page source of an arriving guest.
pub(super) struct RemotePages {
    pages: Mutex<Pages, lock_order::RemotePages>,
    /// `awaited` or `answers_come` has changed.
    changed: Condvar,
    /// Where `Want`s go.
    wants: Mutex<Option<Frames>, lock_order::RemoteWants>,
}

struct Pages {
    /// `awaited` is known. Before, every page counts as awaited.
    has_arrived: bool,
    /// Pages at the source.
    awaited: PageSet,
    /// Requests for awaited pages.
    asked: BTreeMap<u64, Vec<PageRequest>>,
    /// Why awaited pages never arrive.
    abandoned: Option<Arc<str>>,
    /// The connection for answers is in use.
    answers_come: bool,
    /// A cut ends the migration, because the guest is not prepared yet.
    needs_connection: bool,
}

type PagesGuard<'a> = MutexGuard<'a, Pages>;

/// Where a page is.
enum Place {
    Awaited,
    Zeros,
    Lost(Arc<str>),
}

impl RemotePages {
    /// All pages are at the source. Nothing is allocated by their number: it comes from a peer, and
    /// the VMM has not agreed to it yet.
    pub fn new() -> Arc<Self> {
        let pages = Pages {
            has_arrived: false,
            awaited: PageSet::empty(0),
            asked: BTreeMap::new(),
            abandoned: None,
            answers_come: false,
            needs_connection: true,
        };
        Arc::new(Self {
            pages: Mutex::new(pages),
            changed: Condvar::new(),
            wants: Mutex::new(None),
        })
    }

    /// Records the guest's arrival: only these pages are at the source.
    pub fn set_awaited(&self, awaited: PageSet) {
        let mut pages = self.lock();
        pages.awaited = awaited;
        pages.has_arrived = true;
        // Answer requests from before `awaited` was known, or ask the source.
        let asked = std::mem::take(&mut pages.asked);
        drop(pages);
        asked.into_values().flatten().for_each(|r| self.fetch(r));
    }

    /// Whether the guest has these pages.
    pub fn has(&self, first: SourcePage, count: u64) -> bool {
        let end = first.0.checked_add(count);
        end.is_some_and(|end| end <= self.lock().awaited.pages())
    }

    /// Pages at the source.
    pub fn awaited(&self) -> PageSet {
        self.lock().awaited.clone()
    }

    /// These pages are in place before the guest: the requests for them are answered. A request
    /// that stayed would take the answer for a page that is missing again.
    pub fn forget(&self, first: SourcePage, count: u64) {
        let mut pages = self.lock();
        let mut rest = pages.asked.split_off(&first.0);
        let mut after = rest.split_off(&(first.0 + count));
        pages.asked.append(&mut after);
        drop(pages);
        // A dropped request calls the VM, which ignores it.
        drop(rest);
    }

    /// These pages have arrived, and are in place or zeros. Returns the requests for them.
    pub fn arrived(&self, first: SourcePage, count: u64) -> Vec<PageRequest> {
        let mut pages = self.lock();
        (first.0..first.0 + count).for_each(|page| _ = pages.awaited.remove(SourcePage(page)));
        let mut rest = pages.asked.split_off(&first.0);
        let mut after = rest.split_off(&(first.0 + count));
        pages.asked.append(&mut after);
        self.changed.notify_all();
        rest.into_values().flatten().collect()
    }

    /// These pages have arrived, and are zeros.
    pub fn arrived_zeros(&self, first: SourcePage, count: u64) {
        for request in self.arrived(first, count) {
            let _: Answer = request.provide(&ZERO_PAGE);
        }
    }

    /// The source's answer to a `Want`.
    ///
    /// # Errors
    /// The VM has no request for the page.
    pub fn answered(
        &self,
        page: SourcePage,
        content: &[u8; PAGE_SIZE],
    ) -> Result<(), MigrateError> {
        let requests = self.take_asked(page);
        if requests.is_empty() {
            return Err(MigrateError::stream("an answer to no request"));
        }
        for request in requests {
            let _: Answer = request.provide(content);
        }
        Ok(())
    }

    /// The requests for an awaited page. If there are any, the page is no longer awaited.
    fn take_asked(&self, page: SourcePage) -> Vec<PageRequest> {
        let mut pages = self.lock();
        let requests = pages.asked.remove(&page.0).unwrap_or_default();
        if !requests.is_empty() {
            pages.awaited.remove(page);
            self.changed.notify_all();
        }
        requests
    }

    /// Waits until no page is awaited, or the answers have ended. Returns whether all pages have
    /// arrived.
    pub fn wait_for_all(&self) -> bool {
        let mut pages = self.lock();
        while !pages.awaited.is_empty() && pages.answers_come {
            pages = self.changed.wait(pages).expect("no panic under this lock");
        }
        pages.awaited.is_empty()
    }

    /// Whether a thread waits for an answer of the source.
    pub fn awaits_answer(&self) -> bool {
        !self.lock().asked.is_empty()
    }

    /// The source answers from now on.
    pub fn begin_answers(&self) {
        self.lock().answers_come = true;
    }

    /// The source does not answer until the next connection. For an unprepared guest there is no
    /// next one: the thread that restores its state must not wait for a page.
    pub fn end_answers(&self) {
        let mut pages = self.lock();
        pages.answers_come = false;
        self.changed.notify_all();
        // This is under the same lock, so `outlive_cuts` sees the end of the connection, or
        // precedes it.
        if pages.needs_connection {
            self.abandon_locked(
                pages,
                "the connection was cut before the guest was prepared",
            );
        }
    }

    /// The guest is prepared: it outlives a cut from now on.
    ///
    /// # Errors
    /// A cut was first, and pages are lost.
    pub fn outlive_cuts(&self) -> Result<(), MigrateError> {
        let mut pages = self.lock();
        pages.needs_connection = false;
        match pages.abandoned {
            None => Ok(()),
            Some(_) => Err(MigrateError::Cut(ErrorKind::ConnectionAborted.into())),
        }
    }

    /// Sends `Want`s there from now on, first for all requested pages.
    pub fn connect(&self, wants: Frames) -> Result<(), MigrateError> {
        let mut link = self.wants.lock().unwrap_or_else(PoisonError::into_inner);
        let wants = link.insert(wants);
        // A concurrent request waits for this lock, and asks again: the source answers once.
        let asked: Vec<u64> = self.lock().asked.keys().copied().collect();
        asked.iter().try_for_each(|page| want(wants, *page))
    }

    /// Ends the connection for `Want`s.
    pub fn disconnect(&self) {
        let wants = self.wants.lock();
        *wants.unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Gives up the pages at the source: they are lost.
    pub fn abandon(&self, reason: &str) {
        self.abandon_locked(self.lock(), reason);
    }

    fn abandon_locked(&self, mut pages: PagesGuard<'_>, reason: &str) {
        pages.abandoned = Some(reason.into());
        let asked = std::mem::take(&mut pages.asked);
        drop(pages);
        for request in asked.into_values().flatten() {
            // `Answer::Late` only says that the VM has ended.
            let _: Answer = request.fail(reason);
        }
    }

    fn lock(&self) -> PagesGuard<'_> {
        self.pages.lock().expect("no panic under this lock")
    }

    /// Where the page of `request` is. If it is awaited, keeps the request.
    fn place(&self, request: &PageRequest) -> Place {
        let mut pages = self.lock();
        let page = request.page();
        match &pages.abandoned {
            _ if pages.has_arrived && !pages.awaited.contains(page) => Place::Zeros,
            Some(reason) => Place::Lost(Arc::clone(reason)),
            None => {
                let asked = pages.asked.entry(page.0).or_default();
                asked.push(request.clone());
                Place::Awaited
            }
        }
    }

    fn ask(&self, page: SourcePage) {
        let mut wants = self.wants.lock().unwrap_or_else(PoisonError::into_inner);
        // If there is no connection, the next one begins with all requests.
        if let Some(frames) = &mut *wants
            && want(frames, page.0).is_err()
        {
            *wants = None;
        }
    }
}

fn want(wants: &mut Frames, page: u64) -> Result<(), MigrateError> {
    wants.write(Kind::Want, &page.to_le_bytes(), &[])?;
    wants.flush()
}

impl PageSource for RemotePages {
    fn describe(&self) -> String {
        "the source of the migration".into()
    }

    /// Writes 16 bytes to the connection if the page is at the source. This waits only behind
    /// thousands of unread `Want`s.
    fn fetch(&self, request: PageRequest) {
        let page = request.page();
        let _: Answer = match self.place(&request) {
            Place::Awaited => return self.ask(page),
            Place::Zeros => request.provide(&ZERO_PAGE),
            Place::Lost(reason) => request.fail(&reason),
        };
    }
}
