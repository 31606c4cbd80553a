//! One vCPU's asynchronous page faults: faults in, ready pages out.

use crate::abi::{Abi, Guest, Prefault, Request, Tell};
use crate::arrivals::{Arrivals, Completion};
use crate::recent::Recent;
use crate::stats::Stats;
use crate::token::{Token, Tokens};
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
    /// The guest was told. *Now* start the worker and give it the completion; then run the guest.
    Injected(Completion),
    /// The guest cannot be told: an artificial halt, see [`Queue::halted`]. With a completion:
    /// start the worker first. Without: the page is already on its way.
    Halt(Option<Completion>),
}

/// A fault in flight.
pub(crate) struct Flight {
    /// What the guest was told; `None` if it could not be told.
    pub token: Option<Token>,
    access: Access,
    since: Nanos,
}

/// One vCPU's asynchronous page faults; lives on the vCPU's thread.
///
/// The thread calls [`Queue::poll`] whenever [`Queue::has_arrivals`] says so between two
/// instructions, and before it sleeps for whatever reason; then it sleeps until it is kicked. A
/// kick may come before the sleep: it must leave a permit, as `unpark` does.
pub struct Queue<A> {
    pub(crate) abi: A,
    tokens: Tokens,
    /// The hash of gfns in flight. The guest chooses them, so the hash must be a keyed one, as
    /// std's is. It never grows past its first capacity.
    pub(crate) flights: HashMap<Gfn, Flight>,
    pub(crate) arrivals: Arrivals,
    /// A wake-all is queued. It is only ever queued before any arrival: it comes first.
    pub(crate) wake_all: bool,
    pub(crate) recent: Recent,
    /// The artificial halt, and the page that it waits for.
    pub(crate) halted: Option<Gfn>,
    stats: Stats,
}

impl<A: Abi> Queue<A> {
    /// The queue of vCPU `vcpu`, whose guest is told as `abi` says. `kick` gets the vCPU's
    /// attention: it kicks the vCPU out of guest code and wakes its thread. Completing threads call
    /// it with no lock held. It must not panic.
    ///
    /// # Panics
    /// If `vcpu` does not fit in a token ([`Abi::TOKENS`]).
    pub fn new(vcpu: u32, abi: A, kick: impl Fn() + Send + Sync + 'static) -> Self {
        Self {
            abi,
            tokens: Tokens::new(A::TOKENS, vcpu),
            flights: HashMap::with_capacity(QUEUED_MAX),
            arrivals: Arrivals::new(QUEUED_MAX, kick),
            wake_all: false,
            recent: Recent::new(),
            halted: None,
            stats: Stats::default(),
        }
    }

    /// The contract as the guest has configured it.
    pub(crate) fn abi(&self) -> &A {
        &self.abi
    }

    /// To change the contract; what that asks of the queue goes to [`Queue::obey`].
    pub(crate) fn abi_mut(&mut self) -> &mut A {
        &mut self.abi
    }

    /// Does what a change of the configuration asks for.
    pub(crate) fn obey<G: Guest>(&mut self, request: Request, now: Nanos, guest: &mut G)
    where
        A: Tell<G>,
    {
        match request {
            Request::Enabled => self.queue_wake_all(),
            Request::Disabled => self.forget(),
            Request::Acknowledged => _ = self.poll(now, guest),
            Request::None => {}
        }
    }

    /// The page at `gfn` is not there and takes waiting. Says how to wait.
    pub fn not_present<G: Guest>(
        &mut self,
        gfn: Gfn,
        access: Access,
        now: Nanos,
        guest: &mut G,
    ) -> NotPresent
    where
        A: Tell<G>,
    {
        if !self.abi.is_enabled() {
            return NotPresent::Wait;
        }
        if self.recent.take(gfn) {
            self.stats.waited_recent += 1;
            return NotPresent::Wait;
        }
        if !guest.is_interruptible() {
            self.stats.waited_uninterruptible += 1;
            return NotPresent::Wait;
        }
        if self.flights.contains_key(&gfn) {
            return self.not_present_again(gfn);
        }
        // KVM cancels its workers before a disable returns. Workers here go on, so their pages
        // count until they have come. A guest that disables and enables in a loop then has no more
        // frames in flight than any other guest.
        if self.queued() == QUEUED_MAX || self.arrivals.live() >= QUEUED_MAX {
            self.stats.waited_full += 1;
            return NotPresent::Wait;
        }
        let token = self.tokens.next();
        let told = self.abi.not_present(token, guest).is_ok();
        let token = told.then_some(token);
        let flight = Flight {
            token,
            access,
            since: now,
        };
        self.flights.insert(gfn, flight);
        // The completion exists from here on: ready cannot overtake not-present.
        let completion = self.arrivals.completion(gfn);
        if token.is_some() {
            self.stats.taken += 1;
            NotPresent::Injected(completion)
        } else {
            self.stats.halted += 1;
            self.halted = Some(gfn);
            NotPresent::Halt(Some(completion))
        }
    }

    /// A page in flight is needed by another task, or again after an interrupt broke the halt.
    fn not_present_again(&mut self, gfn: Gfn) -> NotPresent {
        if self.arrivals.contains(gfn) {
            // It came, the guest could not be told yet, and reclaim took it: no worker brings it.
            self.stats.waited_recent += 1;
            return NotPresent::Wait;
        }
        self.stats.repeated += 1;
        self.halted = Some(gfn);
        NotPresent::Halt(None)
    }

    /// Dequeues what may be dequeued now, first come first served; how many that was. For each the
    /// vCPU is made runnable, also when there was nothing to tell.
    pub fn poll<G: Guest>(&mut self, now: Nanos, guest: &mut G) -> usize
    where
        A: Tell<G>,
    {
        if !self.abi.is_enabled() {
            return 0;
        }
        let mut dequeued = 0;
        while self.has_arrivals() && self.abi.takes_ready(guest) {
            if self.wake_all {
                self.wake_all(guest);
            } else if let Some(gfn) = self.arrivals.pop() {
                self.page_ready(gfn, now, guest);
            }
            self.halted = None;
            guest.resume();
            dequeued += 1;
        }
        // A guest that does not read its events still gets the page that its vCPU halted for.
        if self.halted.is_some_and(|gfn| self.arrivals.contains(gfn)) {
            self.halted = None;
        }
        dequeued
    }

    fn wake_all<G: Guest>(&mut self, guest: &mut G)
    where
        A: Tell<G>,
    {
        self.wake_all = false;
        match self.abi.ready(Token::WAKE_ALL, guest) {
            Ok(()) => self.stats.wake_alls += 1,
            Err(_) => self.stats.spurious += 1,
        }
    }

    fn page_ready<G: Guest>(&mut self, gfn: Gfn, now: Nanos, guest: &mut G)
    where
        A: Tell<G>,
    {
        let flight = self.flights.remove(&gfn);
        let flight =
            flight.expect("a completion of this generation is in flight, and completes once");
        self.recent.push(gfn);
        self.stats.swap_in.record(now.since(flight.since));
        if guest.prefault(gfn, flight.access) == Prefault::Mapped {
            self.stats.prefaulted += 1;
        }
        match flight.token.map(|token| self.abi.ready(token, guest)) {
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

    /// Forgets everything in flight: no completion made so far has any effect. The vCPU leaves its
    /// artificial halt and tries again; a guest that sleeps on tokens gets a wake-all for them.
    pub fn cancel(&mut self) {
        self.forget();
        self.wake_all = self.abi.is_enabled();
    }

    /// vCPU reset: nothing in flight, the contract as at power-on, not halted. Tokens and
    /// statistics go on.
    pub fn reset(&mut self) {
        self.abi.reset();
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

    /// The guest has enabled. Its tasks may sleep on tokens that a disable or a migration has made
    /// the queue forget: a wake-all makes them retry. It is left out while anything waits to be
    /// dequeued or the queue is full. Then nothing was forgotten: disable leaves the queue empty,
    /// and cancel queues a wake-all of its own.
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
