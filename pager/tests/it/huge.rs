//! Memory in huge pages of 2 MiB, which are placed as a whole.

use crate::fill::all;
use crate::vmm::{
    Bed, Manual, Memory, Vmm, Words, content, gated, or_skip, removals, with_features, word,
};
use lacuna_addr::{Level, PAGE_SIZE, PageCount};
use lacuna_pager::{Config, Image, WhenLost};
use lacuna_skip::{HugePages, test};
use lacuna_source::Answer;
use lacuna_sys::{Errno, TakenPages, Userfaultfd, Waiters};
use rustix::mm::{MapFlags, munmap};
use std::sync::Arc;
use std::thread;

const UNIT: u64 = 512;
/// `UFFD_FEATURE_EVENT_REMOVE` and `UFFD_FEATURE_MISSING_HUGETLBFS`.
const REMOVALS_OF_HUGE_PAGES: u64 = 1 << 3 | 1 << 4;

/// Memory of huge pages, which are given back at the end.
struct HugeMemory(Memory);

impl HugeMemory {
    fn new(units: u64) -> Self {
        let flags = MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::NORESERVE;
        Self(Memory::mapped(units * UNIT, flags))
    }
}

impl Drop for HugeMemory {
    fn drop(&mut self) {
        // SAFETY: 1. the mapping is this value's own, and no thread accesses it any more.
        unsafe { munmap(self.0.at(0), self.0.pages as usize * PAGE_SIZE) }.unwrap();
    }
}

/// Each huge page comes as a whole, and gets zeros after its removal.
#[test]
fn huge_pages_are_placed_as_a_whole() {
    let uffd = with_features(REMOVALS_OF_HUGE_PAGES);
    let _reserved = HugePages::reserve(2);
    let bed = Bed::new(Arc::new(Words), 3 * UNIT);
    let huge = HugeMemory::new(2);
    let _vmm = Vmm::with(&bed, uffd, (huge.0, 256), Level::L2M);
    for page in [1023, 5, 511, 512] {
        assert_eq!(huge.0.read_whole(page), word(256 + page));
    }
    huge.0.discard(0, UNIT);
    assert_eq!([0, 511].map(|page| huge.0.read_whole(page)), [0, 0]);
    assert_eq!(huge.0.read_whole(512), word(256 + 512));
    bed.wait("the counts", |pager| {
        let counts = pager.stats().counts;
        (counts.placed, counts.zeros) == (2, 1)
    });
    assert_eq!(bed.said(), [""; 0]);
}

/// The host has no huge page. The content waits until there is one.
#[test]
fn a_huge_page_waits_for_memory() {
    let uffd = or_skip(Userfaultfd::open_for_guest());
    let reserved = HugePages::reserve(1);
    let bed = Bed::new(Arc::new(Words), 2 * UNIT);
    let huge = HugeMemory::new(2);
    let memory = huge.0;
    let _vmm = Vmm::with(&bed, uffd, (memory, 0), Level::L2M);
    assert_eq!(memory.read_whole(0), word(0));
    thread::scope(|scope| {
        let reader = scope.spawn(move || memory.read_whole(UNIT));
        bed.wait("two tries", |pager| pager.stats().counts.no_memory >= 2);
        assert!(!reader.is_finished());
        reserved.change(2).unwrap();
        assert_eq!(reader.join().unwrap(), word(UNIT));
    });
    let said = bed.said();
    assert!(
        said.len() == 1 && said[0].contains("has no memory"),
        "{said:?}"
    );
}

/// One lost page loses its unit. The answers for the others are late.
#[test]
fn one_lost_page_loses_its_unit() {
    let uffd = removals();
    let source = Arc::new(Manual::default());
    let bed = Bed::new(source.clone(), UNIT);
    let memory = Memory::anonymous(UNIT, Level::L2M.bytes());
    let _vmm = Vmm::with(&bed, uffd, (memory, 0), Level::L2M);
    // SAFETY: 1. the memory stays mapped, and is accessed only by atomics.
    let taken = unsafe { TakenPages::watch(memory.range()) }.unwrap();
    thread::scope(|scope| {
        let reader = scope.spawn(move || memory.read(7));
        let first = source.next();
        assert_eq!(first.provide(&content(first.page().0)), Answer::Taken);
        assert_eq!(first.provide(&content(first.page().0)), Answer::Late);
        drop(first);
        assert_eq!(source.next().fail("it burnt"), Answer::Taken);
        let late = source.next();
        assert_eq!(late.provide(&content(late.page().0)), Answer::Late);
        reader.join().unwrap();
    });
    assert_eq!(taken.count(), 1);
}

/// Pages of 4 KiB that are announced as one of 2 MiB: the pages in place stay, and the others come.
#[test]
fn a_unit_is_placed_around_the_pages_that_are_there() {
    let uffd = removals();
    let bed = Bed::new(Arc::new(Words), UNIT);
    let memory = Memory::anonymous(UNIT, Level::L2M.bytes());
    // SAFETY: 1. the memory stays mapped, and is accessed only by atomics.
    unsafe { uffd.register(memory.range()) }.unwrap();
    for page in [0, 1, 200, 511] {
        let at = memory.range().start().checked_add_pages(page).unwrap();
        let placed = uffd.place(&[[9; PAGE_SIZE]], at, Waiters::LeaveAsleep);
        assert_eq!(placed, Ok(()));
    }
    let vmm = Vmm::with(&bed, uffd, (memory, 0), Level::L2M);
    assert_eq!(memory.read_whole(300), word(300));
    for page in 0..UNIT {
        let is_there = [0, 1, 200, 511].contains(&page);
        let expected = if is_there {
            u64::from_ne_bytes([9; 8])
        } else {
            word(page)
        };
        assert_eq!(memory.read_whole(page), expected, "page {page}");
    }
    assert_eq!(
        vmm.uffd.copy(&[1; PAGE_SIZE], memory.range().start()),
        Err(Errno::EXIST)
    );
}

/// A request ends while another thread places its unit: its page has arrived, so nothing is lost.
/// The pager calls its report in the middle of the placement, because no huge page is left.
#[test]
fn a_request_that_ends_during_the_placement_is_late() {
    let uffd = or_skip(Userfaultfd::open_for_guest());
    let reserved = HugePages::reserve(1);
    let source = Arc::new(Manual::default());
    let (bed, reports, gate) = gated(source.clone(), 2 * UNIT);
    let huge = HugeMemory::new(2);
    let memory = huge.0;
    let _vmm = Vmm::with(&bed, uffd, (memory, 0), Level::L2M);
    thread::scope(|scope| {
        let reader = scope.spawn(move || memory.read_whole(0));
        for _ in 0..UNIT {
            let request = source.next();
            assert_eq!(request.provide(&content(request.page().0)), Answer::Taken);
        }
        assert_eq!(reader.join().unwrap(), word(0));
        let reader = scope.spawn(move || memory.read_whole(UNIT));
        let answered: Vec<_> = (1..UNIT)
            .map(|_| {
                let request = source.next();
                assert_eq!(request.provide(&content(request.page().0)), Answer::Taken);
                request
            })
            .collect();
        let last = source.next();
        let placing = scope.spawn(move || last.provide(&content(last.page().0)));
        reports.recv().unwrap();
        drop(answered);
        gate.send(()).unwrap();
        assert_eq!(placing.join().unwrap(), Answer::Taken);
        reserved.change(2).unwrap();
        assert_eq!(reader.join().unwrap(), word(UNIT));
    });
    assert_eq!(bed.pager.stats().counts.lost, 0);
}

/// Zeros that find no huge page are repeated after a pause: each try has one more fault.
#[test]
fn zeros_without_a_huge_page_are_repeated_after_a_pause() {
    let uffd = with_features(REMOVALS_OF_HUGE_PAGES);
    let reserved = HugePages::reserve(1);
    let bed = Bed::new(Arc::new(Words), 2 * UNIT);
    let huge = HugeMemory::new(2);
    let memory = huge.0;
    let _vmm = Vmm::with(&bed, uffd, (memory, 0), Level::L2M);
    assert_eq!(memory.read_whole(0), word(0));
    memory.discard(0, UNIT);
    assert_eq!(memory.read_whole(UNIT), word(UNIT));
    thread::scope(|scope| {
        let reader = scope.spawn(move || memory.read_whole(0));
        bed.wait("tries", |pager| pager.stats().counts.no_memory >= 5);
        let counts = bed.pager.stats().counts;
        assert!(counts.faults <= counts.no_memory + 6, "{counts:?}");
        reserved.change(2).unwrap();
        assert_eq!(reader.join().unwrap(), 0);
    });
    assert_eq!(bed.said().len(), 1, "{:?}", bed.said());
}

/// The VM takes a part of a page away, before its content is there: it gets neither zeros in the
/// other part, nor content in this one.
#[test]
fn a_page_whose_part_is_removed_is_lost() {
    let uffd = removals();
    let source = Arc::new(Manual::default());
    let bed = Bed::losing(source.clone(), 2 * UNIT, WhenLost::Hold);
    let memory = Memory::anonymous(2 * UNIT, Level::L2M.bytes());
    let _vmm = Vmm::with(&bed, uffd, (memory, 0), Level::L2M);
    let waits = thread::spawn(move || memory.read(7));
    let request = source.next();
    // The end of the first unit, and all of the second.
    memory.discard(UNIT - 2, UNIT + 2);
    // The fault is read after the change of the states.
    assert_eq!(memory.read_whole(UNIT), 0);
    assert_eq!(request.provide(&content(request.page().0)), Answer::Late);
    assert_eq!(bed.pager.stats().counts.lost, 1);
    assert!(!waits.is_finished());
    let said = bed.said();
    assert!(said[0].contains("a part of the page"), "{said:?}");
}

/// A part of a unit is unmapped, and the descriptor does not report that. The rest is placed.
#[test]
fn a_unit_is_placed_around_unmapped_pages() {
    let uffd = removals();
    let bed = Bed::new(Arc::new(Words), UNIT);
    let memory = Memory::anonymous(UNIT, Level::L2M.bytes());
    let _vmm = Vmm::with(&bed, uffd, (memory, 0), Level::L2M);
    // SAFETY: 1. the range is this test's own, and is not accessed any more.
    unsafe { munmap(memory.at(3), 2 * PAGE_SIZE) }.unwrap();
    for page in (0..UNIT).filter(|page| ![3, 4].contains(page)) {
        assert_eq!(memory.read_whole(page), word(page));
    }
}

/// A fill waits for a huge page too, and then brings the rest.
#[test]
fn a_fill_waits_for_memory() {
    let uffd = or_skip(Userfaultfd::open_for_guest());
    let reserved = HugePages::reserve(1);
    let image = Image {
        fill: Some(all(Arc::new(Words))),
        ..Image::new(Arc::new(Words), PageCount::new(4 * UNIT))
    };
    let bed = Bed::of(image, Config::default());
    let huge = HugeMemory::new(4);
    let _vmm = Vmm::with(&bed, uffd, (huge.0, 0), Level::L2M);
    bed.wait("two tries", |pager| pager.stats().counts.no_memory >= 2);
    reserved.change(4).unwrap();
    bed.wait("the fill", |pager| pager.vms()[0].is_filled);
    for unit in 0..4 {
        assert_eq!(huge.0.read_whole(unit * UNIT + 7), word(unit * UNIT + 7));
    }
    let said = bed.said();
    assert!(
        said.len() == 1 && said[0].contains("has no memory"),
        "{said:?}"
    );
}
