//! What the readers of faults share with each other, and with the threads that complete pages: the
//! failure of the VM, and pages that have just become resident.

use crate::kick::VcpuKicks;
use crate::memory::{Memory, Page};
use crate::provider::Provider;
use crate::slots::SlotTable;
use crate::window::Mapped;
use lacuna_addr::Gpa;
use lacuna_host::{HostError, LostPage, Resolution, Ticket};
use lacuna_machine::{External, FailureKind};
use lacuna_sync::{Mutex, MutexGuard, lock_order};
use lacuna_sys::Errno;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use std::collections::BTreeSet;
use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const TAKEN_AWAY: &str = "Linux has taken a page of the guest's memory away: a memory error, a \
                          memory file that became shorter, or no huge page left";

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

/// The state that the readers share with each other, and with the threads that complete pages.
pub struct FaultState {
    pub memory: Arc<Memory>,
    slots: Arc<SlotTable>,
    pub kicks: Arc<VcpuKicks>,
    /// `None`: no page is ever missing.
    pub provider: Option<Provider>,
    /// The VM has ended, or has failed. The readers end.
    pub(super) over: AtomicBool,
    /// Whether slots have changed.
    pub(super) slots_changed: AtomicBool,
    failure: Mutex<Option<Failure>, lock_order::KvmFailure>,
    /// Pages in flight that are mapped when they have arrived.
    coming: Mutex<BTreeSet<Page>, lock_order::KvmComing>,
    /// Pages that the first reader brings again.
    again: Mutex<Vec<Page>, lock_order::KvmAgain>,
    /// Wakes the first reader, which handles changed slots and pages to be brought again.
    pub(super) doorbell: OwnedFd,
    /// Wakes all readers, because they end. No thread reads it.
    pub(super) end: OwnedFd,
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
            over: AtomicBool::new(false),
            slots_changed: AtomicBool::new(false),
            failure: Mutex::default(),
            coming: Mutex::default(),
            again: Mutex::default(),
            doorbell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            end: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            faults: AtomicU64::new(0),
            memory,
        })
    }

    /// Why the VM cannot continue, if it cannot.
    pub fn failure(&self) -> Option<Failure> {
        let failure = self.failure.lock();
        failure.expect("no panic under this lock").clone()
    }

    /// As [`FaultState::failure`]. First ends the run if Linux has taken a page of the guest away.
    pub fn failure_or_loss(&self) -> Option<Failure> {
        if self.has_losses() && !self.is_over() {
            self.fail(Failure {
                lost: None,
                kind: FailureKind::Lost,
                cause: TAKEN_AWAY.into(),
            });
        }
        self.failure()
    }

    /// Whether Linux has taken a page of the guest away. The guest finds zeros in its place. No
    /// exit and no byte that this VM returns may depend on these zeros.
    pub fn has_losses(&self) -> bool {
        self.memory.host.losses() != 0
    }

    /// Takes the pages that a reader has to bring again.
    pub(super) fn take_again(&self) -> Vec<Page> {
        let again = self.again.lock();
        std::mem::take(&mut *again.expect("no panic under this lock"))
    }

    /// Asks the page source for `page`, or begins to read it back. Returns the ticket if the page
    /// is not there. If the VM ends meanwhile, returns `None`.
    ///
    /// # Errors
    /// The page is lost, or there is no room for it.
    pub fn fetch(self: &Arc<Self>, page: Page) -> Result<Option<Ticket>, HostError> {
        let page_addr = self.memory.backing(page);
        let ticket = self.memory.host.fetch_until(page_addr, &self.over)?;
        self.release(page);
        ticket
            .iter()
            .for_each(|ticket| self.map_later(page, ticket));
        Ok(ticket)
    }

    /// No thread waits for the VMM to provide `page`, or a page that is provided with it.
    pub(super) fn release(&self, page: Page) {
        if let Some(provider) = &self.provider {
            provider.release(self.memory.provided_with(page), |_| true);
        }
    }

    /// The VMM has provided some of `pages`: those for which a thread waits are mapped.
    pub fn provided(&self, pages: Range<Page>) {
        let Some(provider) = &self.provider else {
            return;
        };
        // The last part of a huge page may be another one than the page for which a thread waits.
        let first = self.memory.provided_with(pages.start).start;
        let end = self.memory.provided_with(pages.end - 1).end;
        let held = provider.release(first..end, |page| !self.memory.is_missing(page));
        if self.memory.is_mapped_by_moves() {
            held.into_iter().for_each(|page| self.map_now(page));
        }
    }

    /// Maps `page` when `ticket` is done, or ends the run if it is lost.
    pub(super) fn map_later(self: &Arc<Self>, page: Page, ticket: &Ticket) {
        // One call for each page is enough: if the page has left again, the call looks again.
        if !self.coming().insert(page) {
            return;
        }
        // Weak: a page source of the VM may keep its ticket for ever.
        let state = Arc::downgrade(self);
        ticket.on_done(move || {
            if let Some(state) = state.upgrade() {
                state.coming().remove(&page);
                state.map_now(page);
            }
        });
    }

    fn coming(&self) -> MutexGuard<'_, BTreeSet<Page>> {
        self.coming.lock().expect("no panic under this lock")
    }

    /// Maps `page`, which has just become resident. If that is not possible, a reader tries again.
    fn map_now(&self, page: Page) {
        let host = &self.memory.host;
        match host.with_spare_cache(|cache| self.memory.map(page, cache)) {
            Mapped::Yes => {}
            Mapped::No(Resolution::Lost(lost)) => self.lose(page, &lost),
            Mapped::Later(_) | Mapped::No(_) | Mapped::Refused(_) => self.bring_again(vec![page]),
        }
    }

    /// `pages` were discarded, or made missing. A reader looks again at those for which a thread
    /// waits: meanwhile their exits may have been taken for exits in vain.
    pub fn discarded(&self, pages: Range<Page>) {
        if let Some(provider) = &self.provider {
            let held = provider.release(pages, |_| true);
            if !held.is_empty() {
                self.bring_again(held);
            }
        }
    }

    /// A reader brings `pages`.
    fn bring_again(&self, pages: Vec<Page>) {
        let again = self.again.lock();
        again.expect("no panic under this lock").extend(pages);
        self.ring();
    }

    /// A thread waits for `page`. Ends the run if the page was in place, and another process has
    /// removed it from its file.
    pub(super) fn lose_if_removed(&self, page: Page) -> bool {
        let lost = self.memory.host.find_removed(self.memory.backing(page));
        lost.iter().for_each(|lost| self.lose(page, lost));
        lost.is_some()
    }

    /// Whether `page` is missing in a slot that exits.
    pub(super) fn exits(&self, page: Page) -> bool {
        let provider = self.provider.as_ref();
        provider.is_some_and(|provider| provider.exits(page).is_some())
    }

    pub(super) fn lose(&self, page: Page, lost: &LostPage) {
        let gpa = self.slots.at(self.memory.hva(page)).map(|(_, gpa)| gpa);
        self.fail(Failure {
            lost: gpa,
            kind: lost.kind,
            cause: lost.reason.to_string(),
        });
    }

    /// The handler that fills the memory fills no more pages.
    pub(super) fn handler_is_gone(&self) {
        let gone = self.memory.handler().and_then(External::gone);
        self.fail(Failure {
            lost: None,
            kind: FailureKind::Lost,
            cause: format!(
                "the handler of the guest's memory: {}",
                gone.unwrap_or_default()
            ),
        });
    }

    /// Ends the run: the guest cannot continue without a page. The vCPUs return and report why.
    fn fail(&self, failure: Failure) {
        let first = self.failure.lock();
        first
            .expect("no panic under this lock")
            .get_or_insert(failure);
        self.kicks.stop();
        self.end();
    }

    pub(super) fn cannot(&self, what: &str, why: &dyn Display) {
        self.fail(Failure {
            lost: None,
            kind: FailureKind::Lost,
            cause: format!("cannot {what}: {why}"),
        });
    }

    /// Slots were changed.
    pub(super) fn slots_changed(&self) {
        self.slots_changed.store(true, Ordering::Release);
        self.ring();
    }

    /// Ends the readers.
    pub(super) fn end(&self) {
        self.over.store(true, Ordering::Release);
        wake(&self.end);
    }

    fn ring(&self) {
        wake(&self.doorbell);
    }

    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }
}

fn wake(readers: &OwnedFd) {
    let rung = rustix::io::write(readers, &1u64.to_ne_bytes());
    debug_assert!(rung.is_ok(), "an eventfd is never full of ones");
}
