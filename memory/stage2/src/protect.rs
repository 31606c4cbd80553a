//! Write protection: the next write faults.

use crate::unmap::Removed;
use crate::{Cursor, Entry, EntryRef, Flush, Leaf, Write};
use lacuna_addr::{Gfn, GfnRange};

impl<'s> Cursor<'s> {
    /// Takes W, and with it D, from every leaf that maps a frame of `range`; of a 2 MiB leaf that
    /// reaches beyond it for all its frames, unless [`Cursor::cut`] has split it first. `protected`
    /// is told of each leaf that was writable, as it was: its D is in
    /// nobody's hands but yours. The MMU may still give W back on a fault. Until the flush is
    /// finished a vCPU may write through its TLB.
    ///
    /// # Panics
    /// When the cursor does not hold `range`.
    pub fn protect(&mut self, range: GfnRange, mut protected: impl FnMut(Removed)) -> Flush<'s> {
        self.assert_holds_all(range);
        let mut flush = self.flush();
        self.each_leaf(range, |at, gfn| {
            self.protect_leaf(at, gfn, |was: Removed| {
                flush.add_stale(was.leaf.span(was.gfn));
                protected(was);
            });
        });
        flush
    }

    #[inline]
    fn protect_leaf(&self, at: EntryRef, gfn: Gfn, protected: impl FnOnce(Removed)) {
        let old = self.stage2.update(at, gfn, |found| match found {
            Entry::Leaf(leaf) if leaf.is_writable() => Entry::Leaf(Leaf {
                write: Write::OnFault,
                dirty: false,
                ..leaf
            }),
            other => other,
        });
        if let Entry::Leaf(leaf) = old
            && leaf.is_writable()
        {
            protected(Removed { gfn, at, leaf });
        }
    }
}
