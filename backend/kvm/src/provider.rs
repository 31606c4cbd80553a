//! Pages that the VM's own source, or its VMM, provides: which slots exit for them, and the tokens
//! of these exits.

use crate::memory::{Memory, Page};
use crate::slots::SlotTable;
use crate::tokens::Tokens;
use lacuna_addr::Gpa;
use lacuna_machine::{FaultToken, TokenError};
use lacuna_slots::SlotFlags;
use lacuna_sync::{Mutex, MutexGuard, lock_order};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The provided pages of a VM's boot layout.
pub struct Provider {
    memory: Arc<Memory>,
    slots: Arc<SlotTable>,
    /// The tokens of each vCPU's exits.
    tokens: Box<[Arc<Tokens>]>,
    /// Missing pages for which a thread waits in the kernel and the VMM got an exit. The source was
    /// not asked for them.
    held: Mutex<BTreeSet<Page>, lock_order::KvmHeld>,
    /// Whether the host side of the guest's async page faults is in this process.
    notifies_guest: AtomicBool,
}

impl Provider {
    pub fn new(memory: Arc<Memory>, slots: Arc<SlotTable>, vcpus: usize) -> Self {
        Self {
            memory,
            slots,
            tokens: (0..vcpus).map(|_| Arc::default()).collect(),
            held: Mutex::default(),
            notifies_guest: AtomicBool::new(false),
        }
    }

    /// From now on, vCPUs leave the guest to notify it of missing pages.
    pub fn tell_guest(&self) {
        self.notifies_guest.store(true, Ordering::Release);
    }

    /// Whether [`Provider::tell_guest`] was called.
    pub fn notifies_guest(&self) -> bool {
        self.notifies_guest.load(Ordering::Acquire)
    }

    /// The tokens of `vcpu`.
    pub fn tokens(&self, vcpu: usize) -> &Arc<Tokens> {
        &self.tokens[vcpu]
    }

    /// The tokens of the vCPU that `token` names.
    ///
    /// # Errors
    /// There is no such vCPU.
    pub fn tokens_of(&self, token: FaultToken) -> Result<&Arc<Tokens>, TokenError> {
        self.tokens.get(token.vcpu()).ok_or(TokenError::Unknown)
    }

    /// The guest address of `page`, if the page is missing in a slot that exits.
    pub fn exits(&self, page: Page) -> Option<Gpa> {
        if !self.memory.is_missing(page) {
            return None;
        }
        let (slot, gpa) = self.slots.at(self.memory.hva(page))?;
        slot.flags
            .contains(SlotFlags::EXIT_ON_MISSING)
            .then_some(gpa)
    }

    /// A thread waits for the missing `page`, and the VMM gets an exit. Returns whether it is the
    /// first.
    pub fn hold(&self, page: Page) -> bool {
        self.held().insert(page)
    }

    /// Takes the held pages among `pages` for which `is_over` holds: the source is asked for them,
    /// or they were provided.
    pub fn release(&self, pages: Range<Page>, is_over: impl Fn(Page) -> bool) -> Vec<Page> {
        let mut released: Vec<_> = self.held().range(pages).copied().collect();
        // The host manager has locks of its own.
        released.retain(|page| is_over(*page));
        let mut held = self.held();
        released.retain(|page| held.remove(page));
        released
    }

    /// Whether a thread waits for the missing `page`, and the source was not asked.
    pub fn is_held(&self, page: Page) -> bool {
        self.held().contains(&page) && self.memory.is_missing(page)
    }

    /// The held pages of slots that exit no longer.
    pub fn held_without_exit(&self) -> Vec<Page> {
        let mut held: Vec<_> = self.held().iter().copied().collect();
        held.retain(|page| self.exits(*page).is_none());
        held
    }

    fn held(&self) -> MutexGuard<'_, BTreeSet<Page>> {
        self.held.lock().expect("no panic under this lock")
    }
}
