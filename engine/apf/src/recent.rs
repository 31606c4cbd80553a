//! Forward progress: pages that were made ready a moment ago.
//!
//! Between page-ready and the retry, reclaim may take the page again: the host is short of memory,
//! and the task that waits has not run yet. Another asynchronous fault could go the same way, and
//! so on for ever. So the second fault is a synchronous one, which holds its pages until the
//! instruction has retired.
//!
//! A retry that succeeds reports nothing, so the queue cannot know whether a page was retried. It
//! knows that a page which faults is among the last few made ready. Either reclaim took the page
//! before its retry, or memory is so short that a page comes and goes within a few faults. To
//! mistake the second case for the first costs one synchronous wait. With more memory, later pages
//! have pushed the entry out. The wait that an entry causes removes it.

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
