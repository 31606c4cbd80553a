//! TLB invalidations that reach every vCPU: the inner-shareable forms of TLBI, and the DSB that
//! waits for them (Arm ARM D8.13.4).
//!
//! ```text
//! vCPU A                                    vCPU B
//! TLBI ..IS: own TLB;                       run: running = true; drain the inbox; guest code
//!            B's inbox; B runs? wake it          a wake-up ends the run: running = false
//! DSB: B runs, and its inbox is full?
//!        leave the run loop, try again
//! ```
//! The TLB of a vCPU outside its run loop does not matter: the vCPU drains its inbox before the
//! first instruction of its next run. `running` and the inbox are a Dekker exchange with SeqCst
//! fences. B stores `running` and then looks at the inbox, and A fills the inbox and then looks at
//! `running`. So B finds the invalidation, or A waits for B (`tests/loom.rs`).
//!
//! A leaves its run loop while it waits, so it delays neither a grace period nor an invalidation
//! that B waits for.

use crate::system::Flush;
use lacuna_cpu::{Space, Wake};
use lacuna_sync::shim::{AtomicBool, Ordering, fence};
use lacuna_sync::{CachePadded, Mutex, lock_order};
use std::sync::Arc;

/// The translations that a vCPU must drop from its TLB.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Invalidation {
    /// Everything.
    All,
    /// The translations of this address, in every address space.
    Address(u64),
    /// The non-global translations of one address space.
    Space(Space),
}

impl From<Invalidation> for Flush {
    fn from(what: Invalidation) -> Self {
        match what {
            Invalidation::All => Self::All,
            Invalidation::Address(va) => Self::Address(va),
            Invalidation::Space(space) => Self::Forget(space),
        }
    }
}

/// A longer inbox becomes one [`Invalidation::All`].
const INBOX_MAX: usize = 32;

/// The inboxes of a machine's vCPUs.
pub struct Shootdown {
    vcpus: Box<[CachePadded<Vcpu>]>,
    wake: Arc<dyn Wake>,
}

#[derive(Default)]
struct Vcpu {
    running: AtomicBool,
    /// The inbox is not empty.
    full: AtomicBool,
    inbox: Mutex<Vec<Invalidation>, lock_order::TlbInbox>,
}

impl Shootdown {
    /// The empty inboxes of vCPUs 0 to `vcpus` - 1; none runs.
    pub fn new(vcpus: usize, wake: Arc<dyn Wake>) -> Self {
        Self {
            vcpus: (0..vcpus).map(|_| CachePadded::default()).collect(),
            wake,
        }
    }

    /// vCPU `index` begins to run. Returns the translations to drop first.
    pub fn enter(&self, index: usize) -> Vec<Invalidation> {
        let Some(vcpu) = self.vcpus.get(index) else {
            return Vec::new();
        };
        vcpu.running.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if !vcpu.full.load(Ordering::Relaxed) {
            return Vec::new();
        }
        let mut inbox = vcpu.inbox.lock().expect(UNPOISONED);
        vcpu.full.store(false, Ordering::Release);
        std::mem::take(&mut *inbox)
    }

    /// vCPU `index` leaves its run loop.
    pub fn leave(&self, index: usize) {
        if let Some(vcpu) = self.vcpus.get(index) {
            // Its last accesses come before the end of a DSB that sees this.
            vcpu.running.store(false, Ordering::Release);
        }
    }

    /// vCPU `by` invalidates `what` on all others.
    pub fn send(&self, by: usize, what: Invalidation) {
        for (index, vcpu) in self.others(by) {
            let mut inbox = vcpu.inbox.lock().expect(UNPOISONED);
            match inbox.last() {
                Some(Invalidation::All) => {}
                _ if what == Invalidation::All || inbox.len() == INBOX_MAX => {
                    inbox.clear();
                    inbox.push(Invalidation::All);
                }
                _ => inbox.push(what),
            }
            // If the inbox was full, the thread that filled it has woken the vCPU.
            let was_full = vcpu.full.swap(true, Ordering::Relaxed);
            drop(inbox);
            fence(Ordering::SeqCst);
            if !was_full && vcpu.running.load(Ordering::Relaxed) {
                self.wake.wake(index);
            }
        }
    }

    /// Whether no vCPU but `by` can still use an invalidated translation.
    pub fn is_done(&self, by: usize) -> bool {
        self.others(by).all(|(_, vcpu)| {
            !(vcpu.running.load(Ordering::Acquire) && vcpu.full.load(Ordering::Acquire))
        })
    }

    fn others(&self, by: usize) -> impl Iterator<Item = (usize, &Vcpu)> {
        let all = self.vcpus.iter().map(|vcpu| &**vcpu).enumerate();
        all.filter(move |(index, _)| *index != by)
    }
}

const UNPOISONED: &str = "no panic under this lock";

#[cfg(test)]
mod tests {
    use super::*;
    use lacuna_cpu::testing::Wakes;

    fn machine(vcpus: usize) -> (Shootdown, Arc<Wakes>) {
        let wakes = Arc::new(Wakes::default());
        (Shootdown::new(vcpus, wakes.clone()), wakes)
    }

    #[test]
    fn a_running_vcpu_is_woken_and_waited_for() {
        let (all, wakes) = machine(3);
        assert_eq!(all.enter(1), []);
        all.send(0, Invalidation::Address(0x1000));
        assert_eq!(wakes.take(), [1], "2 does not run");
        assert!(!all.is_done(0));
        all.send(0, Invalidation::Address(0x2000));
        assert_eq!(wakes.take(), [], "it has been woken");
        all.leave(1);
        assert!(all.is_done(0), "it runs no guest code");
        let both = [0x1000, 0x2000].map(Invalidation::Address);
        assert_eq!(all.enter(1), both);
        assert!(all.is_done(0));
        assert_eq!(all.enter(2), both);
        assert_eq!(all.enter(0), [], "the sender drops its own at once");
    }

    #[test]
    fn an_inbox_is_bounded() {
        let (all, _) = machine(2);
        for page in 0..1000 {
            all.send(1, Invalidation::Address(page << 12));
        }
        assert_eq!(all.enter(0), [Invalidation::All]);
        all.send(1, Invalidation::Space(Space(7)));
        all.send(1, Invalidation::All);
        all.send(1, Invalidation::Space(Space(8)));
        assert_eq!(all.enter(0), [Invalidation::All]);
    }

    #[test]
    fn one_vcpu_waits_for_none() {
        let (all, wakes) = machine(1);
        assert_eq!(all.enter(0), []);
        all.send(0, Invalidation::All);
        assert!(all.is_done(0));
        assert_eq!(wakes.take(), []);
    }
}
