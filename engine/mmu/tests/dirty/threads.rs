//! The same with vCPUs on threads, while the monitor does everything at once.

use crate::bed::{Bed, Monitor, PAGES, PLACES, SLOT, Stuck, Vcpu};
use crate::{DETECTIONS, deliveries};
use lacuna_addr::{GfnRange, HvaRange};
use lacuna_host::{HugePages, MmuNotifier};
use lacuna_mmu::{Delivery, Detection, DirtyError, HugeLeaves, Initially, Logging};
use lacuna_slots::SlotFlags;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{scope, sleep, yield_now};
use std::time::Duration;

/// How much of it, and which: `LACUNA_ROUNDS=100000 LACUNA_SEED=7` for a long look.
fn from_env(name: &str, otherwise: u64) -> u64 {
    let told = std::env::var(name).ok();
    told.map_or(otherwise, |text| text.parse().expect("a number"))
}

/// A small generator: the test needs variety, not quality.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// Nobody shall wait for who has panicked.
struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn run(bed: &Bed, vcpu: &mut Vcpu, seed: u64, done: &AtomicBool) -> u64 {
    let mut rng = Rng(seed);
    let mut writes = 0;
    let _done = Done(done);
    while !done.load(Ordering::Relaxed) {
        // A hot part, so that TLBs are used.
        let page = [rng.below(64), rng.below(PAGES)][usize::from(rng.below(4) == 0)];
        let write = (rng.below(4) != 0).then(|| rng.below(u64::MAX));
        match vcpu.access(bed, page, write) {
            Ok(_) => writes += u64::from(write.is_some()),
            Err(Stuck::Ring | Stuck::NoSlot) => yield_now(),
        }
    }
    writes
}

fn disturb(bed: &Bed, monitor: &mut Monitor, rng: &mut Rng) {
    let page = rng.below(PAGES - 300);
    match rng.below(16) {
        0..=4 => monitor.harvest(bed),
        5 => monitor.clear_some(bed, rng.below(25) as usize, 8),
        6 => monitor.lose(bed),
        7 => bed.mmu.set_detection(DETECTIONS[rng.below(2) as usize]),
        8 => {
            bed.mmu.set_logging(SLOT, Logging::Off).unwrap();
            let initially = [Initially::Clean, Initially::AllSet][rng.below(2) as usize];
            let huge = [HugeLeaves::Lazy, HugeLeaves::Eager][rng.below(2) as usize];
            *monitor = Monitor::begin(bed, initially, huge);
        }
        9 => drop(bed.host.balance()),
        10 => drop(bed.host.collapse_step()),
        11 => {
            let start = bed.backing.start().checked_add_pages(page).unwrap();
            bed.mmu.shatter(HvaRange::new(start, 300).unwrap());
        }
        12 => bed.move_to(PLACES[rng.below(2) as usize]),
        13 => {
            for flags in [SlotFlags::READONLY, SlotFlags::empty()] {
                bed.mmu.set_slot_flags(SLOT, flags).unwrap();
            }
        }
        14 => {
            let gfns = GfnRange::new(bed.gfn(page), 300).unwrap();
            if bed.mmu.disallow_huge(gfns).is_ok() {
                bed.mmu.allow_huge(gfns);
            }
        }
        _ => bed
            .mmu
            .write_protect(HvaRange::new(bed.backing.start(), 300).unwrap()),
    }
}

/// A device.
fn write_past(bed: &Bed, seed: u64, done: &AtomicBool) {
    let mut rng = Rng(seed);
    let _done = Done(done);
    while !done.load(Ordering::Relaxed) {
        match bed.host_write(rng.below(PAGES), rng.below(u64::MAX)) {
            Ok(()) => {}
            // It must leave memory alone that logs into rings only.
            Err(error) => assert_eq!(error, DirtyError::NoBitmap),
        }
        sleep(Duration::from_micros(20));
    }
}

#[test]
fn a_replayed_copy_is_right_under_threads() {
    for (seed, huge) in [HugePages::Never, HugePages::Always]
        .into_iter()
        .enumerate()
    {
        for delivery in deliveries() {
            let (bed, mut vcpus) = Bed::new(huge, delivery);
            let mut monitor = Monitor::begin(&bed, Initially::Clean, HugeLeaves::Lazy);
            let seed = from_env("LACUNA_SEED", 77) + seed as u64;
            let mut rng = Rng(seed);
            let done = AtomicBool::new(false);
            let writes: u64 = scope(|scope| {
                let (bed, done) = (&bed, &done);
                let threads: Vec<_> = vcpus
                    .iter_mut()
                    .zip([5, 6])
                    .map(|(vcpu, more)| scope.spawn(move || run(bed, vcpu, seed + more, done)))
                    .collect();
                scope.spawn(move || write_past(bed, seed + 7, done));
                let over = Done(done);
                for _ in 0..from_env("LACUNA_ROUNDS", 300) {
                    if done.load(Ordering::Relaxed) {
                        break;
                    }
                    disturb(bed, &mut monitor, &mut rng);
                    sleep(Duration::from_micros(300));
                }
                drop(over);
                threads.into_iter().map(|vcpu| vcpu.join().unwrap()).sum()
            });
            assert!(writes > 1000, "{huge:?} {delivery:?}: {writes} writes");
            monitor.harvest(&bed);
            for page in 0..PAGES {
                let words = bed.words(page);
                assert_eq!(
                    monitor.shadow[page as usize], words,
                    "{huge:?} {delivery:?}, seed {seed}: page {page} was written unseen"
                );
            }
            bed.mmu.verify();
        }
    }
}

/// A vCPU that stays in the guest until it is asked to leave counts up in a page.
#[test]
fn a_harvest_has_all_that_was_written_before_it() {
    const PAGE: u64 = 7;
    for detection in DETECTIONS {
        for delivery in deliveries() {
            let (bed, [mut vcpu, _]) = Bed::new(HugePages::Never, delivery);
            bed.mmu.set_detection(detection);
            let mut monitor = Monitor::begin(&bed, Initially::Clean, HugeLeaves::Lazy);
            let (count, done) = (AtomicU64::new(0), AtomicBool::new(false));
            scope(|scope| {
                let over = Done(&done);
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        vcpu.enter(&bed);
                        while !bed.quiescence.vcpu(0).poked() && !done.load(Ordering::Relaxed) {
                            let next = count.load(Ordering::Relaxed) + 1;
                            if vcpu.online(&bed, PAGE, Some(next)).is_err() {
                                break;
                            }
                            count.store(next, Ordering::Release);
                        }
                        vcpu.leave(&bed);
                    }
                });
                for _ in 0..100 {
                    let before = count.load(Ordering::Acquire);
                    monitor.harvest(&bed);
                    let got = monitor.shadow[PAGE as usize][0];
                    assert!(
                        got >= before,
                        "{detection:?} {delivery:?}: {got} of {before}"
                    );
                    sleep(Duration::from_micros(200));
                }
                drop(over);
            });
            assert!(count.into_inner() > 100);
        }
    }
}

/// What `first` begins cannot end before vCPU 0 leaves; nor may what `second` does then.
fn both_wait(
    bed: &Bed,
    vcpu: &mut Vcpu,
    page: u64,
    first: impl Fn() + Send,
    second: impl Fn() + Send,
) {
    vcpu.enter(bed);
    assert!(vcpu.online(bed, page, Some(1)).is_ok());
    let gfn = bed.gfn(page);
    let waited = scope(|scope| {
        let first = scope.spawn(first);
        while bed.mmu.stage2().find(gfn).is_some() {
            yield_now();
        }
        let second = scope.spawn(second);
        // Long enough for a call that does not wait to be over; one that waits cannot be, ever.
        sleep(Duration::from_millis(50));
        let waited = !first.is_finished() && !second.is_finished();
        vcpu.leave(bed);
        waited
    });
    assert!(
        waited,
        "somebody did not wait for a vCPU with a TLB or a log"
    );
}

/// Reclaim has unmapped a page that a vCPU still writes to by its TLB: there is no W to take, and
/// the harvest must wait for that vCPU all the same before the page is copied.
#[test]
fn a_harvest_waits_for_a_reclaim_that_waits() {
    let (bed, [mut vcpu, _]) = Bed::new(HugePages::Never, Delivery::Bitmap);
    bed.mmu.set_logging(SLOT, Logging::LAZY).unwrap();
    vcpu.access(&bed, 7, Some(1)).unwrap();
    let page = HvaRange::new(bed.backing.start().checked_add_pages(7).unwrap(), 1).unwrap();
    let harvest = || {
        let mut words = [0; 25];
        bed.mmu.get_dirty(SLOT, &mut words).unwrap();
        assert_eq!(words[0], 1 << 7);
    };
    both_wait(&bed, &mut vcpu, 7, || bed.mmu.invalidate(&[page]), harvest);
}

/// A page in a vCPU's log, unmapped by reclaim: nothing of the slot is mapped for the slot's move
/// to wait for, but the log knows the page by its old address.
#[test]
fn a_slot_does_not_move_away_under_a_log() {
    // In a block that the slot does not fill: its table stays, so that no table is waited for.
    const PAGE: u64 = 1550;
    let (bed, [mut vcpu, _]) = Bed::new(HugePages::Never, Delivery::Bitmap);
    bed.mmu.set_detection(Detection::Pml);
    vcpu.access(&bed, PAGE, Some(1)).unwrap();
    bed.mmu.set_logging(SLOT, Logging::LAZY).unwrap();
    let at = bed.backing.start().checked_add_pages(PAGE).unwrap();
    let page = HvaRange::new(at, 1).unwrap();
    let reclaim = || bed.mmu.invalidate(&[page]);
    both_wait(&bed, &mut vcpu, PAGE, reclaim, || bed.move_to(PLACES[1]));
    let mut words = [0; 25];
    bed.mmu.get_dirty(SLOT, &mut words).unwrap();
    assert_eq!(words[24], 1 << (PAGE % 64), "the write was lost on the way");
}
