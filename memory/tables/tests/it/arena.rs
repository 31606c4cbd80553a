//! The arena's promises: new tables are zero, no table is given out twice, limbo waits for its
//! grace period, and the cap holds.

use lacuna_sync::{GracePeriod, Qsbr};
use lacuna_tables::{Arena, ArenaError, Exhausted, Index, TableId, Usage};
use std::collections::HashSet;
use std::sync::atomic::Ordering;

fn arena(cap: u32) -> Arena {
    Arena::new(cap).expect("address space")
}

fn fill(arena: &Arena, id: TableId) {
    Index::all().for_each(|i| arena.entry(id, i).store(u64::MAX, Ordering::Relaxed));
}

fn is_zero(arena: &Arena, id: TableId) -> bool {
    Index::all().all(|i| arena.entry(id, i).load(Ordering::Relaxed) == 0)
}

/// Two grace periods, the second requested after the first.
fn two_grace_periods() -> (GracePeriod, GracePeriod) {
    let qsbr = Qsbr::new(1);
    (qsbr.request(), qsbr.request())
}

#[test]
fn entries_of_different_tables_are_different_memory() {
    let arena = arena(8);
    let ids: Vec<_> = (0..8)
        .map(|_| arena.alloc().expect("below the cap"))
        .collect();
    for (n, id) in ids.iter().enumerate() {
        for i in Index::all() {
            arena
                .entry(*id, i)
                .store((n as u64) << 32 | u64::from(i.get()), Ordering::Relaxed);
        }
    }
    for (n, id) in ids.iter().enumerate() {
        for i in Index::all() {
            let expected = (n as u64) << 32 | u64::from(i.get());
            assert_eq!(arena.entry(*id, i).load(Ordering::Relaxed), expected);
        }
    }
}

#[test]
fn a_used_table_comes_back_zeroed_after_its_grace_period_only() {
    let arena = arena(2);
    let (early, late) = two_grace_periods();
    let (a, b) = (arena.alloc().expect("one"), arena.alloc().expect("two"));
    fill(&arena, a);
    fill(&arena, b);
    let (a_out, b_out) = (arena.detach(a), arena.detach(b));
    assert_eq!(
        arena.usage(),
        Usage {
            in_use: 0,
            detached: 2,
            limbo: 0
        }
    );
    arena.retire([a_out], early);
    arena.retire([b_out], late);
    assert_eq!(
        arena.usage(),
        Usage {
            in_use: 0,
            detached: 0,
            limbo: 2
        }
    );
    assert_eq!(arena.alloc(), Err(Exhausted { cap: 2, limbo: 2 }));
    assert_eq!(arena.reap(|_| false), 0);
    assert_eq!(arena.reap(|grace| grace <= early), 1);
    let again = arena.alloc().expect("the one whose grace period passed");
    assert_eq!(again, a);
    assert!(is_zero(&arena, again));
    assert_eq!(arena.alloc(), Err(Exhausted { cap: 2, limbo: 1 }));
    assert_eq!(arena.reap(|_| true), 1);
    assert_eq!(
        arena.usage(),
        Usage {
            in_use: 1,
            detached: 0,
            limbo: 0
        }
    );
}

#[test]
fn a_table_that_was_never_linked_is_free_at_once() {
    let arena = arena(1);
    let id = arena.alloc().expect("one");
    fill(&arena, id);
    arena.free_unlinked(id);
    let again = arena.alloc().expect("free again");
    assert_eq!(again, id);
    assert!(is_zero(&arena, again));
}

#[test]
fn threads_never_get_the_same_table() {
    let arena = arena(400);
    let all: Vec<TableId> = std::thread::scope(|s| {
        let workers: Vec<_> = (0..4)
            .map(|_| s.spawn(|| (0..100).map(|_| arena.alloc()).collect::<Vec<_>>()))
            .collect();
        let joined = workers.into_iter().flat_map(|w| w.join().expect("worker"));
        joined.map(|id| id.expect("below the cap")).collect()
    });
    assert_eq!(all.iter().collect::<HashSet<_>>().len(), 400);
    assert!(arena.alloc().is_err());
}

#[test]
fn the_cap_is_checked_and_errors_say_what_to_do() {
    assert_eq!(Arena::new(0).err(), Some(ArenaError::Cap(0)));
    let error = Arena::new(Arena::MAX_CAP + 1)
        .err()
        .expect("too many to name");
    assert_eq!(
        error.to_string(),
        "a VM cannot have a cap of 8388608 table pages: choose one between 1 and 8388607"
    );
    let largest = Arena::new(Arena::MAX_CAP).expect("address space is cheap");
    assert!(largest.alloc().is_ok());
    assert_eq!(
        Exhausted { cap: 7, limbo: 3 }.to_string(),
        "all 7 translation-table pages are in use (3 of them wait for a TLB shoot-down): give the \
         VM a larger table cap"
    );
}

#[test]
#[should_panic(expected = "table id of another arena")]
fn an_id_past_the_cap_reads_no_memory() {
    let id = TableId::new(9).expect("a valid number");
    arena(8).entry(id, Index::truncate(0));
}

#[test]
fn ids_and_indices_have_their_limits() {
    assert_eq!(TableId::new(0), None);
    assert_eq!(TableId::new(1 << TableId::BITS), None);
    assert_eq!(
        TableId::new(Arena::MAX_CAP).map(TableId::get),
        Some(Arena::MAX_CAP)
    );
    assert_eq!(Index::truncate(512 + 3).get(), 3);
    assert_eq!(size_of::<Option<TableId>>(), 4);
}
