//! Where a huge leaf may be.

use super::common::*;
use std::collections::BTreeSet;

/// The blocks of a slot that may have a huge leaf, by their first frames.
fn huge_blocks(place: SlotPlace) -> BTreeSet<u64> {
    let mmu = mmu(4096);
    add(&mmu, &[place]);
    let (first, _, pages) = place;
    for at in first..first + pages {
        let _ = touch(&mmu, at, Access::Write, Level::L2M)
            .expect("a slot")
            .expect("tables");
    }
    mmu.verify();
    let huge = leaves(&mmu)
        .into_iter()
        .filter(|(_, level, _)| *level == Level::L2M);
    huge.map(|(gfn, ..)| gfn).collect()
}

#[test]
fn only_whole_blocks_with_backing_aligned_alike_are_huge() {
    assert_eq!(huge_blocks((512, 512, 1024)), BTreeSet::from([512, 1024]));
    assert_eq!(
        huge_blocks((512 + 7, 7, 1024)),
        BTreeSet::from([1024]),
        "head and tail are cut"
    );
    assert_eq!(
        huge_blocks((512, 0, 511)),
        BTreeSet::new(),
        "a page too short"
    );
    assert_eq!(huge_blocks((512, 0, 513)), BTreeSet::from([512]));
    assert_eq!(huge_blocks((512, 1, 1500)), BTreeSet::new(), "misaligned");
    assert_eq!(
        huge_blocks((3, 3, 300)),
        BTreeSet::new(),
        "inside one block"
    );
}

#[test]
fn a_disallow_count_returns_to_where_it_began() {
    let mmu = mmu(4096);
    add(&mmu, &[(0, 0, PAGES - 1)]);
    let max_level = || [0, 600, 1024, 1536].map(|at| mmu.max_level(gfn(at)).expect("a slot"));
    let (small, huge) = (Level::L4K, Level::L2M);
    assert_eq!(max_level(), [huge, huge, huge, small], "the tail is cut");
    let cut = GfnRange::new(gfn(511), 2).expect("a range");
    let all = GfnRange::new(gfn(0), PAGES).expect("a range");
    mmu.disallow_huge(cut).expect("tables");
    mmu.disallow_huge(all).expect("tables");
    assert_eq!(max_level(), [small; 4]);
    mmu.allow_huge(cut);
    assert_eq!(max_level(), [small; 4]);
    mmu.allow_huge(all);
    assert_eq!(max_level(), [huge, huge, huge, small]);
    assert_eq!(mmu.max_level(gfn(PAGES)), None);
}

#[test]
fn disallowed_leaves_are_split_and_what_the_host_has_by_pages_stays_so() {
    let mmu = mmu(4096);
    add(&mmu, &[(0, 0, PAGES)]);
    let all = GfnRange::new(gfn(0), PAGES).expect("a range");
    let first = touch(&mmu, 3, Access::Write, Level::L2M).expect("a slot");
    assert_eq!(first, Ok(Level::L2M));
    mmu.disallow_huge(all).expect("tables");
    mmu.verify();
    assert_eq!(mmu.stage2.counts().leaves, [512, 0, 0]);
    let again = touch(&mmu, 600, Access::Write, Level::L2M).expect("a slot");
    assert_eq!(again, Ok(Level::L4K));
    mmu.allow_huge(all);
    mmu.verify();
    assert_eq!(
        mmu.stage2.counts().leaves,
        [513, 0, 0],
        "contiguous, but the host does not have the block whole"
    );
    for page in [3, 601] {
        let later = touch(&mmu, page, Access::Write, Level::L2M).expect("a slot");
        assert_eq!(later, Ok(Level::L2M), "a fault, and the host said so");
    }
    assert_eq!(mmu.stage2.counts().leaves, [0, 2, 0]);
}

#[test]
fn the_reverse_map_costs_twelve_bytes_a_block() {
    let gfns = GfnRange::new(gfn(0), 1 << 18).expect("1 GiB");
    let rmap = crate::Rmap::new(gfns, BackingRange::new(addr(0), 1 << 18).expect("1 GiB"));
    assert_eq!(rmap.bytes(), 512 * 12 + 12, "and three words for its 1 GiB");
}
