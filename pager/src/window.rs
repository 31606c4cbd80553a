//! Limits the requests of one VM that are in flight.
//!
//! All VMs of a source share its queue. A huge page of 1 GiB is 262144 requests: without a limit,
//! the faults of the other VMs would wait behind them. So the requests beyond the limit wait here,
//! in their VM, and a VM's fault waits in the source behind [`REQUESTS_MAX`] requests of each other
//! VM at most.
//!
//! ```text
//! fault ─► queue of units ─► in flight, at most REQUESTS_MAX ─► ended: at REFILL, the event thread
//!                                                                sends the next ones
//! ```

use crate::regions::Unit;
use lacuna_sync::{Mutex, lock, lock_order};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The most requests of one VM in flight: the pages of 2 MiB. That is eight times the reads that a
/// memory file has in flight, and more than a VM of small pages has vCPUs.
pub const REQUESTS_MAX: u64 = 512;
/// So many are in flight when the next ones are sent: the source always has work.
const REFILL: u64 = REQUESTS_MAX / 2;

/// The requests of one VM.
#[derive(Default)]
pub struct Window {
    /// Units, each with its first page without a request.
    queue: Mutex<VecDeque<(Unit, u64)>, lock_order::PagerRequests>,
    in_flight: AtomicU64,
    /// A request has found the limit, and no end of another one has been reported since.
    is_full: AtomicBool,
}

impl Window {
    /// All pages of `unit` are to be requested.
    pub fn push(&self, unit: Unit) {
        lock(&self.queue).push_back((unit, 0));
    }

    /// The page to request now. It counts as in flight until [`Window::end_one`]. Units that are
    /// not `wanted` any more are left out.
    pub fn next(&self, wanted: impl Fn(u64) -> bool) -> Option<(Unit, u64)> {
        let mut queue = lock(&self.queue);
        loop {
            let (unit, page) = queue.front_mut()?;
            if !wanted(unit.number) {
                queue.pop_front();
                continue;
            }
            if self.in_flight.load(Ordering::SeqCst) >= REQUESTS_MAX {
                self.is_full.store(true, Ordering::SeqCst);
                // If requests ended before the store, no later end may report itself.
                if self.in_flight.load(Ordering::SeqCst) > REFILL {
                    return None;
                }
            }
            self.in_flight.fetch_add(1, Ordering::SeqCst);
            let next = (*unit, *page);
            *page += 1;
            if *page == unit.memory.pages() {
                queue.pop_front();
            }
            return Some(next);
        }
    }

    /// A request has ended. Returns whether the next ones are to be sent.
    pub fn end_one(&self) -> bool {
        let left = self.in_flight.fetch_sub(1, Ordering::SeqCst) - 1;
        left <= REFILL && self.is_full.swap(false, Ordering::SeqCst)
    }

    /// Forgets the waiting requests.
    pub fn clear(&self) {
        let all = std::mem::take(&mut *lock(&self.queue));
        drop(all);
    }
}
