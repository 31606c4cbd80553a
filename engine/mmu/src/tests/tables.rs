//! Behaviour when tables are exhausted.

use super::common::*;
use proptest::prelude::*;

/// A root, two upper tables, and the leaf table of block 1; no table is left to split block 0.
fn full() -> Arc<Mmu> {
    let mmu = mmu(4);
    add(&mmu, &[(0, 0, PAGES)]);
    let huge = touch(&mmu, 5, Access::Write, Level::L2M).expect("a slot");
    assert_eq!(huge, Ok(Level::L2M));
    let small = touch(&mmu, 512, Access::Read, Level::L4K).expect("a slot");
    assert_eq!(small, Ok(Level::L4K));
    mmu
}

#[test]
fn what_cannot_be_split_goes_whole() {
    for walk in RmapWalk::ALL {
        let mmu = full();
        let steps = mmu.invalidate_as(walk, range(10, 1));
        assert_eq!(steps.leaves, 1, "{walk:?}");
        assert_eq!(mmu.stage2.counts().leaves, [1, 0, 0]);
        mmu.verify();
    }
}

#[test]
fn what_cannot_be_split_answers_for_all_its_pages() {
    let mmu = full();
    mmu.split_huge(range(0, 512));
    mmu.write_protect(range(10, 1));
    assert_eq!(mmu.stage2.counts().leaves, [1, 1, 0]);
    let mut young = [false; 2];
    mmu.age(&[range(10, 1), range(11, 1)], &mut young);
    assert_eq!(young, [true, true], "neither takes the bit from the other");
    let refused = touch(&mmu, 7, Access::Write, Level::L4K).expect("a slot");
    assert!(
        refused.is_err(),
        "no table for the page that must be written"
    );
    mmu.verify();
}

#[test]
fn what_cannot_be_disallowed_everywhere_is_allowed_as_before() {
    let mmu = full();
    let all = GfnRange::new(gfn(0), PAGES).expect("a range");
    // The first block is empty by now, and the third is huge: the refusal is half-way.
    let _ = mmu.invalidate_as(RmapWalk::PerLevel, range(0, 512));
    let _ = touch(&mmu, 1024, Access::Read, Level::L2M)
        .expect("a slot")
        .expect("a table");
    assert!(mmu.disallow_huge(all).is_err());
    for block in 0..4 {
        assert_eq!(mmu.max_level(gfn(block * 512)), Some(Level::L2M));
    }
    mmu.verify();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// With too few tables any operation may be refused, but no invalidated page stays mapped.
    #[test]
    fn exhaustion_leaves_nothing_behind(
        steps in prop::collection::vec((0..PAGES, 1..700u64, 0..8u8), 1..80),
    ) {
        let mmu = mmu(6);
        add(&mmu, &SLOTS[..1]);
        let home = SLOTS[0].0;
        for (page, pages, what) in steps {
            match what {
                0..3 => drop(touch(&mmu, home + page, Access::Write, Level::L2M)),
                3 => drop(touch(&mmu, home + page, Access::Read, Level::L4K)),
                4 => mmu.split_huge(range(page & !511, 512)),
                5 => mmu.write_protect(range(page, pages)),
                _ => {
                    let _ = mmu.invalidate_as(RmapWalk::PerLevel, range(page, pages));
                    for at in page..(page + pages).min(PAGES) {
                        prop_assert_eq!(mmu.stage2.find(gfn(home + at)), None);
                    }
                }
            }
            mmu.verify();
            let _ = mmu.stage2.reap(&*mmu.qsbr);
        }
    }
}
