//! Pages that the VM takes away: their old content never comes back.

use crate::vmm::{Bed, Manual, Vmm, Words, content, gated, removals, word};
use lacuna_skip::test;
use lacuna_source::Answer;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// Each fault after a removal gets zeros, and the page can be used again.
#[test]
fn a_removed_page_gets_zeros() {
    let uffd = removals();
    let bed = Bed::new(Arc::new(Words), 16);
    let vmm = Vmm::connect(&bed, uffd, 0, 16);
    for round in 0..50 {
        let page = round % 8;
        let before = if round < 8 { word(page) } else { 0 };
        assert_eq!(vmm.memory.read_whole(page), before);
        vmm.memory.write(page, round + 1);
        vmm.memory.discard(page, 1);
        assert_eq!(vmm.memory.read_whole(page), 0);
        vmm.memory.discard(page, 1);
    }
    // Pages that were never touched, with a range that begins at touched ones.
    vmm.memory.discard(6, 6);
    assert_eq!(
        [6, 11, 12].map(|page| vmm.memory.read_whole(page)),
        [0, 0, word(12)]
    );
    bed.wait("the counts", |pager| {
        let counts = pager.stats().counts;
        (counts.removals, counts.placed) == (101, 9)
    });
}

/// The content arrives after the removal of its page was read: it is dropped, and the waiting
/// thread gets zeros.
#[test]
fn the_content_of_a_removed_page_is_dropped() {
    let uffd = removals();
    let source = Arc::new(Manual::default());
    let bed = Bed::new(source.clone(), 2);
    let vmm = Vmm::connect(&bed, uffd, 0, 2);
    thread::scope(|scope| {
        let reader = scope.spawn(|| vmm.memory.read_whole(1));
        let request = source.next();
        // The discard returns after its event was read.
        vmm.memory.discard(1, 1);
        // It is late, or waits if the event thread still changes the states.
        let _ = request.provide(&content(1));
        assert_eq!(reader.join().unwrap(), 0);
    });
    assert!(source.is_empty());
    assert_eq!(bed.pager.stats().counts.placed, 0);
}

/// While a removal is unread, the kernel refuses placements. The source's thread does not wait, and
/// the content is placed after the removal is read. So many rounds make the order a matter of
/// course: in each, the answer comes beside a removal of another page.
#[test]
fn content_that_arrives_beside_a_removal_is_kept() {
    let uffd = removals();
    let source = Arc::new(Manual::default());
    let pages = 2000;
    let bed = Bed::new(source.clone(), pages);
    let vmm = Vmm::connect(&bed, uffd, 0, pages);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                vmm.memory.discard(0, 1);
            }
        });
        let mut page = 1;
        while page < pages && bed.pager.stats().counts.again < 20 {
            let reader = scope.spawn(move || vmm.memory.read_whole(page));
            assert_eq!(source.next().provide(&content(page)), Answer::Taken);
            assert_eq!(reader.join().unwrap(), word(page));
            page += 1;
        }
        over.store(true, Ordering::SeqCst);
    });
    assert!(
        bed.pager.stats().counts.again > 0,
        "{:?}",
        bed.pager.stats()
    );
}

/// The page's own removal races with its answer. The removing thread never sees the old content
/// afterwards.
#[test]
fn old_content_never_comes_back() {
    let uffd = removals();
    let source = Arc::new(Manual::default());
    let pages = 400;
    let bed = Bed::new(source.clone(), pages);
    let vmm = Vmm::connect(&bed, uffd, 0, pages);
    let memory = vmm.memory;
    let (mut taken, mut late) = (0, 0);
    for page in 0..pages {
        thread::scope(|scope| {
            // One word: the removal may happen between two.
            let reader = scope.spawn(move || memory.read(page));
            let request = source.next();
            let remover = scope.spawn(move || {
                memory.discard(page, 1);
                assert_eq!(memory.read_whole(page), 0, "page {page}");
            });
            match request.provide(&content(page)) {
                Answer::Taken => taken += 1,
                Answer::Late => late += 1,
            }
            remover.join().unwrap();
            let read = reader.join().unwrap();
            assert!(read == 0 || read == word(page), "{read:#x}");
            assert_eq!(memory.read_whole(page), 0);
        });
    }
    assert_eq!(taken + late, pages);
    assert!(source.is_empty());
}

/// A removal is not read while a thread acts on a state that it has checked. The pager calls its
/// report in the middle of such an action.
#[test]
fn a_removal_waits_for_the_thread_that_has_checked_a_state() {
    let uffd = removals();
    let source = Arc::new(Manual::default());
    let (bed, reports, opened) = gated(source.clone(), 2);
    let vmm = Vmm::connect(&bed, uffd, 0, 2);
    let memory = vmm.memory;
    thread::scope(|scope| {
        let reader = scope.spawn(move || memory.read(0));
        let request = source.next();
        scope.spawn(move || request.fail("it burnt"));
        reports.recv().unwrap();
        let remover = scope.spawn(move || memory.discard(0, 2));
        // It would take microseconds if the event were read.
        thread::sleep(Duration::from_millis(20));
        let waits = !remover.is_finished();
        opened.send(()).unwrap();
        assert!(waits, "the event was read");
        remover.join().unwrap();
        assert_eq!(reader.join().unwrap(), 0);
    });
}
