//! Forward progress: the last pages made ready.
//!
//! The race: a page is made ready; before the waiting task runs, reclaim takes the page again; the
//! task retries and faults. If that fault is asynchronous too, the race can repeat for ever. So
//! that fault is synchronous. A synchronous fault pins its pages until the instruction has retired.
//!
//! A successful retry reports nothing, so the queue knows only that a faulting page is among the
//! last ones made ready. Two cases look alike: reclaim took the page before its retry; or after it,
//! because memory is so short that a page arrives and is evicted within a few faults. In the second
//! case the rule costs one synchronous wait.
//!
//! An entry is removed when a fault has waited for its page, or when later pages push it out.

use lacuna_addr::Gfn;
use std::collections::VecDeque;

/// The number of pages kept. So many pages may be in flight, and so many ready pages may wait for
/// their retry.
const KEPT: usize = crate::QUEUED_MAX;

/// The last [`KEPT`] pages made ready, oldest first.
pub(crate) struct Recent(VecDeque<Gfn>);

impl Recent {
    pub fn new() -> Self {
        Self(VecDeque::with_capacity(KEPT))
    }

    pub fn push(&mut self, gfn: Gfn) {
        if self.0.len() == KEPT {
            self.0.pop_front();
        }
        self.0.push_back(gfn);
    }

    /// Removes `gfn`; returns whether it was there.
    pub fn take(&mut self, gfn: Gfn) -> bool {
        let at = self.0.iter().position(|&kept| kept == gfn);
        at.is_some_and(|at| self.0.remove(at).is_some())
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }

    pub fn contains(&self, gfn: Gfn) -> bool {
        self.0.contains(&gfn)
    }
}
