//! Stage 2 against a plain map, with `verify()` after every step.

use lacuna_addr::{Access, Gfn, GfnRange, Level, Pfn};
use lacuna_stage2::{
    Age, Arena, Cause, Counts, Entry, EntryRef, Leaf, MapError, Mapped, Removed, Stage2, Walk,
    Write,
};
use lacuna_sync::Quiescence;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Copy, Debug)]
enum Op {
    Map { gfn: u64, frame: u32, write: Write },
    MapLarge { gfn: u64, frame: u32, write: Write },
    Unmap { a: u64, b: u64 },
    UnmapPage { gfn: u64 },
    UnmapAt { gfn: u64 },
    Protect { a: u64, b: u64 },
    Age { gfn: u64 },
    Walk { gfn: u64, access: Access },
}

/// Frames where tables of every height begin and end.
fn any_gfn() -> impl Strategy<Value = u64> {
    let block = prop::sample::select(vec![
        0,
        1,
        2,
        511,
        512,
        513,
        (1 << 18) - 1,
        1 << 18,
        (1 << 27) - 512,
        (1 << 27) - 1,
    ]);
    let page = prop::sample::select(vec![0, 1, 2, 511]);
    (block, page).prop_map(|(block, page): (u64, u64)| block * 512 + page)
}

fn any_op() -> impl Strategy<Value = Op> {
    let write = prop::sample::select(vec![Write::Never, Write::OnFault, Write::Allowed]);
    let access = prop::sample::select(vec![Access::Read, Access::Write, Access::Fetch]);
    let gfn = any_gfn;
    prop_oneof![
        8 => (gfn(), 0..2u32, write.clone())
            .prop_map(|(gfn, frame, write)| Op::Map { gfn, frame, write }),
        3 => (gfn(), 0..2u32, write)
            .prop_map(|(gfn, frame, write)| Op::MapLarge { gfn, frame, write }),
        2 => (gfn(), gfn()).prop_map(|(a, b)| Op::Unmap { a, b }),
        1 => gfn().prop_map(|a| Op::Unmap { a: a & !511, b: a | 511 }),
        3 => gfn().prop_map(|gfn| Op::UnmapPage { gfn }),
        2 => gfn().prop_map(|gfn| Op::UnmapAt { gfn }),
        2 => (gfn(), gfn()).prop_map(|(a, b)| Op::Protect { a, b }),
        2 => gfn().prop_map(|gfn| Op::Age { gfn }),
        6 => (gfn(), access).prop_map(|(gfn, access)| Op::Walk { gfn, access }),
    ]
}

/// What the tables should say, without tables.
#[derive(Default)]
struct Model {
    /// By first frame.
    leaves: BTreeMap<u64, Leaf>,
    rmap: BTreeMap<u64, EntryRef>,
    /// Blocks with a leaf table, empty ones too.
    tables: BTreeSet<u64>,
}

impl Model {
    fn find(&self, gfn: u64) -> Option<u64> {
        let (start, leaf) = self.leaves.range(..=gfn).next_back()?;
        (gfn < start + leaf.level.pages()).then_some(*start)
    }

    fn in_range(&self, range: GfnRange) -> Vec<u64> {
        let touches = |(start, leaf): &(&u64, &Leaf)| {
            **start < range.end_raw() && *start + leaf.level.pages() > range.start().get()
        };
        self.leaves
            .iter()
            .filter(touches)
            .map(|(start, _)| *start)
            .collect()
    }

    fn remove(&mut self, start: u64) -> Removed {
        let leaf = self.leaves.remove(&start).expect("a leaf");
        let at = self.rmap.remove(&start).expect("its place");
        Removed {
            gfn: gfn(start),
            at,
            leaf,
        }
    }

    fn counts_leaves(&self) -> [u64; 3] {
        Level::ALL.map(|level| self.leaves.values().filter(|l| l.level == level).count() as u64)
    }
}

struct World {
    stage2: Stage2,
    model: Model,
    nobody: Quiescence,
}

impl World {
    fn new() -> Self {
        let stage2 = Stage2::new(Arena::new(64).expect("address space")).expect("a root");
        Self {
            stage2,
            model: Model::default(),
            nobody: Quiescence::new(1),
        }
    }

    fn step(&mut self, op: Op) {
        match op {
            Op::Map { gfn, frame, write } => self.map(gfn, leaf(gfn, frame, write, Level::L4K)),
            Op::MapLarge { gfn, frame, write } => {
                let gfn = gfn & !511;
                self.map(gfn, leaf(gfn, frame, write, Level::L2M));
            }
            Op::Unmap { a, b } => self.unmap(range(a, b)),
            Op::UnmapPage { gfn } => self.unmap_page(gfn),
            Op::UnmapAt { gfn } => self.unmap_at(gfn),
            Op::Protect { a, b } => self.protect(range(a, b)),
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
        let model = &mut self.model;
        let block = raw / 512;
        match model.find(raw).map(|start| (start, model.leaves[&start])) {
            Some((_, old)) if (old.pfn, old.level) == (leaf.pfn, leaf.level) => {
                let both = Leaf {
                    write: old.write.max(leaf.write),
                    dirty: old.dirty || leaf.dirty,
                    accessed: true,
                    ..old
                };
                let at = model.rmap[&raw];
                let expected = if both == old {
                    Mapped::Spurious(at)
                } else {
                    Mapped::Upgraded(at)
                };
                assert_eq!(result, Ok(expected));
                model.leaves.insert(raw, both);
            }
            Some((_, old)) if old.level == Level::L2M || leaf.level == Level::L4K => {
                let found = Entry::Leaf(old);
                assert_eq!(
                    result,
                    Err(MapError::Occupied {
                        gfn: gfn(raw),
                        wanted: leaf,
                        found
                    })
                );
            }
            _ if leaf.level == Level::L2M && model.tables.contains(&block) => {
                let is_table = matches!(
                    result,
                    Err(MapError::Occupied {
                        found: Entry::Table(_),
                        ..
                    })
                );
                assert!(is_table, "{result:?}");
            }
            _ => {
                let Ok(Mapped::New(at)) = result else {
                    panic!("{result:?}")
                };
                assert_eq!(EntryRef::from_bits(at.to_bits()), Some(at));
                assert!(
                    !model.rmap.values().any(|other| *other == at),
                    "{at:?} is used twice"
                );
                if leaf.level == Level::L4K {
                    model.tables.insert(block);
                }
                model.rmap.insert(raw, at);
                model.leaves.insert(raw, leaf);
            }
        }
    }

    fn unmap(&mut self, range: GfnRange) {
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
        flush.finish(&self.nobody);
    }

    fn unmap_page(&mut self, raw: u64) {
        let expected = self.model.find(raw).map(|start| self.model.remove(start));
        let result = self.stage2.fault_cursor(gfn(raw)).unmap_page(gfn(raw));
        assert_eq!(result.as_ref().map(|(removed, _)| *removed), expected);
        if let Some((_, flush)) = result {
            assert!(!flush.is_empty());
            flush.finish(&self.nobody);
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
        flush.finish(&self.nobody);
    }

    fn protect(&mut self, range: GfnRange) {
        let mut protected = Vec::new();
        let flush = self
            .stage2
            .cursor(range)
            .protect(range, |was| protected.push(was));
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
        flush.finish(&self.nobody);
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
            assert_eq!((violation.access, violation.cause), (access, Cause::Absent));
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

/// Each gfn has two frames it may get, so that some maps collide with another frame. D is preset
/// only with the first, so that walks have to set it.
fn leaf(gfn: u64, frame: u32, write: Write, level: Level) -> Leaf {
    let pfn = Pfn::new(((gfn % 4096) as u32 | frame << 20) & !(level.pages() as u32 - 1));
    Leaf {
        write,
        dirty: write == Write::Allowed && frame == 0,
        ..Leaf::clean(pfn).at(level)
    }
}

fn gfn(raw: u64) -> Gfn {
    Gfn::new(raw).expect("a frame below 2^36")
}

fn range(a: u64, b: u64) -> GfnRange {
    let (low, high) = (a.min(b), a.max(b));
    GfnRange::new(gfn(low), high - low + 1).expect("not empty")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn stage2_is_a_map(ops in prop::collection::vec(any_op(), 1..80)) {
        let mut world = World::new();
        for op in ops {
            world.step(op);
        }
        world.unmap(range(0, (1 << 36) - 1));
        prop_assert_eq!(world.stage2.verify(), Counts::default());
        prop_assert_eq!(world.stage2.arena().usage().in_use, 1, "only the root is left");
    }
}
