//! One ticket per page in flight.
//!
//! ```text
//! Idle --claim--> Started --complete--> Done
//! ```
//! Created idle by the fault that gave the page a frame; every later fault on the page gets the
//! same one. Whoever claims it carries out the read: an I/O thread that was given it, or the first
//! waiter.

use crate::error::LostPage;
use crate::region::Region;
use crate::residency::PageNo;
use crate::swap::SwapEntry;
use lacuna_addr::{Hva, Pfn};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

const IDLE: u32 = 0;
const STARTED: u32 = 1;
const DONE: u32 = 2;

type Callback = Box<dyn FnOnce() + Send>;

/// A page on its way in. A clone is the same ticket.
#[derive(Clone)]
pub struct Ticket(Arc<Inner>);

struct Inner {
    page: PageNo,
    region: Arc<Region>,
    frame: Pfn,
    entry: SwapEntry,
    state: AtomicU32,
    done: Mutex<Outcome>,
    wake: Condvar,
}

#[derive(Default)]
struct Outcome {
    result: Option<Result<(), LostPage>>,
    callbacks: Vec<Callback>,
}

impl Ticket {
    pub(crate) fn new(page: PageNo, region: Arc<Region>, frame: Pfn, entry: SwapEntry) -> Self {
        Self(Arc::new(Inner {
            page,
            region,
            frame,
            entry,
            state: AtomicU32::new(IDLE),
            done: Mutex::default(),
            wake: Condvar::new(),
        }))
    }

    /// The page it is about.
    pub fn page(&self) -> Hva {
        self.0.page.hva()
    }

    /// Whether the page has arrived or is known to be lost: resolve it again to learn which.
    pub fn is_done(&self) -> bool {
        self.0.state.load(Ordering::Acquire) == DONE
    }

    /// Whether somebody carries out the read.
    pub fn is_started(&self) -> bool {
        self.0.state.load(Ordering::Acquire) != IDLE
    }

    /// Whether both are about the same flight of the same page.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Calls `callback` once the ticket is done: now if it is, else on the thread that completes
    /// it, which holds no lock. It must be short and must not wait.
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

    pub(crate) fn region(&self) -> &Region {
        &self.0.region
    }

    pub(crate) fn frame(&self) -> Pfn {
        self.0.frame
    }

    pub(crate) fn entry(&self) -> SwapEntry {
        self.0.entry
    }

    /// Takes the duty to read; true for one caller only.
    #[must_use]
    pub(crate) fn claim(&self) -> bool {
        let state = &self.0.state;
        state
            .compare_exchange(IDLE, STARTED, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }

    pub(crate) fn complete(&self, result: Result<(), LostPage>) {
        let mut done = self.lock();
        done.result = Some(result);
        self.0.state.store(DONE, Ordering::Release);
        let callbacks = std::mem::take(&mut done.callbacks);
        drop(done);
        self.0.wake.notify_all();
        for callback in callbacks {
            callback();
        }
    }

    /// The result, if there is one yet.
    pub(crate) fn result(&self) -> Option<Result<(), LostPage>> {
        self.lock().result.clone()
    }

    /// Sleeps until somebody completes it, but not longer than `patience`.
    pub(crate) fn sleep(&self, patience: Duration) -> Option<Result<(), LostPage>> {
        let waited = self
            .0
            .wake
            .wait_timeout_while(self.lock(), patience, |done| done.result.is_none());
        let (done, _) = waited.unwrap_or_else(PoisonError::into_inner);
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
