//! Leaves of 1 GiB: their split, their collapse, and what the holder of one block's lock finds.

use super::Stage2;
use lacuna_addr::{Access, Gfn, GfnRange, Level, Pfn};
use lacuna_stage2::{Arena, Cause, Entry, Leaf, MapError, Mapped, Walk, Write};
use lacuna_sync::Qsbr;

const GIB: u64 = Level::L1G.pages();
/// The first frame of the second 1 GiB.
const FIRST: u64 = GIB;

fn gfn(raw: u64) -> Gfn {
    Gfn::new(raw).expect("a frame")
}

/// Locks all of the second 1 GiB.
macro_rules! gib {
    ($stage2:expr) => {
        $stage2.cursor(GfnRange::gib_of(gfn(FIRST)))
    };
}

/// The leaf that maps the second 1 GiB to itself.
fn leaf(write: Write) -> Leaf {
    Leaf {
        write,
        ..Leaf::clean(Pfn::new(FIRST as u32)).at(Level::L1G)
    }
}

fn part(write: Write, at: u64, level: Level) -> Leaf {
    leaf(write).part(gfn(at), level)
}

/// The second 1 GiB is mapped by one leaf.
fn mapped(tables: u32, write: Write) -> Stage2 {
    let stage2 = Stage2::with_format(Arena::new(tables).expect("address space")).expect("a root");
    let mapped = gib!(stage2).map_gib(gfn(FIRST), leaf(write));
    assert!(matches!(mapped, Ok(Mapped::New(_))), "{mapped:?}");
    stage2
}

fn assert_maps(stage2: &Stage2, leaves: [u64; 3]) {
    assert_eq!(stage2.verify().leaves, leaves);
}

#[test]
fn a_walk_finds_each_page_of_it() {
    let stage2 = mapped(3, Write::Allowed);
    for at in [0, 1, 511, 512, GIB - 1].map(|page| FIRST + page) {
        let Walk::Hit(hit) = stage2.walk(gfn(at), Access::Write) else {
            panic!("gfn {at:#x}")
        };
        assert_eq!((hit.pfn.get(), hit.level), (at, Level::L1G));
        assert!(hit.writable);
    }
    assert_maps(&stage2, [0, 0, 1]);
    for outside in [FIRST - 1, FIRST + GIB] {
        assert!(matches!(
            stage2.walk(gfn(outside), Access::Read),
            Walk::Violation(violation) if violation.cause == Cause::Absent
        ));
    }
}

#[test]
fn the_holder_of_one_block_uses_it_and_cannot_change_it() {
    let stage2 = mapped(16, Write::OnFault);
    let at = FIRST + 512;
    for level in [Level::L4K, Level::L2M] {
        let mut cursor = stage2.fault_cursor(gfn(at));
        let read = cursor.map(gfn(at), part(Write::OnFault, at, level));
        assert!(matches!(read, Ok(Mapped::Spurious(_))), "{read:?}");
        let write = cursor.map(gfn(at), part(Write::Allowed, at, level));
        let found = Entry::Leaf(leaf(Write::OnFault));
        assert!(
            matches!(write, Err(MapError::Occupied { found: it, .. }) if it == found),
            "{write:?}"
        );
        assert_eq!(cursor.split(gfn(at)), Ok(None));
        assert!(matches!(cursor.collapse(gfn(at)), Ok(None)));
    }
    assert!(stage2.fast_page_fault(gfn(at)).is_none());
    let upgraded = gib!(stage2).map_gib(gfn(FIRST), leaf(Write::Allowed));
    assert!(matches!(upgraded, Ok(Mapped::Upgraded(_))), "{upgraded:?}");
    assert_maps(&stage2, [0, 0, 1]);
}

#[test]
#[should_panic(expected = "is not inside the cursor's")]
fn the_holder_of_one_block_does_not_protect_it() {
    let stage2 = mapped(8, Write::Allowed);
    let mut cursor = stage2.fault_cursor(gfn(FIRST));
    let _ = cursor.protect([GfnRange::page(gfn(FIRST))], |_| ());
}

#[test]
fn it_is_split_and_collapsed_with_its_bits() {
    let stage2 = mapped(8, Write::Allowed);
    assert!(matches!(
        stage2.walk(gfn(FIRST + 7), Access::Write),
        Walk::Hit(_)
    ));
    let split = gib!(stage2).split_gib(gfn(FIRST + 700)).expect("a leaf");
    assert_eq!((split.gfn, split.leaf.dirty), (gfn(FIRST), true));
    assert_eq!(gib!(stage2).split_gib(gfn(FIRST)), None);
    assert_maps(&stage2, [0, 512, 0]);
    let at = FIRST + 3 * 512;
    assert_eq!(
        stage2.find(gfn(at + 5)),
        Some(split.first.beside_block(gfn(at)))
    );

    // A block with small leaves, and a block that is not mapped, are in the way.
    let block = GfnRange::new(gfn(at), 512).expect("a block");
    let small = stage2.fault_cursor(gfn(at)).split(gfn(at));
    assert!(matches!(small, Ok(Some(_))), "{small:?}");
    let refused = gib!(stage2).collapse_gib(gfn(FIRST), None).err();
    assert_eq!(refused.map(|error| error.gfn), Some(gfn(at)));
    let flush = stage2.fault_cursor(gfn(at)).unmap(block, |_| ());
    flush.finish(&Qsbr::new(0));
    assert!(gib!(stage2).collapse_gib(gfn(FIRST), None).is_err());

    // The rights of the whole 1 GiB are known: the missing block is mapped as well, and so is a
    // block whose table is empty.
    let other = at + 512;
    let small = stage2.fault_cursor(gfn(other)).split(gfn(other));
    assert!(matches!(small, Ok(Some(_))), "{small:?}");
    for page in GfnRange::new(gfn(other), 512).expect("a block").iter() {
        let (_, flush) = stage2.fault_cursor(page).unmap_page(page).expect("mapped");
        flush.finish(&Qsbr::new(0));
    }
    let granted = Some(leaf(Write::OnFault));
    let collapsed = gib!(stage2).collapse_gib(gfn(FIRST), granted);
    let (collapsed, flush) = collapsed.expect("uniform").expect("a table");
    assert!(!flush.must_wait());
    flush.retire(&Qsbr::new(0));
    let leaf = collapsed.leaf;
    assert_eq!((leaf.level, leaf.dirty), (Level::L1G, true));
    assert_maps(&stage2, [0, 0, 1]);
    let dirty = |dirty| stage2.walk(gfn(at + dirty), Access::Write);
    assert!(matches!(dirty(0), Walk::Hit(hit) if hit.writable && hit.pfn.get() == at));
}

#[test]
fn no_table_for_its_split_means_no_leaf() {
    // The root and a directory.
    let stage2 = Stage2::with_format(Arena::new(2).expect("address space")).expect("a root");
    let mapped = gib!(stage2).map_gib(gfn(FIRST), leaf(Write::Allowed));
    assert!(matches!(mapped, Err(MapError::Exhausted(_))), "{mapped:?}");
    assert_maps(&stage2, [0; 3]);
    // The table of the split is in the place of the deposited one.
    let stage2 = self::mapped(3, Write::Allowed);
    assert!(gib!(stage2).split_gib(gfn(FIRST)).is_some());
    assert!(matches!(
        gib!(stage2).collapse_gib(gfn(FIRST), None),
        Ok(None)
    ));
    assert_maps(&stage2, [0, 512, 0]);
}

#[test]
fn unmapping_it_frees_its_table() {
    for whole in [GfnRange::gib_of(gfn(FIRST)), range(0, 1 << 30)] {
        let stage2 = mapped(3, Write::Allowed);
        let mut removed = Vec::new();
        let mut cursor = stage2.cursor(whole);
        let flush = cursor.unmap(whole, |gone| removed.push((gone.gfn, gone.leaf.level)));
        drop(cursor);
        flush.finish(&Qsbr::new(0));
        assert_eq!(removed, [(gfn(FIRST), Level::L1G)]);
        assert_maps(&stage2, [0; 3]);
    }
    let stage2 = mapped(3, Write::Allowed);
    let (_, flush) = gib!(stage2).unmap_page(gfn(FIRST + 99)).expect("mapped");
    flush.finish(&Qsbr::new(0));
    assert_maps(&stage2, [0; 3]);
}

#[test]
fn an_invalidation_of_any_of_its_blocks_makes_a_fault_retry() {
    let stage2 = mapped(8, Write::Allowed);
    let gib = GfnRange::gib_of(gfn(FIRST));
    let seq = stage2.invalidate_seq_of(gib);
    assert!(!gib!(stage2).invalidate_retry(seq));
    let one = range(FIRST + 77 * 512, 512);
    stage2.cursor(one).invalidate_begin();
    assert!(gib!(stage2).invalidate_retry(seq), "in progress");
    let during = stage2.invalidate_seq_of(gib);
    assert!(during.invalidate_in_progress());
    stage2.cursor(one).invalidate_end();
    assert!(gib!(stage2).invalidate_retry(seq), "it has ended since");
    assert!(gib!(stage2).invalidate_retry(during), "it has ended since");
    assert!(!gib!(stage2).invalidate_retry(stage2.invalidate_seq_of(gib)));
}

fn range(first: u64, pages: u64) -> GfnRange {
    GfnRange::new(gfn(first), pages).expect("a range")
}
