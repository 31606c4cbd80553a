//! Pages that the source has lost, and memory that the VMM did not announce: never zeros.

use crate::vmm::{Bed, Manual, Memory, Vmm, Words, content, gated, removals, with_features, word};
use lacuna_addr::{HvaRange, Level, PAGE_SIZE};
use lacuna_pager::WhenLost;
use lacuna_skip::test;
use lacuna_source::Answer;
use lacuna_sys::TakenPages;
use rustix::fs::OFlags;
use rustix::mm::{MapFlags, MremapFlags, ProtFlags, mmap_anonymous, mremap, mremap_fixed, munmap};
use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

/// Features of `linux/userfaultfd.h`.
const EVENT_FORK: u64 = 1 << 1;
const EVENT_REMAP: u64 = 1 << 2;
const EVENT_UNMAP: u64 = 1 << 6;

/// The access to a lost page gets SIGBUS, in threads that wait and in later ones. Another page is
/// served.
#[test]
fn a_lost_page_is_poisoned() {
    let uffd = removals();
    let source = Arc::new(Manual::default());
    let bed = Bed::new(source.clone(), 3);
    let vmm = Vmm::connect(&bed, uffd, 0, 3);
    // SAFETY: 1. the memory stays mapped, and is accessed only by atomics.
    let taken = unsafe { TakenPages::watch(vmm.memory.range()) }.unwrap();
    thread::scope(|scope| {
        let reader = scope.spawn(|| vmm.memory.read(1));
        assert_eq!(source.next().fail("it burnt"), Answer::Taken);
        // The signal's handler has put another page there, for this test to go on.
        reader.join().unwrap();
        let reader = scope.spawn(|| vmm.memory.read_whole(2));
        assert_eq!(source.next().provide(&content(2)), Answer::Taken);
        assert_eq!(reader.join().unwrap(), word(2));
    });
    assert_eq!(taken.count(), 1);
    assert_eq!(bed.pager.stats().counts.lost, 1);
    let said = bed.said();
    assert!(said[0].contains("has lost page 1: it burnt"), "{said:?}");
}

/// A thread waits for a lost page until the VM takes the page away. The loss is said once.
#[test]
fn a_lost_page_is_held() {
    let uffd = removals();
    let source = Arc::new(Manual::default());
    let bed = Bed::losing(source.clone(), 3, WhenLost::Hold);
    let vmm = Vmm::connect(&bed, uffd, 0, 3);
    let memory = vmm.memory;
    thread::scope(|scope| {
        let readers = [0, 1].map(|page| {
            let reader = scope.spawn(move || memory.read_whole(page));
            // Dropped without an answer, as by a source that ends.
            drop(source.next());
            reader
        });
        bed.wait("the losses", |pager| pager.stats().counts.lost == 2);
        thread::sleep(std::time::Duration::from_millis(5));
        assert!(readers.iter().all(|reader| !reader.is_finished()));
        memory.discard(0, 2);
        assert_eq!(readers.map(|reader| reader.join().unwrap()), [0, 0]);
    });
    assert_eq!(bed.said().len(), 1, "{:?}", bed.said());
}

/// The VMM has registered more memory than it has announced.
#[test]
fn a_fault_outside_of_the_regions_is_held() {
    let uffd = removals();
    let bed = Bed::losing(Arc::new(Words), 4, WhenLost::Hold);
    let all = Memory::anonymous(2, PAGE_SIZE as u64);
    // SAFETY: 1. the memory stays mapped, and is accessed only by atomics.
    unsafe { uffd.register(all.range()) }.unwrap();
    let announced = Memory { pages: 1, ..all };
    let _vmm = Vmm::with(&bed, uffd, (announced, 2), Level::L4K);
    // It waits until the process ends.
    let waits = thread::spawn(move || all.read(1));
    bed.wait("the fault", |pager| pager.stats().counts.outside == 1);
    assert_eq!(all.read_whole(0), word(2));
    let said = bed.said();
    assert!(
        said[0].contains("which is in none of its regions"),
        "{said:?}"
    );
    assert!(!waits.is_finished());
}

/// The missing pages of moved memory are lost, and faults at the new addresses are outside.
#[test]
fn moved_memory_is_not_followed() {
    let bed = Bed::losing(Arc::new(Words), 8, WhenLost::Hold);
    let vmm = Vmm::connect(&bed, with_features(EVENT_REMAP), 0, 8);
    let (memory, target) = (vmm.memory, Memory::anonymous(4, PAGE_SIZE as u64));
    assert_eq!(memory.read_whole(0), word(0));
    let bytes = 4 * PAGE_SIZE;
    // SAFETY: 1. both ranges are this test's own, and no reference to them exists.
    unsafe {
        mremap_fixed(
            memory.at(0),
            bytes,
            bytes,
            MremapFlags::MAYMOVE,
            target.at(0),
        )
    }
    .unwrap();
    assert_eq!(
        target.read_whole(0),
        word(0),
        "a page that was in place has moved"
    );
    let _waits = thread::spawn(move || target.read(1));
    bed.wait("the fault", |pager| pager.stats().counts.outside == 1);
    assert_eq!(memory.read_whole(4), word(4), "the rest is served");
    let said = bed.said();
    assert!(
        said[0].contains("by mremap, which this pager does not follow"),
        "{said:?}"
    );
}

/// Memory at the addresses of unmapped memory gets zeros.
#[test]
fn unmapped_memory_is_removed() {
    let bed = Bed::new(Arc::new(Words), 4);
    let vmm = Vmm::connect(&bed, with_features(EVENT_UNMAP), 0, 4);
    let memory = vmm.memory;
    assert_eq!(memory.read_whole(1), word(1));
    let (at, bytes) = (memory.at(1), 2 * PAGE_SIZE);
    let (prot, flags) = (
        ProtFlags::READ | ProtFlags::WRITE,
        MapFlags::PRIVATE | MapFlags::FIXED,
    );
    // SAFETY: 1. the range is this test's own, and no reference to it exists.
    unsafe { munmap(at, bytes) }.unwrap();
    // SAFETY: 1. as above.
    unsafe { mmap_anonymous(at, bytes, prot, flags) }.unwrap();
    let again = HvaRange::new(memory.range().start().checked_add_pages(1).unwrap(), 2).unwrap();
    // SAFETY: 1. the memory stays mapped, and is accessed only by atomics.
    unsafe { vmm.uffd.register(again) }.unwrap();
    assert_eq!(
        [0, 1, 2, 3].map(|page| memory.read_whole(page)),
        [word(0), 0, 0, word(3)]
    );
}

/// A fork waits until its event is read. The parent is served afterwards.
#[test]
fn a_fork_is_reported() {
    let bed = Bed::new(Arc::new(Words), 4);
    let vmm = Vmm::connect(&bed, with_features(EVENT_FORK), 0, 4);
    assert_eq!(vmm.memory.read_whole(0), word(0));
    for _ in 0..2 {
        let mut command = Command::new("true");
        // SAFETY: 1. the function does nothing. With it, the child is a copy of this process.
        unsafe { command.pre_exec(|| Ok(())) };
        assert!(command.status().unwrap().success());
    }
    assert_eq!(vmm.memory.read_whole(1), word(1));
    let said = bed.said();
    assert!(
        said.len() == 1 && said[0].contains("has forked"),
        "{said:?}"
    );
}

/// The answer's thread serves all VMs, so it does not wait for the event thread of one. That one
/// reports a move here, with the lock held alone.
#[test]
fn an_answer_does_not_wait_for_the_event_thread() {
    let uffd = with_features(EVENT_REMAP);
    let source = Arc::new(Manual::default());
    let (bed, reports, gate) = gated(source.clone(), 8);
    let vmm = Vmm::connect(&bed, uffd, 0, 8);
    let (memory, target) = (vmm.memory, Memory::anonymous(1, PAGE_SIZE as u64));
    thread::scope(|scope| {
        let readers = [5, 6].map(|page| {
            let reader = scope.spawn(move || memory.read_whole(page));
            (reader, source.next())
        });
        let [(provided, answered), (_, failed)] = readers;
        let flags = MremapFlags::MAYMOVE;
        let (from, to) = (memory.at(0).addr(), target.at(0).addr());
        let mover = scope.spawn(move || {
            let [from, to] = [from, to].map(std::ptr::with_exposed_provenance_mut);
            // SAFETY: 1. both ranges are this test's own, and no reference to them exists.
            unsafe { mremap_fixed(from, PAGE_SIZE, PAGE_SIZE, flags, to) }.map(drop)
        });
        reports.recv().unwrap();
        let (done, is_done) = channel();
        scope.spawn(move || {
            let answers = [answered.provide(&content(5)), failed.fail("it burnt")];
            done.send(answers).unwrap();
        });
        let answers = is_done.recv_timeout(Duration::from_secs(20));
        gate.send(()).unwrap();
        assert_eq!(answers, Ok([Answer::Taken; 2]));
        mover.join().unwrap().unwrap();
        assert_eq!(provided.join().unwrap(), word(5));
        bed.wait("the loss", |pager| pager.stats().counts.lost == 1);
        // Its reader continues with zeros.
        vmm.uffd
            .unregister(
                HvaRange::new(memory.range().start().checked_add_pages(6).unwrap(), 1).unwrap(),
            )
            .unwrap();
    });
}

/// A thread that waits in moved memory is woken. Its old addresses are still mapped here, so it has
/// another fault.
#[test]
fn threads_that_wait_in_moved_memory_are_woken() {
    let uffd = with_features(EVENT_REMAP);
    let source = Arc::new(Manual::default());
    let bed = Bed::losing(source.clone(), 2, WhenLost::Hold);
    let vmm = Vmm::connect(&bed, uffd, 0, 2);
    let memory = vmm.memory;
    let waits = thread::spawn(move || memory.read(0));
    let request = source.next();
    let flags = MremapFlags::MAYMOVE | MremapFlags::DONTUNMAP;
    // SAFETY: 1. the range is this test's own, and no reference to it exists.
    let moved = unsafe { mremap(memory.at(0), 2 * PAGE_SIZE, 2 * PAGE_SIZE, flags) };
    if let Err(errno) = moved {
        return lacuna_skip::skip(errno);
    }
    // It finds memory that is no longer registered, or has another fault.
    bed.wait("the wake-up", |pager| {
        waits.is_finished() || pager.stats().counts.faults >= 2
    });
    assert_eq!(request.provide(&content(0)), Answer::Late);
}

/// The end of the service is said also after another message.
#[test]
fn a_dead_service_is_said() {
    let uffd = removals();
    let source = Arc::new(Manual::default());
    let bed = Bed::losing(source.clone(), 3, WhenLost::Hold);
    let vmm = Vmm::connect(&bed, uffd, 0, 3);
    let memory = vmm.memory;
    let _waits = [0, 1].map(|page| {
        let waits = thread::spawn(move || memory.read(page));
        assert_eq!(source.next().fail("it burnt"), Answer::Taken);
        waits
    });
    // The flag belongs to all copies of the descriptor.
    rustix::fs::fcntl_setfl(vmm.uffd.as_fd(), OFlags::empty()).unwrap();
    let _waits = thread::spawn(move || memory.read(2));
    bed.wait("a message", |_| bed.said().len() == 2);
    let said = bed.said();
    assert!(said[1].contains("its events cannot be read"), "{said:?}");
}
