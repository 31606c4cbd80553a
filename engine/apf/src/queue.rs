//! One vCPU's asynchronous page faults: faults in, ready pages out.

use crate::abi::{Features, Msr, Token, Tokens};
use crate::arrivals::{Arrivals, Claim};
use crate::control::{Control, GeneralProtection, Request};
use crate::delivery::Enabled;
use crate::recent::Recent;
use crate::stats::Stats;
use crate::{Guest, Prefault};
use lacuna_addr::{Access, Gfn};
use lacuna_sync::Nanos;
use std::collections::HashMap;

/// How many faults of one vCPU may be outstanding, a wake-all included (KVM's
/// `ASYNC_PF_PER_VCPU`).
pub const QUEUED_MAX: usize = 64;

/// What is to be done about a page that is not there.
#[must_use]
pub enum NotPresent {
    /// Wait for the page as if there were no asynchronous faults.
    Wait,
    /// The guest was told. *Now* start the worker and give it the claim; then run the guest.
    Injected(Claim),
    /// The guest can't be told: an artificial halt, see [`Queue::halted`]. With a claim: start the
    /// worker first. Without: the page is already on its way.
    Halt(Option<Claim>),
}

/// A fault in flight.
pub(crate) struct Flight {
    /// What the guest was told; nothing, if it could not be.
    pub token: Option<Token>,
    access: Access,
    since: Nanos,
}

/// One vCPU's asynchronous page faults; lives on the vCPU's thread.
///
/// The thread calls [`Queue::poll`] whenever [`Queue::has_arrivals`] says so between two
/// instructions, and before it sleeps for whatever reason; then it sleeps until it is rung. A ring
/// may come before the sleep: it must leave a permit, as `unpark` does.
pub struct Queue {
    pub(crate) control: Control,
    tokens: Tokens,
    /// The hash of gfns in flight. The guest chooses them, so that std's keyed hash is the right
    /// one. Never grows past its first capacity.
    pub(crate) flights: HashMap<Gfn, Flight>,
    pub(crate) arrivals: Arrivals,
    /// A wake-all is queued. It is only ever queued before any arrival: it comes first.
    pub(crate) wake_all: bool,
    pub(crate) recent: Recent,
    /// The artificial halt, and the page that it waits for.
    pub(crate) halted: Option<Gfn>,
    stats: Stats,
}

impl Queue {
    /// The queue of vCPU `vcpu`, disabled. `ring` gets the vCPU's attention (kicks it out of guest
    /// code, wakes its thread); completers call it on their threads, no lock held. It must not
    /// panic.
    ///
    /// # Panics
    /// If `vcpu` is above 4095: a token has 12 bits for it.
    pub fn new(vcpu: u32, features: Features, ring: impl Fn() + Send + Sync + 'static) -> Self {
        Self {
            control: Control::new(features),
            tokens: Tokens::new(vcpu),
            flights: HashMap::with_capacity(QUEUED_MAX),
            arrivals: Arrivals::new(QUEUED_MAX, ring),
            wake_all: false,
            recent: Recent::new(),
            halted: None,
            stats: Stats::default(),
        }
    }

    /// RDMSR. `None` raises #GP(0): the guest's CPUID does not offer the register.
    pub fn read_msr(&self, msr: Msr) -> Option<u64> {
        self.control.read(msr)
    }

    /// WRMSR.
    pub fn write_msr(
        &mut self,
        msr: Msr,
        value: u64,
        now: Nanos,
        guest: &mut impl Guest,
    ) -> Result<(), GeneralProtection> {
        match self.control.write(msr, value, guest)? {
            Request::Enabled => self.queue_wake_all(),
            Request::Disabled => self.forget(),
            Request::Acknowledged => _ = self.poll(now, guest),
            Request::None => {}
        }
        Ok(())
    }

    /// The page at `gfn` is not there and takes waiting. Says how to wait.
    pub fn not_present(
        &mut self,
        gfn: Gfn,
        access: Access,
        now: Nanos,
        guest: &mut impl Guest,
    ) -> NotPresent {
        let Some(enabled) = self.control.enabled() else {
            return NotPresent::Wait;
        };
        if self.recent.take(gfn) {
            self.stats.waited_recent += 1;
            return NotPresent::Wait;
        }
        if !guest.state().interruptible {
            self.stats.waited_uninterruptible += 1;
            return NotPresent::Wait;
        }
        if self.flights.contains_key(&gfn) {
            return self.not_present_again(gfn);
        }
        // KVM cancels its workers before a disable returns. Ours go on, so that their pages count
        // until they have come: a guest that disables and enables in a loop has no more frames in
        // flight than any other.
        if self.queued() == QUEUED_MAX || self.arrivals.live() >= QUEUED_MAX {
            self.stats.waited_full += 1;
            return NotPresent::Wait;
        }
        let token = enabled.not_present(self.tokens.next(), guest);
        let flight = Flight {
            token,
            access,
            since: now,
        };
        self.flights.insert(gfn, flight);
        // The claim exists from here on: ready cannot overtake not-present.
        let claim = self.arrivals.claim(gfn);
        if token.is_some() {
            self.stats.taken += 1;
            NotPresent::Injected(claim)
        } else {
            self.stats.halted += 1;
            self.halted = Some(gfn);
            NotPresent::Halt(Some(claim))
        }
    }

    /// A page in flight is needed by another task, or again after an interrupt broke the halt.
    fn not_present_again(&mut self, gfn: Gfn) -> NotPresent {
        if self.arrivals.contains(gfn) {
            // It came, the guest could not be told yet, and it was taken away: nobody brings it.
            self.stats.waited_recent += 1;
            return NotPresent::Wait;
        }
        self.stats.repeated += 1;
        self.halted = Some(gfn);
        NotPresent::Halt(None)
    }

    /// Dequeues what may be dequeued now, first come first served; how many that was. For each the
    /// vCPU is made runnable, also when there was nothing to tell.
    pub fn poll(&mut self, now: Nanos, guest: &mut impl Guest) -> usize {
        let Some(enabled) = self.control.enabled() else {
            return 0;
        };
        let mut dequeued = 0;
        while self.has_arrivals() && enabled.takes_ready(guest) {
            if self.wake_all {
                self.wake_all(enabled, guest);
            } else if let Some(gfn) = self.arrivals.pop() {
                self.page_ready(gfn, enabled, now, guest);
            }
            self.halted = None;
            guest.resume();
            dequeued += 1;
        }
        // A guest that does not read its events still gets the page that it has stopped for.
        if self.halted.is_some_and(|gfn| self.arrivals.contains(gfn)) {
            self.halted = None;
        }
        dequeued
    }

    fn wake_all(&mut self, enabled: Enabled, guest: &mut impl Guest) {
        self.wake_all = false;
        let vector = self.control.vector();
        match enabled.ready(Token::WAKE_ALL, vector, guest) {
            Ok(()) => self.stats.wake_alls += 1,
            Err(_) => self.stats.spurious += 1,
        }
    }

    fn page_ready(&mut self, gfn: Gfn, enabled: Enabled, now: Nanos, guest: &mut impl Guest) {
        let flight = self.flights.remove(&gfn);
        let flight = flight.expect("a claim of this generation is in flight, and completes once");
        self.recent.push(gfn);
        self.stats.swap_in.record(now.since(flight.since));
        if guest.prefault(gfn, flight.access) == Prefault::Mapped {
            self.stats.prefaulted += 1;
        }
        let vector = self.control.vector();
        match flight
            .token
            .map(|token| enabled.ready(token, vector, guest))
        {
            Some(Ok(())) => self.stats.ready += 1,
            Some(Err(_)) | None => self.stats.spurious += 1,
        }
    }

    /// Whether there may be something for [`Queue::poll`]. One load of an atomic.
    #[inline]
    pub fn has_arrivals(&self) -> bool {
        self.wake_all || self.arrivals.any()
    }

    /// Whether pages are on their way of which the guest is to be told.
    pub fn awaits_pages(&self) -> bool {
        !self.flights.is_empty()
    }

    /// Whether the vCPU is in its artificial halt. An interrupt breaks it, and so does the arrival
    /// of the page, by way of [`Queue::poll`].
    pub const fn halted(&self) -> bool {
        self.halted.is_some()
    }

    /// Ends the artificial halt: an interrupt is to be taken. The instruction that faulted will
    /// fault again.
    pub fn break_halt(&mut self) {
        self.halted = None;
    }

    /// Forgets everything in flight: no claim made so far has any effect. The vCPU leaves its
    /// artificial halt and tries again; a guest that sleeps on tokens gets a wake-all for them.
    pub fn cancel(&mut self) {
        self.forget();
        self.wake_all = self.control.enabled().is_some();
    }

    /// vCPU reset: nothing in flight, the MSRs 0, not halted. Tokens and statistics go on.
    pub fn reset(&mut self) {
        self.control.reset();
        self.forget();
    }

    /// The counters so far.
    pub const fn stats(&self) -> Stats {
        self.stats
    }

    /// Faults in flight, and the wake-all.
    pub(crate) fn queued(&self) -> usize {
        self.flights.len() + usize::from(self.wake_all)
    }

    /// The guest has enabled: tasks may sleep on tokens of before, which nobody knows any more (a
    /// disable, a migration). Not needed, and left out, when anything waits to be dequeued or the
    /// queue is full, as then nothing has been forgotten that is not announced already: what
    /// forgets is disable, which leaves the queue empty, and cancel, which queues its own.
    fn queue_wake_all(&mut self) {
        if !self.has_arrivals() && self.queued() < QUEUED_MAX {
            self.wake_all = true;
        }
    }

    fn forget(&mut self) {
        self.arrivals.cancel();
        self.stats.cancelled += self.flights.len() as u64;
        self.flights.clear();
        self.recent.clear();
        self.wake_all = false;
        self.halted = None;
    }
}
