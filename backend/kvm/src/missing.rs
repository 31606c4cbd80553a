//! Missing memory: exits to the VMM, and pages that the VMM provides.
//!
//! A guest is never told of a missing page by its VMM here, because KVM's kernel owns its async
//! page faults: [`accept`](lacuna_machine::Vcpu::accept) is always refused. If the guest has
//! enabled async page faults, KVM tells it by itself, beside the exit.

use crate::kick::MissingPage;
use crate::memory;
use crate::slots::KvmSlot;
use crate::source::{Provider, State};
use crate::vcpu::{Faulted, Vcpu};
use crate::vm::Vm;
use lacuna_addr::{Access, GfnRange, Gpa, Hva, HvaRange, PAGE_SIZE};
use lacuna_machine::{
    Exit, FaultToken, MemoryError, MemoryFaultFlags, MissingMemory, Provided, TokenError, Told,
    VcpuError,
};
use std::sync::Arc;

/// How many pages `populate` asks for at a time.
const BATCH: u64 = 512;

impl Vcpu {
    fn provider(&self) -> Option<&Provider> {
        self.vm.source.provider()
    }

    /// The vCPU is entered: its last exit needs no answer any more.
    pub(crate) fn end_exit(&mut self) {
        let answered = self.faulted.is_some_and(|faulted| !faulted.waits);
        if let (true, Some(provider)) = (answered, self.provider()) {
            provider.provision.tokens.enter(self.index);
        }
    }

    /// The exit of this vCPU for a missing page, if there is one.
    pub(crate) fn missing_exit(&mut self) -> Option<Exit> {
        self.provider()?;
        while let Some(missing) = self.vm.kicks.take_missing(self.index) {
            if let Some(exit) = self.exit_for(missing) {
                return Some(exit);
            }
        }
        // A worker of KVM waits for this page, and its fault is reported once. So the exit repeats
        // until the page is provided.
        let last = self.faulted.take_if(|faulted| !faulted.waits)?;
        let held = self.provider()?.provision.state(last.missing.page) == State::Held;
        held.then(|| self.exit_for(last.missing)).flatten()
    }

    /// `None`: the page has come, or the slot exits no longer.
    fn exit_for(&mut self, missing: MissingPage) -> Option<Exit> {
        let provision = &self.provider()?.provision;
        let gpa = provision.exits(missing.page)?;
        let token = provision.tokens.exit(self.index);
        self.vm.kicks.set_waits(self.index, None);
        let waits = false;
        self.faulted = Some(Faulted { missing, waits });
        Some(Exit::MemoryFault {
            gpa,
            size: PAGE_SIZE as u64,
            flags: match missing.access {
                Access::Read | Access::Fetch => MemoryFaultFlags::READ,
                Access::Write => MemoryFaultFlags::WRITE,
            },
            token,
        })
    }

    pub(crate) fn refuse_fault(&mut self, token: FaultToken) -> TokenError {
        let Some(provider) = self.provider() else {
            return TokenError::Unknown;
        };
        let refused = provider.provision.tokens.refuse(self.index, token);
        if let (TokenError::CannotTell, Some(faulted)) = (refused, &mut self.faulted) {
            faulted.waits = true;
            let page = faulted.missing.page;
            self.vm.kicks.set_waits(self.index, Some(page));
        }
        refused
    }

    /// The vCPU has another state. Its exits belonged to the old one. A worker of KVM may still
    /// wait for one of their pages, so the source is asked for those.
    pub(crate) fn forget_exits(&mut self) {
        let last = self.faulted.take();
        let Some(provider) = self.provider() else {
            return;
        };
        let kicks = &self.vm.kicks;
        let found = std::iter::from_fn(|| kicks.take_missing(self.index));
        for missing in found.chain(last.map(|last| last.missing)) {
            if provider.provision.state(missing.page) == State::Held {
                provider.ask(missing.page);
            }
        }
        kicks.set_waits(self.index, None);
        provider.provision.tokens.enter(self.index);
    }

    /// The source has failed, so the vCPU cannot go on.
    pub(crate) fn check_source(&self) -> Result<(), VcpuError> {
        let vcpu = self.index;
        match self.vm.source.failure() {
            None => Ok(()),
            Some(failure) => Err(match (failure.lost, failure.cause) {
                (Some(gpa), cause) => VcpuError::PageLost { vcpu, gpa, cause },
                (None, cause) => VcpuError::Host { vcpu, cause },
            }),
        }
    }
}

impl Vm {
    /// Refuses `gpa` if the VM has failed.
    pub(crate) fn check_source(&self, gpa: Gpa) -> Result<(), MemoryError> {
        let failure = self.source.failure();
        failure.map_or(Ok(()), |failure| {
            let cause = match failure.lost {
                Some(lost) => format!("the VM has lost its page {lost}: {}", failure.cause),
                None => failure.cause,
            };
            Err(MemoryError::Backing { gpa, cause })
        })
    }

    /// The page source, if it provides the pages of `slot`.
    fn provider_of(&self, slot: &KvmSlot) -> Option<&Provider> {
        let provider = self.source.provider();
        provider.filter(|_| slot.attach.has_source())
    }

    fn slot_at(&self, gpa: Gpa) -> Result<Arc<KvmSlot>, MemoryError> {
        let slots = self.slots.snapshot();
        let slot = slots.find(gpa.gfn()).ok_or(MemoryError::NoSlot(gpa))?;
        Ok(Arc::clone(slot))
    }

    /// The page's number among those of the boot layout.
    fn page_at(&self, hva: Hva) -> u32 {
        let page = self.memory.guest.index(hva);
        page.expect("a slot with a source lies in the guest's mapping")
    }

    fn populate_batch(&self, slot: &KvmSlot, range: HvaRange) -> Result<(), String> {
        if let Some(provider) = self.provider_of(slot) {
            let first = self.page_at(range.start());
            for page in first..first + range.pages() as u32 {
                provider.ask(page);
            }
        }
        let populated = memory::populate(range.start(), range.pages());
        populated.map_err(|errno| format!("cannot bring its pages in: {errno}"))
    }
}

impl MissingMemory for Vm {
    fn provide(&self, gpa: Gpa, pages: &[u8]) -> Result<Provided, MemoryError> {
        let (mut pages, rest) = pages.as_chunks::<PAGE_SIZE>();
        if gpa.offset() != 0 || !rest.is_empty() {
            return Err(MemoryError::Refused {
                gpa,
                cause: format!(
                    "{} bytes from there are not whole pages: give multiples of 4 KiB",
                    pages.len() * PAGE_SIZE + rest.len()
                ),
            });
        }
        let (mut provided, mut at) = (Provided::default(), Some(gpa));
        while !pages.is_empty() {
            let here = at.ok_or(MemoryError::NoSlot(gpa))?;
            let slot = self.slot_at(here)?;
            let left = slot.gfns.pages() - slot.page(here.gfn()) as u64;
            let (now, later) = pages.split_at(pages.len().min(left as usize));
            match self.provider_of(&slot) {
                // Linux supplies the slot's pages, so none is missing.
                None => provided.late += now.len() as u64,
                Some(provider) => {
                    let page = self.page_at(slot.backing_of(here.gfn()));
                    let filled = provider.provision.fill(page, now);
                    let filled =
                        filled.map_err(|cause| MemoryError::Backing { gpa: here, cause })?;
                    provided.taken += filled.taken;
                    provided.late += filled.late;
                }
            }
            at = here.checked_add(size_of_val(now) as u64);
            pages = later;
        }
        Ok(provided)
    }

    fn fetch(&self, gpa: Gpa, token: Option<FaultToken>) -> Result<(), MemoryError> {
        let slot = self.slot_at(gpa)?;
        let Some(provider) = self.provider_of(&slot) else {
            // No page of the slot is missing.
            let _ = token.map(|token| self.ready(token));
            return Ok(());
        };
        let page = self.page_at(slot.backing_of(gpa.gfn()));
        if let Some(token) = token {
            provider.provision.tell_later(page, token);
        }
        provider.ask(page);
        self.check_source(gpa)
    }

    fn populate(&self, gfns: GfnRange) -> Result<(), MemoryError> {
        let mut next = Some(gfns.start());
        while let Some(gfn) = next.filter(|gfn| gfns.contains(*gfn)) {
            let slot = self.slot_at(gfn.gpa())?;
            let part = slot.gfns.intersect(gfns).expect("the slot has the page");
            let pages = (part.end_raw() - gfn.get()).min(BATCH);
            let range = HvaRange::new(slot.backing_of(gfn), pages);
            let populated = self.populate_batch(&slot, range.expect("a part of the slot's memory"));
            populated.map_err(|cause| MemoryError::Backing {
                gpa: gfn.gpa(),
                cause,
            })?;
            self.check_source(gfn.gpa())?;
            next = gfn.checked_add(pages);
        }
        Ok(())
    }

    fn ready(&self, token: FaultToken) -> Result<Told, TokenError> {
        let provider = self.source.provider().ok_or(TokenError::Unknown)?;
        provider.provision.tokens.ready(token)
    }
}
