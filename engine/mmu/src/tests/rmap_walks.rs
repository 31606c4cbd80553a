//! All rmap walk strategies find the same leaves; the steps of each are counted exactly.

use super::common::*;
use crate::Steps;
use proptest::prelude::*;

/// One step that makes a mixture of leaves.
#[derive(Clone, Copy, Debug)]
enum Make {
    Touch(usize, u64, Level),
    SplitHuge(u64),
}

fn make(mmu: &Mmu, steps: &[Make]) {
    add(mmu, &SLOTS);
    for step in steps {
        match *step {
            Make::Touch(slot, page, has) => {
                let (first, _, pages) = SLOTS[slot];
                let done = touch(mmu, first + page % pages, Access::Write, has);
                let _ = done.expect("a slot").expect("tables");
            }
            Make::SplitHuge(block) => mmu.split_huge(range(block * 512, 512)),
        }
    }
}

fn any_make() -> impl Strategy<Value = Make> {
    let level = prop::sample::select(vec![Level::L4K, Level::L4K, Level::L2M]);
    prop_oneof![
        6 => (0..4usize, 0..PAGES, level).prop_map(|(s, page, level)| Make::Touch(s, page, level)),
        1 => (0..4u64).prop_map(Make::SplitHuge),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The ranges include unaligned ones, aliases, slots that begin inside a block, and huge leaves
    /// that reach beyond the range.
    #[test]
    fn every_shape_removes_the_same_leaves(
        steps in prop::collection::vec(any_make(), 0..60),
        page in 0..PAGES,
        pages in 1..PAGES,
    ) {
        let mut results = Vec::new();
        for walk in RmapWalk::ALL {
            let mmu = mmu(4096);
            make(&mmu, &steps);
            let before = leaves(&mmu).len();
            let done = mmu.invalidate_as(walk, range(page, pages));
            mmu.verify();
            results.push((before, done.leaves, leaves(&mmu)));
        }
        for result in &results[1..] {
            prop_assert_eq!(result, &results[0]);
        }
    }
}

/// `count` slots of two blocks, side by side in guest and backing; only the first block of each is
/// mapped.
fn rows(count: u16, has: Level) -> Arc<Mmu> {
    let mmu = mmu(4096);
    for id in 0..count {
        let at = u64::from(id) * 1024;
        mmu.insert_slot(spec(id, (at, at, 1024))).expect("room");
    }
    for page in (0..512).step_by(has.pages() as usize) {
        let done = touch(&mmu, page, Access::Read, has);
        assert_eq!(done.expect("a slot").expect("tables"), has);
    }
    mmu
}

#[test]
fn one_huge_page_costs_what_is_written_down() {
    for slots in [1u16, 64, 500] {
        let steps = |walk| rows(slots, Level::L2M).invalidate_as(walk, range(0, 512));
        let s = u64::from(slots);
        let expected = |slots, words, entries| Steps {
            slots,
            words,
            entries,
            leaves: 1,
        };
        assert_eq!(steps(RmapWalk::PageLoop), expected(512 * s, 1024, 1));
        assert_eq!(steps(RmapWalk::RangeThenPages), expected(s, 1024, 1));
        let per_level = steps(RmapWalk::PerLevel);
        assert_eq!(per_level, expected(per_level.slots, 1, 1));
        assert_eq!(steps(RmapWalk::Walk), expected(per_level.slots, 0, 3));
        let most = u64::from(slots.next_power_of_two().ilog2()) + 2;
        assert!(
            per_level.slots <= most,
            "{} of {slots} slots",
            per_level.slots
        );
    }
}

#[test]
fn small_pages_cost_what_is_written_down() {
    let steps = |walk| rows(1, Level::L4K).invalidate_as(walk, range(0, 512));
    let expected = |slots, words, entries| Steps {
        slots,
        words,
        entries,
        leaves: 512,
    };
    assert_eq!(steps(RmapWalk::PageLoop), expected(512, 1024, 512));
    assert_eq!(steps(RmapWalk::RangeThenPages), expected(1, 1024, 512));
    assert_eq!(steps(RmapWalk::PerLevel), expected(1, 1, 3 + 512));
    assert_eq!(steps(RmapWalk::Walk), expected(1, 0, 3 + 512));
}

#[test]
fn an_empty_range_costs_a_word_a_block() {
    let mmu = rows(1, Level::L2M);
    let steps = mmu.invalidate_as(RmapWalk::PerLevel, range(512, 512));
    let expected = Steps {
        slots: 1,
        words: 1,
        ..Steps::default()
    };
    assert_eq!(steps, expected);
}
