//! The order of the locks is asserted in debug builds, and costs nothing in release builds.
#![cfg(not(loom))]

use lacuna_sync::lock_order::{FreeFrames, MmuLayout, RegionTable, SlotsWriter, TicketResult};
use lacuna_sync::{Condvar, Mutex, RangeLocks, RwLock};
use std::time::Duration;

#[test]
fn a_lock_is_as_large_as_that_of_the_standard_library() {
    type Ours<T> = Mutex<T, FreeFrames>;
    type Theirs<T> = std::sync::Mutex<T>;
    assert_eq!(size_of::<Ours<u64>>(), size_of::<Theirs<u64>>());
    assert_eq!(align_of::<Ours<u64>>(), align_of::<Theirs<u64>>());
    assert_eq!(
        size_of::<RwLock<u64, RegionTable>>(),
        size_of::<std::sync::RwLock<u64>>()
    );
    if !cfg!(debug_assertions) {
        assert_eq!(
            size_of::<lacuna_sync::MutexGuard<'_, u64>>(),
            size_of::<std::sync::MutexGuard<'_, u64>>()
        );
    }
}

#[test]
fn locks_taken_in_order_are_taken_and_freed() {
    let (outer, inner) = (
        Mutex::<_, MmuLayout>::new(1),
        Mutex::<_, FreeFrames>::new(2),
    );
    let ranges = RangeLocks::new(4);
    for _ in 0..2 {
        let outer = outer.lock().unwrap();
        let (first, second) = (ranges.lock_index(1), ranges.lock_index(3));
        let inner = inner.lock().unwrap();
        assert_eq!(*outer + *inner, 3);
        // Guards may be dropped in any order.
        drop(outer);
        drop((second, inner, first));
    }
    drop(inner.lock());
    // The thread holds nothing any more.
    drop(outer.lock());
}

#[test]
fn a_wait_keeps_its_lock_recorded() {
    let (mutex, condvar) = (Mutex::<_, TicketResult>::new(0), Condvar::new());
    let guard = mutex.lock().unwrap();
    let guard = condvar.wait_timeout(guard, Duration::from_millis(1));
    let guard = condvar.wait_while(guard.unwrap(), |_| false).unwrap();
    let waits = |count: &mut u32| {
        *count += 1;
        *count < 2
    };
    let guard = condvar.wait_timeout_while(guard, Duration::from_millis(1), waits);
    drop(guard);
    assert_eq!(*mutex.lock().unwrap(), 2);
}

#[cfg(debug_assertions)]
mod violations {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    /// The message with which `body` panics.
    fn message(body: impl FnOnce()) -> String {
        let panic = catch_unwind(AssertUnwindSafe(body)).expect_err("it must panic");
        let text = panic.downcast_ref::<String>();
        text.expect("panics of the order have a text").clone()
    }

    #[track_caller]
    fn names(message: &str, taken: &str, held: &str) {
        let expected = format!("lock order: {taken} is taken while {held} is held");
        assert!(message.starts_with(&expected), "{message}");
    }

    #[test]
    fn a_lower_rank_under_a_higher_one_names_both() {
        let (layout, frames) = (
            Mutex::<_, MmuLayout>::new(()),
            Mutex::<_, FreeFrames>::new(()),
        );
        let message = message(|| {
            let _frames = frames.lock();
            let _layout = layout.lock();
        });
        let (taken, held) = (
            "Mmu::layout of rank Vm",
            "Frames::free (frames) of rank Leaf",
        );
        names(&message, taken, held);
        // The refused lock is neither held nor poisoned, and no lock is recorded.
        drop(layout.lock().unwrap());
    }

    #[test]
    fn two_locks_of_one_rank_are_refused() {
        let table = RwLock::<_, RegionTable>::new(());
        let frames = Mutex::<_, FreeFrames>::new(());
        let takes = [
            |table: &RwLock<(), RegionTable>| drop(table.read()),
            |table: &RwLock<(), RegionTable>| drop(table.write()),
        ];
        for take in takes {
            let message = message(|| {
                let _frames = frames.lock();
                take(&table);
            });
            let (taken, held) = ("Regions::list (host)", "Frames::free (frames)");
            let of = |name| format!("{name} of rank Leaf");
            names(&message, &of(taken), &of(held));
        }
    }

    #[test]
    fn a_lock_that_was_tried_counts_as_held() {
        let (slots, frames) = (
            Mutex::<_, SlotsWriter>::new(()),
            Mutex::<_, FreeFrames>::new(()),
        );
        let message = message(|| {
            let _frames = frames.try_lock();
            let _slots = slots.lock();
        });
        let (taken, held) = (
            "Slots::writer of rank Slots",
            "Frames::free (frames) of rank Leaf",
        );
        names(&message, taken, held);
    }

    #[test]
    fn range_locks_are_taken_in_ascending_order_within_one_vm() {
        let (ranges, others) = (RangeLocks::new(4), RangeLocks::new(4));
        let descending = message(|| {
            let _second = ranges.lock_index(2);
            let _first = ranges.lock_index(1);
        });
        let (taken, held) = ("range lock 1 of rank Blocks", "range lock 2 of rank Blocks");
        names(&descending, taken, held);
        let twice = message(|| {
            let _once = ranges.lock_index(2);
            let _again = ranges.lock_index(2);
        });
        names(&twice, held, held);
        let of_two = message(|| {
            let _one = ranges.lock_index(1);
            let _other = others.lock_index(2);
        });
        names(&of_two, held, taken);
    }

    #[test]
    fn no_thread_waits_under_a_lock_that_forbids_it() {
        let (condvar, ranges) = (Condvar::new(), RangeLocks::new(4));
        let wait = || {
            let result = Mutex::<_, TicketResult>::new(());
            let guard = result.lock().unwrap();
            drop(condvar.wait_timeout(guard, Duration::from_millis(1)));
        };
        let expected = "lock order: a thread waits while range lock 0 of rank Blocks is held";
        let message = message(|| {
            let _range = ranges.lock_index(0);
            wait();
        });
        assert!(message.starts_with(expected), "{message}");
        let layout = Mutex::<_, MmuLayout>::new(());
        let _layout = layout.lock();
        wait();
        lacuna_sync::assert_may_wait();
    }
}
