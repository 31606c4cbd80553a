//! Faults are answered from the source.

use crate::vmm::{Bed, Manual, Vmm, Words, content, or_skip, removals, word};
use lacuna_addr::{PAGE_SIZE, PageCount};
use lacuna_skip::test;
use lacuna_source::{Answer, MemoryFile, Policy};
use lacuna_sys::{Userfaultfd, Waiters};
use std::sync::Arc;
use std::thread;
use tempfile::NamedTempFile;

/// The pages of a memory file come in their places, also behind an offset.
#[test]
fn a_memory_file_fills_a_vm() {
    let uffd = removals();
    let file = NamedTempFile::new().unwrap();
    let pages: Vec<_> = (0..16).flat_map(content).collect();
    std::fs::write(&file, pages).unwrap();
    let source = MemoryFile::open(file.path(), PageCount::new(16), Policy::default()).unwrap();
    let bed = Bed::new(Arc::new(source), 16);
    let vmm = Vmm::connect(&bed, uffd, 4, 12);
    for page in (0..12).rev() {
        assert_eq!(vmm.memory.read_whole(page), word(4 + page));
    }
    bed.wait("the counts", |pager| pager.stats().counts.placed == 12);
    let stats = bed.pager.stats();
    assert_eq!((stats.vms, stats.accepted, stats.refused), (1, 1, 0));
    let vm = &bed.pager.vms()[0];
    assert_eq!((vm.bytes, vm.pages.provided), (12 * PAGE_SIZE as u64, 12));
    assert_eq!(vm.pid, Some(std::process::id() as i32));
    assert_eq!(bed.said(), [""; 0]);
}

/// Threads that wait for one page are woken by one answer, and the source is asked once.
#[test]
fn one_answer_serves_all_threads() {
    let uffd = removals();
    let source = Arc::new(Manual::default());
    let bed = Bed::new(source.clone(), 4);
    let vmm = Vmm::connect(&bed, uffd, 0, 4);
    thread::scope(|scope| {
        let readers = [(); 3].map(|()| scope.spawn(|| vmm.memory.read_whole(2)));
        bed.wait("three faults", |pager| pager.stats().counts.faults >= 3);
        let request = source.next();
        assert_eq!(request.page().0, 2);
        assert_eq!(request.provide(&content(2)), Answer::Taken);
        assert_eq!(request.provide(&content(2)), Answer::Late);
        for reader in readers {
            assert_eq!(reader.join().unwrap(), word(2));
        }
    });
    assert!(source.is_empty());
    assert_eq!(bed.pager.stats().counts.placed, 1);
}

/// Another thread fills the page first, and wakes no thread. The pager's copy finds the page, and
/// wakes the thread.
#[test]
fn a_page_that_is_there_wakes_its_threads() {
    let uffd = removals();
    let source = Arc::new(Manual::default());
    let bed = Bed::new(source.clone(), 1);
    let vmm = Vmm::connect(&bed, uffd, 0, 1);
    thread::scope(|scope| {
        let reader = scope.spawn(|| vmm.memory.read_whole(0));
        let request = source.next();
        let filled = vmm.uffd.place(
            &[[9; PAGE_SIZE]],
            vmm.memory.range().start(),
            Waiters::LeaveAsleep,
        );
        assert_eq!(filled, Ok(()));
        assert_eq!(request.provide(&content(0)), Answer::Taken);
        assert_eq!(reader.join().unwrap(), u64::from_ne_bytes([9; 8]));
    });
    let counts = bed.pager.stats().counts;
    assert_eq!((counts.exists, counts.placed), (1, 0));
}

/// A descriptor that reports no removals: a discarded page gets zeros, not its old content.
#[test]
fn a_discarded_page_without_an_event_gets_zeros() {
    let uffd = or_skip(Userfaultfd::open_user());
    let bed = Bed::new(Arc::new(Words), 4);
    let vmm = Vmm::connect(&bed, uffd, 0, 4);
    for page in 0..4 {
        assert_eq!(vmm.memory.read_whole(page), word(page));
        vmm.memory.write(page, 77);
        vmm.memory.discard(page, 1);
        assert_eq!(vmm.memory.read_whole(page), 0);
        vmm.memory.write(page, 78);
        assert_eq!(vmm.memory.read_whole(page), 78);
    }
    bed.wait("the counts", |pager| pager.stats().counts.zeros == 4);
}

/// VMs that come and go at the same time, each with its own part of the source.
#[test]
fn many_vms_at_once() {
    drop(removals());
    let bed = Bed::new(Arc::new(Words), 64);
    thread::scope(|scope| {
        for thread in 0..4 {
            let bed = &bed;
            scope.spawn(move || {
                for round in 0..4 {
                    let first = thread * 16 + round;
                    let vmm = Vmm::connect(bed, removals(), first, 8);
                    for page in 0..8 {
                        assert_eq!(vmm.memory.read_whole(page), word(first + page));
                    }
                }
            });
        }
    });
    bed.wait("the ends", |pager| pager.stats().vms == 0);
    let stats = bed.pager.stats();
    assert_eq!((stats.accepted, stats.counts.placed), (16, 128));
}
