//! The operations, each applied to the tables and to the model.

use super::Op;
use super::plain::{Model, gfn, leaf, range};
use lacuna_addr::{Access, GfnRange, Level};
use lacuna_stage2::{
    Age, Arena, Cause, Counts, Entry, Leaf, LookupLevel, MapError, Mapped, Removed, Stage2,
    TableFormat, Walk, Write,
};
use lacuna_sync::Qsbr;

pub(crate) struct Fixture<F> {
    pub(crate) stage2: Stage2<F>,
    pub(crate) model: Model,
    pub(crate) no_vcpu: Qsbr,
}

impl<F: TableFormat> Fixture<F> {
    pub(crate) fn new() -> Self {
        let stage2 = Stage2::with_format(Arena::new(64).expect("address space")).expect("a root");
        Self {
            stage2,
            model: Model::default(),
            no_vcpu: Qsbr::new(1),
        }
    }

    pub(crate) fn step(&mut self, op: Op) {
        match op {
            Op::Map { gfn, frame, write } => self.map(gfn, leaf(gfn, frame, write, Level::L4K)),
            Op::MapLarge { gfn, frame, write } => {
                let gfn = gfn & !511;
                self.map(gfn, leaf(gfn, frame, write, Level::L2M));
            }
            Op::Fill { gfn, frame, write } => {
                for gfn in gfn & !511..=gfn | 511 {
                    self.map(gfn, leaf(gfn, frame, write, Level::L4K));
                }
            }
            Op::Split { gfn } => self.split(gfn),
            Op::Collapse { gfn } => self.collapse(gfn, None),
            Op::CollapseTo { gfn, frame, write } => {
                self.collapse(gfn, Some(leaf(gfn & !511, frame, write, Level::L2M)));
            }
            Op::Unmap { a, b } => self.unmap(range(a, b)),
            Op::CutAndUnmap { a, b } => {
                self.cut(range(a, b));
                self.unmap(range(a, b));
            }
            Op::CutAndProtect { a, b } => {
                self.cut(range(a, b));
                self.protect(range(a, b));
            }
            Op::TestYoung { gfn } => self.test_young(gfn),
            Op::UnmapPage { gfn } => self.unmap_page(gfn),
            Op::UnmapAt { gfn } => self.unmap_at(gfn),
            Op::Protect { a, b } => self.protect(range(a, b)),
            Op::ClearDirty { a, b } => self.clear_dirty(range(a, b)),
            Op::PresetDirty { a, b } => self.preset_dirty(range(a, b)),
            Op::FastPageFault { gfn } => self.fast_page_fault(gfn),
            Op::Age { gfn } => self.age(gfn),
            Op::Walk { gfn, access } => self.walk(gfn, access),
        }
        let counts: Counts = self.stage2.verify();
        assert_eq!(counts.leaves, self.model.counts_leaves());
        let usage = self.stage2.arena().usage();
        assert_eq!(
            (usage.detached, usage.limbo),
            (0, 0),
            "every flush was finished"
        );
    }

    fn map(&mut self, raw: u64, leaf: Leaf) {
        let result = self.stage2.fault_cursor(gfn(raw)).map(gfn(raw), leaf);
        let Some(start) = self.model.find(raw) else {
            return self.map_new(raw, leaf, result);
        };
        let old = self.model.leaves[&start];
        let same_frame = old.pfn.get() + (raw - start) == leaf.pfn.get();
        if !same_frame || old.level < leaf.level {
            let table = old.level < leaf.level;
            let Err(MapError::Occupied { gfn: at, found, .. }) = result else {
                panic!("{result:?}")
            };
            assert_eq!(at, gfn(raw));
            match found {
                Entry::Table(_) => assert!(table),
                found => assert_eq!(found, Entry::Leaf(old)),
            }
            return;
        }
        let at = match result {
            Ok(Mapped::Split(at)) => {
                assert!(
                    leaf.level < old.level && leaf.write > old.write,
                    "{old:?} does as well"
                );
                let _ = self.model.split(start, at.beside(gfn(start)));
                self.model.rmap[&raw]
            }
            _ => self.model.rmap[&start],
        };
        let start = self.model.find(raw).expect("still mapped");
        let old = self.model.leaves[&start];
        let both = Leaf {
            write: old.write.max(leaf.write),
            dirty: old.dirty || leaf.dirty,
            accessed: true,
            ..old
        };
        match result {
            Ok(Mapped::Split(_)) => {}
            Ok(Mapped::Spurious(_)) => assert_eq!(both, old),
            Ok(Mapped::Upgraded(_)) => {
                assert_ne!(both, old);
                assert!(leaf.level == old.level || leaf.write <= old.write);
            }
            _ => panic!("{result:?}"),
        }
        assert_eq!(result.map(Mapped::at), Ok(at));
        self.model.leaves.insert(start, both);
    }

    fn map_new(&mut self, raw: u64, leaf: Leaf, result: Result<Mapped, MapError>) {
        if leaf.level == Level::L2M && self.model.tables.contains(&(raw / 512)) {
            let is_table = matches!(
                result,
                Err(MapError::Occupied {
                    found: Entry::Table(_),
                    ..
                })
            );
            assert!(is_table, "{result:?}");
            return;
        }
        let Ok(Mapped::New(at)) = result else {
            panic!("{result:?}")
        };
        self.model.insert(raw, leaf, at);
    }

    fn split(&mut self, raw: u64) {
        let result = self.stage2.fault_cursor(gfn(raw)).split(gfn(raw));
        let split = result.expect("room for a table");
        match self.model.find(raw) {
            Some(start) if self.model.leaves[&start].level == Level::L2M => {
                let split = split.expect("a 2 MiB leaf");
                assert_eq!(self.model.split(start, split.first), split);
            }
            _ => assert_eq!(split, None),
        }
    }

    fn cut(&mut self, range: GfnRange) {
        let mut splits = Vec::new();
        let done = self
            .stage2
            .cursor(range)
            .cut(range, |split| splits.push(split));
        assert_eq!(done, Ok(()));
        let expected = self.model.cut_by(range);
        assert_eq!(splits.len(), expected.len());
        for (split, start) in splits.into_iter().zip(expected) {
            assert_eq!(self.model.split(start, split.first), split);
        }
        assert_eq!(self.model.cut_by(range), []);
    }

    fn collapse(&mut self, raw: u64, granted: Option<Leaf>) {
        let start = raw & !511;
        let mut cursor = self.stage2.fault_cursor(gfn(raw));
        let result = match granted {
            Some(leaf) => cursor.collapse_to(gfn(raw), leaf),
            None => cursor.collapse(gfn(raw)),
        };
        drop(cursor);
        if !self.model.tables.contains(&(raw / 512)) {
            assert!(matches!(result, Ok(None)));
            return;
        }
        let (expected, result) = (self.model.whole(start, granted), result.map(Option::unwrap));
        let (collapsed, flush) = match (expected, result) {
            (Err(expected), Err(error)) => return assert_eq!(error, expected),
            (Ok(leaf), Ok((collapsed, flush))) => {
                assert_eq!((collapsed.gfn, collapsed.leaf), (gfn(start), leaf));
                (collapsed, flush)
            }
            (expected, result) => panic!("{expected:?}, but {:?}", result.map(|(c, _)| c)),
        };
        assert!(!flush.is_empty() && !flush.must_wait());
        flush.retire(&self.no_vcpu);
        for page in start..start + 512 {
            self.model.leaves.remove(&page);
            self.model.rmap.remove(&page);
        }
        self.model.tables.remove(&(raw / 512));
        self.model.insert(start, collapsed.leaf, collapsed.at);
    }

    fn test_young(&mut self, raw: u64) {
        let expected = match self.model.find(raw).map(|start| self.model.leaves[&start]) {
            None => Age::Absent,
            Some(leaf) if leaf.accessed => Age::Young,
            Some(_) => Age::Old,
        };
        let cursor = self.stage2.fault_cursor(gfn(raw));
        assert_eq!(cursor.test_young(gfn(raw)), expected);
    }

    pub(crate) fn unmap(&mut self, range: GfnRange) {
        let mut removed = Vec::new();
        let flush = self.stage2.cursor(range).unmap(range, |r| removed.push(r));
        let expected: Vec<_> = self
            .model
            .in_range(range)
            .into_iter()
            .map(|start| self.model.remove(start))
            .collect();
        assert_eq!(removed, expected);
        self.model.tables.retain(|block| {
            range.start().get() > block * 512 || range.end_raw() < (block + 1) * 512
        });
        flush.finish(&self.no_vcpu);
    }

    fn unmap_page(&mut self, raw: u64) {
        let expected = self.model.find(raw).map(|start| self.model.remove(start));
        let result = self.stage2.fault_cursor(gfn(raw)).unmap_page(gfn(raw));
        assert_eq!(result.as_ref().map(|(removed, _)| *removed), expected);
        if let Some((_, flush)) = result {
            assert!(!flush.is_empty());
            flush.finish(&self.no_vcpu);
        }
    }

    fn unmap_at(&mut self, raw: u64) {
        let Some(start) = self.model.find(raw) else {
            return;
        };
        let at = self.model.rmap[&start];
        let expected = self.model.remove(start);
        let result = self.stage2.fault_cursor(gfn(raw)).unmap_at(at, gfn(raw));
        let (removed, flush) = result.expect("it is mapped there");
        assert_eq!(removed, expected);
        flush.finish(&self.no_vcpu);
    }

    fn protect(&mut self, range: GfnRange) {
        let mut protected = Vec::new();
        let flush = self
            .stage2
            .cursor(range)
            .protect([range], |was| protected.push(was));
        let mut expected = Vec::new();
        for start in self.model.in_range(range) {
            let leaf = self.model.leaves.get_mut(&start).expect("a leaf");
            if leaf.is_writable() {
                let at = self.model.rmap[&start];
                expected.push(Removed {
                    gfn: gfn(start),
                    at,
                    leaf: *leaf,
                });
                *leaf = Leaf {
                    write: Write::OnFault,
                    dirty: false,
                    ..*leaf
                };
            }
        }
        assert_eq!(protected, expected);
        assert_eq!(flush.is_empty(), expected.is_empty());
        flush.finish(&self.no_vcpu);
    }

    fn age(&mut self, raw: u64) {
        let expected = match self.model.find(raw) {
            None => Age::Absent,
            Some(start) => {
                let leaf = self.model.leaves.get_mut(&start).expect("a leaf");
                let young = std::mem::replace(&mut leaf.accessed, false);
                if young { Age::Young } else { Age::Old }
            }
        };
        assert_eq!(self.stage2.fault_cursor(gfn(raw)).age(gfn(raw)), expected);
    }

    fn walk(&mut self, raw: u64, access: Access) {
        let outcome = self.stage2.walk(gfn(raw), access);
        let Some(start) = self.model.find(raw) else {
            let Walk::Violation(violation) = outcome else {
                panic!("{outcome:?}")
            };
            assert_eq!(violation.access, access);
            assert_eq!(violation.cause, Cause::Absent);
            let level = self.stage2.lookup_level(gfn(raw));
            let has_leaf_table = self.model.tables.contains(&(raw / 512));
            assert_eq!(level == LookupLevel::ALL[3], has_leaf_table, "{level:?}");
            return;
        };
        let leaf = self.model.leaves.get_mut(&start).expect("a leaf");
        if access.is_write() && !leaf.is_writable() {
            let Walk::Violation(violation) = outcome else {
                panic!("{outcome:?}")
            };
            assert_eq!(
                (violation.access, violation.cause),
                (access, Cause::Denied(*leaf))
            );
            return;
        }
        let level = self.stage2.lookup_level(gfn(raw));
        assert_eq!(level.get(), 4 - leaf.level as u8);
        leaf.accessed = true;
        leaf.dirty |= access.is_write();
        let Walk::Hit(hit) = outcome else {
            panic!("{outcome:?}")
        };
        assert_eq!(hit.pfn.get(), leaf.pfn.get() + (raw - start));
        assert_eq!(hit.level, leaf.level);
        assert_eq!(
            hit.writable, leaf.dirty,
            "a TLB may let writes through exactly if D is set"
        );
    }
}
