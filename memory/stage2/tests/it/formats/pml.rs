//! Page-modification logging as a processor does it (SDM 29.3.6).

use super::Stage2;
use lacuna_addr::{Access, Gfn, GfnRange, Level, Pfn};
use lacuna_stage2::{Arena, Leaf, LogFull, PmlLog, Walk, Write};
use lacuna_sync::Qsbr;
use proptest::prelude::*;

fn gfn(raw: u64) -> Gfn {
    Gfn::new(raw).expect("a frame")
}

/// Maps `pages` pages, writable, without A and D.
fn armed(pages: u64) -> Stage2 {
    let stage2 = Stage2::with_format(Arena::new(16).expect("address space")).expect("a root");
    for page in 0..pages {
        let leaf = Leaf {
            write: Write::Allowed,
            accessed: false,
            ..Leaf::clean(Pfn::new(page as u32))
        };
        let mapped = stage2.fault_cursor(gfn(page)).map(gfn(page), leaf);
        assert!(mapped.is_ok(), "{mapped:?}");
    }
    stage2
}

fn hit(stage2: &Stage2, page: u64, access: Access, log: &mut PmlLog) {
    let outcome = stage2.walk_logged(gfn(page), access, log);
    assert!(matches!(outcome, Ok(Walk::Hit(_))), "{outcome:?}");
}

/// Removes the leaf of a page, and returns it with its final A and D.
fn last(stage2: &Stage2, page: u64) -> Leaf {
    let gone = stage2.fault_cursor(gfn(page)).unmap_page(gfn(page));
    let (removed, flush) = gone.expect("mapped");
    flush.finish(&Qsbr::new(0));
    removed.leaf
}

fn flushed(log: &mut PmlLog) -> Vec<u64> {
    let logged = log.take().iter().rev();
    logged.map(|gpa| gpa.gfn().get()).collect()
}

#[test]
fn entries_go_down_from_511_and_the_index_wraps() {
    let stage2 = armed(513);
    let mut log = PmlLog::new();
    assert!(log.is_empty());
    for page in 0..511 {
        hit(&stage2, page, Access::Write, &mut log);
        assert_eq!(u64::from(log.index()), 510 - page);
    }
    hit(&stage2, 511, Access::Write, &mut log);
    assert_eq!((log.index(), log.is_full()), (0xffff, true));
    assert_eq!(
        log.entries()[0].get(),
        511 << 12,
        "the last entry went into slot 0"
    );
    let in_order: Vec<u64> = (0..512).collect();
    assert_eq!(flushed(&mut log), in_order);
    assert!(log.is_empty() && flushed(&mut log).is_empty());
}

#[test]
fn a_full_log_stops_what_would_set_a_or_d() {
    let stage2 = armed(514);
    let mut log = PmlLog::new();
    (0..512).for_each(|page| hit(&stage2, page, Access::Write, &mut log));
    for access in [Access::Read, Access::Write, Access::Fetch] {
        let outcome = stage2.walk_logged(gfn(512), access, &mut log);
        assert_eq!(outcome, Err(LogFull), "{access:?}");
    }
    // Neither bit has to be set, so there is nothing to log.
    hit(&stage2, 5, Access::Write, &mut log);
    hit(&stage2, 5, Access::Read, &mut log);
    let leaf = last(&stage2, 512);
    assert!(!leaf.accessed && !leaf.dirty, "{leaf:?}");
    let nothing = stage2.walk_logged(gfn(600), Access::Write, &mut log);
    assert!(
        matches!(nothing, Ok(Walk::Violation(_))),
        "a violation is first"
    );
    assert_eq!(flushed(&mut log).len(), 512);
    hit(&stage2, 513, Access::Read, &mut log);
    assert!(log.is_empty(), "A alone makes no entry");
}

#[test]
fn preset_pages_make_no_entry_and_cleared_ones_one_each_time() {
    let stage2 = armed(512);
    let (mut log, no_vcpu) = (PmlLog::new(), Qsbr::new(0));
    let all = GfnRange::new(gfn(0), 512).expect("a block");
    let write_all = |log: &mut PmlLog| (0..512).for_each(|p| hit(&stage2, p, Access::Write, log));
    stage2.cursor(all).preset_dirty(all);
    write_all(&mut log);
    assert!(log.is_empty(), "D was preset");
    for _ in 0..2 {
        let mut cleared = 0;
        let flush = stage2.cursor(all).clear_dirty([all], |was| {
            assert!(was.leaf.dirty);
            cleared += 1;
        });
        assert!(flush.must_wait());
        flush.finish(&no_vcpu);
        assert_eq!(cleared, 512, "each D was handed over");
        write_all(&mut log);
        assert_eq!(flushed(&mut log).len(), 512);
    }
}

#[test]
fn a_large_leaf_is_write_protected_instead() {
    let stage2 = Stage2::with_format(Arena::new(8).expect("address space")).expect("a root");
    let large = Leaf::dirty(Pfn::new(512)).at(Level::L2M);
    let mapped = stage2.fault_cursor(gfn(0)).map(gfn(0), large);
    assert!(mapped.is_ok(), "{mapped:?}");
    let page = GfnRange::page(gfn(7));
    let mut cleared = Vec::new();
    let flush = stage2
        .fault_cursor(gfn(7))
        .clear_dirty([page], |was| cleared.push(was.leaf));
    assert_eq!(cleared, [large]);
    flush.finish(&Qsbr::new(0));
    assert_eq!(
        stage2.fast_page_fault(gfn(7)),
        None,
        "one D would speak for 512"
    );
    assert!(!last(&stage2, 0).is_writable());
}

proptest! {
    /// A log has exactly the pages whose D changed from 0 to 1, in order.
    #[test]
    fn the_log_is_the_order_of_first_writes(
        ops in prop::collection::vec((0u64..64, any::<bool>(), 0u8..20), 1..2000),
    ) {
        let stage2 = armed(64);
        let (mut log, no_vcpu) = (PmlLog::new(), Qsbr::new(0));
        let (mut got, mut want, mut dirty) = (Vec::new(), Vec::new(), [false; 64]);
        for (page, write, clear) in ops {
            let access = if write { Access::Write } else { Access::Read };
            if stage2.walk_logged(gfn(page), access, &mut log).is_err() {
                got.extend(flushed(&mut log));
                hit(&stage2, page, access, &mut log);
            }
            if write && !dirty[page as usize] {
                dirty[page as usize] = true;
                want.push(page);
            }
            if clear == 0 {
                let some = GfnRange::new(gfn(page / 2), page - page / 2 + 1).expect("a range");
                let flush = stage2.cursor(some).clear_dirty([some], |was| {
                    assert!(dirty[was.gfn.get() as usize], "D out of nowhere");
                    dirty[was.gfn.get() as usize] = false;
                });
                // A statement of its own: no cursor may be held while the flush is waited for.
                flush.finish(&no_vcpu);
            }
        }
        got.extend(flushed(&mut log));
        prop_assert_eq!(got, want);
    }
}
