//! The choke point: every write to an entry, except the walker's A and D, is a `change`.

use crate::{Entry, EntryRef, Leaf, Stage2, format};
use core::sync::atomic::{AtomicU64, Ordering};
use lacuna_addr::{Gfn, Level};

/// How much is mapped, by leaf size, and by how many tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Leaves of 4 KiB, 2 MiB, 1 GiB.
    pub leaves: [u64; 3],
    /// Tables below the root.
    pub tables: u64,
}

impl Counts {
    /// Leaves of one level.
    pub const fn of(&self, level: Level) -> u64 {
        self.leaves[level as usize - 1]
    }

    /// Guest pages of 4 KiB that are mapped.
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

/// One stripe's share of the counts, written only under its lock, so that counting costs a fault no
/// shared cache line. A table linked under one stripe may be unlinked under another: shares wrap,
/// only their sum means something.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct StripeCounts {
    leaves: [AtomicU64; 3],
    tables: AtomicU64,
}

impl StripeCounts {
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
        // A load and a store, not a read-modify-write: the stripe is locked.
        counter.store(
            counter.load(Ordering::Relaxed).wrapping_add(step),
            Ordering::Relaxed,
        );
    }
}

impl Stage2 {
    /// Replaces `old` by `new` at `at`, under a cursor that holds `gfn`, one of the frames
    /// translated there. When the entry is not `old` any more, changes nothing and returns what it
    /// is: a walk has set A or D, or, in an upper table, another stripe linked a table first.
    ///
    /// # Panics
    /// When no situation makes the change right: a bug in the caller that must not reach a guest.
    #[inline]
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
        // Release: whoever walks to the new table or frame sees it zeroed and filled. Acquire on
        // removal is not needed: frames are reused after a shoot-down, which orders the guest's
        // accesses.
        let entry = self.entry(at);
        let (was, becomes) = (format::encode(old), format::encode(new));
        match entry.compare_exchange(was, becomes, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                let counts = self.counts_of(gfn);
                counts.count(old, 1u64.wrapping_neg());
                counts.count(new, 1);
                Ok(())
            }
            Err(seen) => Err(format::decode(seen)),
        }
    }

    /// [`Stage2::change`] of whatever is there to what `next` makes of it, however often a walk
    /// comes in between. Returns what was there.
    #[inline]
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

    #[inline]
    pub(crate) fn read(&self, at: EntryRef) -> Entry {
        format::decode(self.entry(at).load(Ordering::Acquire))
    }
}

/// Why `old` must not become `new`, whoever asks.
#[inline]
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
        (Entry::Table(_), Entry::Leaf(_)) => Some("a table must be unlinked before a leaf"),
        (Entry::Leaf(_), Entry::Table(_)) => Some("a leaf must be unmapped before a table"),
        (Entry::Table(_), Entry::Table(_)) => Some("a table must not replace a table"),
    }
}

/// Rights, A and D of a mapping may change, what it maps may not: a TLB that still holds the old
/// frame would be undetectable.
#[inline]
fn illegal_leaf(old: Leaf, new: Leaf) -> Option<&'static str> {
    if (old.pfn, old.level) != (new.pfn, new.level) {
        Some("a present leaf must be unmapped before its frame changes")
    } else if old.dirty && !new.dirty && new.is_writable() {
        Some("D must not be lost while W stays")
    } else {
        None
    }
}
