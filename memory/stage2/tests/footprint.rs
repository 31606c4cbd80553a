//! Flushes know their blocks: which vCPUs get a request and are waited for.
#![cfg(not(loom))]

use lacuna_addr::{Gfn, GfnRange, Level, Pfn};
use lacuna_stage2::{Arena, Flush, Leaf, Stage2, Waiting};
use lacuna_sync::Quiescence;

fn stage2() -> Stage2 {
    Stage2::new(Arena::new(32).expect("address space")).expect("a root")
}

fn gfn(raw: u64) -> Gfn {
    Gfn::new(raw).expect("a frame")
}

fn range(start: u64, pages: u64) -> GfnRange {
    GfnRange::new(gfn(start), pages).expect("a range")
}

fn map(stage2: &Stage2, at: u64, leaf: Leaf) {
    let mapped = stage2.fault_cursor(gfn(at)).map(gfn(at), leaf);
    assert!(mapped.is_ok(), "{mapped:?}");
}

/// Two vCPUs, online; each has noted one block.
fn noted(blocks: [u64; 2]) -> Quiescence {
    let quiescence = Quiescence::new(2);
    for (index, block) in blocks.into_iter().enumerate() {
        quiescence.online(index);
        quiescence.vcpu(index).flushed();
        quiescence.vcpu(index).note(block);
    }
    quiescence
}

/// Whether each vCPU gets a request.
fn requested(quiescence: &Quiescence) -> [bool; 2] {
    [0, 1].map(|index| quiescence.vcpu(index).has_request())
}

fn settle(quiescence: &Quiescence, waiting: Waiting<'_>) {
    quiescence.offline(0);
    quiescence.offline(1);
    waiting.wait(quiescence);
}

#[test]
fn a_page_that_goes_disturbs_those_who_noted_its_block() {
    let stage2 = stage2();
    map(&stage2, 5, Leaf::dirty(Pfn::new(1)));
    let quiescence = noted([0, 1]);
    let gone = stage2.fault_cursor(gfn(5)).unmap_page(gfn(5));
    let waiting = gone.expect("mapped").1.start(&quiescence);
    assert_eq!(requested(&quiescence), [true, false]);
    settle(&quiescence, waiting);
}

#[test]
fn a_batch_disturbs_those_who_noted_any_of_it() {
    let stage2 = stage2();
    let quiescence = noted([700, 1]);
    let mut flush = Flush::none(&stage2);
    for block in [0, 700, 3, 20] {
        map(&stage2, block * 512, Leaf::dirty(Pfn::new(block as u32)));
        let range = range(block * 512, 1);
        flush.join(stage2.cursor(range).protect([range], |_| {}));
    }
    let waiting = flush.start(&quiescence);
    assert_eq!(requested(&quiescence), [true, false]);
    settle(&quiescence, waiting);
}

#[test]
fn an_upper_table_that_goes_disturbs_all_who_may_walk_through_it() {
    // Only block 0 is mapped, but a walk for block 300 uses the same upper table.
    let stage2 = stage2();
    map(&stage2, 5, Leaf::dirty(Pfn::new(1)));
    let quiescence = noted([300, 600]);
    let gigabyte = range(0, 1 << 18);
    let flush = stage2.cursor(gigabyte).unmap(gigabyte, |_| {});
    let waiting = flush.start(&quiescence);
    assert_eq!(requested(&quiescence), [true, false]);
    assert_eq!(
        stage2.arena().usage().limbo,
        2,
        "the leaf table and the one above"
    );
    settle(&quiescence, waiting);
    assert_eq!(stage2.arena().usage().limbo, 0);
    stage2.verify();
}

#[test]
fn a_collapsed_table_waits_and_nobody_waits_for_it() {
    let stage2 = stage2();
    map(&stage2, 0, Leaf::clean(Pfn::new(512)).at(Level::L2M));
    let split = stage2.fault_cursor(gfn(0)).split(gfn(0)).expect("room");
    assert!(split.is_some());
    let quiescence = noted([0, 1]);
    let done = stage2.fault_cursor(gfn(9)).collapse(gfn(9));
    let (collapsed, flush) = done.expect("uniform").expect("a table");
    assert_eq!((collapsed.gfn, collapsed.leaf.level), (gfn(0), Level::L2M));
    assert_eq!(Some(collapsed.at), stage2.find(gfn(77)));
    flush.retire(&quiescence);
    assert_eq!(requested(&quiescence), [true, false]);
    assert_eq!(stage2.arena().usage().limbo, 1, "a walk may be inside");
    assert_eq!(stage2.reap(&quiescence), 0);
    quiescence.online(0);
    assert_eq!(stage2.reap(&quiescence), 1);
    stage2.verify();
}

#[test]
#[should_panic(expected = "must be waited for")]
fn frames_are_never_left_to_a_later_reap() {
    let stage2 = stage2();
    map(&stage2, 5, Leaf::dirty(Pfn::new(1)));
    let gone = stage2.fault_cursor(gfn(5)).unmap_page(gfn(5));
    gone.expect("mapped").1.retire(&Quiescence::new(0));
}
