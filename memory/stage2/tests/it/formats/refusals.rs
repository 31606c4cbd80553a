//! The refused requests of stage 2, and its messages.

use super::Stage2;
use lacuna_addr::{Gfn, GfnRange, Level, Pfn};
use lacuna_stage2::{Arena, EntryRef, Leaf, MapError};
use lacuna_sync::Qsbr;

fn stage2(tables: u32) -> Stage2 {
    Stage2::with_format(Arena::new(tables).expect("address space")).expect("a root")
}

fn gfn(raw: u64) -> Gfn {
    Gfn::new(raw).expect("a frame")
}

fn refusal(stage2: &Stage2, at: u64, leaf: Leaf) -> MapError {
    stage2
        .fault_cursor(gfn(at))
        .map(gfn(at), leaf)
        .expect_err("must be refused")
}

#[test]
fn a_leaf_must_be_aligned_and_small_enough() {
    let stage2 = stage2(8);
    let large = Leaf::dirty(Pfn::new(512)).at(Level::L2M);
    assert_eq!(
        refusal(&stage2, 1, large).to_string(),
        "gfn 0x1 and frame 0x200 do not both start a leaf of L2M: align both to its size, or map \
         4 KiB leaves"
    );
    let crooked = Leaf::dirty(Pfn::new(3)).at(Level::L2M);
    assert!(matches!(
        refusal(&stage2, 512, crooked),
        MapError::Misaligned { .. }
    ));
    let huge = Leaf::dirty(Pfn::new(0)).at(Level::L1G);
    assert_eq!(
        refusal(&stage2, 0, huge).to_string(),
        "a leaf of L1G is not mapped under the lock of one block: map a 2 MiB leaf"
    );
    assert_eq!(
        stage2.verify().tables,
        0,
        "refused before anything was changed"
    );
}

#[test]
fn another_frame_never_replaces_a_present_one() {
    let stage2 = stage2(8);
    assert!(
        stage2
            .fault_cursor(gfn(5))
            .map(gfn(5), Leaf::clean(Pfn::new(1)))
            .is_ok()
    );
    let text = refusal(&stage2, 5, Leaf::clean(Pfn::new(2))).to_string();
    assert!(
        text.starts_with("gfn 0x5 cannot be mapped to Leaf"),
        "{text}"
    );
    assert!(text.contains("is there; unmap that"), "{text}");
    stage2.verify();
}

#[test]
fn running_out_of_tables_changes_nothing_that_counts() {
    let stage2 = stage2(4);
    assert!(
        stage2
            .fault_cursor(gfn(0))
            .map(gfn(0), Leaf::clean(Pfn::new(0)))
            .is_ok()
    );
    let error = refusal(&stage2, 1 << 18, Leaf::clean(Pfn::new(1)));
    assert!(matches!(error, MapError::Exhausted(_)), "{error:?}");
    assert_eq!(stage2.verify().pages(), 1);
    // In the tables that exist, mapping still works.
    assert!(
        stage2
            .fault_cursor(gfn(1))
            .map(gfn(1), Leaf::clean(Pfn::new(1)))
            .is_ok()
    );
}

/// A block mapped by one read-only leaf, and no table left to split it.
fn a_block_and_no_table() -> Stage2 {
    let stage2 = stage2(3);
    let leaf = Leaf::clean(Pfn::new(512)).at(Level::L2M);
    let mapped = stage2.fault_cursor(gfn(0)).map(gfn(0), leaf);
    assert!(mapped.is_ok(), "{mapped:?}");
    stage2
}

#[test]
fn a_block_that_cannot_be_split_stays_as_it_is() {
    let stage2 = a_block_and_no_table();
    let before = stage2.verify();
    assert!(stage2.fault_cursor(gfn(9)).split(gfn(9)).is_err());
    let part = GfnRange::new(gfn(100), 900).expect("a range");
    let cut = stage2.cursor(part).cut(part, |split| panic!("{split:?}"));
    assert!(cut.is_err());
    let error = refusal(&stage2, 9, Leaf::dirty(Pfn::new(521)));
    assert!(matches!(error, MapError::Exhausted(_)), "{error:?}");
    assert_eq!(stage2.verify(), before);
    // The whole block is removed, and the result says so.
    let mut removed = Vec::new();
    let flush = stage2.cursor(part).unmap(part, |gone| removed.push(gone));
    flush.finish(&Qsbr::new(0));
    assert_eq!(removed.len(), 1);
    assert_eq!(
        (removed[0].gfn, removed[0].leaf.level),
        (gfn(0), Level::L2M)
    );
}

#[test]
fn a_split_that_was_prepared_and_not_committed_costs_no_table() {
    let stage2 = stage2(4);
    let leaf = Leaf::clean(Pfn::new(512)).at(Level::L2M);
    let _ = stage2.fault_cursor(gfn(0)).map(gfn(0), leaf).expect("room");
    let before = (stage2.verify(), stage2.arena().usage());
    let mut cursor = stage2.fault_cursor(gfn(9));
    let place = cursor.prepare(gfn(9), Leaf::dirty(Pfn::new(521)));
    assert!(place.is_ok());
    drop(place);
    drop(cursor);
    assert_eq!((stage2.verify(), stage2.arena().usage()), before);
}

#[test]
fn a_table_with_a_stranger_in_it_stays_a_table() {
    let stage2 = stage2(4);
    for page in 0..512 {
        let pfn = Pfn::new(512 + page as u32 + u32::from(page == 300));
        let _ = stage2
            .fault_cursor(gfn(page))
            .map(gfn(page), Leaf::clean(pfn))
            .expect("room");
    }
    let before = stage2.verify();
    let refused = stage2.fault_cursor(gfn(0)).collapse(gfn(0));
    let text = refused.err().expect("not uniform").to_string();
    assert!(
        text.starts_with("the leaves around gfn 0x12c stay small: Leaf"),
        "{text}"
    );
    assert_eq!(stage2.verify(), before);
}

#[test]
fn rights_that_do_not_mix_are_never_invented() {
    let odd = [
        Leaf::read_only(Pfn::new(512)),
        Leaf {
            exec: false,
            ..Leaf::clean(Pfn::new(512))
        },
    ];
    for odd in odd {
        let stage2 = stage2(4);
        let _ = stage2.fault_cursor(gfn(0)).map(gfn(0), odd).expect("room");
        let granted = Leaf::dirty(Pfn::new(512)).at(Level::L2M);
        let refused = stage2.fault_cursor(gfn(0)).collapse_to(gfn(0), granted);
        assert_eq!(refused.err().map(|error| error.gfn), Some(gfn(0)));
        stage2.verify();
    }
}

#[test]
#[should_panic(expected = "outside the cursor's")]
fn a_cursor_is_good_for_its_own_block_only() {
    let stage2 = stage2(8);
    let _ = stage2
        .fault_cursor(gfn(0))
        .map(gfn(512), Leaf::clean(Pfn::new(0)));
}

#[test]
#[should_panic(expected = "is not inside the cursor's")]
fn a_range_must_be_held_whole() {
    let stage2 = stage2(8);
    let two_blocks = GfnRange::new(gfn(0), 513).expect("a range");
    stage2
        .fault_cursor(gfn(0))
        .unmap(two_blocks, |_| {})
        .finish(&Qsbr::new(0));
}

#[test]
fn an_invalidation_near_it_turns_a_fault_away() {
    let stage2 = stage2(8);
    let range = GfnRange::new(gfn(0), 2048).expect("a range");
    let before = stage2.invalidate_seq(gfn(600));
    let elsewhere = stage2.invalidate_seq(gfn(9000));
    assert!(!stage2.fault_cursor(gfn(600)).invalidate_retry(before));
    stage2.cursor(range).invalidate_begin();
    let during = stage2.invalidate_seq(gfn(600));
    assert!(during.invalidate_in_progress());
    assert!(stage2.fault_cursor(gfn(600)).invalidate_retry(before));
    assert!(stage2.fault_cursor(gfn(600)).invalidate_retry(during));
    stage2.cursor(range).invalidate_end();
    assert!(stage2.fault_cursor(gfn(600)).invalidate_retry(before));
    assert!(stage2.fault_cursor(gfn(600)).invalidate_retry(during));
    assert!(
        !stage2
            .fault_cursor(gfn(600))
            .invalidate_retry(stage2.invalidate_seq(gfn(600)))
    );
    assert!(
        !stage2.fault_cursor(gfn(9000)).invalidate_retry(elsewhere),
        "not near it"
    );
}

#[test]
fn a_range_wider_than_all_range_locks_takes_each_once() {
    let stage2 = stage2(8);
    let range = GfnRange::new(gfn(0), 512 * 1000 + 1).expect("a range");
    stage2.cursor(range).invalidate_begin();
    stage2.cursor(range).invalidate_end();
    let odd = GfnRange::new(gfn(512 * 200), 512 * 120).expect("a range");
    stage2.cursor(odd).invalidate_begin();
    assert!(
        stage2
            .invalidate_seq(gfn(512 * 310))
            .invalidate_in_progress()
    );
    stage2.cursor(odd).invalidate_end();
    assert!(
        !stage2
            .invalidate_seq(gfn(512 * 310))
            .invalidate_in_progress()
    );
}

#[test]
fn an_entry_ref_is_four_bytes_and_never_zero() {
    assert_eq!(size_of::<Option<EntryRef>>(), 4);
    assert_eq!(EntryRef::from_bits(0), None);
    assert_eq!(EntryRef::from_bits(511), None, "table zero does not exist");
}
