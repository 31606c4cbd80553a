//! The done list: pages that have come, from any thread to the vCPU's.
//!
//! ```text
//! completer                                 vCPU's thread
//! lock                                      poll; nothing to do: sleep until rung
//!   generation is the claim's? no -> gone
//!   push, any := true                       lock, pop, any := not empty, unlock
//! unlock
//! ring
//! ```
//! *Cancel* moves the generation under the lock. So a completion is either in the list when it is
//! emptied, or finds another generation: nothing of before is delivered after, and nobody has to
//! wait for a worker.
//!
//! *No lost ring.* Every push is followed by a ring, and a ring leaves a permit. A vCPU that found
//! the list without the push is rung after it looked. (KVM rings only for the first of a list and
//! spares the kick while a ready is not acknowledged, but always wakes a blocked vCPU. Our ring is
//! both, and an artificial halt also ends for a page further down the list, so that no push may
//! go without.)

use lacuna_addr::Gfn;
use lacuna_sync::shim::{Arc, AtomicBool, AtomicUsize, Mutex, MutexGuard, Ordering};
use std::collections::VecDeque;
use std::sync::PoisonError;

struct Shared {
    list: Mutex<List>,
    /// Whether the list has anything: written under the lock, read without, as a hint.
    any: AtomicBool,
    /// Claims that somebody holds, of whatever generation.
    live: AtomicUsize,
    ring: Box<dyn Fn() + Send + Sync>,
}

struct List {
    generation: u64,
    pages: VecDeque<Gfn>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn arrive(&self, claim: &Claim) {
        let mut list = self.lock();
        if list.generation != claim.generation {
            return;
        }
        list.pages.push_back(claim.gfn);
        self.any.store(true, Ordering::Relaxed);
        drop(list);
        (self.ring)();
    }
}

/// The duty to say that a page has come, or that it never will: the vCPU then tries again and sees
/// for itself. Dropping it says so too, so that a worker that dies loses nothing. Says nothing any
/// more once the queue has been cancelled, reset, disabled or dropped.
#[must_use = "dropping it says that the page has come"]
pub struct Claim {
    shared: Arc<Shared>,
    generation: u64,
    gfn: Gfn,
}

impl Claim {
    /// The page has come. Takes a lock for a moment, then rings the vCPU, on the calling thread.
    pub fn complete(self) {}
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.shared.live.fetch_sub(1, Ordering::Relaxed);
        self.shared.arrive(self);
    }
}

/// The vCPU's end of the list.
pub(crate) struct Arrivals {
    shared: Arc<Shared>,
    generation: u64,
}

impl Arrivals {
    /// A list that never grows past `capacity` claims of one generation.
    pub fn new(capacity: usize, ring: impl Fn() + Send + Sync + 'static) -> Self {
        let list = List {
            generation: 0,
            pages: VecDeque::with_capacity(capacity),
        };
        let shared = Shared {
            list: Mutex::new(list),
            any: AtomicBool::new(false),
            live: AtomicUsize::new(0),
            ring: Box::new(ring),
        };
        Self {
            shared: Arc::new(shared),
            generation: 0,
        }
    }

    pub fn claim(&self, gfn: Gfn) -> Claim {
        self.shared.live.fetch_add(1, Ordering::Relaxed);
        Claim {
            shared: Arc::clone(&self.shared),
            generation: self.generation,
            gfn,
        }
    }

    /// Pages on their way, those included that nobody waits for any more: each has a frame.
    pub fn live(&self) -> usize {
        self.shared.live.load(Ordering::Relaxed)
    }

    #[inline]
    pub fn any(&self) -> bool {
        self.shared.any.load(Ordering::Relaxed)
    }

    /// The page that came first.
    pub fn pop(&self) -> Option<Gfn> {
        let mut list = self.shared.lock();
        let page = list.pages.pop_front();
        self.shared
            .any
            .store(!list.pages.is_empty(), Ordering::Relaxed);
        page
    }

    pub fn contains(&self, gfn: Gfn) -> bool {
        self.any() && self.shared.lock().pages.contains(&gfn)
    }

    /// All claims so far are void.
    pub fn cancel(&mut self) {
        self.generation += 1;
        let mut list = self.shared.lock();
        list.generation = self.generation;
        list.pages.clear();
        self.shared.any.store(false, Ordering::Relaxed);
    }

    /// What is in the list, for [`Queue::verify`](crate::Queue::verify).
    pub fn pages(&self) -> Vec<Gfn> {
        let list = self.shared.lock();
        assert_eq!(self.any(), !list.pages.is_empty());
        list.pages.iter().copied().collect()
    }
}

/// Nobody is rung for a vCPU that is gone.
impl Drop for Arrivals {
    fn drop(&mut self) {
        self.cancel();
    }
}
