//! The same with vCPUs on threads, while the monitor does everything at once.

use crate::bed::{Bed, Monitor, PAGES, PLACES, SLOT, Stuck, Vcpu};
use crate::{DETECTIONS, bare_ring, deliveries};
use lacuna_addr::HvaRange;
use lacuna_host::{HugePages, MmuNotifier};
use lacuna_mmu::{HugeLeaves, Initially, Logging};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, sleep, yield_now};
use std::time::Duration;

const ROUNDS: u64 = 200;

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
        12 => {
            bed.move_to(PLACES[rng.below(2) as usize]);
            if bed.mmu.delivery() == bare_ring() {
                *monitor = Monitor::begin(bed, Initially::Clean, HugeLeaves::Lazy);
            }
        }
        _ => drop(bed.host_write(page, rng.below(u64::MAX))),
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
            let mut rng = Rng(77 + seed as u64);
            let done = AtomicBool::new(false);
            let writes: u64 = scope(|scope| {
                let (bed, done) = (&bed, &done);
                let threads: Vec<_> = vcpus
                    .iter_mut()
                    .zip([5, 6])
                    .map(|(vcpu, seed)| scope.spawn(move || run(bed, vcpu, seed, done)))
                    .collect();
                let over = Done(done);
                for _ in 0..ROUNDS {
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
                    "{huge:?} {delivery:?}: page {page} was written unseen"
                );
            }
            bed.mmu.verify();
        }
    }
}
