//! vCPUs, monitors and a device run on threads of their own, while the main thread changes the VM:
//! it switches logging and detection, moves the slot, splits, collapses, reclaims.
//!
//! One seed determines a round: the number of vCPUs and monitors, how writes are detected, which
//! operations run. Now and then the main thread stops all others between two of their steps. It
//! then compares, for each page, the last values written by the vCPUs and the device, the page in
//! memory, and the newest words in the monitors' copies. Then the threads continue.
//!
//! ```text
//! LACUNA_ROUNDS=100 cargo test -p lacuna-mmu --release --test it dirty::chaos      (some minutes)
//! LACUNA_SEED=7 cargo test -p lacuna-mmu --test it dirty::chaos
//! ```
//! A failing round prints its seed. With that seed each thread draws the same random numbers again,
//! but the threads interleave in another way.

use super::fixture::ring;
use super::fixture::{Fixture, HOST_WORD, PAGES, PLACES, SLOT, Stuck, VCPUS_MAX, Vcpu, Words};
use super::monitor::{Begun, Monitor};
use super::steps::{DETECTIONS, bare_ring};
use super::threads::Done;
use lacuna_addr::{BackingRange, GfnRange};
use lacuna_host::{HugePages, MmuNotifier};
use lacuna_mmu::{Backup, Delivery, DirtyError, HugeLeaves, Initially, Logging};
use lacuna_slots::SlotFlags;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, RwLock};
use std::thread::{scope, sleep, yield_now};
use std::time::Duration;

/// The minimum of operations by the main thread in a round.
const STEPS: u64 = 40;
/// A vCPU makes fewer accesses than this before it goes offline.
const STAY: u64 = 80;
/// The accesses of a vCPU between two checks for a request to leave guest mode.
const BASIC_BLOCK: u64 = 16;
/// A round ends only after this number of writes by vCPUs, because on a busy machine their threads
/// may run seldom.
const WRITES: u64 = 200;

fn from_env(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().expect("a number"))
}

/// A small generator: the test needs variety, not quality.
struct Rng(u64);

impl Rng {
    fn new(seed: u64, thread: u64) -> Self {
        // Neighbouring seeds must not begin with the same numbers.
        Self((seed << 8 | thread).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }

    fn of<T: Copy>(&mut self, some: &[T]) -> T {
        some[self.below(some.len() as u64) as usize]
    }

    /// Three of four accesses go to the first 64 pages, so that many of them hit in a TLB.
    fn page(&mut self) -> u64 {
        let pages = self.of(&[64, 64, 64, PAGES]);
        self.below(pages)
    }
}

/// Prints the round's seed if it is dropped by a panic.
struct Round {
    seed: u64,
    huge: HugePages,
    delivery: Delivery,
}

impl Drop for Round {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Self {
                seed,
                huge,
                delivery,
            } = self;
            eprintln!("LACUNA_SEED={seed}: huge pages {huge:?}, {delivery:?}");
        }
    }
}

/// State that all threads of a round share.
struct Chaos {
    fixture: Fixture,
    /// Held for reading by each operation, and for writing by the comparison.
    going: RwLock<()>,
    done: AtomicBool,
    monitors: Vec<Mutex<Monitor>>,
    /// The last value written to each page, by each vCPU and the device.
    written: Vec<Mutex<Vec<u64>>>,
    /// The number of writes by vCPUs.
    writes: AtomicU64,
}

impl Chaos {
    fn new(fixture: Fixture, monitors: u64) -> Self {
        let monitor = |_| Mutex::new(Monitor::new());
        let written = |_| Mutex::new(vec![0; PAGES as usize]);
        Self {
            fixture,
            going: RwLock::new(()),
            done: AtomicBool::new(false),
            monitors: (0..monitors).map(monitor).collect(),
            written: (0..=VCPUS_MAX).map(written).collect(),
            writes: AtomicU64::new(0),
        }
    }

    /// Calls `step` until the round is over, or another thread has panicked.
    fn repeat(&self, mut step: impl FnMut()) {
        let _done = Done(&self.done);
        while !self.done.load(Ordering::Relaxed) {
            let _going = self.going.read().expect("no panic while all is compared");
            step();
        }
    }

    fn run_vcpu(&self, index: usize, vcpu: &mut Vcpu, mut rng: Rng) {
        let mut clock = 0;
        self.repeat(|| {
            let mut written = self.written[index].lock().unwrap();
            let mut next = |rng: &mut Rng| {
                clock += 1;
                (rng.page(), (rng.below(4) != 0).then_some(clock))
            };
            // A wrong value is asserted only when the vCPU is offline. If the vCPU panicked online,
            // threads that wait for it to go offline would wait for ever.
            let mut wrong = None;
            let mut note = |page: u64, write: Option<u64>, seen: u64| {
                let word = &mut written[page as usize];
                *word = write.unwrap_or(*word);
                self.writes
                    .fetch_add(write.is_some().into(), Ordering::Relaxed);
                if seen != *word {
                    wrong = Some((page, *word, seen));
                }
            };
            if rng.below(2) == 0 {
                let (page, write) = next(&mut rng);
                match vcpu.access(&self.fixture, page, write) {
                    Ok(seen) => note(page, write, seen),
                    Err(Stuck::Ring | Stuck::NoSlot) => yield_now(),
                }
                assert_eq!(wrong, None, "page, what vCPU {index} wrote, what it sees");
                return;
            }
            vcpu.enter(&self.fixture);
            for access in 0..rng.below(STAY) {
                // A vCPU checks for a request only between two basic blocks.
                if access % BASIC_BLOCK == 0 && vcpu.is_poked(&self.fixture) || !vcpu.has_room() {
                    break;
                }
                let (page, write) = next(&mut rng);
                match vcpu.online(&self.fixture, page, write) {
                    Ok(seen) => note(page, write, seen),
                    Err(_) => break,
                }
            }
            vcpu.leave(&self.fixture);
            assert_eq!(wrong, None, "page, what vCPU {index} wrote, what it sees");
        });
    }

    fn run_monitor(&self, index: usize, mut rng: Rng) {
        let fixture = &self.fixture;
        self.repeat(|| {
            let mut monitor = self.monitors[index].lock().unwrap();
            match rng.below(8) {
                0..=4 => monitor.harvest(fixture),
                5 | 6 => monitor.clear_some(fixture, rng.below(25) as usize, 8),
                _ => monitor.lose(fixture),
            }
            drop(monitor);
            sleep(Duration::from_micros(rng.below(400)));
        });
    }

    fn run_device(&self, mut rng: Rng) {
        let mut clock = 0;
        self.repeat(|| {
            clock += 1;
            let page = rng.page();
            let mut written = self.written[HOST_WORD].lock().unwrap();
            match self.fixture.host_write(page, clock) {
                Ok(()) => written[page as usize] = clock,
                // A slot that logs only into rings refuses the device's write.
                Err(error) => assert_eq!(
                    (error, self.fixture.mmu.delivery()),
                    (DirtyError::NoBitmap, bare_ring())
                ),
            }
            drop(written);
            sleep(Duration::from_micros(20));
        });
    }

    /// Makes one random change of the VM or of the host's memory.
    fn disturb(&self, rng: &mut Rng, detections: &[lacuna_mmu::Detection]) {
        let _going = self.going.read().expect("no panic while all is compared");
        let fixture = &self.fixture;
        let page = rng.below(PAGES - 300);
        match rng.below(12) {
            0 => fixture.mmu.set_detection(rng.of(detections)),
            1 | 2 => {
                let mut monitor = self.monitors[0].lock().unwrap();
                fixture.mmu.set_logging(SLOT, Logging::Off).unwrap();
                let (initially, huge) = some_log(rng);
                let _ = monitor.begin(fixture, initially, huge);
            }
            3 => drop(fixture.host.balance()),
            4 => drop(fixture.host.collapse_step()),
            5 => {
                let start = fixture.backing.start().checked_add_pages(page).unwrap();
                fixture
                    .mmu
                    .split_huge(BackingRange::new(start, 300).unwrap());
            }
            6 => fixture.move_to(rng.of(&PLACES)),
            7 => {
                for flags in [SlotFlags::READONLY, SlotFlags::empty()] {
                    fixture.mmu.set_slot_flags(SLOT, flags).unwrap();
                }
            }
            8 | 9 => {
                let gfns = GfnRange::new(fixture.gfn(page), 300).unwrap();
                if fixture.mmu.disallow_huge(gfns).is_ok() {
                    sleep(Duration::from_micros(rng.below(300)));
                    fixture.mmu.allow_huge(gfns);
                }
            }
            10 => {
                let start = fixture.backing.start().checked_add_pages(page).unwrap();
                fixture
                    .mmu
                    .invalidate(&[BackingRange::new(start, 1 + rng.below(300)).unwrap()]);
            }
            _ => fixture
                .mmu
                .write_protect(BackingRange::new(fixture.backing.start(), 300).unwrap()),
        }
    }

    /// Stops all threads. One monitor harvests the remaining pages. Then the newest words of all
    /// copies must be the written values. Half of the calls then begin a new log. If that log
    /// reports all pages as written, every monitor drops its copies.
    fn compare(&self, rng: &mut Rng) {
        let _stopped = self.going.write().expect("no panic in a thread");
        let mut monitors: Vec<_> = self.monitors.iter().map(|m| m.lock().unwrap()).collect();
        let last = rng.below(monitors.len() as u64) as usize;
        monitors[last].harvest(&self.fixture);
        let mut all = Monitor::new();
        monitors.iter().for_each(|monitor| all.join(monitor));
        let written: Vec<_> = self.written.iter().map(|w| w.lock().unwrap()).collect();
        for page in 0..PAGES {
            let truth: Words = std::array::from_fn(|writer| written[writer][page as usize]);
            assert_eq!(self.fixture.words(page), truth, "page {page} lost a write");
            assert_eq!(
                *all.page(page),
                truth,
                "page {page}: a write was not harvested"
            );
        }
        self.fixture.mmu.verify();
        if rng.below(2) == 0 {
            self.fixture.mmu.set_logging(SLOT, Logging::Off).unwrap();
            let (initially, huge) = some_log(rng);
            if monitors[last].begin(&self.fixture, initially, huge) == Begun::AllSet {
                monitors.iter_mut().for_each(|monitor| monitor.forget());
            }
        }
    }
}

fn some_log(rng: &mut Rng) -> (Initially, HugeLeaves) {
    (
        rng.of(&[Initially::Clean, Initially::AllSet]),
        rng.of(&[HugeLeaves::Lazy, HugeLeaves::Eager]),
    )
}

fn round(seed: u64, huge: HugePages, delivery: Delivery) {
    let _on_panic = Round {
        seed,
        huge,
        delivery,
    };
    let mut rng = Rng::new(seed, 0);
    // All combinations of these counts occur in 15 seeds. A round uses one detection, or switches
    // between both.
    let (vcpus, monitors) = (1 + seed % VCPUS_MAX as u64, 1 + seed % 3);
    let detections: &[_] = rng.of(&[&DETECTIONS[..1], &DETECTIONS[1..], &DETECTIONS]);
    let (fixture, mut all) = Fixture::new(huge, delivery, vcpus as usize);
    fixture.mmu.set_detection(rng.of(detections));
    fixture.mmu.set_logging(SLOT, Logging::LAZY).unwrap();
    let chaos = Chaos::new(fixture, monitors);
    scope(|scope| {
        let chaos = &chaos;
        for (index, vcpu) in all.iter_mut().enumerate() {
            let rng = Rng::new(seed, 1 + index as u64);
            scope.spawn(move || chaos.run_vcpu(index, vcpu, rng));
        }
        for index in 0..monitors as usize {
            let rng = Rng::new(seed, 10 + index as u64);
            scope.spawn(move || chaos.run_monitor(index, rng));
        }
        scope.spawn(move || chaos.run_device(Rng::new(seed, 20)));
        let _over = Done(&chaos.done);
        let mut steps = 0;
        while steps < STEPS || chaos.writes.load(Ordering::Relaxed) < WRITES {
            if chaos.done.load(Ordering::Relaxed) {
                break;
            }
            steps += 1;
            chaos.disturb(&mut rng, detections);
            sleep(Duration::from_micros(rng.below(400)));
            if rng.below(6) == 0 {
                chaos.compare(&mut rng);
            }
        }
    });
    chaos.compare(&mut rng);
}

const HUGE: [HugePages; 2] = [HugePages::Never, HugePages::Always];

/// Runs a round without huge pages and one with them, for each of `LACUNA_ROUNDS` seeds (one by
/// default) from `LACUNA_SEED` on.
fn rounds(delivery: Delivery) {
    let first = from_env("LACUNA_SEED").unwrap_or(30);
    for seed in first..first + from_env("LACUNA_ROUNDS").unwrap_or(1) {
        for huge in HUGE {
            round(seed, huge, delivery);
        }
    }
}

#[test]
fn by_bitmap() {
    rounds(Delivery::Bitmap);
}

#[test]
fn by_ring() {
    rounds(bare_ring());
}

#[test]
fn by_ring_with_a_bitmap() {
    rounds(ring(Backup::Bitmap));
}
