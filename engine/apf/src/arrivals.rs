//! The completion queue: any thread reports an arrived page, and the vCPU's thread takes it.
//!
//! ```text
//! completing thread                         vCPU's thread
//! lock                                      poll; nothing to do: sleep until kicked
//!   another generation? nothing to do
//!   push, any := true                       lock, pop, any := not empty, unlock
//! unlock
//! kick
//! ```
//! *Cancel* increments the generation under the lock. A completion before cancel is in the list,
//! and cancel empties the list. A completion after cancel finds another generation. So after a
//! cancel no earlier completion is delivered, and cancel waits for no worker.
//!
//! *No lost kick.* Suppose that the vCPU looks, finds the list empty, and is about to sleep. Then a
//! page is pushed. The kick after the push leaves a permit, so the sleep ends at once.
//!
//! Every push kicks. KVM does less: it requests `APF_READY` only for the first item of a list,
//! skips that kick while a ready is not acknowledged, and always wakes a blocked vCPU. Here one
//! kick does both. An artificial halt also ends for a page further down the list, so every push
//! needs its kick.

use lacuna_addr::Gfn;
use lacuna_sync::shim::{Arc, AtomicBool, AtomicUsize, Ordering};
use lacuna_sync::{Mutex, MutexGuard, lock_order};
use std::collections::VecDeque;
use std::sync::PoisonError;

struct ArrivalQueue {
    list: Mutex<List, lock_order::ApfArrivals>,
    /// Whether the list has anything. It is written under the lock, and read without it as a hint.
    any: AtomicBool,
    /// The number of existing completions, of any generation.
    live: AtomicUsize,
    kick: Box<dyn Fn() + Send + Sync>,
}

struct List {
    generation: u64,
    pages: VecDeque<Gfn>,
}

impl ArrivalQueue {
    fn lock(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn arrive(&self, completion: &Completion) {
        let mut list = self.lock();
        if list.generation != completion.generation {
            return;
        }
        list.pages.push_back(completion.gfn);
        self.any.store(true, Ordering::Relaxed);
        drop(list);
        (self.kick)();
    }
}

/// The duty to report that a page has arrived or never will. The vCPU then retries its access and
/// finds out which. Dropping a completion reports too, so a dying worker loses nothing. After the
/// queue was cancelled, reset, disabled or dropped, a completion has no effect.
#[must_use = "dropping it says that the page has arrived"]
pub struct Completion {
    shared: Arc<ArrivalQueue>,
    generation: u64,
    gfn: Gfn,
}

impl Completion {
    /// Whether a report has no effect any more: the queue was cancelled, reset, disabled or
    /// dropped.
    pub fn is_cancelled(&self) -> bool {
        self.shared.lock().generation != self.generation
    }

    /// Reports that the page has arrived. The calling thread takes a lock for a moment, and then
    /// kicks the vCPU.
    pub fn complete(self) {}

    /// As [`Completion::complete`]. Returns whether the report has an effect.
    pub fn report(self) -> bool {
        !self.is_cancelled()
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        self.shared.live.fetch_sub(1, Ordering::Relaxed);
        self.shared.arrive(self);
    }
}

/// The vCPU's end of the completion queue.
pub(crate) struct Arrivals {
    shared: Arc<ArrivalQueue>,
    generation: u64,
}

impl Arrivals {
    /// A list that never grows past `capacity` completions of one generation.
    pub fn new(capacity: usize, kick: impl Fn() + Send + Sync + 'static) -> Self {
        let list = List {
            generation: 0,
            pages: VecDeque::with_capacity(capacity),
        };
        let shared = ArrivalQueue {
            list: Mutex::new(list),
            any: AtomicBool::new(false),
            live: AtomicUsize::new(0),
            kick: Box::new(kick),
        };
        Self {
            shared: Arc::new(shared),
            generation: 0,
        }
    }

    pub fn completion(&self, gfn: Gfn) -> Completion {
        self.shared.live.fetch_add(1, Ordering::Relaxed);
        Completion {
            shared: Arc::clone(&self.shared),
            generation: self.generation,
            gfn,
        }
    }

    /// Pages on their way. Pages forgotten by a cancel count as well, because each of them has a
    /// frame.
    pub fn live(&self) -> usize {
        self.shared.live.load(Ordering::Relaxed)
    }

    #[inline]
    pub fn any(&self) -> bool {
        self.shared.any.load(Ordering::Relaxed)
    }

    /// Takes the page that arrived first.
    pub fn pop(&self) -> Option<Gfn> {
        let mut list = self.shared.lock();
        let page = list.pages.pop_front();
        self.shared
            .any
            .store(!list.pages.is_empty(), Ordering::Relaxed);
        page
    }

    /// The page that arrived first.
    pub fn first(&self) -> Option<Gfn> {
        self.shared.lock().pages.front().copied()
    }

    pub fn contains(&self, gfn: Gfn) -> bool {
        self.any() && self.shared.lock().pages.contains(&gfn)
    }

    /// All completions made so far lose their effect.
    pub fn cancel(&mut self) {
        self.generation += 1;
        let mut list = self.shared.lock();
        list.generation = self.generation;
        list.pages.clear();
        self.shared.any.store(false, Ordering::Relaxed);
    }

    /// The pages in the list, for [`Queue::verify`](crate::Queue::verify).
    pub fn pages(&self) -> Vec<Gfn> {
        let list = self.shared.lock();
        assert_eq!(self.any(), !list.pages.is_empty());
        list.pages.iter().copied().collect()
    }
}

/// The vCPU is gone, so a later completion must not kick it.
impl Drop for Arrivals {
    fn drop(&mut self) {
        self.cancel();
    }
}
