//! Operations in any order, compared with a map of leaves.

use super::common::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug)]
enum Op {
    Touch(u64, Access, Level),
    Invalidate(u64, u64, RmapWalk),
    Age(u64, u64),
    TestYoung(u64, u64),
    Protect(u64, u64),
    SplitHuge(u64),
    Disallow(u64, u64),
    Allow,
    Delete(u16),
    Add(u16),
    Move(u16, u64),
}

/// A leaf of the model.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Plain {
    level: Level,
    young: bool,
    write: bool,
}

/// Pages in 1 GiB.
const GIB: u64 = Level::L1G.pages();

/// One slot with a whole 1 GiB and more; one that begins inside of a 1 GiB and has the next; one
/// whose frames and backing are aligned alike to 2 MiB only. They share backing.
const GIB_SLOTS: [SlotPlace; 3] = [
    (GIB, 0, GIB + 1000),
    (4 * GIB + 1024, 1024, 2 * GIB),
    (8 * GIB, 512, GIB),
];

/// Leaves by their first frame, slots by their number, and the disallowed blocks of each slot since
/// it was last made.
#[derive(Default)]
struct Model {
    /// Where each slot is added.
    places: &'static [SlotPlace],
    leaves: BTreeMap<u64, Plain>,
    slots: BTreeMap<u16, (SlotPlace, u32)>,
    lives: u32,
    disallowed: Vec<GfnRange>,
    counts: BTreeMap<(u16, u64), u32>,
}

impl Model {
    fn slot_of(&self, gfn: u64) -> Option<(u16, SlotPlace)> {
        let inside = |(first, _, pages): SlotPlace| (first..first + pages).contains(&gfn);
        let mut slots = self.slots.iter().map(|(id, (place, _))| (*id, *place));
        slots.find(|(_, place)| inside(*place))
    }

    fn allows_huge(&self, gfn: u64) -> bool {
        let Some((id, (first, page, pages))) = self.slot_of(gfn) else {
            return false;
        };
        let block = gfn & !511;
        first <= block
            && block + 512 <= first + pages
            && first % 512 == page % 512
            && self
                .counts
                .get(&(id, block))
                .is_none_or(|count| *count == 0)
    }

    fn allows_gib(&self, gfn: u64) -> bool {
        let Some((id, (first, page, pages))) = self.slot_of(gfn) else {
            return false;
        };
        let gib = gfn & !(GIB - 1);
        let mut counts = self.counts.range((id, gib)..(id, gib + GIB));
        first <= gib
            && gib + GIB <= first + pages
            && first % GIB == page % GIB
            && counts.all(|(_, count)| *count == 0)
    }

    fn max_level(&self, gfn: u64) -> Level {
        match (self.allows_gib(gfn), self.allows_huge(gfn)) {
            (true, _) => Level::L1G,
            (_, true) => Level::L2M,
            _ => Level::L4K,
        }
    }

    /// The level of the leaf that maps `gfn`.
    fn level(&self, gfn: u64) -> Level {
        match (self.gib(gfn), self.huge(gfn)) {
            (Some(_), _) => Level::L1G,
            (_, Some(_)) => Level::L2M,
            _ => Level::L4K,
        }
    }

    fn large(&self, gfn: u64, level: Level) -> Option<Plain> {
        let leaf = self.leaves.get(&(gfn & !(level.pages() - 1))).copied();
        leaf.filter(|leaf| leaf.level == level)
    }

    fn huge(&self, gfn: u64) -> Option<Plain> {
        self.large(gfn, Level::L2M)
    }

    fn gib(&self, gfn: u64) -> Option<Plain> {
        self.large(gfn, Level::L1G)
    }

    fn split_gib(&mut self, gfn: u64) {
        if let Some(gib) = self.gib(gfn) {
            let level = Level::L2M;
            let first = gfn & !(GIB - 1);
            let blocks = (first..first + GIB).step_by(512);
            self.leaves
                .extend(blocks.map(|gfn| (gfn, Plain { level, ..gib })));
        }
    }

    /// Whether no 4 KiB leaf is in the 1 GiB.
    fn has_no_small(&self, gfn: u64) -> bool {
        let gib = gfn & !(GIB - 1);
        let mut inside = self.leaves.range(gib..gib + GIB);
        inside.all(|(_, leaf)| leaf.level > Level::L4K)
    }

    fn split(&mut self, gfn: u64) {
        self.split_gib(gfn);
        if let Some(huge) = self.huge(gfn) {
            let level = Level::L4K;
            let block = gfn & !511;
            self.leaves
                .extend((block..block + 512).map(|gfn| (gfn, Plain { level, ..huge })));
        }
    }

    /// Merges the leaves of the block or 1 GiB into one of `level`, joined with `new`.
    fn join(&mut self, gfn: u64, new: Plain, level: Level) {
        let first = gfn & !(level.pages() - 1);
        let mut joined = Plain { level, ..new };
        let parts = self.leaves.range(first..first + level.pages());
        for gfn in parts.map(|(gfn, _)| *gfn).collect::<Vec<_>>() {
            let old = self.leaves.remove(&gfn).expect("just found");
            joined.young |= old.young;
            joined.write |= old.write;
        }
        self.leaves.insert(first, joined);
    }

    fn touch(&mut self, gfn: u64, write: bool, has: Level) {
        let new = Plain {
            level: Level::L4K,
            young: true,
            write,
        };
        if has == Level::L1G && self.allows_gib(gfn) && self.has_no_small(gfn) {
            return self.join(gfn, new, Level::L1G);
        }
        match self.gib(gfn) {
            Some(gib) if gib.write || !write => return self.join(gfn, new_in(gib), Level::L1G),
            _ => self.split_gib(gfn),
        }
        if has >= Level::L2M && self.allows_huge(gfn) {
            self.join(gfn, new, Level::L2M);
        } else if let Some(huge) = self.huge(gfn)
            && (huge.write || !write)
        {
            self.leaves.insert(
                gfn & !511,
                Plain {
                    young: true,
                    ..huge
                },
            );
        } else {
            self.split(gfn);
            let old = self.leaves.get(&gfn).is_some_and(|old| old.write);
            self.leaves.insert(
                gfn,
                Plain {
                    write: write || old,
                    ..new
                },
            );
        }
    }

    /// The guest frames of pages `page..page + pages` of the backing, in ranges.
    fn gfns(&self, page: u64, pages: u64) -> Vec<std::ops::Range<u64>> {
        let part = |((gfn, first, count), _): &(SlotPlace, u32)| {
            let start = page.max(*first);
            let end = (page + pages).min(first + count);
            (start < end).then(|| gfn + start - first..gfn + end - first)
        };
        self.slots.values().filter_map(part).collect()
    }

    /// Applies `act` to the first frames of the leaves that map these pages of the backing, after
    /// the leaves were cut at the edges, and 1 GiB leaves as `gibs` says.
    fn each(
        &mut self,
        page: u64,
        pages: u64,
        (cut, gibs): (bool, Gibs),
        mut act: impl FnMut(&mut Self, u64),
    ) {
        for gfns in self.gfns(page, pages) {
            for gib in (gfns.start & !(GIB - 1)..gfns.end).step_by(GIB as usize) {
                let whole = gfns.start <= gib && gib + GIB <= gfns.end;
                if gibs == Gibs::Split || gibs == Gibs::Cut && !whole {
                    self.split_gib(gib);
                }
            }
            for edge in [gfns.start, gfns.end - 1] {
                let block = edge & !511;
                if cut && (block < gfns.start || gfns.end < block + 512) {
                    self.split(edge);
                }
            }
            let inside = self.leaves.range(gfns.clone());
            let mut hit: Vec<u64> = inside.map(|(gfn, _)| *gfn).collect();
            // A large leaf may begin before the range.
            for level in [Level::L2M, Level::L1G] {
                let first = gfns.start & !(level.pages() - 1);
                if first < gfns.start && self.large(first, level).is_some() {
                    hit.push(first);
                }
            }
            hit.into_iter().for_each(|gfn| act(self, gfn));
        }
    }

    fn forget_leaves(&mut self, id: u16) {
        if let Some(((gfn, _, pages), _)) = self.slots.get(&id) {
            let gone = *gfn..*gfn + *pages;
            self.leaves.retain(|at, _| !gone.contains(at));
        }
    }

    fn forget_slot(&mut self, id: u16) -> Option<SlotPlace> {
        self.forget_leaves(id);
        self.counts.retain(|(other, _), _| *other != id);
        self.slots.remove(&id).map(|(place, _)| place)
    }

    fn fits(&self, id: u16, (gfn, _, pages): SlotPlace) -> bool {
        let meets = |(other, ((first, _, count), _)): (&u16, &(SlotPlace, u32))| {
            *other != id && gfn < first + count && *first < gfn + pages
        };
        !self.slots.iter().any(meets)
    }

    fn insert(&mut self, id: u16, place: SlotPlace) {
        self.lives += 1;
        self.slots.insert(id, (place, self.lives));
    }

    /// The slots and blocks that a range of guest frames touches.
    fn blocks(&self, gfns: GfnRange) -> Vec<(u16, u64)> {
        let of_slot = |(id, ((first, _, pages), _)): (&u16, &(SlotPlace, u32))| {
            let slot = GfnRange::new(gfn(*first), *pages).expect("a slot");
            let id = *id;
            let blocks = slot.intersect(gfns).into_iter().flat_map(parts);
            blocks
                .map(move |part| (id, part.start().get() & !511))
                .collect::<Vec<_>>()
        };
        self.slots.iter().flat_map(of_slot).collect()
    }
}

/// What an operation does with the 1 GiB leaves that it meets.
#[derive(Clone, Copy, PartialEq)]
enum Gibs {
    /// It uses them.
    Keep,
    /// It splits those that reach beyond the range.
    Cut,
    /// It splits them.
    Split,
}

/// The leaf after a read.
fn new_in(leaf: Plain) -> Plain {
    Plain {
        young: true,
        ..leaf
    }
}

fn step(mmu: &Mmu, model: &mut Model, op: Op) {
    match op {
        Op::Touch(gfn, access, has) => {
            let done = touch(mmu, gfn, access, has);
            assert_eq!(done.is_some(), model.slot_of(gfn).is_some());
            if let Some(level) = done {
                model.touch(gfn, access.is_write(), has);
                let expected = match has {
                    // A part of a 1 GiB leaf serves as well.
                    Level::L2M => model.level(gfn).min(has),
                    _ => model.level(gfn),
                };
                assert_eq!(level, Ok(expected));
            }
        }
        Op::Invalidate(page, pages, walk) => {
            let steps = mmu.invalidate_as(walk, range(page, pages));
            let mut removed = 0;
            model.each(page, pages, (true, Gibs::Cut), |model, gfn| {
                removed += u64::from(model.leaves.remove(&gfn).is_some());
            });
            assert_eq!(steps.leaves, removed, "{steps:?}");
        }
        Op::Age(page, pages) => {
            let mut young = [false];
            mmu.age(&[range(page, pages)], &mut young);
            let mut expected = false;
            model.each(page, pages, (true, Gibs::Split), |model, gfn| {
                let leaf = model.leaves.get_mut(&gfn).expect("a leaf");
                expected |= std::mem::take(&mut leaf.young);
            });
            assert_eq!(young, [expected]);
        }
        Op::TestYoung(page, pages) => {
            let mut expected = false;
            model.each(page, pages, (false, Gibs::Keep), |model, gfn| {
                expected |= model.leaves[&gfn].young
            });
            assert_eq!(mmu.test_young(range(page, pages)), expected);
        }
        Op::Protect(page, pages) => {
            mmu.write_protect(range(page, pages));
            model.each(page, pages, (true, Gibs::Split), |model, gfn| {
                model.leaves.get_mut(&gfn).expect("a leaf").write = false;
            });
        }
        Op::SplitHuge(block) => {
            mmu.split_huge(range(block * 512, 512));
            for gfns in model.gfns(block * 512, 512) {
                gfns.step_by(64).for_each(|gfn| model.split(gfn));
            }
        }
        op => step_levels(mmu, model, op),
    }
}

/// The steps that change slots or their disallow counts.
fn step_levels(mmu: &Mmu, model: &mut Model, op: Op) {
    match op {
        Op::Disallow(first, pages) => {
            let gfns = GfnRange::new(gfn(first), pages).expect("a range");
            mmu.disallow_huge(gfns).expect("tables");
            model.disallowed.push(gfns);
            for block in model.blocks(gfns) {
                *model.counts.entry(block).or_default() += 1;
                model.split(block.1);
            }
        }
        Op::Allow => {
            // A slot added after a range was disallowed has no count to take back.
            let Some(gfns) = model.disallowed.pop() else {
                return;
            };
            let blocks = model.blocks(gfns);
            if blocks
                .iter()
                .any(|at| model.counts.get(at).is_none_or(|count| *count == 0))
            {
                return;
            }
            mmu.allow_huge(gfns);
            for at in blocks {
                // No leaf becomes huge at once, because the host has no whole block.
                *model.counts.get_mut(&at).expect("counted") -= 1;
            }
        }
        Op::Delete(id) => {
            let known = model.forget_slot(id).is_some();
            assert_eq!(mmu.delete_slot(SlotId(id)).is_ok(), known);
        }
        Op::Add(id) => {
            let place = model.places[usize::from(id)];
            let free = !model.slots.contains_key(&id) && model.fits(id, place);
            assert_eq!(mmu.insert_slot(spec(id, place)).is_ok(), free);
            if free {
                model.insert(id, place);
            }
        }
        Op::Move(id, to) => {
            let target = gfn(to).gpa();
            let Some(((_, page, pages), _)) = model.slots.get(&id).copied() else {
                assert!(mmu.move_slot(SlotId(id), target).is_err());
                return;
            };
            let place = (to, page, pages);
            let free = model.fits(id, place);
            assert_eq!(mmu.move_slot(SlotId(id), target).is_ok(), free);
            if free {
                model.forget_slot(id);
                model.insert(id, place);
            } else {
                // The slot has been unmapped nevertheless.
                model.forget_leaves(id);
            }
        }
        _ => unreachable!("a step of leaves"),
    }
}

fn compare(mmu: &Mmu, model: &Model) {
    mmu.verify();
    let expected: Vec<_> = model
        .leaves
        .iter()
        .map(|(gfn, p)| (*gfn, p.level, p.young))
        .collect();
    let found = leaves(mmu);
    if found != expected {
        let differ = found.iter().zip(&expected).find(|(a, b)| a != b);
        panic!(
            "{} leaves, not {}; first {differ:?}",
            found.len(),
            expected.len()
        );
    }
    for (id, ((first, _, pages), _)) in &model.slots {
        for block in (*first..first + pages).step_by(256.max(*pages as usize / 32)) {
            let max_level = Some(model.max_level(block));
            assert_eq!(
                mmu.max_level(gfn(block)),
                max_level,
                "slot {id}, gfn {block:#x}"
            );
        }
    }
}

fn guest_frame() -> impl Strategy<Value = u64> {
    let inside = |(first, _, pages): SlotPlace| first..first + pages;
    prop_oneof![
        4 => inside(SLOTS[0]),
        1 => inside(SLOTS[1]),
        2 => inside(SLOTS[2]),
        1 => inside(SLOTS[3]),
        1 => 0x3_0000..0x3_1000u64,
    ]
}

fn pages() -> impl Strategy<Value = (u64, u64)> {
    prop_oneof![
        (0..PAGES, 1..4u64),
        (0..PAGES, 1..PAGES),
        (0..4u64, 1..3u64).prop_map(|(block, blocks)| (block * 512, blocks * 512)),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let access = prop::sample::select(vec![Access::Read, Access::Write]);
    let level = prop::sample::select(vec![Level::L4K, Level::L2M, Level::L2M]);
    let place = prop::sample::select(vec![0x3_0000u64, 0x3_0001, 0x3_0200, 0x3_0000 + 300, 0x480]);
    prop_oneof![
        16 => (guest_frame(), access, level).prop_map(|(g, a, l)| Op::Touch(g, a, l)),
        4 => (pages(), prop::sample::select(RmapWalk::ALL.to_vec()))
            .prop_map(|((page, pages), walk)| Op::Invalidate(page, pages, walk)),
        2 => pages().prop_map(|(page, pages)| Op::Age(page, pages)),
        1 => pages().prop_map(|(page, pages)| Op::TestYoung(page, pages)),
        2 => pages().prop_map(|(page, pages)| Op::Protect(page, pages)),
        2 => (0..4u64).prop_map(Op::SplitHuge),
        1 => (guest_frame(), 1..1500u64).prop_map(|(gfn, pages)| Op::Disallow(gfn, pages)),
        2 => Just(Op::Allow),
        1 => (0..4u16).prop_map(Op::Delete),
        2 => (0..4u16).prop_map(Op::Add),
        1 => (0..4u16, place).prop_map(|(id, to)| Op::Move(id, to)),
    ]
}

/// A frame in or near a whole 1 GiB, mostly in one of a few blocks.
fn gib_frame() -> impl Strategy<Value = u64> {
    let block = prop::sample::select(vec![0, 1, 2, 3, 510, 511, 512, 513]);
    let gib = prop::sample::select(vec![1, 1, 1, 4, 5, 5, 8]);
    let page = prop::sample::select(vec![0, 1, 300, 511]);
    (gib, block, page)
        .prop_map(|(gib, block, page): (u64, u64, u64)| gib * GIB + block * 512 + page)
}

/// Ranges of a few pages, of whole blocks and of 1 GiB.
fn gib_pages() -> impl Strategy<Value = (u64, u64)> {
    let few = (gib_frame(), 1..700u64).prop_map(|(page, pages)| (page % (2 * GIB), pages));
    let blocks = (0..1024u64, 1..4u64).prop_map(|(block, blocks)| (block * 512, blocks * 512));
    let gib = prop::sample::select(vec![(0, GIB), (GIB, GIB), (0, 2 * GIB), (512, GIB)]);
    prop_oneof![3 => few, 1 => blocks, 2 => gib]
}

fn gib_op() -> impl Strategy<Value = Op> {
    let access = prop::sample::select(vec![Access::Read, Access::Write]);
    let level = prop::sample::select(vec![Level::L4K, Level::L2M, Level::L1G, Level::L1G]);
    // The older strategies visit each page.
    let walk = prop::sample::select(vec![RmapWalk::PerLevel, RmapWalk::PerLevel, RmapWalk::Walk]);
    let place = prop::sample::select(vec![16 * GIB, 16 * GIB + 1024, 16 * GIB + 1]);
    prop_oneof![
        16 => (gib_frame(), access, level).prop_map(|(g, a, l)| Op::Touch(g, a, l)),
        4 => (gib_pages(), walk)
            .prop_map(|((page, pages), walk)| Op::Invalidate(page, pages, walk)),
        1 => gib_pages().prop_map(|(page, pages)| Op::Age(page, pages)),
        2 => gib_pages().prop_map(|(page, pages)| Op::TestYoung(page, pages)),
        1 => gib_pages().prop_map(|(page, pages)| Op::Protect(page, pages)),
        1 => (0..1024u64).prop_map(Op::SplitHuge),
        1 => (gib_frame(), 1..1500u64).prop_map(|(gfn, pages)| Op::Disallow(gfn, pages)),
        2 => Just(Op::Allow),
        1 => (0..3u16).prop_map(Op::Delete),
        2 => (0..3u16).prop_map(Op::Add),
        1 => (0..3u16, place).prop_map(|(id, to)| Op::Move(id, to)),
    ]
}

fn run(places: &'static [SlotPlace], ops: Vec<Op>) {
    let mmu = mmu(8192);
    let mut model = Model {
        places,
        ..Model::default()
    };
    for id in 0..places.len() {
        step(&mmu, &mut model, Op::Add(id as u16));
    }
    for op in ops {
        step(&mmu, &mut model, op);
        compare(&mmu, &model);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn leaves_are_what_a_plain_map_says(ops in prop::collection::vec(op(), 1..120)) {
        run(&SLOTS, ops);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn leaves_of_three_sizes_are_what_a_plain_map_says(
        ops in prop::collection::vec(gib_op(), 1..40),
    ) {
        run(&GIB_SLOTS, ops);
    }
}
