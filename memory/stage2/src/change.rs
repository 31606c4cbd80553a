//! The functions that change an entry of a linked table. They make only the changes below. A walk
//! makes one other change: it sets A and D.
//!
//! ```text
//!  Absent --> Leaf, Table, Frozen      Leaf --> Leaf of the same frames: other rights, A, D
//!  Leaf, Table --> Absent, Frozen      Frozen --> no change: its table was unlinked
//!  Leaf W D --> Leaf W     rearm only: it returns the D to its caller
//!  large Leaf --> Table    link_split only: the table is filled with the leaf's parts
//!  Table --> large Leaf    link_collapsed only: the table's leaves are the leaf's parts
//! ```

use crate::{Entry, EntryRef, Leaf, Stage2, TableFormat};
use lacuna_addr::{Gfn, GfnRange, Level, Pfn};
use lacuna_sync::shim::{AtomicU64, Ordering};
use lacuna_tables::{ENTRIES, Index, TableId};

/// What is mapped, by leaf size, and the number of tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// The numbers of leaves of 4 KiB, of 2 MiB, and of 1 GiB.
    pub leaves: [u64; 3],
    /// The number of tables below the root.
    pub tables: u64,
}

impl Counts {
    /// Leaves of one level.
    pub const fn of(&self, level: Level) -> u64 {
        self.leaves[level as usize - 1]
    }

    /// Mapped guest pages of 4 KiB.
    pub fn pages(&self) -> u64 {
        Level::ALL
            .iter()
            .map(|level| self.of(*level) * level.pages())
            .sum()
    }

    pub(crate) fn plus(self, other: Self) -> Self {
        let mut leaves = self.leaves;
        for (sum, more) in leaves.iter_mut().zip(other.leaves) {
            *sum = sum.wrapping_add(more);
        }
        Self {
            leaves,
            tables: self.tables.wrapping_add(other.tables),
        }
    }
}

/// One range lock's share of the counts. It is written only under that lock, so vCPUs that fault
/// under different locks do not write the same cache line. A table may be linked under one range
/// lock and unlinked under another. So a share may wrap around below zero; only the sum of all
/// shares has a meaning.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct RangeCounts {
    leaves: [AtomicU64; 3],
    tables: AtomicU64,
}

impl RangeCounts {
    pub(crate) fn read(&self) -> Counts {
        Counts {
            leaves: [0, 1, 2].map(|i| self.leaves[i].load(Ordering::Relaxed)),
            tables: self.tables.load(Ordering::Relaxed),
        }
    }

    #[inline]
    fn count(&self, entry: Entry, step: u64) {
        let counter = match entry {
            Entry::Leaf(leaf) => &self.leaves[leaf.level as usize - 1],
            Entry::Table(_) => &self.tables,
            Entry::Absent | Entry::Frozen => return,
        };
        // A load and a store, not a read-modify-write: the range lock is held.
        counter.store(
            counter.load(Ordering::Relaxed).wrapping_add(step),
            Ordering::Relaxed,
        );
    }
}

impl<F: TableFormat> Stage2<F> {
    /// Replaces `old` by `new` at `at`. The caller has a cursor that holds `gfn`, one of the guest
    /// frames that the entry translates. If the entry is no longer `old`, changes nothing and
    /// returns the current entry. That happens if a walk has set A or D. In an upper table it also
    /// happens if a cursor with another range lock has linked a table first.
    ///
    /// # Panics
    /// If the change is illegal. That is a bug in the caller: a panic is better than a wrong
    /// mapping.
    #[inline(always)]
    pub(crate) fn change(
        &self,
        at: EntryRef,
        gfn: Gfn,
        old: Entry,
        new: Entry,
    ) -> Result<(), Entry> {
        if let Some(wrong) = illegal(old, new) {
            panic!("stage-2 entry of gfn {gfn}: {wrong} ({old:?} -> {new:?})");
        }
        self.replace(at, gfn, old, new)
    }

    /// Replaces `leaf`, which maps `span`, by `table`: fills the table with the parts of the leaf,
    /// then links it at `at`. No other thread knows `table` yet. If a walk has set A or D since the
    /// caller read `leaf`, links nothing and returns the current entry. The caller may then call
    /// again with the same table.
    pub(crate) fn link_split(
        &self,
        at: EntryRef,
        span: GfnRange,
        leaf: Leaf,
        table: TableId,
    ) -> Result<(), Entry> {
        let small = leaf.level.smaller().expect("no 4 KiB leaf is split");
        for (part, gfn) in EntryRef::parts(table, span, small) {
            // Relaxed: the exchange below publishes the table.
            self.entry(part).store(
                F::encode(Entry::Leaf(leaf.part(gfn, small))),
                Ordering::Relaxed,
            );
        }
        let gfn = span.start();
        self.replace(at, gfn, Entry::Leaf(leaf), Entry::Table(table))?;
        let counts = self.counts_of(gfn);
        counts.count(Entry::Leaf(leaf.part(gfn, small)), ENTRIES as u64);
        Ok(())
    }

    /// Replaces `table` at `at` by `leaf`, which maps `span`. Each entry of the table maps the
    /// frame that `leaf` maps there, or nothing. The counts still contain the table's leaves: the
    /// caller must freeze each entry next, or call `forget_leaves`.
    pub(crate) fn link_collapsed(&self, at: EntryRef, span: GfnRange, table: TableId, leaf: Leaf) {
        let small = leaf.level.smaller().expect("a large leaf");
        assert_eq!(leaf.defect(), None, "{leaf:?} at {span:?}");
        debug_assert!(
            EntryRef::parts(table, span, small).all(|(part, gfn)| {
                match self.read(part) {
                    Entry::Absent => true,
                    Entry::Leaf(child) => {
                        // W is not compared. A fast page fault may have set it after the caller
                        // read this entry; freezing the entry returns that W, and the caller adds
                        // it to `leaf`.
                        child.pfn == leaf.frame_of(gfn) && leaf.exec >= child.exec
                    }
                    Entry::Table(_) | Entry::Frozen => false,
                }
            }),
            "{leaf:?} does not map {span:?} as its table does"
        );
        self.replace(at, span.start(), Entry::Table(table), Entry::Leaf(leaf))
            .expect("only a cursor over all that it spans unlinks the table");
    }

    /// Removes the 512 leaves of `block` from the counts. Their table was unlinked by
    /// `link_collapsed`, so until it is freed only walks inside it change its entries: they set A
    /// and D.
    pub(crate) fn forget_leaves(&self, block: GfnRange) {
        let leaf = Entry::Leaf(Leaf::clean(Pfn::new(0)));
        let counts = self.counts_of(block.start());
        counts.count(leaf, block.pages().wrapping_neg());
    }

    /// Exchanges the entry and updates the counts. The caller has checked that the change is legal.
    #[inline(always)]
    fn replace(&self, at: EntryRef, gfn: Gfn, old: Entry, new: Entry) -> Result<(), Entry> {
        // Release: a walk that reaches the new table or frame sees it zeroed and filled. A removal
        // needs no acquire: frames are reused after a shoot-down, which orders the guest's
        // accesses.
        let entry = self.entry(at);
        let (was, becomes) = (F::encode(old), F::encode(new));
        match entry.compare_exchange(was, becomes, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                // A leaf that replaces a leaf has the same size.
                if !matches!((old, new), (Entry::Leaf(_), Entry::Leaf(_))) {
                    let counts = self.counts_of(gfn);
                    counts.count(old, 1u64.wrapping_neg());
                    counts.count(new, 1);
                }
                Ok(())
            }
            Err(seen) => Err(F::decode(seen)),
        }
    }

    /// Replaces the current entry by `next` of it, as [`Stage2::change`] does. If a walk changes
    /// the entry before the exchange, calls `next` again, with the new value. Returns the replaced
    /// entry.
    #[inline(always)]
    pub(crate) fn update(
        &self,
        at: EntryRef,
        gfn: Gfn,
        mut next: impl FnMut(Entry) -> Entry,
    ) -> Entry {
        let mut old = self.read(at);
        loop {
            let new = next(old);
            if new == old {
                return old;
            }
            match self.change(at, gfn, old, new) {
                Ok(()) => return old,
                Err(seen) => old = seen,
            }
        }
    }

    /// Rearms the leaf at `at` if it is writable, so that the next write is detected: `rearmed` is
    /// [`F::write_protected`] or [`F::dirty_cleared`]. Returns the old leaf, or `None` if nothing
    /// had to change. Only this function clears D and leaves W. The caller must report that D to
    /// the host.
    ///
    /// It changes the raw bits: a harvest calls it for every dirty page, and decoding and encoding
    /// an entry costs more than the exchange.
    #[inline]
    pub(crate) fn rearm(&self, at: EntryRef, rearmed: impl Fn(u64) -> u64) -> Option<Leaf> {
        let entry = self.entry(at);
        let mut old = entry.load(Ordering::Acquire);
        loop {
            let new = rearmed(old);
            if !F::is_writable_leaf(old) || new == old {
                return None;
            }
            match entry.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => match F::decode(old) {
                    Entry::Leaf(leaf) => return Some(leaf),
                    _ => unreachable!("a writable leaf is a leaf"),
                },
                Err(seen) => old = seen,
            }
        }
    }

    /// Changes rights, A or D of a leaf without a cursor. Returns whether the entry was `old`.
    pub(crate) fn exchange(&self, at: EntryRef, old: Entry, new: Entry, order: Ordering) -> bool {
        debug_assert_eq!(illegal(old, new), None, "{old:?} -> {new:?}");
        old == new
            || self
                .entry(at)
                .compare_exchange(F::encode(old), F::encode(new), order, Ordering::Relaxed)
                .is_ok()
    }

    /// The table of entry `index` in `table`; `None` if the entry is not a table pointer. Faster
    /// than [`Stage2::read`] where the entry is nearly always a table pointer.
    #[inline(always)]
    pub(crate) fn read_table(&self, table: TableId, index: Index) -> Option<TableId> {
        F::table(self.arena.entry(table, index).load(Ordering::Acquire))
    }

    #[inline(always)]
    pub(crate) fn read(&self, at: EntryRef) -> Entry {
        F::decode(self.entry(at).load(Ordering::Acquire))
    }
}

/// Why `old` must never become `new`; `None` if it may.
#[inline(always)]
fn illegal(old: Entry, new: Entry) -> Option<&'static str> {
    if let Entry::Leaf(leaf) = new
        && let Some(defect) = leaf.defect()
    {
        return Some(defect);
    }
    match (old, new) {
        (Entry::Absent, Entry::Leaf(_) | Entry::Table(_) | Entry::Frozen)
        | (Entry::Leaf(_) | Entry::Table(_), Entry::Absent | Entry::Frozen) => None,
        (Entry::Leaf(old), Entry::Leaf(new)) => illegal_leaf(old, new),
        (Entry::Frozen, _) => Some("a frozen entry belongs to a dead table"),
        (Entry::Absent, Entry::Absent) => Some("no change"),
        (Entry::Table(_), Entry::Leaf(_)) => Some("a table must be unlinked or collapsed"),
        (Entry::Leaf(_), Entry::Table(_)) => Some("a leaf must be unmapped or split"),
        (Entry::Table(_), Entry::Table(_)) => Some("a table must not replace a table"),
    }
}

/// Rights, A and D of a mapping may change, but not its frame: such a change adds nothing to a
/// flush, so a TLB could keep the old frame.
#[inline(always)]
fn illegal_leaf(old: Leaf, new: Leaf) -> Option<&'static str> {
    if (old.pfn, old.level) != (new.pfn, new.level) {
        Some("a present leaf must be unmapped before its frame changes")
    } else if old.dirty && !new.dirty && new.is_writable() {
        Some("D must not be lost while W stays")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::illegal;
    use crate::{Entry, Leaf, Write};
    use lacuna_addr::{Level, Pfn};
    use lacuna_tables::TableId;

    const TABLE: Entry = Entry::Table(TableId::new(1).expect("not zero"));

    fn refused(old: Entry, new: Entry) -> bool {
        illegal(old, new).is_some()
    }

    #[test]
    fn only_split_and_collapse_exchange_a_table_and_a_leaf() {
        let large = Entry::Leaf(Leaf::clean(Pfn::new(512)).at(Level::L2M));
        assert!(refused(large, TABLE) && refused(TABLE, large));
        assert!(refused(TABLE, TABLE));
        for gone in [Entry::Absent, Entry::Frozen] {
            assert!(!refused(large, gone) && !refused(TABLE, gone));
            assert!(refused(Entry::Frozen, gone), "a dead table stays dead");
        }
    }

    #[test]
    fn a_leaf_keeps_its_frames_and_its_d() {
        let dirty = Leaf::dirty(Pfn::new(512));
        let clean = Leaf {
            dirty: false,
            ..dirty
        };
        let protected = Leaf {
            write: Write::OnFault,
            ..clean
        };
        let of = |old: Leaf, new: Leaf| refused(Entry::Leaf(old), Entry::Leaf(new));
        assert!(of(dirty, clean), "D must not go while W stays");
        assert!(!of(dirty, protected) && !of(clean, dirty));
        assert!(of(
            clean,
            Leaf {
                pfn: Pfn::new(1),
                ..clean
            }
        ));
        assert!(of(clean, clean.at(Level::L2M)), "a leaf keeps its size");
    }
}
