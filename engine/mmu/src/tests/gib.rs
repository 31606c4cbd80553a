//! Leaves of 1 GiB: dirty logging, and threads that map, split and unmap one at once.

use super::common::*;
use crate::{Detection, HugeLeaves, Initially, Logging};
use lacuna_stage2::Flush;

const GIB: u64 = Level::L1G.pages();
/// One slot of 1 GiB.
const SLOT: SlotPlace = (GIB, 0, GIB);

fn mapped(access: Access) -> Arc<Mmu> {
    let mmu = mmu(4096);
    add(&mmu, &[SLOT]);
    assert_eq!(
        touch(&mmu, GIB + 5, access, Level::L1G),
        Some(Ok(Level::L1G))
    );
    mmu
}

fn is_mapped_by(mmu: &Mmu, leaves: [u64; 3]) {
    mmu.verify();
    assert_eq!(mmu.counts().leaves, leaves);
}

#[test]
fn a_logged_write_gets_a_page_of_its_own() {
    for detection in [Detection::Pml, Detection::WriteProtect] {
        for huge in [HugeLeaves::Eager, HugeLeaves::Lazy] {
            let mmu = mapped(Access::Write);
            mmu.set_detection(detection);
            let initially = Initially::Clean;
            let on = Logging::On { initially, huge };
            mmu.set_logging(SlotId(0), on).expect("a slot");
            let is_split = huge == HugeLeaves::Eager;
            is_mapped_by(&mmu, if is_split { [GIB, 0, 0] } else { [0, 512, 0] });
            let walk = |at| mmu.stage2.walk(gfn(at), Access::Write);
            let is_detected = |at| match walk(at) {
                lacuna_stage2::Walk::Hit(_) => is_split && detection == Detection::Pml,
                lacuna_stage2::Walk::Violation(_) => true,
            };
            assert!([0, 700, GIB - 1].iter().all(|page| is_detected(GIB + page)));
            // The host has the 1 GiB whole, but the slot logs.
            let written = touch(&mmu, GIB + 700, Access::Write, Level::L1G);
            assert_eq!(written, Some(Ok(Level::L4K)));
            is_mapped_by(&mmu, if is_split { [GIB, 0, 0] } else { [512, 511, 0] });
        }
    }
}

#[test]
fn pages_that_the_log_marks_first_leave_the_leaf_whole_until_a_write_is_refused() {
    let mmu = mapped(Access::Read);
    let on = Logging::On {
        initially: Initially::AllSet,
        huge: HugeLeaves::Lazy,
    };
    mmu.set_logging(SlotId(0), on).expect("a slot");
    is_mapped_by(&mmu, [0, 0, 1]);
    let read = touch(&mmu, GIB + 700, Access::Read, Level::L1G);
    assert_eq!(read, Some(Ok(Level::L1G)));
    let written = touch(&mmu, GIB + 700, Access::Write, Level::L1G);
    assert_eq!(written, Some(Ok(Level::L4K)));
    is_mapped_by(&mmu, [512, 511, 0]);
}

/// Faults collapse small leaves to larger ones after a log was turned off, and before the end of
/// the log has visited their block.
#[test]
fn a_leaf_made_at_the_end_of_a_log_has_d() {
    let mmu = mapped(Access::Write);
    mmu.set_detection(Detection::Pml);
    let on = Logging::On {
        initially: Initially::Clean,
        huge: HugeLeaves::Lazy,
    };
    mmu.set_logging(SlotId(0), on).expect("a slot");
    let written = touch(&mmu, GIB + 700, Access::Write, Level::L1G);
    assert_eq!(written, Some(Ok(Level::L4K)));
    let slot = mmu.slot(SlotId(0)).expect("a slot");
    let block = gfn(GIB + 700).block().range();
    let mut flush = Flush::none(&mmu.stage2);
    mmu.rearm_runs(&slot.attach, block, [block], &mut flush);
    flush.finish(&*mmu.qsbr);
    is_mapped_by(&mmu, [512, 511, 0]);
    slot.attach.log().turn_off();
    for level in [Level::L2M, Level::L1G] {
        let read = touch(&mmu, GIB + 701, Access::Read, Level::L1G);
        assert_eq!(read, Some(Ok(level)));
    }
    // Finds W without D nowhere.
    is_mapped_by(&mmu, [0, 0, 1]);
}

#[test]
fn its_whole_range_is_unmapped_by_one_step() {
    let mmu = mapped(Access::Write);
    let steps = mmu.invalidate_as(RmapWalk::PerLevel, range(0, GIB));
    assert_eq!((steps.leaves, steps.entries), (1, 1));
    is_mapped_by(&mmu, [0; 3]);
    // A part of it is unmapped alone.
    let again = touch(&mmu, GIB, Access::Write, Level::L1G);
    assert_eq!(again, Some(Ok(Level::L1G)));
    assert_eq!(
        mmu.invalidate_as(RmapWalk::PerLevel, range(700, 1)).leaves,
        1
    );
    is_mapped_by(&mmu, [511, 511, 0]);
}

#[test]
fn its_unmapping_is_in_progress_in_each_of_its_blocks() {
    let mmu = mapped(Access::Write);
    let begun = mmu.begin_invalidation(&[range(0, GIB)]);
    for page in [0, 700, GIB - 1] {
        let other = mmu.begin_invalidation(&[range(page, 1)]);
        assert!(other.must_flush(), "the first has not waited yet");
        other.finish();
    }
    begun.finish();
    let seq = mmu.stage2.invalidate_seq_of(GfnRange::gib_of(gfn(GIB)));
    assert!(!seq.invalidate_in_progress());
    let again = touch(&mmu, GIB, Access::Write, Level::L1G);
    assert_eq!(again, Some(Ok(Level::L1G)));
}

#[test]
fn a_block_that_is_disallowed_or_has_small_leaves_excludes_it() {
    let mmu = mmu(64);
    add(&mmu, &[SLOT]);
    let slot = mmu.slot(SlotId(0)).expect("a slot");
    let is_excluded = || {
        mmu.verify();
        !slot.attach.could_have_gib(gfn(GIB + 5))
    };
    assert!(!is_excluded());
    let blocks = GfnRange::new(gfn(GIB + 1024), 1024).expect("two blocks");
    for _ in 0..2 {
        mmu.disallow_huge(blocks).expect("nothing is mapped");
        assert!(is_excluded());
    }
    mmu.allow_huge(blocks);
    assert!(is_excluded());
    mmu.allow_huge(blocks);
    assert!(!is_excluded());
    for page in [512, 513] {
        let small = touch(&mmu, GIB + page, Access::Read, Level::L4K);
        assert_eq!(small, Some(Ok(Level::L4K)));
        assert!(is_excluded());
    }
    mmu.invalidate(&[range(512, 1)]);
    assert!(is_excluded());
    let huge = touch(&mmu, GIB + 600, Access::Read, Level::L2M);
    assert_eq!(huge, Some(Ok(Level::L2M)));
    assert!(!is_excluded(), "the small leaf is a part of the huge one");
    mmu.split_huge(range(512, 512));
    assert!(is_excluded());
    mmu.invalidate(&[range(512, 512)]);
    assert!(!is_excluded());
}

#[test]
fn threads_map_split_and_unmap_it() {
    let mmu = mapped(Access::Write);
    std::thread::scope(|scope| {
        for thread in 0..3u64 {
            let mmu = &mmu;
            scope.spawn(move || {
                for round in 0..150 {
                    let page = (round * 7919 + thread * 104_729) % GIB;
                    let has = [Level::L1G, Level::L1G, Level::L2M, Level::L4K];
                    let has = has[(round % 4) as usize];
                    let access = [Access::Read, Access::Write][(round % 2) as usize];
                    let touched = touch(mmu, GIB + page, access, has);
                    assert!(matches!(touched, Some(Ok(_))), "{touched:?}");
                    match (round + thread) % 5 {
                        0 => mmu.invalidate(&[range(page, 1)]),
                        1 => mmu.invalidate(&[range(0, GIB)]),
                        2 => mmu.split_huge(range(page & !511, 512)),
                        3 => mmu.write_protect(range(page, 1)),
                        _ => _ = mmu.test_young(range(page, 1)),
                    }
                }
            });
        }
    });
    mmu.invalidate(&[range(0, GIB)]);
    is_mapped_by(&mmu, [0; 3]);
}
