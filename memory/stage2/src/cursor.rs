//! The cursor is the lock: a mapping is changed only under a cursor over its gfn; `Drop` unlocks.
//!
//! ```text
//! fault          s = invalidate_seq(gfn)  find the slot, resolve the page (no lock)
//!                c = fault_cursor(gfn)    c.invalidate_retry(s)?  yes -> drop, start again
//!                p = c.prepare(gfn, leaf)?    p.commit()    drop
//! invalidation   c = cursor(range)    c.invalidate_begin()    flush = c.unmap(range, ..)    drop
//!                flush.finish(qsbr)     <- no lock is held while vCPUs are waited for
//!                c = cursor(range)    c.invalidate_end()    drop    now the frames may be reused
//! ```
//!
//! A cursor holds range locks (see `lacuna_sync::RangeLocks`), each of a set of 2 MiB blocks, taken
//! in ascending order. A thread holds one cursor at a time. So two cursors cannot deadlock. Under a
//! cursor no other thread changes an entry of its blocks, with two exceptions: a walk sets A or D,
//! and a fast page fault sets W in a 4 KiB leaf. The tables above a block are shared between range
//! locks: they are linked by compare-and-swap, and unlinked only under a cursor over all that they
//! span. A 1 GiB leaf is mapped, split and unmapped only under a cursor over all of it (`gib`).

use crate::{Ept, Flush, Stage2, TableFormat};
use lacuna_addr::{Gfn, GfnRange};
use lacuna_sync::{InvalidateSeq, RangeGuard};

/// The right to change the mappings of a range.
#[must_use = "a cursor that is dropped at once protects nothing"]
pub struct Cursor<'s, F = Ept> {
    pub(crate) stage2: &'s Stage2<F>,
    range: GfnRange,
    guards: Guards<'s>,
}

/// The locks. One block, the fault path's case, needs no allocation.
pub(crate) enum Guards<'s> {
    One(RangeGuard<'s>),
    Many(Vec<RangeGuard<'s>>),
}

impl<'s, F: TableFormat> Cursor<'s, F> {
    #[inline]
    pub(crate) fn new(stage2: &'s Stage2<F>, range: GfnRange, guards: Guards<'s>) -> Self {
        Self {
            stage2,
            range,
            guards,
        }
    }

    /// The range that it locks; for [`Stage2::fault_cursor`] the block around the gfn.
    pub fn range(&self) -> GfnRange {
        self.range
    }

    /// Whether the fault must be retried: an invalidation near it is in progress, or has ended
    /// since `seq` was read: by [`Stage2::invalidate_seq`] for a gfn of a fault cursor's block, or
    /// by [`Stage2::invalidate_seq_of`] for the cursor's range.
    #[inline]
    #[must_use]
    pub fn invalidate_retry(&self, seq: InvalidateSeq) -> bool {
        match &self.guards {
            Guards::One(guard) => guard.invalidate_retry(seq),
            Guards::Many(guards) => RangeGuard::any_invalidate_retry(guards, seq),
        }
    }

    /// Begins an invalidation of this range: until it ends, faults near it must retry.
    pub fn invalidate_begin(&mut self) {
        self.for_each_guard(RangeGuard::invalidate_begin);
    }

    /// A flush for pages that other threads may have unmapped here without a wait so far. It is
    /// empty unless an invalidation is in progress. A caller that unmaps nothing, but must be sure
    /// that no TLB holds the range, calls this before [`Cursor::invalidate_begin`] and finishes the
    /// flush.
    pub fn unsettled(&self) -> Flush<'s> {
        let mut flush = self.flush();
        let in_progress = match &self.guards {
            Guards::One(guard) => guard.invalidate_in_progress(),
            Guards::Many(guards) => guards.iter().any(RangeGuard::invalidate_in_progress),
        };
        if in_progress {
            flush.add_stale(self.range);
        }
        flush
    }

    /// Ends the invalidation that a cursor over the same range began; its flush must be finished.
    pub fn invalidate_end(&mut self) {
        self.for_each_guard(RangeGuard::invalidate_end);
    }

    fn for_each_guard(&mut self, mut act: impl FnMut(&mut RangeGuard<'s>)) {
        match &mut self.guards {
            Guards::One(guard) => act(guard),
            Guards::Many(guards) => guards.iter_mut().for_each(act),
        }
    }

    pub(crate) fn flush(&self) -> Flush<'s> {
        Flush::none(self.stage2)
    }

    #[track_caller]
    #[inline]
    pub(crate) fn assert_holds(&self, gfn: Gfn) {
        assert!(
            self.range.contains(gfn),
            "gfn {gfn} is outside the cursor's {:?}",
            self.range
        );
    }

    #[track_caller]
    pub(crate) fn assert_holds_all(&self, range: GfnRange) {
        assert!(
            self.range.intersect(range) == Some(range),
            "{range:?} is not inside the cursor's {:?}",
            self.range
        );
    }
}
