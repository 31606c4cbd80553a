//! Missing memory: exits to the VMM, and pages that the VMM provides.

use crate::apf::{ExitedVcpu, VcpuApf};
use crate::faults::Failure;
use crate::kick::{Comes, MissingPage};
use crate::mapping;
use crate::memory::Page;
use crate::provider::Provider;
use crate::slots::KvmSlot;
use crate::vcpu::{Faulted, Register, Vcpu};
use crate::vm::Vm;
use lacuna_addr::{Access, GfnRange, Gpa, Hva, HvaRange, PAGE_SIZE, PageCount};
use lacuna_apf::Completion;
use lacuna_host::{Host, HostError};
use lacuna_machine::{
    Exit, FailureKind, FaultToken, MemoryError, MemoryFaultFlags, MissingMemory, Provided,
    ReadyOutcome, TokenError, VcpuError,
};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// The number of pages that `populate` requests at a time. Each has a frame until it has arrived.
const BATCH: u64 = 32;
/// The time between two looks for the page of the area shared by guest and host.
const AREA_LOOK: Duration = Duration::from_micros(200);

impl Vcpu {
    fn provider(&self) -> Option<&Provider> {
        self.vm.provider()
    }

    /// Ends the last exit, because the vCPU is entered. If the VMM could not notify the guest, the
    /// vCPU waits for that page.
    pub(crate) fn end_exit(&mut self) {
        let answered = self.faulted.is_some_and(|faulted| !faulted.waits);
        if let (true, Some(provider)) = (answered, self.provider()) {
            provider.tokens(self.index).enter();
        }
    }

    /// The exit of this vCPU for a missing page, if there is one.
    pub(crate) fn missing_exit(&mut self) -> Option<Exit> {
        self.provider()?;
        if let Some(exit) = self.exit_again() {
            return Some(exit);
        }
        while let Some(missing) = self.vm.kicks.take_missing(self.index) {
            if let Some(exit) = self.exit_for(missing) {
                return Some(exit);
            }
        }
        None
    }

    /// The exit for the page of the last exit, if the VMM has not provided it. A worker of KVM
    /// waits for this page, and KVM reports its fault only once, so the exit repeats until the page
    /// is provided.
    ///
    /// The caller looks for other pages afterwards, because only the last exit's page is kept. The
    /// race: KVM halts the vCPU for page P; an interrupt switches processes, and the next one needs
    /// page Q; the vCPU exits for P; Q is noted, and the VMM reports P ready without the page. If
    /// the vCPU exited for Q now, P would be forgotten, and its process would repeat its access for
    /// ever.
    fn exit_again(&mut self) -> Option<Exit> {
        let last = self.faulted.take_if(|faulted| !faulted.waits)?;
        let held = self.provider()?.is_held(last.missing.page);
        held.then(|| self.exit_for(last.missing)).flatten()
    }

    /// The exit for a missing page. `None`: the vCPU needs no exit. Another vCPU gets it, the page
    /// arrives without the VMM or has arrived, the VMM knows that this vCPU waits, or the slot
    /// exits no longer.
    fn exit_for(&mut self, missing: MissingPage) -> Option<Exit> {
        if self.is_idle() && self.vm.kicks.pass_on(self.index, missing) {
            return None;
        }
        if missing.comes == Comes::ByItself {
            self.tell_of(missing);
            return None;
        }
        let gpa = self.provider()?.exits(missing.page)?;
        // If the page's page-not-present was delivered, another process of the guest needs the
        // page, or a worker acts for another vCPU. KVM has halted the vCPU that needs it.
        let awaits = self.with_apf(|apf, _| apf.awaits(gpa.gfn()));
        let waits = |last: Faulted| last.waits && last.missing.page == missing.page;
        if awaits == Some(true) || self.faulted.is_some_and(waits) {
            return None;
        }
        // A userfaultfd does not distinguish a fetch from a read.
        let mut flags = match missing.access {
            Access::Read | Access::Fetch => MemoryFaultFlags::READ,
            Access::Write => MemoryFaultFlags::WRITE,
        };
        if self.with_apf(|apf, vcpu| apf.can_notify(gpa.gfn(), vcpu)) == Some(true) {
            flags |= MemoryFaultFlags::CAN_NOTIFY;
        }
        let token = self.provider()?.tokens(self.index).exit(self.index);
        self.vm.kicks.set_waits(self.index, None);
        let waits = false;
        self.faulted = Some(Faulted { missing, waits });
        let together = self.vm.memory.provided_with(missing.page);
        let before = u64::from(missing.page - together.start) * PAGE_SIZE as u64;
        Some(Exit::MemoryFault {
            gpa: Gpa::truncate(gpa.get() - before),
            size: together.len() as u64 * PAGE_SIZE as u64,
            flags,
            token,
        })
    }

    /// Waits for the page that this process will access for the guest's access to a register of
    /// async page faults. A kick ends this wait, but would not end a wait in that access.
    pub(crate) fn wait_for_area(&mut self) -> Option<Exit> {
        let Some(Register::Write(index, value)) = self.msr else {
            return None;
        };
        let accessed = |apf: &mut VcpuApf, _: &ExitedVcpu<'_>| apf.page_accessed_by(index, value);
        let gfn = self.with_apf(accessed)??;
        let slot = self.vm.slot_at(gfn.gpa()).ok()?;
        self.vm.provider_of(&slot)?;
        let page = self.vm.page_at(slot.backing_of(gfn));
        // If it is lost, or there is no room for it, the access finds that too.
        self.vm.faults.state.fetch(page).ok()?;
        while self.vm.memory.is_missing(page) {
            let kicks = &self.vm.kicks;
            if kicks.take_request(self.index) || kicks.is_stopping() {
                return Some(Exit::Interrupted);
            }
            thread::sleep(AREA_LOOK);
        }
        None
    }

    /// Whether the guest has halted this vCPU, which then needs no page. A VM's only vCPU needs
    /// every missing page.
    fn is_idle(&mut self) -> bool {
        let several = self.vm.config.vcpus > 1;
        several && self.with_apf(VcpuApf::is_idle) == Some(true)
    }

    /// Delivers page-not-present for a page that arrives without the VMM, if possible now.
    fn tell_of(&mut self, missing: MissingPage) -> Option<()> {
        let completion = self.not_present(missing)?;
        match self.vm.faults.state.fetch(missing.page) {
            Ok(Some(ticket)) => ticket.on_done(move || completion.complete()),
            // It has arrived meanwhile; or it is lost, and the guest's next access finds that.
            Ok(None) | Err(_) => completion.complete(),
        }
        Some(())
    }

    /// Delivers page-not-present. `None`: it cannot be delivered now.
    fn not_present(&mut self, missing: MissingPage) -> Option<Completion> {
        let hva = self.vm.memory.hva(missing.page);
        let (_, gpa) = self.vm.slots.at(hva)?;
        let notify = |apf: &mut VcpuApf, vcpu: &ExitedVcpu<'_>| {
            apf.not_present(gpa.gfn(), missing.access, vcpu)
        };
        self.with_apf(notify).flatten()
    }

    pub(crate) fn accept_fault(&mut self, token: FaultToken) -> Result<(), TokenError> {
        let provider = self.provider().ok_or(TokenError::Unknown)?;
        provider.tokens(self.index).check(token)?;
        let faulted = self.faulted.ok_or(TokenError::Unknown)?;
        let completion = self.not_present(faulted.missing);
        let provider = self.provider().ok_or(TokenError::Unknown)?;
        let tokens = Arc::clone(provider.tokens(self.index));
        let page = faulted.missing.page;
        if let Some(completion) = completion {
            // After an early ready, keep the exit: if the page is not provided, the vCPU exits for
            // it again.
            tokens.accepted(token, page, move || completion.report())?;
            self.faulted = None;
            return Ok(());
        }
        tokens.enter();
        self.vm.kicks.set_waits(self.index, Some(page));
        let waits = true;
        self.faulted = Some(Faulted { waits, ..faulted });
        Err(TokenError::CannotNotify)
    }

    /// Forgets the exits of the vCPU's old state. A worker of KVM may still wait for one of their
    /// pages, so the source gets requests for them.
    pub(crate) fn forget_exits(&mut self) {
        let last = self.faulted.take();
        let Some(provider) = self.provider() else {
            return;
        };
        let kicks = &self.vm.kicks;
        let found = std::iter::from_fn(|| kicks.take_missing(self.index));
        for missing in found.chain(last.map(|last| last.missing)) {
            if provider.is_held(missing.page) {
                // If it is lost, the vCPU's access fails.
                let _ = self.vm.faults.state.fetch(missing.page);
            }
        }
        kicks.set_waits(self.index, None);
        provider.tokens(self.index).reset();
    }

    /// Returns the source's failure: the vCPU cannot continue.
    pub(crate) fn check_source(&self) -> Result<(), VcpuError> {
        let vcpu = self.index;
        match self.vm.faults.state.failure_or_loss() {
            None => Ok(()),
            Some(Failure { lost, kind, cause }) => Err(match lost {
                Some(gpa) => VcpuError::no_page(vcpu, gpa, kind, cause),
                None => VcpuError::Host { vcpu, cause },
            }),
        }
    }
}

impl Vm {
    /// Refuses `gpa` if the VM has failed.
    pub(crate) fn check_source(&self, gpa: Gpa) -> Result<(), MemoryError> {
        let failure = self.faults.state.failure_or_loss();
        failure.map_or(Ok(()), |failure| {
            let cause = match failure.lost {
                Some(lost) => format!("the VM has lost its page {lost}: {}", failure.cause),
                None => failure.cause,
            };
            let kind = failure.kind;
            Err(MemoryError::Backing { gpa, kind, cause })
        })
    }

    pub(crate) fn provider(&self) -> Option<&Provider> {
        self.faults.state.provider.as_ref()
    }

    /// The provider of the pages of `slot`. `None`: none of them is ever missing.
    fn provider_of(&self, slot: &KvmSlot) -> Option<&Provider> {
        self.provider().filter(|_| slot.attach.is_of_boot())
    }

    pub(crate) fn slot_at(&self, gpa: Gpa) -> Result<Arc<KvmSlot>, MemoryError> {
        let slots = self.slots.snapshot();
        let slot = slots.find(gpa.gfn()).ok_or(MemoryError::NoSlot(gpa))?;
        Ok(Arc::clone(slot))
    }

    /// The page's number in the boot layout.
    pub(crate) fn page_at(&self, hva: Hva) -> Page {
        let page = self.memory.page(hva);
        page.expect("a slot of the boot layout lies in the guest's memory")
    }

    fn populate_batch(&self, slot: &KvmSlot, range: HvaRange, gpa: Gpa) -> Result<(), MemoryError> {
        if self.provider_of(slot).is_some() {
            let first = self.page_at(range.start());
            for page in first..first + range.pages() as Page {
                let fetched = self.faults.state.fetch(page);
                fetched.map_err(|error| backing(gpa, &error))?;
            }
        }
        let populated = mapping::populate(range.start(), range.pages());
        populated.map_err(|errno| MemoryError::Backing {
            gpa,
            kind: FailureKind::Lost,
            cause: format!("cannot bring its pages in: {errno}"),
        })
    }
}

/// The error of an access at `gpa` that the host manager has refused.
pub(crate) fn backing(gpa: Gpa, error: &HostError) -> MemoryError {
    let cause = error.to_string();
    match error {
        HostError::Discard { .. } => MemoryError::Refused { gpa, cause },
        _ => {
            let kind = error.failure_kind();
            MemoryError::Backing { gpa, kind, cause }
        }
    }
}

impl MissingMemory for Vm {
    fn unit(&self) -> PageCount {
        PageCount::new(self.memory.backing.page_size().pages())
    }

    fn make_missing(&self, gfns: GfnRange) -> Result<(), MemoryError> {
        self.discard_by(gfns, Host::make_missing)
    }

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
                Some(_) => {
                    let page = self.page_at(slot.backing_of(here.gfn()));
                    let host = &self.memory.host;
                    let taken = host.provide_pages(self.memory.backing(page), now);
                    self.faults.state.provided(page..page + now.len() as Page);
                    let taken = taken.map_err(|error| backing(here, &error))?;
                    provided.taken += taken as u64;
                    provided.late += (now.len() - taken) as u64;
                }
            }
            at = here.checked_add(size_of_val(now) as u64);
            pages = later;
        }
        Ok(provided)
    }

    fn fetch(&self, gpa: Gpa, token: Option<FaultToken>) -> Result<(), MemoryError> {
        let slot = self.slot_at(gpa)?;
        let of_vcpu = |token: FaultToken| {
            let tokens = self.provider().and_then(|all| all.tokens_of(token).ok());
            let tokens = tokens.filter(|tokens| tokens.is_open(token));
            let tokens = tokens.ok_or_else(|| TokenError::Unknown.refuses(gpa));
            tokens.map(|tokens| (tokens, token))
        };
        let token = token.map(of_vcpu).transpose()?;
        if self.provider_of(&slot).is_none() {
            // No page of the slot is missing.
            let _ = token.map(|(_, token)| self.ready(token));
            return Ok(());
        }
        let page = self.page_at(slot.backing_of(gpa.gfn()));
        let coming = self.faults.state.fetch(page);
        match (coming.map_err(|error| backing(gpa, &error))?, token) {
            (Some(ticket), Some((tokens, token))) => {
                if tokens.ready_when(page, token) {
                    let tokens = Arc::clone(tokens);
                    ticket.on_done(move || tokens.has_come(page));
                }
            }
            (None, Some((tokens, token))) => _ = tokens.ready(token),
            (_, None) => {}
        }
        self.check_source(gpa)
    }

    fn populate(&self, gfns: GfnRange) -> Result<(), MemoryError> {
        let mut next = Some(gfns.start());
        while let Some(gfn) = next.filter(|gfn| gfns.contains(*gfn)) {
            let slot = self.slot_at(gfn.gpa())?;
            let part = slot.gfns.intersect(gfns).expect("the slot has the page");
            let pages = (part.end_raw() - gfn.get()).min(BATCH);
            let range = HvaRange::new(slot.backing_of(gfn), pages);
            let range = range.expect("a part of the slot's memory");
            self.populate_batch(&slot, range, gfn.gpa())?;
            self.check_source(gfn.gpa())?;
            next = gfn.checked_add(pages);
        }
        Ok(())
    }

    fn ready(&self, token: FaultToken) -> Result<ReadyOutcome, TokenError> {
        let provider = self.provider().ok_or(TokenError::Unknown)?;
        let (outcome, page) = provider.tokens_of(token)?.ready(token)?;
        // A worker of KVM still waits for the page, and KVM reports its fault only once. So the
        // vCPU exits again for the page.
        let missing = page.filter(|page| provider.is_held(*page));
        if let Some(page) = missing {
            let missing = MissingPage {
                page,
                access: Access::Write,
                comes: Comes::FromVmm,
                search: None,
            };
            self.kicks.report_again(token.vcpu(), missing);
        }
        Ok(outcome)
    }
}

#[cfg(test)]
mod tests;
