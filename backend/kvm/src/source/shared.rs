//! The state that the page source's thread shares with its users: configuration, counters, failure,
//! and notices to the thread.

use super::Page;
use crate::kick::VcpuKicks;
use crate::pages::FirstTouch;
use lacuna_addr::{Gpa, PageCount};
use lacuna_machine::{FailureKind, PageSource};
use lacuna_swap::Swap;
use lacuna_sync::{LatencySetting, Mutex, lock_order};
use rustix::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The configuration of a source.
#[derive(Clone, Debug)]
pub struct SourceConfig {
    /// The largest number of resident pages, at least 2 MiB.
    pub resident: PageCount,
    /// Where the other pages are.
    pub swap: Swap,
    /// How long a swapped-out page takes to arrive, in addition to the read from the device.
    pub latency: LatencySetting,
    /// Whether this also holds for a page at its first touch.
    pub first_touch: FirstTouch,
    /// Provides the pages of the boot layout at their first touch; `first_touch` is not used then.
    /// A page's number is its place in the layout. `None`: the pages are zeros.
    pub from: Option<Arc<dyn PageSource>>,
}

/// Counters of a source.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SourceStats {
    /// Faults received. Several threads that wait for one page may count as one or as several.
    pub faults: u64,
    /// Pages supplied at their first touch.
    pub first_touches: u64,
    /// Pages supplied after the latency.
    pub fetched: u64,
    /// Pages on probation, mapped again at once.
    pub reprieved: u64,
    /// Pages evicted.
    pub evicted: u64,
    /// Pages that Linux refused to move.
    pub refused: u64,
    /// Sum over the delayed pages of the time from the receipt of the fault until the page was in
    /// place, in nanoseconds.
    pub delay_ns: u64,
}

#[derive(Default)]
pub struct Counters {
    pub faults: AtomicU64,
    pub first_touches: AtomicU64,
    pub fetched: AtomicU64,
    pub reprieved: AtomicU64,
    pub evicted: AtomicU64,
    pub refused: AtomicU64,
    pub delay_ns: AtomicU64,
}

impl Counters {
    pub fn read(&self) -> SourceStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        SourceStats {
            faults: read(&self.faults),
            first_touches: read(&self.first_touches),
            fetched: read(&self.fetched),
            reprieved: read(&self.reprieved),
            evicted: read(&self.evicted),
            refused: read(&self.refused),
            delay_ns: read(&self.delay_ns),
        }
    }
}

pub fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

/// Why the VM cannot continue: a page cannot be supplied.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    /// The lost page, if the source could not provide it.
    pub lost: Option<Gpa>,
    /// The origin of the error.
    pub kind: FailureKind,
    /// The cause in words.
    pub cause: String,
}

pub struct SourceShared {
    pub counters: Counters,
    pub kicks: Arc<VcpuKicks>,
    pub quit: AtomicBool,
    /// Whether slots have changed.
    pub slots_changed: AtomicBool,
    failure: Mutex<Option<Failure>, lock_order::KvmSourceFailure>,
    /// Pages put in place by other threads.
    arrived: Mutex<Vec<Page>, lock_order::KvmArrived>,
    pub doorbell: OwnedFd,
}

impl SourceShared {
    pub fn new(doorbell: OwnedFd, kicks: Arc<VcpuKicks>) -> Self {
        Self {
            counters: Counters::default(),
            kicks,
            quit: AtomicBool::new(false),
            slots_changed: AtomicBool::new(false),
            failure: Mutex::default(),
            arrived: Mutex::default(),
            doorbell,
        }
    }

    pub fn failure(&self) -> Option<Failure> {
        let failure = self.failure.lock();
        failure.expect("no panic under this lock").clone()
    }

    pub fn has_failed(&self) -> bool {
        let failure = self.failure.lock();
        failure.expect("no panic under this lock").is_some()
    }

    /// Ends the run: the guest cannot continue without a page. The vCPUs return and report why.
    pub fn fail(&self, failure: Failure) {
        let first = self.failure.lock();
        first
            .expect("no panic under this lock")
            .get_or_insert(failure);
        self.kicks.stop();
        self.ring();
    }

    /// Wakes the page source's thread.
    pub fn ring(&self) {
        let rung = rustix::io::write(&self.doorbell, &1u64.to_ne_bytes());
        debug_assert!(rung.is_ok(), "an eventfd is never full of ones");
    }

    /// Sets `notice`, and wakes the page source's thread, which looks for it.
    pub fn notify(&self, notice: &AtomicBool) {
        notice.store(true, Ordering::Release);
        self.ring();
    }

    /// Notifies the thread, which counts resident pages, that `pages` are in place.
    pub fn arrived(&self, pages: std::ops::Range<Page>) {
        let mut arrived = self.arrived.lock().expect("no panic under this lock");
        let was_empty = arrived.is_empty();
        arrived.extend(pages);
        drop(arrived);
        // The thread takes all notices at once, so the first one wakes it.
        if was_empty {
            self.ring();
        }
    }

    pub fn take_arrived(&self) -> Vec<Page> {
        let arrived = self.arrived.lock();
        std::mem::take(&mut *arrived.expect("no panic under this lock"))
    }
}
