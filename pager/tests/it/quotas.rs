//! The limits of one VM, and of all VMs of a socket.

use crate::vmm::{Bed, Manual, Memory, Vmm, Words, content, removals, word};
use lacuna_addr::{Level, PAGE_SIZE, PageCount};
use lacuna_pager::{Config, Image};
use lacuna_skip::test;
use std::sync::Arc;
use std::thread;

const UNIT: u64 = 512;

/// A VM of huge pages asks for three of them at once. The fault of a VM of small pages does not
/// wait behind them, and the rest follows as answers arrive.
#[test]
fn a_vm_has_few_requests_in_flight() {
    let (large, small) = (removals(), removals());
    let source = Arc::new(Manual::default());
    let bed = Bed::new(source.clone(), 3 * UNIT);
    let memory = Memory::anonymous(3 * UNIT, Level::L2M.bytes());
    let _large = Vmm::with(&bed, large, (memory, 0), Level::L2M);
    thread::scope(|scope| {
        let units = [0, 1, 2].map(|unit| scope.spawn(move || memory.read_whole(unit * UNIT + 7)));
        bed.wait("three faults", |pager| pager.stats().counts.faults >= 3);
        bed.wait("512 requests", |_| source.len() == 512);
        let small = Vmm::connect(&bed, small, 5, 1);
        let reader = scope.spawn(move || small.memory.read_whole(0));
        bed.wait("one more", |_| source.len() == 513);
        // The last request is the small VM's.
        let request = source.next();
        assert_eq!(request.page().0, 5);
        let _ = request.provide(&content(5));
        drop(request);
        assert_eq!(reader.join().unwrap(), word(5));
        let mut most = 0;
        for answered in 0..3 * UNIT {
            let request = source.next();
            let _ = request.provide(&content(request.page().0));
            drop(request);
            most = most.max(source.len());
            // Half of the window is empty: the next requests come without a fault.
            if answered == 255 {
                bed.wait("the next requests", |_| source.len() == 512);
            }
        }
        assert!(most <= 512, "{most} requests in flight");
        assert!(source.is_empty());
        for (unit, reader) in (0..).zip(units) {
            assert_eq!(reader.join().unwrap(), word(unit * UNIT + 7));
        }
    });
    assert_eq!(bed.pager.stats().counts.lost, 0);
}

/// The requests of a page that the VM takes away are not sent any more.
#[test]
fn a_removal_ends_the_requests_of_its_page() {
    let uffd = removals();
    let source = Arc::new(Manual::default());
    let bed = Bed::new(source.clone(), 2 * UNIT);
    let memory = Memory::anonymous(2 * UNIT, Level::L2M.bytes());
    let _vmm = Vmm::with(&bed, uffd, (memory, 0), Level::L2M);
    thread::scope(|scope| {
        let readers = [0, UNIT].map(|page| scope.spawn(move || memory.read_whole(page)));
        bed.wait("two faults", |pager| pager.stats().counts.faults >= 2);
        bed.wait("512 requests", |_| source.len() == 512);
        memory.discard(0, 2 * UNIT);
        for reader in readers {
            assert_eq!(reader.join().unwrap(), 0);
        }
        (0..UNIT).for_each(|_| drop(source.next()));
    });
    assert!(source.is_empty());
    assert_eq!(bed.pager.stats().counts.lost, 0);
}

#[test]
fn a_socket_has_a_limit_of_vms_and_of_memory() {
    let uffds = [(); 5].map(|()| removals());
    let [first, second, third, fourth, fifth] = uffds;
    let image = Image {
        vms_max: Some(2),
        memory_max: Some(4 * PAGE_SIZE as u64),
        ..Image::new(Arc::new(Words), PageCount::new(8))
    };
    let bed = Bed::of(image, Config::default());
    let refused = |count: usize, reason: &str| {
        bed.wait("a message", |_| bed.said().len() == count);
        let last = bed.said().pop().unwrap();
        assert!(last.contains(reason), "{last}");
    };
    let one = Vmm::connect(&bed, first, 0, 1);
    bed.wait("a VM", |pager| pager.stats().vms == 1);
    let _large = Vmm::connect(&bed, second, 0, 4);
    refused(
        1,
        "it has 16384 bytes, and the other VMs of its socket 4096",
    );
    let other = Vmm::connect(&bed, third, 2, 3);
    assert_eq!(other.memory.read_whole(0), word(2));
    let _third = Vmm::connect(&bed, fourth, 0, 1);
    refused(2, "serves 2 VMs already, as many as vms-max says");
    drop(other);
    bed.wait("the end", |pager| pager.stats().vms == 1);
    let next = Vmm::connect(&bed, fifth, 4, 3);
    assert_eq!(next.memory.read_whole(2), word(6));
    assert_eq!(one.memory.read_whole(0), word(0));
}
