//! The state of one vCPU's asynchronous page faults: takes faults, delivers ready pages.

use crate::abi::{Abi, Deliver, Guest, Prefault, Request};
use crate::arrivals::{Arrivals, Completion};
use crate::poll_first::PollFirst;
use crate::recent::Recent;
use crate::stats::Stats;
use crate::token::{Token, Tokens};
use lacuna_addr::{Access, Gfn};
use lacuna_sync::Nanos;
use std::collections::HashMap;
use tracing::trace;

/// The largest number of outstanding faults of one vCPU (KVM's `ASYNC_PF_PER_VCPU`). A wake-all
/// counts as one.
pub const QUEUED_MAX: usize = 64;

/// The backend's next step for a missing page.
#[must_use]
pub enum NotPresent {
    /// Wait for the page as if there were no asynchronous faults.
    Wait,
    /// The guest got page-not-present. Start the worker *now* and give it the completion; then run
    /// the guest.
    Injected(Completion),
    /// The event cannot be delivered, so the vCPU is in an artificial halt (see [`Queue::halted`]).
    /// If there is a completion, start the worker first. If there is none, the page is already on
    /// its way.
    Halt(Option<Completion>),
}

/// A fault in flight.
pub(crate) struct Flight {
    /// The token of the guest's page-not-present; `None` if the event could not be delivered.
    pub token: Option<Token>,
    access: Access,
    since: Nanos,
}

/// One vCPU's asynchronous page faults. Only the vCPU's thread uses it.
///
/// The thread calls [`Queue::poll`] between two instructions if [`Queue::has_arrivals`], and before
/// each sleep, whatever the reason for the sleep. A kick ends the sleep. A kick between the call
/// and the sleep must leave a permit, as `unpark` does.
pub struct Queue<A> {
    pub(crate) abi: A,
    tokens: Tokens,
    /// The faults in flight, by gfn. The guest chooses the gfns, so the hash function must be
    /// keyed, as std's is. The map never grows past its first capacity.
    pub(crate) flights: HashMap<Gfn, Flight>,
    pub(crate) arrivals: Arrivals,
    /// A wake-all is queued. It is queued only while there is no arrival, and is delivered first.
    pub(crate) wake_all: bool,
    pub(crate) recent: Recent,
    poll_first: PollFirst,
    /// In an artificial halt: the page that the vCPU waits for.
    pub(crate) halted: Option<Gfn>,
    stats: Stats,
}

impl<A: Abi> Queue<A> {
    /// The queue of vCPU `vcpu`. `abi` delivers the events. `kick` makes the vCPU leave guest code,
    /// or wakes its thread. Completing threads call it and hold no lock then. It must not panic.
    ///
    /// # Panics
    /// If `vcpu` does not fit in a token ([`Abi::tokens`]).
    pub fn new(vcpu: u32, abi: A, kick: impl Fn() + Send + Sync + 'static) -> Self {
        Self {
            tokens: Tokens::new(abi.tokens(), vcpu),
            abi,
            flights: HashMap::with_capacity(QUEUED_MAX),
            arrivals: Arrivals::new(QUEUED_MAX, kick),
            wake_all: false,
            recent: Recent::new(),
            poll_first: PollFirst::new(),
            halted: None,
            stats: Stats::default(),
        }
    }

    /// The contract as the guest has configured it.
    pub(crate) fn abi(&self) -> &A {
        &self.abi
    }

    /// The contract, to change it. The request that follows from a change goes to [`Queue::apply`].
    pub(crate) fn abi_mut(&mut self) -> &mut A {
        &mut self.abi
    }

    /// Performs the request of a changed configuration.
    pub(crate) fn apply<G: Guest>(&mut self, request: Request, now: Nanos, guest: &mut G)
    where
        A: Deliver<G>,
    {
        match request {
            Request::Enabled => self.queue_wake_all(),
            Request::Disabled => self.forget(),
            Request::Acknowledged => _ = self.poll(now, guest),
            Request::None => {}
        }
    }

    /// Whether [`Queue::not_present`] would deliver page-not-present for `gfn` now. Changes
    /// nothing.
    pub fn can_notify<G: Guest>(&mut self, gfn: Gfn, guest: &mut G) -> bool
    where
        A: Deliver<G>,
    {
        self.abi.is_enabled()
            && !self.recent.contains(gfn)
            && guest.is_interruptible()
            && !self.is_in_flight(gfn)
            && !self.is_full()
            && self.abi.takes_not_present(guest)
    }

    /// Whether the vCPU first polls for the page at `gfn`, for [`POLL_NS`](crate::POLL_NS) at most.
    /// The caller starts the read before, and reports the end of the poll ([`Queue::polled`]).
    /// `least_ns`: the latency that the device states; a read may take longer.
    pub fn polls_first<G: Guest>(&mut self, gfn: Gfn, least_ns: u64, guest: &mut G) -> bool
    where
        A: Deliver<G>,
    {
        self.can_notify(gfn, guest) && self.poll_first.begin(least_ns)
    }

    /// A poll has ended, with the page or without.
    pub fn polled(&mut self, with_page: bool) {
        self.poll_first.ended(with_page);
        self.stats.waited_polled += u64::from(with_page);
    }

    /// The page that a delivery accesses; `None` while the contract is disabled. A backend that
    /// must not wait inside a call brings the page in before.
    pub fn shared_page(&self) -> Option<Gfn> {
        self.abi.shared_page()
    }

    /// Whether a fault on `gfn` is in flight.
    fn is_in_flight(&self, gfn: Gfn) -> bool {
        self.flights.contains_key(&gfn)
    }

    /// Whether a fault on `gfn` is in flight, and its page is not reported as arrived.
    pub fn awaits(&self, gfn: Gfn) -> bool {
        self.is_in_flight(gfn) && !self.arrivals.contains(gfn)
    }

    /// Whether no more faults may be in flight.
    ///
    /// KVM cancels its workers before a disable returns. Workers here continue, so `live` counts
    /// their pages until they have arrived. A guest that disables and enables in a loop then has no
    /// more frames in flight than any other guest.
    fn is_full(&self) -> bool {
        self.queued() == QUEUED_MAX || self.arrivals.live() >= QUEUED_MAX
    }

    /// The vCPU needs the absent page at `gfn`. Delivers page-not-present if possible, and returns
    /// the vCPU's next step.
    pub fn not_present<G: Guest>(
        &mut self,
        gfn: Gfn,
        access: Access,
        now: Nanos,
        guest: &mut G,
    ) -> NotPresent
    where
        A: Deliver<G>,
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
        if self.is_in_flight(gfn) {
            return self.not_present_again(gfn);
        }
        if self.is_full() {
            self.stats.waited_full += 1;
            return NotPresent::Wait;
        }
        let token = self.next_token();
        let delivered = self.abi.not_present(token, guest).is_ok();
        let token = delivered.then_some(token);
        let flight = Flight {
            token,
            access,
            since: now,
        };
        self.flights.insert(gfn, flight);
        // The completion is made after page-not-present was delivered, so page-ready cannot
        // overtake it.
        let completion = self.arrivals.completion(gfn);
        if let Some(token) = token {
            let (vcpu, gfn, token) = (self.tokens.vcpu(), gfn.get(), token.get());
            trace!(target: "lacuna::apf", vcpu, gfn, token, "page-not-present");
            self.stats.taken += 1;
            NotPresent::Injected(completion)
        } else {
            self.stats.halted += 1;
            self.halted = Some(gfn);
            NotPresent::Halt(Some(completion))
        }
    }

    fn next_token(&mut self) -> Token {
        let format = self.abi.tokens();
        loop {
            let token = self.tokens.next(format);
            // The counter may wrap around while a page is on its way.
            let in_use = |flight: &Flight| flight.token == Some(token);
            if !self.tokens.have_wrapped() || !self.flights.values().any(in_use) {
                return token;
            }
        }
    }

    /// A fault on the page is in flight already: another task faulted on it, or an interrupt ended
    /// the halt and the task retried its access.
    fn not_present_again(&mut self, gfn: Gfn) -> NotPresent {
        if self.arrivals.contains(gfn) {
            // The page arrived, page-ready could not be delivered yet, and reclaim took the page
            // again. No worker brings it.
            self.stats.waited_recent += 1;
            return NotPresent::Wait;
        }
        self.stats.repeated += 1;
        self.halted = Some(gfn);
        NotPresent::Halt(None)
    }

    /// Takes arrivals from the completion queue, in order, as long as events may be delivered.
    /// Returns their number. Each arrival makes the vCPU runnable, even without an event to
    /// deliver.
    pub fn poll<G: Guest>(&mut self, now: Nanos, guest: &mut G) -> usize
    where
        A: Deliver<G>,
    {
        if !self.abi.is_enabled() {
            return 0;
        }
        let mut dequeued = 0;
        while self.has_arrivals() && (self.abi.takes_ready(guest) || self.next_is_untaken()) {
            if self.wake_all {
                self.wake_all(guest);
            } else if let Some(gfn) = self.arrivals.pop() {
                self.page_ready(gfn, now, guest);
            }
            self.halted = None;
            guest.resume();
            dequeued += 1;
        }
        // If the guest does not read its events, the page stays in the list, but the halt for that
        // page ends.
        if self.halted.is_some_and(|gfn| self.arrivals.contains(gfn)) {
            self.halted = None;
        }
        dequeued
    }

    /// Whether the vCPU has not yet taken the event of the first arrival. Then the guest needs no
    /// event at all.
    fn next_is_untaken(&self) -> bool {
        let Some(untaken) = self.abi.untaken().filter(|_| !self.wake_all) else {
            return false;
        };
        let flight = self.arrivals.first().and_then(|gfn| self.flights.get(&gfn));
        flight.is_some_and(|flight| flight.token == Some(untaken))
    }

    fn wake_all<G: Guest>(&mut self, guest: &mut G)
    where
        A: Deliver<G>,
    {
        self.wake_all = false;
        match self.abi.ready(Token::WAKE_ALL, guest) {
            Ok(()) => self.stats.wake_alls += 1,
            Err(_) => self.stats.spurious += 1,
        }
    }

    fn page_ready<G: Guest>(&mut self, gfn: Gfn, now: Nanos, guest: &mut G)
    where
        A: Deliver<G>,
    {
        let flight = self.flights.remove(&gfn);
        let flight =
            flight.expect("a completion of this generation is in flight, and completes once");
        self.recent.push(gfn);
        self.stats.swap_in.record(now.since(flight.since));
        let vcpu = self.tokens.vcpu();
        if guest.prefault(gfn, flight.access) == Prefault::Mapped {
            trace!(target: "lacuna::apf", vcpu, gfn = gfn.get(), "fault is retried");
            self.stats.prefaulted += 1;
        }
        let delivered = flight.token;
        let seen = delivered.filter(|&token| !self.abi.withdraw(token, guest));
        match seen.map(|token| self.abi.ready(token, guest)) {
            Some(Ok(())) => self.stats.ready += 1,
            Some(Err(_)) | None => self.stats.spurious += 1,
        }
        let (gfn, token) = (gfn.get(), delivered.map(Token::get));
        trace!(target: "lacuna::apf", vcpu, gfn, token, "page-ready");
    }

    /// Whether [`Queue::poll`] may find an arrival. Costs one load of an atomic.
    #[inline]
    pub fn has_arrivals(&self) -> bool {
        self.wake_all || self.arrivals.any()
    }

    /// Whether faults are in flight.
    pub fn awaits_pages(&self) -> bool {
        !self.flights.is_empty()
    }

    /// Whether the vCPU is in an artificial halt. [`Queue::poll`] ends the halt when the page has
    /// arrived; the backend ends it for an interrupt ([`Queue::break_halt`]).
    pub const fn halted(&self) -> bool {
        self.halted.is_some()
    }

    /// Ends the artificial halt, because the vCPU takes an interrupt. The faulting instruction will
    /// fault again.
    pub fn break_halt(&mut self) {
        self.halted = None;
    }

    /// Forgets every fault in flight: no completion made so far has an effect. The vCPU leaves its
    /// artificial halt and tries its access again. If the contract is enabled, the guest gets a
    /// wake-all, because its tasks may sleep on tokens.
    pub fn cancel(&mut self) {
        self.forget();
        self.wake_all = self.abi.is_enabled();
    }

    /// vCPU reset: nothing is in flight, the contract is as at power-on, the vCPU is not halted.
    /// The token counter and the statistics keep their values.
    pub fn reset(&mut self) {
        self.abi.reset();
        self.forget();
    }

    /// The counters so far.
    pub fn stats(&self) -> Stats {
        Stats {
            in_flight: self.flights.len() as u64,
            ..self.stats
        }
    }

    /// Faults in flight, and the wake-all.
    pub(crate) fn queued(&self) -> usize {
        self.flights.len() + usize::from(self.wake_all)
    }

    /// Queues a wake-all, because the guest has enabled asynchronous page faults. Its tasks may
    /// sleep on tokens that the queue forgot at a disable or a migration. The wake-all makes them
    /// retry.
    ///
    /// The wake-all is left out if there are arrivals or the queue is full. Then nothing was
    /// forgotten: a disable leaves the queue empty, and a cancel queues a wake-all itself.
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
