//! The cursor is the lock: to change a mapping, hold a cursor over its gfn; `Drop` unlocks.
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
//! A cursor holds range locks (see `lacuna_sync::RangeLocks`), each a set of 2 MiB blocks,
//! ascending, so two cursors cannot deadlock; a thread holds one cursor at a time. Under a cursor
//! nobody else changes an entry of its blocks, except a walk that sets A or D, and a repair that
//! gives W back to a 4 KiB leaf. The tables above a block are shared between range locks: they are
//! linked by compare-and-swap, and unlinked only under a cursor over all they span.

use crate::{Ept, Flush, Stage2, TableFormat};
use lacuna_addr::{Gfn, GfnRange};
use lacuna_sync::{InvalidateSeq, RangeGuard};

/// The right to change the mappings of a range.
#[must_use = "a cursor that is dropped at once locked nothing for anybody"]
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

    /// What it locks: whole, for [`Stage2::fault_cursor`], the block around the gfn.
    pub fn range(&self) -> GfnRange {
        self.range
    }

    /// Whether what was resolved after `snapshot`, taken for a gfn of this cursor's one block, may
    /// still be mapped: no invalidation near it is under way or has ended since.
    ///
    /// # Panics
    /// On a cursor made for a range: it has no one sequence.
    #[inline]
    #[must_use]
    pub fn invalidate_retry(&self, seq: InvalidateSeq) -> bool {
        match &self.guards {
            Guards::One(guard) => guard.invalidate_retry(seq),
            Guards::Many(_) => panic!("faults are admitted by a fault cursor"),
        }
    }

    /// An invalidation in this range begins: until its end no fault is admitted near it.
    pub fn invalidate_begin(&mut self) {
        self.for_each_guard(RangeGuard::invalidate_begin);
    }

    /// What others may have removed here and not waited for yet: nothing, unless an invalidation is
    /// in progress. Who finds nothing to unmap but must be sure that no TLB holds it asks before
    /// [`Cursor::invalidate_begin`], and finishes this.
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

    /// The invalidation that a cursor over the same range began has ended: its flush is finished.
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
