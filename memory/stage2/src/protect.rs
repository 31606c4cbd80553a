//! Write protection: the next write faults.

use crate::format::Height;
use crate::unmap::Removed;
use crate::{Cursor, Entry, EntryRef, Flush, Leaf, Write};
use lacuna_addr::{Gfn, GfnRange};
use lacuna_tables::TableId;

impl<'s> Cursor<'s> {
    /// Takes W, and with it D, from every leaf that maps a frame of `range`, also one that reaches
    /// beyond it. `protected` is told of each leaf that was writable, as it was: its D is in
    /// nobody's hands but yours. The MMU may still give W back on a fault. Until the flush is
    /// finished a vCPU may write through its TLB.
    ///
    /// # Panics
    /// When the cursor does not hold `range`.
    pub fn protect(&mut self, range: GfnRange, mut protected: impl FnMut(Removed)) -> Flush<'s> {
        self.assert_holds_all(range);
        let mut flush = self.flush();
        self.protect_table(self.stage2.root, Height::ROOT, range, &mut |was| {
            flush.add_stale();
            protected(was);
        });
        flush
    }

    fn protect_table(
        &self,
        table: TableId,
        height: Height,
        range: GfnRange,
        protected: &mut dyn FnMut(Removed),
    ) {
        for (index, span) in height.entries(range.start(), range) {
            let at = EntryRef::new(table, index);
            match self.stage2.read(at) {
                Entry::Table(below) => {
                    let part = range
                        .intersect(span)
                        .expect("entries() yields what overlaps");
                    self.protect_table(below, height.below(), part, protected);
                }
                Entry::Leaf(_) => self.protect_leaf(at, span.start(), protected),
                Entry::Absent => {}
                Entry::Frozen => unreachable!("a frozen entry in a linked table"),
            }
        }
    }

    fn protect_leaf(&self, at: EntryRef, gfn: Gfn, protected: &mut dyn FnMut(Removed)) {
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
