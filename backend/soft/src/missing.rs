//! Missing memory: a vCPU's reactions to a missing page, its exits to the VMM, and pages that the
//! VMM provides.

use crate::bus::{Origin, PageFault};
use crate::platform::Platform;
use crate::stall::FaultKind;
use crate::step::{Step, Wait};
use crate::tokens::{Faulted, Tokens};
use crate::vcpu::VcpuOf;
use crate::vm::Vm;
use lacuna_addr::{
    Access, BackingAddr, BackingRange, Gfn, GfnRange, Gpa, Level, PAGE_SIZE, PageCount,
};
use lacuna_apf::{NotPresent, POLL_NS};
use lacuna_host::{Host, HostError, SharedMemory, Ticket};
use lacuna_machine::{
    Apf, Exit, FaultToken, MemoryError, MemoryFaultFlags, MissingMemory, Provided, ReadyOutcome,
    TokenError,
};
use lacuna_mmu::Outcome;
use std::sync::Arc;

impl<P: Platform> VcpuOf<P> {
    /// Ends the last exit, because the vCPU is entered. If the VMM could not notify the guest, the
    /// vCPU waits for that page.
    pub(crate) fn end_exit(&mut self) {
        let host = &self.vm.host;
        // If the VMM has brought the page after a refused token, the vCPU has nothing to wait for.
        let has_come = |faulted: &Faulted| {
            faulted.ticket.is_none()
                && !host.with_spare_cache(|cache| host.is_nonresident(faulted.page, cache))
        };
        match &self.faulted {
            Some(faulted) if !faulted.waits => {
                self.faulted = None;
                self.tokens().enter();
            }
            Some(faulted) if has_come(faulted) => self.faulted = None,
            _ => {}
        }
    }

    /// Forgets the exits of the old state: the vCPU is reset, or gets another state.
    pub(crate) fn forget_exits(&mut self) {
        self.faulted = None;
        self.tokens().reset();
    }

    fn tokens(&self) -> &Tokens {
        &self.vm.tokens[self.index]
    }

    /// Handles a page that is not at hand, in a slot that exits: the vCPU exits, or waits if the
    /// VMM knows of its wait.
    pub(crate) fn missing(&mut self, gfn: Gfn, access: Access) -> Step {
        // If the slot was removed meanwhile, the access is repeated.
        let Ok(page) = self.vm.backing_addr(gfn.gpa()) else {
            return Step::Ran;
        };
        let waits = |last: &Faulted| last.waits_for(page);
        if self.faulted.as_ref().is_some_and(waits) {
            return self.wait_for_page(gfn, access);
        }
        // True if the VMM has accepted a token for this page and not reported it ready. After a
        // ready without the page, the vCPU exits: the VMM does not know that a vCPU waits.
        if self.apf.awaits(gfn) {
            return self.missing_again(gfn, access);
        }
        let mut flags = match access {
            Access::Read => MemoryFaultFlags::READ,
            Access::Write => MemoryFaultFlags::WRITE,
            Access::Fetch => MemoryFaultFlags::EXEC,
        };
        if self.can_notify(gfn) {
            flags |= MemoryFaultFlags::CAN_NOTIFY;
        }
        flags.set(
            MemoryFaultFlags::EVICTED,
            !self.vm.host.was_never_provided(page),
        );
        self.faulted = Some(Faulted {
            gfn,
            page,
            access,
            waits: false,
            ticket: None,
        });
        let missing = self.provided_with(gfn);
        Step::Exit(Exit::MemoryFault {
            gpa: missing.start().gpa(),
            size: missing.pages() * PAGE_SIZE as u64,
            flags,
            token: self.tokens().exit(self.index),
        })
    }

    /// The pages that the VMM provides together with `gfn`.
    fn provided_with(&self, gfn: Gfn) -> GfnRange {
        let alone = GfnRange::page(gfn);
        if !self.vm.shared_memory().is_some_and(SharedMemory::is_huge) {
            return alone;
        }
        let slots = self.vm.mmu.read_slots();
        let together = slots.find(gfn).and_then(|slot| {
            let unit = self.vm.host.provided_with(slot.backing_of(gfn));
            slot.gfns_of(unit)
        });
        together.unwrap_or(alone)
    }

    /// Another process of the guest, or the same one after an interrupt, needs a page for which the
    /// guest already got page-not-present. The VMM knows of the page from the first exit. The vCPU
    /// halts until the page or an interrupt arrives. If the vCPU cannot take an interrupt, it
    /// waits.
    fn missing_again(&mut self, gfn: Gfn, access: Access) -> Step {
        let now = self.vm.clock.now();
        match self.apf.not_present(gfn, access, now, &mut self.entry) {
            NotPresent::Halt(None) => Step::Ran,
            // The VMM has just reported the page ready: retry the access.
            NotPresent::Wait if !self.apf.awaits(gfn) => Step::Ran,
            NotPresent::Wait => self.wait_for_page(gfn, access),
            NotPresent::Injected(_) | NotPresent::Halt(Some(_)) => {
                unreachable!("a fault on the page is in flight")
            }
        }
    }

    /// Whether page-not-present for the page at `gfn` could be delivered to the guest now.
    fn can_notify(&mut self, gfn: Gfn) -> bool {
        self.vm.apf() == Apf::On && self.apf.can_notify(gfn, &mut self.entry)
    }

    /// Handles a fault on an absent page. Returns the ticket if the vCPU has to wait for it.
    pub(crate) fn page_not_present(&mut self, fault: PageFault) -> Option<Ticket> {
        let PageFault {
            gfn,
            access,
            ticket,
            origin,
        } = fault;
        if self.vm.apf() == Apf::Off {
            return Some(ticket);
        }
        // If the page arrives before the event could be delivered, the event is useless.
        match origin {
            Origin::Swap if self.vm.host.reads_at_once(&ticket) => return Some(ticket),
            Origin::Swap => {
                if self.arrives_soon(gfn, &ticket) {
                    return (!ticket.is_done()).then_some(ticket);
                }
            }
            // A source may answer at once, on this thread.
            Origin::Source => {
                self.vm.host.start(&ticket);
                if ticket.is_done() {
                    return None;
                }
            }
        }
        let now = self.vm.clock.now();
        let answer = self.apf.not_present(gfn, access, now, &mut self.entry);
        self.publish();
        match answer {
            NotPresent::Wait => return Some(ticket),
            NotPresent::Halt(None) => {}
            NotPresent::Injected(completion) | NotPresent::Halt(Some(completion)) => {
                ticket.on_done(move || completion.complete());
            }
        }
        // Start the read in every case, because an unstarted ticket keeps its frame for ever.
        self.vm.host.start(&ticket);
        None
    }

    /// Whether the page arrives so soon that a notification of the guest is not worth its cost. In
    /// real time the vCPU polls for the page.
    fn arrives_soon(&mut self, gfn: Gfn, ticket: &Ticket) -> bool {
        let host = &self.vm.host;
        let least = host.stated_latency_ns();
        if !self.apf.polls_first(gfn, least, &mut self.entry) {
            return false;
        }
        self.stalled_since = Some(self.vm.clock.now());
        let arrives = host.arrives_within(ticket, POLL_NS);
        self.apf.polled(arrives);
        self.publish();
        arrives
    }

    /// Waits for a page that the VMM provides. The page source is not asked, because the vCPU has
    /// exited for the page. If the page is evicted, its read begins.
    fn wait_for_page(&mut self, gfn: Gfn, access: Access) -> Step {
        let vm = &self.vm;
        let outcome = self.entry.bus.wait_for_page(gfn, access);
        if let Some(Outcome::Missing(ticket) | Outcome::Pending(ticket)) = &outcome
            && let Some(faulted) = self
                .faulted
                .as_mut()
                .filter(|last| last.waits && last.gfn == gfn)
        {
            faulted.ticket = Some(ticket.clone());
        }
        match outcome {
            None => Step::Ran,
            Some(Outcome::Missing(ticket)) => {
                self.stalled_since = Some(vm.clock.now());
                self.stalled_for = Some(FaultKind::Missing);
                Step::Wait(Wait::Provided(ticket))
            }
            Some(other) => {
                let _ = self.entry.bus.stop(gfn, access, other);
                self.blocked()
            }
        }
    }

    pub(crate) fn accept_fault(&mut self, token: FaultToken) -> Result<(), TokenError> {
        self.tokens().check(token)?;
        let faulted = self.faulted.as_mut().ok_or(TokenError::Unknown)?;
        let (gfn, page, access) = (faulted.gfn, faulted.page, faulted.access);
        if self.vm.apf() == Apf::On {
            let now = self.vm.clock.now();
            match self.apf.not_present(gfn, access, now, &mut self.entry) {
                NotPresent::Injected(completion) => {
                    self.publish();
                    let report = move || completion.report();
                    self.tokens().accepted(token, page, report)?;
                    self.faulted = None;
                    return Ok(());
                }
                // The drop of the completion ends the artificial halt: the vCPU retries its access,
                // and then waits for the page.
                NotPresent::Halt(completion) => drop(completion),
                NotPresent::Wait => {}
            }
        }
        if let Some(faulted) = &mut self.faulted {
            faulted.waits = true;
        }
        self.tokens().enter();
        Err(TokenError::CannotNotify)
    }
}

/// The error of an access at `gpa` that the host manager has refused.
pub fn backing(gpa: Gpa, error: &HostError) -> MemoryError {
    let cause = error.to_string();
    match error {
        HostError::Discard { .. } | HostError::PageOut { .. } => {
            MemoryError::Refused { gpa, cause }
        }
        _ => {
            let kind = error.failure_kind();
            MemoryError::Backing { gpa, kind, cause }
        }
    }
}

impl Vm {
    fn backing_addr(&self, at: Gpa) -> Result<BackingAddr, MemoryError> {
        let slots = self.mmu.read_slots();
        let slot = slots.find(at.gfn()).ok_or(MemoryError::NoSlot(at))?;
        Ok(slot.backing_of(at.gfn()))
    }
}

impl MissingMemory for Vm {
    fn unit(&self) -> PageCount {
        let page = self.shared_memory().map(SharedMemory::page_size);
        PageCount::new(page.unwrap_or(Level::L4K).pages())
    }

    fn make_missing(&self, gfns: GfnRange) -> Result<(), MemoryError> {
        self.discard_by(gfns, Host::make_missing)
    }

    fn provide(&self, gpa: Gpa, pages: &[u8]) -> Result<Provided, MemoryError> {
        let (chunks, cut) = pages.as_chunks::<PAGE_SIZE>();
        if gpa.offset() != 0 || !cut.is_empty() {
            return Err(MemoryError::Refused {
                gpa,
                cause: format!(
                    "{} bytes from there are not whole pages: give multiples of 4 KiB",
                    pages.len()
                ),
            });
        }
        let slots = self.mmu.read_slots();
        let mut provided = Provided::default();
        let mut rest = chunks;
        let mut next = Some(gpa);
        while !rest.is_empty() {
            let here = next.ok_or(MemoryError::NoSlot(gpa))?;
            let slot = slots.find(here.gfn()).ok_or(MemoryError::NoSlot(here))?;
            let in_slot = slot.gfns.end_raw() - here.gfn().get();
            let run = &rest[..in_slot.min(rest.len() as u64) as usize];
            let taken = self.host.provide_pages(slot.backing_of(here.gfn()), run);
            let taken = taken.map_err(|error| backing(here, &error))?;
            provided.taken += taken as u64;
            provided.late += (run.len() - taken) as u64;
            next = here.checked_add(size_of_val(run) as u64);
            rest = &rest[run.len()..];
        }
        Ok(provided)
    }

    fn fetch(&self, gpa: Gpa, token: Option<FaultToken>) -> Result<(), MemoryError> {
        let page = self.backing_addr(gpa)?;
        let of_vcpu = |token: FaultToken| {
            let tokens = self.tokens.get(token.vcpu());
            let tokens = tokens.filter(|tokens| tokens.is_open(token));
            let tokens = tokens.ok_or_else(|| TokenError::Unknown.refuses(gpa));
            tokens.map(|tokens| (tokens, token))
        };
        let tokens = token.map(of_vcpu).transpose()?;
        let coming = self.host.fetch(page);
        let coming = coming.map_err(|error| backing(gpa, &error))?;
        let Some((tokens, token)) = tokens else {
            return Ok(());
        };
        match coming {
            Some(ticket) if tokens.ready_when(page, token) => {
                let tokens = Arc::clone(tokens);
                ticket.on_done(move || tokens.has_come(page));
            }
            Some(_) => {}
            // The call fails if the token is already completed.
            None => _ = tokens.ready(token),
        }
        Ok(())
    }

    fn populate(&self, gfns: GfnRange) -> Result<(), MemoryError> {
        let slots = self.mmu.slots();
        let mut next = Some(gfns.start());
        while let Some(gfn) = next.filter(|gfn| gfns.contains(*gfn)) {
            let slot = slots.find(gfn).ok_or(MemoryError::NoSlot(gfn.gpa()))?;
            let part = slot.gfns.intersect(gfns).expect("the slot has the page");
            let range = BackingRange::new(slot.backing_of(part.start()), part.pages());
            let populated = self
                .host
                .populate(range.expect("a part of the slot's backing"));
            populated.map_err(|error| backing(part.start().gpa(), &error))?;
            next = gfn.checked_add(part.pages());
        }
        Ok(())
    }

    fn ready(&self, token: FaultToken) -> Result<ReadyOutcome, TokenError> {
        let tokens = self.tokens.get(token.vcpu());
        let (outcome, _) = tokens.ok_or(TokenError::Unknown)?.ready(token)?;
        Ok(outcome)
    }
}
