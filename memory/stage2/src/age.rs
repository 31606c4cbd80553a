//! Aging: whether a page was accessed since the last check.

use crate::{Cursor, Entry, EntryRef, Leaf, TableFormat};
use lacuna_addr::Gfn;

/// The result of aging.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Age {
    /// A was set: a walk has used the leaf since A was last cleared.
    Young,
    /// A leaf maps the page, and its A was clear.
    Old,
    /// No leaf maps the page.
    Absent,
}

impl<F: TableFormat> Cursor<'_, F> {
    /// Reads and clears A of the leaf that maps `gfn`. If that is a 2 MiB leaf, it has one A for
    /// the whole block.
    ///
    /// Pages are not flushed one by one. Instead end each *pass* with one shoot-down request, and
    /// do not wait for it. Without that request, hot pages look old: this call clears A; a vCPU
    /// continues to access the page through its TLB, which sets no A; the next pass finds A clear.
    ///
    /// # Panics
    /// If the cursor does not hold `gfn`.
    pub fn age(&mut self, gfn: Gfn) -> Age {
        self.assert_holds(gfn);
        match self.stage2.find(gfn) {
            Some(at) => self.age_at(at, gfn),
            None => Age::Absent,
        }
    }

    /// As [`Cursor::age`], without the walk: `at` is where `gfn` is mapped.
    ///
    /// # Panics
    /// If the cursor does not hold `gfn`; in debug builds also if `gfn` is not mapped at `at`.
    pub fn age_at(&mut self, at: EntryRef, gfn: Gfn) -> Age {
        self.assert_maps(at, gfn);
        let old = self.stage2.update(at, gfn, |found| match found {
            Entry::Leaf(leaf) => Entry::Leaf(Leaf {
                accessed: false,
                ..leaf
            }),
            other => other,
        });
        Age::of(old)
    }

    /// Reads A of the leaf that maps `gfn`, and does not change it.
    ///
    /// # Panics
    /// If the cursor does not hold `gfn`.
    pub fn test_young(&self, gfn: Gfn) -> Age {
        self.assert_holds(gfn);
        match self.stage2.find(gfn) {
            Some(at) => self.test_young_at(at, gfn),
            None => Age::Absent,
        }
    }

    /// As [`Cursor::test_young`], without the walk: `at` is where `gfn` is mapped.
    ///
    /// # Panics
    /// As [`Cursor::age_at`].
    pub fn test_young_at(&self, at: EntryRef, gfn: Gfn) -> Age {
        self.assert_maps(at, gfn);
        Age::of(self.stage2.read(at))
    }
}

impl Age {
    #[inline]
    fn of(entry: Entry) -> Self {
        match entry {
            Entry::Leaf(leaf) if leaf.accessed => Self::Young,
            Entry::Leaf(_) => Self::Old,
            _ => Self::Absent,
        }
    }
}
