//! Forward progress: pages that were made ready a moment ago.
//!
//! Between page-ready and the retry the page may be taken away again: the host is short of memory,
//! and the task that waits has not run yet. Faulting asynchronously once more could go on like that
//! for ever. So the second fault is a synchronous one: that way holds pages until the instruction
//! has retired.
//!
//! A vCPU that retries with success never tells, so "not retried since" cannot be known. What can
//! be known is enough: a page is among the last few made ready here, and faults. Either it was
//! taken before its retry, or memory is so short that a page comes and goes within a few faults.
//! The price of taking the second for the first is one synchronous wait; with more memory the entry
//! has long been pushed out. An entry is used up by the wait that it causes.

use lacuna_addr::Gfn;
use std::collections::VecDeque;

/// As many as can be in flight: ready pages of which none has been retried yet.
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

    /// Whether `gfn` is one of them; not any more, if so.
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
