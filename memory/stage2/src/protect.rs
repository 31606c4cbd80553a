//! Write protection: the next write faults.

use crate::unmap::Removed;
use crate::{Cursor, Flush, TableFormat};
use lacuna_addr::GfnRange;

impl<'s, F: TableFormat> Cursor<'s, F> {
    /// Clears W, and with it D, in every leaf that maps a frame of `runs`. A 2 MiB leaf that
    /// reaches beyond a run loses W and D for all its frames, unless [`Cursor::cut`] has split it
    /// first. A later write fault may set W again. Until the flush is finished, a vCPU may still
    /// write through its TLB.
    ///
    /// Calls `protected` with each previously writable leaf, with its W and D before the change.
    /// The caller must record that D: the entry has lost it.
    ///
    /// # Panics
    /// If the cursor does not hold `runs`.
    pub fn protect(
        &mut self,
        runs: impl IntoIterator<Item = GfnRange>,
        mut protected: impl FnMut(Removed),
    ) -> Flush<'s> {
        let mut flush = self.flush();
        self.each_leaf(runs, |at, gfn| {
            if let Some(leaf) = self.stage2.rearm(at, F::write_protected) {
                flush.add_stale(leaf.span(gfn));
                protected(Removed { gfn, at, leaf });
            }
        });
        flush
    }
}
