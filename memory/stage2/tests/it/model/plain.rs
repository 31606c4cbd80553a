//! The expected content of the tables, kept without tables.

use lacuna_addr::{Gfn, GfnRange, Level, Pfn};
use lacuna_stage2::{Entry, EntryRef, Leaf, NotUniform, Removed, Split, Write};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Default)]
pub(crate) struct Model {
    /// Leaves by their first frame.
    pub(crate) leaves: BTreeMap<u64, Leaf>,
    pub(crate) rmap: BTreeMap<u64, EntryRef>,
    /// Blocks with a leaf table, also an empty one.
    pub(crate) tables: BTreeSet<u64>,
}

impl Model {
    pub(crate) fn find(&self, gfn: u64) -> Option<u64> {
        let (start, leaf) = self.leaves.range(..=gfn).next_back()?;
        (gfn < start + leaf.level.pages()).then_some(*start)
    }

    pub(crate) fn in_range(&self, range: GfnRange) -> Vec<u64> {
        let touches = |(start, leaf): &(&u64, &Leaf)| {
            **start < range.end_raw() && *start + leaf.level.pages() > range.start().get()
        };
        self.leaves
            .iter()
            .filter(touches)
            .map(|(start, _)| *start)
            .collect()
    }

    pub(crate) fn remove(&mut self, start: u64) -> Removed {
        let leaf = self.leaves.remove(&start).expect("a leaf");
        let at = self.rmap.remove(&start).expect("its place");
        Removed {
            gfn: gfn(start),
            at,
            leaf,
        }
    }

    /// Adds a new leaf that starts at `raw`, with its place.
    pub(crate) fn insert(&mut self, raw: u64, leaf: Leaf, at: EntryRef) {
        assert_eq!(EntryRef::from_bits(at.to_bits()), Some(at));
        assert!(
            !self.rmap.values().any(|other| *other == at),
            "{at:?} is used twice"
        );
        if leaf.level == Level::L4K {
            self.tables.insert(raw / 512);
        }
        self.rmap.insert(raw, at);
        self.leaves.insert(raw, leaf);
    }

    /// Replaces the 2 MiB leaf at `start` by 512 leaves; the first of them is at `first`.
    pub(crate) fn split(&mut self, start: u64, first: EntryRef) -> Split {
        let Removed {
            gfn: head, leaf, ..
        } = self.remove(start);
        assert_eq!(leaf.level, Level::L2M);
        self.tables.insert(start / 512);
        for i in 0..512 {
            let part = Leaf {
                pfn: Pfn::new(leaf.pfn.get() as u32 + i),
                level: Level::L4K,
                ..leaf
            };
            let page = start + u64::from(i);
            self.leaves.insert(page, part);
            self.rmap.insert(page, first.beside(gfn(page)));
        }
        Split {
            gfn: head,
            leaf,
            first,
        }
    }

    /// The blocks with a 2 MiB leaf that a range covers partly.
    pub(crate) fn cut_by(&self, range: GfnRange) -> Vec<u64> {
        let partly = |start: &u64| {
            self.leaves[start].level == Level::L2M
                && (*start < range.start().get() || start + 512 > range.end_raw())
        };
        self.in_range(range).into_iter().filter(partly).collect()
    }

    /// The leaf that can replace the table at `start`, or the first page that does not fit.
    pub(crate) fn whole(&self, start: u64, granted: Option<Leaf>) -> Result<Leaf, NotUniform> {
        let page = |i: u64| self.leaves.get(&(start + i)).copied();
        let error = |i: u64| NotUniform {
            gfn: gfn(start + i),
            found: page(i).map_or(Entry::Absent, Entry::Leaf),
        };
        let model = match (granted, page(0)) {
            (Some(leaf), _) => leaf,
            (None, Some(leaf)) if leaf.pfn.get() % 512 == 0 => leaf,
            (None, _) => return Err(error(0)),
        };
        let fits = |i: u64| match page(i) {
            None => granted.is_some(),
            Some(leaf) => {
                leaf.pfn.get() == model.pfn.get() + i
                    && (leaf.write == Write::Never) == (model.write == Write::Never)
            }
        };
        if let Some(i) = (0..512).find(|i| !fits(*i)) {
            return Err(error(i));
        }
        let all = || (0..512).filter_map(page).chain(granted);
        Ok(Leaf {
            write: all().map(|leaf| leaf.write).max().expect("some"),
            accessed: all().any(|leaf| leaf.accessed),
            dirty: all().any(|leaf| leaf.dirty),
            level: Level::L2M,
            ..model
        })
    }

    pub(crate) fn counts_leaves(&self) -> [u64; 3] {
        Level::ALL.map(|level| self.leaves.values().filter(|l| l.level == level).count() as u64)
    }
}

/// Each gfn has two possible frames, so some maps collide with another frame. D is preset only with
/// the first frame, so that walks must set it with the second.
pub(crate) fn leaf(gfn: u64, frame: u32, write: Write, level: Level) -> Leaf {
    let pfn = Pfn::new(((gfn % 4096) as u32 | frame << 20) & !(level.pages() as u32 - 1));
    Leaf {
        write,
        dirty: write == Write::Allowed && frame == 0,
        ..Leaf::clean(pfn).at(level)
    }
}

pub(crate) fn gfn(raw: u64) -> Gfn {
    Gfn::new(raw).expect("a frame below 2^36")
}

pub(crate) fn range(a: u64, b: u64) -> GfnRange {
    let (low, high) = (a.min(b), a.max(b));
    GfnRange::new(gfn(low), high - low + 1).expect("not empty")
}
