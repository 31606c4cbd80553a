//! Reads all tables and asserts their invariants. Tests, the simulator and fuzzers call it after
//! each step.

use crate::format::Height;
use crate::{Counts, Cursor, Entry, EntryRef, Leaf, Stage2, TableFormat};
use lacuna_addr::{Gfn, GfnRange, Level};
use lacuna_sync::lock;
use lacuna_tables::TableId;
use std::collections::HashSet;

struct Census<'a, F, Each> {
    stage2: &'a Stage2<F>,
    seen: HashSet<TableId>,
    counts: Counts,
    each: Each,
}

impl<F: TableFormat> Stage2<F> {
    /// Takes every range lock: until the cursor is dropped, no other thread maps or unmaps.
    pub fn cursor_of_all(&self) -> Cursor<'_, F> {
        self.cursor(everything())
    }

    /// [`Cursor::verify`], with every range lock held.
    ///
    /// # Panics
    /// As [`Cursor::verify`].
    pub fn verify(&self) -> Counts {
        self.cursor_of_all().verify(|_, _| {})
    }
}

impl<F: TableFormat> Cursor<'_, F> {
    /// Asserts that
    /// * every leaf is valid, and has the level of its table's height;
    /// * no entry is frozen;
    /// * every table is reachable exactly once, or deposited for a 1 GiB leaf, or unlinked and
    ///   waiting for a shoot-down;
    /// * the running counts are right.
    ///
    /// Calls `each` with each leaf and its first frame, and returns the counts. They stay right
    /// until the cursor is dropped. Walks may continue meanwhile.
    ///
    /// # Panics
    /// If one of these does not hold, or if the cursor is not from [`Stage2::cursor_of_all`].
    pub fn verify(&self, each: impl FnMut(Gfn, Leaf)) -> Counts {
        let everything = everything();
        self.assert_holds_all(everything);
        let mut census = Census {
            stage2: self.stage2,
            seen: HashSet::new(),
            counts: Counts::default(),
            each,
        };
        census.visit(self.stage2.root, Height::ROOT, everything);
        assert_eq!(
            census.counts,
            self.stage2.counts(),
            "the entries found and the running counts differ"
        );
        let deposits = lock(&self.stage2.deposits).len();
        assert_eq!(
            deposits as u64,
            census.counts.of(Level::L1G),
            "1 GiB leaves and deposited tables differ"
        );
        assert_eq!(
            census.seen.len() + deposits,
            self.stage2.arena.usage().in_use as usize,
            "tables that are in use and tables that can be reached differ"
        );
        census.counts
    }
}

impl<F: TableFormat, Each: FnMut(Gfn, Leaf)> Census<'_, F, Each> {
    fn visit(&mut self, table: TableId, height: Height, span: GfnRange) {
        assert!(self.seen.insert(table), "{table:?} is linked twice");
        for (index, span) in height.entries(span.start(), span) {
            match self.stage2.read(EntryRef::new(table, index)) {
                Entry::Absent => {}
                Entry::Table(below) => {
                    self.counts.tables += 1;
                    self.visit(below, height.below(), span);
                }
                Entry::Leaf(leaf) => {
                    assert_eq!(
                        height.leaf_level(),
                        Some(leaf.level),
                        "{leaf:?} at {span:?}"
                    );
                    assert_eq!(leaf.defect(), None, "{leaf:?} at {span:?}");
                    self.counts.leaves[leaf.level as usize - 1] += 1;
                    (self.each)(span.start(), leaf);
                }
                Entry::Frozen => panic!("a frozen entry in a linked table, at {span:?}"),
            }
        }
    }
}

fn everything() -> GfnRange {
    let first = Gfn::new(0).expect("zero is a frame");
    let (_, entry) = Height::ROOT
        .entries(first, GfnRange::page(first))
        .next()
        .expect("an entry");
    GfnRange::new(first, entry.pages() * lacuna_tables::ENTRIES as u64).expect("48 bits")
}
