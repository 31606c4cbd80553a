//! What the readers of faults share with each other, and with the threads that complete pages: the
//! failure of the VM, and pages that have just become resident.

use crate::kick::VcpuKicks;
use crate::memory::{Memory, Page};
use crate::provider::Provider;
use crate::slots::SlotTable;
use crate::window::Mapped;
use lacuna_addr::Gpa;
use lacuna_host::{HostError, LostPage, Resolution, Ticket};
use lacuna_machine::FailureKind;
use lacuna_sync::{Mutex, lock_order};
use lacuna_sys::Errno;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Why the VM cannot continue: a page is lost, or cannot be put in place.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    /// The lost page, if the guest sees it.
    pub lost: Option<Gpa>,
    /// The origin of the error.
    pub kind: FailureKind,
    /// The cause in words.
    pub cause: String,
}

/// What the readers share with each other, and with the threads that complete pages.
pub struct FaultState {
    pub memory: Arc<Memory>,
    slots: Arc<SlotTable>,
    pub kicks: Arc<VcpuKicks>,
    /// `None`: no page is ever missing.
    pub provider: Option<Provider>,
    /// The readers end.
    pub(super) quit: AtomicBool,
    /// Whether slots have changed.
    pub(super) slots_changed: AtomicBool,
    failure: Mutex<Option<Failure>, lock_order::KvmFailure>,
    /// Pages that the first reader tries to map again.
    again: Mutex<Vec<Page>, lock_order::KvmAgain>,
    /// Wakes the first reader, which also handles changed slots.
    pub(super) doorbell: OwnedFd,
    /// Faults read so far.
    pub(super) faults: AtomicU64,
}

impl FaultState {
    pub fn new(
        memory: Arc<Memory>,
        slots: Arc<SlotTable>,
        kicks: Arc<VcpuKicks>,
    ) -> Result<Self, Errno> {
        let vcpus = kicks.count();
        let provider = memory
            .has_source
            .then(|| Provider::new(Arc::clone(&memory), Arc::clone(&slots), vcpus));
        Ok(Self {
            slots,
            kicks,
            provider,
            quit: AtomicBool::new(false),
            slots_changed: AtomicBool::new(false),
            failure: Mutex::default(),
            again: Mutex::default(),
            doorbell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            faults: AtomicU64::new(0),
            memory,
        })
    }

    /// Why the VM cannot continue, if it cannot.
    pub fn failure(&self) -> Option<Failure> {
        let failure = self.failure.lock();
        failure.expect("no panic under this lock").clone()
    }

    /// Takes the pages that a reader has to map again.
    pub(super) fn take_again(&self) -> Vec<Page> {
        let again = self.again.lock();
        std::mem::take(&mut *again.expect("no panic under this lock"))
    }

    /// Asks the page source for `page`, or begins to read it back. Returns the ticket if the page
    /// is not there.
    ///
    /// # Errors
    /// The page is lost, or there is no room for it.
    pub fn fetch(self: &Arc<Self>, page: Page) -> Result<Option<Ticket>, HostError> {
        if let Some(provider) = &self.provider {
            provider.release(page..page + 1);
        }
        let ticket = self.memory.host.fetch(self.memory.backing(page))?;
        ticket
            .iter()
            .for_each(|ticket| self.map_later(page, ticket));
        Ok(ticket)
    }

    /// The VMM has provided `pages`: maps those that are in frames.
    pub fn provided(&self, pages: Range<Page>) {
        if let Some(provider) = &self.provider {
            provider.release(pages.clone());
        }
        if self.memory.is_mapped_by_moves() {
            pages.for_each(|page| self.map_now(page));
        }
    }

    /// Maps `page`, or ends the run, when `ticket` is done.
    pub(super) fn map_later(self: &Arc<Self>, page: Page, ticket: &Ticket) {
        // Weak: a page source of the VM may keep its ticket for ever.
        let (state, done) = (Arc::downgrade(self), ticket.clone());
        ticket.on_done(move || {
            if let Some(state) = state.upgrade()
                && (state.memory.is_mapped_by_moves() || done.is_lost())
            {
                state.map_now(page);
            }
        });
    }

    /// Maps `page`, which has just become resident. If that is not possible, a reader tries again.
    fn map_now(&self, page: Page) {
        let host = &self.memory.host;
        match host.with_spare_cache(|cache| self.memory.map(page, cache)) {
            Mapped::Yes => {}
            Mapped::No(Resolution::Lost(lost)) => self.lose(page, &lost),
            Mapped::Later(_) | Mapped::No(_) | Mapped::Refused(_) => {
                let again = self.again.lock();
                again.expect("no panic under this lock").push(page);
                self.ring();
            }
        }
    }

    pub(super) fn lose(&self, page: Page, lost: &LostPage) {
        let gpa = self.slots.at(self.memory.hva(page)).map(|(_, gpa)| gpa);
        self.fail(Failure {
            lost: gpa,
            kind: lost.kind,
            cause: lost.reason.to_string(),
        });
    }

    /// Ends the run: the guest cannot continue without a page. The vCPUs return and report why.
    fn fail(&self, failure: Failure) {
        let first = self.failure.lock();
        first
            .expect("no panic under this lock")
            .get_or_insert(failure);
        self.kicks.stop();
        self.ring();
    }

    pub(super) fn cannot(&self, what: &str, why: &dyn Display) {
        self.fail(Failure {
            lost: None,
            kind: FailureKind::Lost,
            cause: format!("cannot {what}: {why}"),
        });
    }

    /// Sets `notice`, and wakes the first reader, which looks for it.
    pub(super) fn notify(&self, notice: &AtomicBool) {
        notice.store(true, Ordering::Release);
        self.ring();
    }

    pub(super) fn ring(&self) {
        let rung = rustix::io::write(&self.doorbell, &1u64.to_ne_bytes());
        debug_assert!(rung.is_ok(), "an eventfd is never full of ones");
    }

    pub(super) fn is_over(&self) -> bool {
        self.quit.load(Ordering::Acquire) || self.failure().is_some()
    }
}
