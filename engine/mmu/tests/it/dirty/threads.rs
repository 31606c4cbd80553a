//! vCPUs on threads: an operation must wait for the right vCPUs.

use super::fixture::{Fixture, PLACES, SLOT, Vcpu};
use super::monitor::Monitor;
use super::steps::{DETECTIONS, deliveries};
use lacuna_addr::BackingRange;
use lacuna_host::{HugePages, MmuNotifier};
use lacuna_mmu::{Delivery, Detection, Logging};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{scope, sleep, yield_now};
use std::time::Duration;

/// Sets the flag when its thread ends, also by a panic, so that no other thread waits for that
/// thread.
pub struct Done<'a>(pub &'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A vCPU increments a counter in a page, and stays in the guest until it is asked to leave.
#[test]
fn a_harvest_has_all_that_was_written_before_it() {
    const PAGE: u64 = 7;
    for detection in DETECTIONS {
        for delivery in deliveries() {
            let (fixture, mut vcpus) = Fixture::new(HugePages::Never, delivery, 1);
            let vcpu = &mut vcpus[0];
            fixture.mmu.set_detection(detection);
            fixture.mmu.set_logging(SLOT, Logging::LAZY).unwrap();
            let mut monitor = Monitor::new();
            let (count, done) = (AtomicU64::new(0), AtomicBool::new(false));
            scope(|scope| {
                let over = Done(&done);
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        vcpu.enter(&fixture);
                        while !vcpu.is_poked(&fixture) && !done.load(Ordering::Relaxed) {
                            let next = count.load(Ordering::Relaxed) + 1;
                            if vcpu.online(&fixture, PAGE, Some(next)).is_err() {
                                break;
                            }
                            count.store(next, Ordering::Release);
                        }
                        vcpu.leave(&fixture);
                    }
                });
                let mut harvests = 0;
                while harvests < 100 || count.load(Ordering::Relaxed) < 100 {
                    harvests += 1;
                    let before = count.load(Ordering::Acquire);
                    monitor.harvest(&fixture);
                    let got = monitor.page(PAGE)[0];
                    assert!(
                        got >= before,
                        "{detection:?} {delivery:?}: {got} of {before}"
                    );
                    sleep(Duration::from_micros(200));
                }
                drop(over);
            });
        }
    }
}

/// The operation that `first` begins cannot end before vCPU 0 leaves; nor may `second`'s operation.
fn both_wait(
    fixture: &Fixture,
    vcpu: &mut Vcpu,
    page: u64,
    first: impl Fn() + Send,
    second: impl Fn() + Send,
) {
    vcpu.enter(fixture);
    assert!(vcpu.online(fixture, page, Some(1)).is_ok());
    let gfn = fixture.gfn(page);
    let waited = scope(|scope| {
        let first = scope.spawn(first);
        while fixture.mmu.is_mapped(gfn) {
            yield_now();
        }
        let second = scope.spawn(second);
        // The time suffices for a call that does not wait to return; a waiting call cannot return
        // at all.
        sleep(Duration::from_millis(50));
        let waited = !first.is_finished() && !second.is_finished();
        vcpu.leave(fixture);
        waited
    });
    assert!(waited, "a call did not wait for a vCPU with a TLB or a log");
}

/// Reclaim has unmapped a page to which a vCPU still writes by its TLB. The harvest finds no W to
/// clear, but it must wait for that vCPU before the page is copied.
#[test]
fn a_harvest_waits_for_a_reclaim_that_waits() {
    let (fixture, mut vcpus) = Fixture::new(HugePages::Never, Delivery::Bitmap, 1);
    fixture.mmu.set_logging(SLOT, Logging::LAZY).unwrap();
    vcpus[0].access(&fixture, 7, Some(1)).unwrap();
    let page = BackingRange::new(fixture.backing.start().checked_add_pages(7).unwrap(), 1).unwrap();
    let harvest = || {
        let mut words = [0; 25];
        fixture.mmu.get_dirty(SLOT, &mut words).unwrap();
        assert_eq!(words[0], 1 << 7);
    };
    both_wait(
        &fixture,
        &mut vcpus[0],
        7,
        || fixture.mmu.invalidate(&[page]),
        harvest,
    );
}

/// A page is in a vCPU's log, and reclaim has unmapped it. The move of the slot finds nothing
/// mapped to wait for, but the log knows the page by its old address.
#[test]
fn a_slot_does_not_move_while_a_vcpu_logs_its_pages() {
    // The slot does not fill this block, so its table stays, and no thread waits for a table.
    const PAGE: u64 = 1550;
    let (fixture, mut vcpus) = Fixture::new(HugePages::Never, Delivery::Bitmap, 1);
    fixture.mmu.set_detection(Detection::Pml);
    vcpus[0].access(&fixture, PAGE, Some(1)).unwrap();
    fixture.mmu.set_logging(SLOT, Logging::LAZY).unwrap();
    let at = fixture.backing.start().checked_add_pages(PAGE).unwrap();
    let page = BackingRange::new(at, 1).unwrap();
    let reclaim = || fixture.mmu.invalidate(&[page]);
    both_wait(&fixture, &mut vcpus[0], PAGE, reclaim, || {
        fixture.move_to(PLACES[1])
    });
    let mut words = [0; 25];
    fixture.mmu.get_dirty(SLOT, &mut words).unwrap();
    assert_eq!(words[24], 1 << (PAGE % 64), "the write was lost on the way");
}

/// A range that reclaim has unmapped without a wait for the vCPUs.
struct Taken {
    huge: HugePages,
    detection: Detection,
    /// The written page, and the taken range.
    page: u64,
    first: u64,
    pages: u64,
}

/// The slot moves meanwhile. A monitor that then copies the pages of a harvest must not miss a
/// vCPU's write at the old address.
fn moved(taken: &Taken) {
    let (fixture, mut vcpus) = Fixture::new(taken.huge, Delivery::Bitmap, 1);
    fixture.mmu.set_detection(taken.detection);
    fixture.mmu.set_logging(SLOT, Logging::LAZY).unwrap();
    let vcpu = &mut vcpus[0];
    vcpu.access(&fixture, taken.page, Some(1)).unwrap();
    for page in taken.first..taken.first + taken.pages.min(200) {
        vcpu.access(&fixture, page, Some(1)).unwrap();
    }
    let old = fixture.gfn(taken.page);
    let at = fixture
        .backing
        .start()
        .checked_add_pages(taken.first)
        .unwrap();
    let range = BackingRange::new(at, taken.pages).unwrap();
    let begun = fixture.mmu.begin_invalidation(&[range]);
    fixture.move_to(PLACES[1]);
    let mut monitor = Monitor::new();
    monitor.harvest(&fixture);
    assert_eq!(monitor.page(taken.page)[0], 1);
    vcpu.enter(&fixture);
    let wrote = vcpu.write_by_tlb(&fixture, old, 2);
    vcpu.leave(&fixture);
    begun.finish();
    monitor.harvest(&fixture);
    assert_eq!(
        monitor.page(taken.page)[0],
        fixture.words(taken.page)[0],
        "a write is lost"
    );
    assert!(!wrote, "a TLB has the old address");
}

#[test]
fn a_slot_that_moves_during_a_reclaim_is_in_no_tlb() {
    for detection in DETECTIONS {
        // The slot does not fill this block, so that no table is removed with the leaf.
        moved(&Taken {
            huge: HugePages::Never,
            detection,
            page: 1550,
            first: 1550,
            pages: 1,
        });
        // Many small leaves are removed at once with their table: for a compound page of the host,
        // and for single pages.
        for huge in [HugePages::Always, HugePages::Never] {
            moved(&Taken {
                huge,
                detection,
                page: 7,
                first: 0,
                pages: 512,
            });
        }
    }
}

#[test]
fn a_page_protected_during_a_reclaim_is_in_no_tlb() {
    let (fixture, mut vcpus) = Fixture::new(HugePages::Never, Delivery::Bitmap, 1);
    let vcpu = &mut vcpus[0];
    vcpu.access(&fixture, 7, Some(1)).unwrap();
    let gfn = fixture.gfn(7);
    let at = fixture.backing.start().checked_add_pages(7).unwrap();
    let page = BackingRange::new(at, 1).unwrap();
    let begun = fixture.mmu.begin_invalidation(&[page]);
    fixture.mmu.write_protect(page);
    vcpu.enter(&fixture);
    assert!(!vcpu.write_by_tlb(&fixture, gfn, 2), "a TLB still has W");
    vcpu.leave(&fixture);
    begun.finish();
}
