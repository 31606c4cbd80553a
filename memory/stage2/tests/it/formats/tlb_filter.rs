//! Flushes have blocks, which decide which vCPUs get a request and are waited for.

use super::Stage2;
use lacuna_addr::{Gfn, GfnRange, Level, Pfn};
use lacuna_stage2::{Arena, Flush, Leaf, Waiting};
use lacuna_sync::Qsbr;

fn stage2() -> Stage2 {
    Stage2::with_format(Arena::new(32).expect("address space")).expect("a root")
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
fn noted(blocks: [u64; 2]) -> Qsbr {
    let qsbr = Qsbr::new(2);
    for (index, block) in blocks.into_iter().enumerate() {
        qsbr.online(index);
        qsbr.vcpu(index).flushed();
        qsbr.vcpu(index).note(block);
    }
    qsbr
}

/// Whether each vCPU gets a request.
fn requested(qsbr: &Qsbr) -> [bool; 2] {
    [0, 1].map(|index| qsbr.vcpu(index).has_request())
}

fn settle(qsbr: &Qsbr, waiting: Waiting<'_>) {
    qsbr.offline(0);
    qsbr.offline(1);
    waiting.wait(qsbr);
}

#[test]
fn a_page_that_goes_disturbs_those_who_noted_its_block() {
    let stage2 = stage2();
    map(&stage2, 5, Leaf::dirty(Pfn::new(1)));
    let qsbr = noted([0, 1]);
    let gone = stage2.fault_cursor(gfn(5)).unmap_page(gfn(5));
    let waiting = gone.expect("mapped").1.start(&qsbr);
    assert_eq!(requested(&qsbr), [true, false]);
    settle(&qsbr, waiting);
}

#[test]
fn a_batch_disturbs_those_who_noted_any_of_it() {
    let stage2 = stage2();
    let qsbr = noted([700, 1]);
    let mut flush = Flush::none(&stage2);
    for block in [0, 700, 3, 20] {
        map(&stage2, block * 512, Leaf::dirty(Pfn::new(block as u32)));
        let range = range(block * 512, 1);
        flush.join(stage2.cursor(range).protect([range], |_| {}));
    }
    let waiting = flush.start(&qsbr);
    assert_eq!(requested(&qsbr), [true, false]);
    settle(&qsbr, waiting);
}

#[test]
fn an_upper_table_that_goes_disturbs_all_who_may_walk_through_it() {
    // Only block 0 is mapped, but a walk for block 300 uses the same upper table.
    let stage2 = stage2();
    map(&stage2, 5, Leaf::dirty(Pfn::new(1)));
    let qsbr = noted([300, 600]);
    let gigabyte = range(0, 1 << 18);
    let flush = stage2.cursor(gigabyte).unmap(gigabyte, |_| {});
    let waiting = flush.start(&qsbr);
    assert_eq!(requested(&qsbr), [true, false]);
    assert_eq!(
        stage2.arena().usage().limbo,
        2,
        "the leaf table and the one above"
    );
    settle(&qsbr, waiting);
    assert_eq!(stage2.arena().usage().limbo, 0);
    stage2.verify();
}

#[test]
fn a_collapsed_table_waits_and_nobody_waits_for_it() {
    let stage2 = stage2();
    map(&stage2, 0, Leaf::clean(Pfn::new(512)).at(Level::L2M));
    let split = stage2.fault_cursor(gfn(0)).split(gfn(0)).expect("room");
    assert!(split.is_some());
    let qsbr = noted([0, 1]);
    let done = stage2.fault_cursor(gfn(9)).collapse(gfn(9));
    let (collapsed, flush) = done.expect("uniform").expect("a table");
    assert_eq!((collapsed.gfn, collapsed.leaf.level), (gfn(0), Level::L2M));
    assert_eq!(Some(collapsed.at), stage2.find(gfn(77)));
    flush.retire(&qsbr);
    assert_eq!(requested(&qsbr), [true, false]);
    assert_eq!(stage2.arena().usage().limbo, 1, "a walk may be inside");
    assert_eq!(stage2.reap(&qsbr), 0);
    qsbr.online(0);
    assert_eq!(stage2.reap(&qsbr), 1);
    stage2.verify();
}

#[test]
#[should_panic(expected = "must be waited for")]
fn frames_are_never_left_to_a_later_reap() {
    let stage2 = stage2();
    map(&stage2, 5, Leaf::dirty(Pfn::new(1)));
    let gone = stage2.fault_cursor(gfn(5)).unmap_page(gfn(5));
    gone.expect("mapped").1.retire(&Qsbr::new(0));
}
