//! Forward progress: the pages that were made ready last.
//!
//! The race: a page is made ready; before the waiting task runs, reclaim takes the page again; the
//! task retries and faults. If that fault is asynchronous too, the same can happen again, for ever.
//! So it is synchronous. A synchronous fault pins its pages until the instruction has retired.
//!
//! A retry that succeeds reports nothing, so the queue cannot know whether a page was retried. It
//! knows only that a faulting page is among the last ones made ready. Two cases look alike: reclaim
//! took the page before its retry; or after it, because memory is so short that a page arrives and
//! is evicted within a few faults. In the second case the rule costs one synchronous wait.
//!
//! An entry goes when a fault has waited for its page, or when later pages have pushed it out.

use lacuna_addr::Gfn;
use std::collections::VecDeque;

/// The number of pages kept. At most so many are in flight, so that many ready pages may wait for
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
