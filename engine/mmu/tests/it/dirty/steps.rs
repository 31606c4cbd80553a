//! One step after the other: reclaim, splits, collapses, slot changes, switches of detection.

use super::fixture::{
    Fixture, HOST_WORD, PAGES, PLACES, SLOT, Stuck, VCPUS_MAX, Vcpu, Words, ring,
};
use super::monitor::{Begun, Monitor};
use lacuna_addr::{BackingRange, GfnRange, Level};
use lacuna_host::{HugePages, MmuNotifier};
use lacuna_mmu::{Backup, Delivery, Detection, DirtyError, HugeLeaves, Initially, Logging};
use lacuna_slots::SlotFlags;
use proptest::prelude::*;

pub fn deliveries() -> [Delivery; 3] {
    [Delivery::Bitmap, ring(Backup::Bitmap), bare_ring()]
}

pub fn bare_ring() -> Delivery {
    ring(Backup::None)
}

pub const DETECTIONS: [Detection; 2] = [Detection::WriteProtect, Detection::Pml];

/// Operations name vCPUs and monitors by a number; its remainder by their count is used.
#[derive(Clone, Debug)]
enum Op {
    Write(usize, u64),
    Run(usize, u64),
    Read(usize, u64),
    HostWrite(u64),
    Harvest(usize),
    ClearSome(usize, usize, usize),
    Lose(usize),
    Check,
    Detect(Detection),
    Restart(Initially, HugeLeaves),
    Balance,
    Collapse,
    SplitHuge(u64),
    Disallow(u64, u64),
    Allow,
    Move(usize),
    Flags,
}

fn op() -> impl Strategy<Value = Op> {
    let (who, page) = (|| 0..60usize, || 0..PAGES);
    let initially = prop::sample::select(vec![Initially::Clean, Initially::AllSet]);
    let huge = prop::sample::select(vec![HugeLeaves::Lazy, HugeLeaves::Eager]);
    prop_oneof![
        20 => (who(), page()).prop_map(|(v, p)| Op::Write(v, p)),
        6 => (who(), page()).prop_map(|(v, p)| Op::Run(v, p)),
        6 => (who(), page()).prop_map(|(v, p)| Op::Read(v, p)),
        3 => page().prop_map(Op::HostWrite),
        6 => who().prop_map(Op::Harvest),
        4 => (who(), 0..25usize, 1..12usize).prop_map(|(m, from, n)| Op::ClearSome(m, from, n)),
        2 => who().prop_map(Op::Lose),
        6 => Just(Op::Check),
        3 => prop::sample::select(DETECTIONS.to_vec()).prop_map(Op::Detect),
        3 => (initially, huge).prop_map(|(i, h)| Op::Restart(i, h)),
        3 => Just(Op::Balance),
        2 => Just(Op::Collapse),
        2 => (0..3u64).prop_map(Op::SplitHuge),
        1 => (page(), 1..700u64).prop_map(|(p, n)| Op::Disallow(p, n.min(PAGES - p))),
        1 => Just(Op::Allow),
        2 => (0..2usize).prop_map(Op::Move),
        1 => Just(Op::Flags),
    ]
}

struct Scenario {
    fixture: Fixture,
    vcpus: Vec<Vcpu>,
    monitors: Vec<Monitor>,
    truth: Vec<Words>,
    /// The last value written to any page.
    clock: u64,
    disallowed: Vec<GfnRange>,
}

impl Scenario {
    fn new(huge: HugePages, delivery: Delivery, vcpus: usize, monitors: usize) -> Self {
        let (fixture, vcpus) = Fixture::new(huge, delivery, vcpus);
        fixture.mmu.set_logging(SLOT, Logging::LAZY).unwrap();
        Self {
            fixture,
            vcpus,
            monitors: (0..monitors).map(|_| Monitor::new()).collect(),
            truth: vec![Words::default(); PAGES as usize],
            clock: 0,
            disallowed: Vec::new(),
        }
    }

    fn monitor(&mut self, number: usize) -> (&Fixture, &mut Monitor) {
        let index = number % self.monitors.len();
        (&self.fixture, &mut self.monitors[index])
    }

    fn harvest(&mut self, number: usize) {
        let (fixture, monitor) = self.monitor(number);
        monitor.harvest(fixture);
    }

    fn write(&mut self, vcpu: usize, page: u64) {
        self.clock += 1;
        self.access(vcpu, page, Some(self.clock));
    }

    fn access(&mut self, vcpu: usize, page: u64, write: Option<u64>) {
        let vcpu = vcpu % self.vcpus.len();
        let seen = match self.vcpus[vcpu].access(&self.fixture, page, write) {
            Err(Stuck::Ring) => {
                self.harvest(vcpu);
                self.vcpus[vcpu].access(&self.fixture, page, write)
            }
            other => other,
        };
        let word = &mut self.truth[page as usize][vcpu];
        *word = write.unwrap_or(*word);
        assert_eq!(seen, Ok(*word));
    }

    fn host_write(&mut self, page: u64) {
        self.clock += 1;
        match self.fixture.host_write(page, self.clock) {
            Ok(()) => self.truth[page as usize][HOST_WORD] = self.clock,
            Err(error) => assert_eq!(
                (error, self.fixture.mmu.delivery()),
                (DirtyError::NoBitmap, bare_ring())
            ),
        }
    }

    fn check(&mut self) {
        self.harvest(0);
        let mut all = Monitor::new();
        self.monitors.iter().for_each(|monitor| all.join(monitor));
        for (page, truth) in (0..).zip(&self.truth) {
            assert_eq!(all.page(page), truth, "page {page} was written unseen");
        }
        self.fixture.mmu.verify();
    }

    fn restart(&mut self, initially: Initially, huge: HugeLeaves) {
        self.fixture.mmu.set_logging(SLOT, Logging::Off).unwrap();
        let (fixture, monitor) = self.monitor(self.clock as usize);
        if monitor.begin(fixture, initially, huge) == Begun::AllSet {
            self.monitors.iter_mut().for_each(Monitor::forget);
        }
    }

    fn step(&mut self, op: &Op) {
        match *op {
            Op::Write(vcpu, page) => self.write(vcpu, page),
            Op::Run(vcpu, page) => {
                (page..(page + 90).min(PAGES)).for_each(|page| self.write(vcpu, page));
            }
            Op::Read(vcpu, page) => self.access(vcpu, page, None),
            Op::HostWrite(page) => self.host_write(page),
            Op::Harvest(monitor) => self.harvest(monitor),
            Op::ClearSome(monitor, from, count) => {
                let (fixture, monitor) = self.monitor(monitor);
                monitor.clear_some(fixture, from, count);
            }
            Op::Lose(monitor) => {
                let (fixture, monitor) = self.monitor(monitor);
                monitor.lose(fixture);
            }
            Op::Check => self.check(),
            Op::Detect(detection) => self.fixture.mmu.set_detection(detection),
            Op::Restart(initially, huge) => self.restart(initially, huge),
            Op::Balance => drop(self.fixture.host.balance()),
            Op::Collapse => drop(self.fixture.host.collapse_step()),
            Op::SplitHuge(block) => {
                let start = self.fixture.backing.start().checked_add_pages(block * 512);
                let block = BackingRange::new(start.unwrap(), 512).unwrap();
                self.fixture.mmu.split_huge(block);
            }
            Op::Disallow(page, pages) => {
                let gfns = GfnRange::new(self.fixture.gfn(page), pages).unwrap();
                self.fixture.mmu.disallow_huge(gfns).unwrap();
                self.disallowed.push(gfns);
            }
            Op::Allow => {
                if let Some(gfns) = self.disallowed.pop() {
                    self.fixture.mmu.allow_huge(gfns);
                }
            }
            Op::Move(place) => {
                self.disallowed.clear();
                self.fixture.move_to(PLACES[place]);
            }
            Op::Flags => {
                self.disallowed.clear();
                for flags in [SlotFlags::READONLY, SlotFlags::empty()] {
                    self.fixture.mmu.set_slot_flags(SLOT, flags).unwrap();
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_replayed_copy_is_right(
        huge in prop::sample::select(vec![HugePages::Never, HugePages::Always]),
        delivery in prop::sample::select(deliveries().to_vec()),
        vcpus in 1..=VCPUS_MAX,
        monitors in 1..=3usize,
        ops in prop::collection::vec(op(), 1..200),
    ) {
        let mut scenario = Scenario::new(huge, delivery, vcpus, monitors);
        for op in &ops {
            scenario.step(op);
        }
        scenario.check();
    }
}

fn fill(scenario: &mut Scenario) {
    (0..PAGES).for_each(|page| scenario.write(0, page));
}

/// Each detection with each delivery: every page once, then all pages, twice over.
#[test]
fn every_detection_with_every_delivery() {
    for detection in DETECTIONS {
        for delivery in deliveries() {
            let mut scenario = Scenario::new(HugePages::Never, delivery, 1, 1);
            scenario.fixture.mmu.set_detection(detection);
            for _ in 0..2 {
                fill(&mut scenario);
                scenario.check();
            }
            let stats = scenario.fixture.mmu.dirty_stats()[0];
            let noticed = stats.faults + stats.fast_page_faults + stats.logged;
            assert!(
                noticed >= 2 * PAGES,
                "{detection:?} {delivery:?}: {stats:?}"
            );
        }
    }
}

#[test]
fn nothing_is_logged_for_a_slot_without_a_log() {
    let (fixture, mut vcpus) = Fixture::new(HugePages::Always, Delivery::Bitmap, 1);
    fixture.mmu.set_detection(Detection::Pml);
    for round in 0..3 {
        for page in 0..PAGES {
            vcpus[0].access(&fixture, page, Some(round)).unwrap();
        }
    }
    let stats = fixture.mmu.dirty_stats()[0];
    assert_eq!((stats.flushes, stats.logged), (0, 0), "{stats:?}");
    let mut words = [0; 25];
    assert_eq!(
        fixture.mmu.get_dirty(SLOT, &mut words),
        Err(DirtyError::NotLogging(SLOT))
    );
}

/// All pages were armed when the log ended. No later write is reported, to huge leaves or small
/// ones.
#[test]
fn a_log_that_has_ended_records_nothing() {
    for detection in DETECTIONS {
        for huge in [HugePages::Never, HugePages::Always] {
            let (fixture, mut vcpus) = Fixture::new(huge, Delivery::Bitmap, 1);
            fixture.mmu.set_detection(detection);
            // The host certainly has frames for this many pages.
            let mut write = |value| {
                (0..600).for_each(|page| {
                    vcpus[0].access(&fixture, page, Some(value)).unwrap();
                });
            };
            write(1);
            fixture.mmu.set_logging(SLOT, Logging::LAZY).unwrap();
            write(2);
            fixture.mmu.get_dirty(SLOT, &mut [0; 25]).unwrap();
            fixture.mmu.set_logging(SLOT, Logging::Off).unwrap();
            let before = fixture.mmu.dirty_stats();
            write(3);
            assert_eq!(fixture.mmu.dirty_stats(), before, "{detection:?} {huge:?}");
        }
    }
}

/// Huge leaves are split for written pages, and collapsed at once afterwards.
#[test]
fn huge_leaves_go_lazily_and_come_back_in_place() {
    for detection in DETECTIONS {
        let (fixture, mut vcpus) = Fixture::new(HugePages::Always, Delivery::Bitmap, 1);
        fixture.mmu.set_detection(detection);
        let mut write = |page| {
            vcpus[0].access(&fixture, page, Some(page)).unwrap();
        };
        (0..1024).for_each(&mut write);
        let huge = || fixture.mmu.counts().of(Level::L2M);
        assert_eq!(huge(), 2);
        fixture.mmu.set_logging(SLOT, Logging::LAZY).unwrap();
        assert_eq!(huge(), 2, "protected, not split");
        write(5);
        assert_eq!(huge(), 1, "{detection:?}");
        let mut words = [0; 25];
        fixture.mmu.get_dirty(SLOT, &mut words).unwrap();
        assert_eq!((words[0], words[1..].iter().max()), (1 << 5, Some(&0)));
        fixture.mmu.set_logging(SLOT, Logging::Off).unwrap();
        assert_eq!(huge(), 2, "put together in place");
        fixture.mmu.set_logging(SLOT, Logging::LAZY).unwrap();
        fixture.mmu.set_logging(SLOT, Logging::Off).unwrap();
        let eager = Logging::On {
            initially: Initially::Clean,
            huge: HugeLeaves::Eager,
        };
        fixture.mmu.set_logging(SLOT, eager).unwrap();
        assert_eq!(huge(), 0);
        assert!(
            fixture.mmu.is_mapped(fixture.gfn(700)),
            "nothing was unmapped"
        );
        fixture.mmu.verify();
    }
}

#[test]
fn a_vm_with_rings_refuses_bitmap_calls_and_host_writes() {
    let (fixture, _) = Fixture::new(HugePages::Never, bare_ring(), 1);
    let all_set = Logging::On {
        initially: Initially::AllSet,
        huge: HugeLeaves::Lazy,
    };
    assert_eq!(
        fixture.mmu.set_logging(SLOT, all_set),
        Err(DirtyError::NoBitmap)
    );
    assert_eq!(fixture.host_write(1, 1), Ok(()), "no slot logs yet");
    fixture.mmu.set_logging(SLOT, Logging::LAZY).unwrap();
    assert_eq!(fixture.host_write(1, 1), Err(DirtyError::NoBitmap));
    let text = fixture.mmu.get_dirty(SLOT, &mut [0; 25]).unwrap_err();
    assert!(text.to_string().contains("reap the rings"), "{text}");
    let late = fixture.mmu.set_delivery(Delivery::Bitmap);
    assert_eq!(late, Err(DirtyError::TooLate));
}

/// At the end of a log, a compound page of the host gets one leaf, in place.
#[test]
fn a_block_allowed_again_is_huge_if_the_host_has_it_whole() {
    for (huge, expected) in [(HugePages::Always, 2), (HugePages::Never, 0)] {
        let (fixture, mut vcpus) = Fixture::new(huge, Delivery::Bitmap, 1);
        // The host certainly has frames for this many pages.
        (0..700).for_each(|page| {
            vcpus[0].access(&fixture, page, Some(page)).unwrap();
        });
        let huge = || fixture.mmu.counts().of(Level::L2M);
        let all = GfnRange::new(fixture.gfn(0), PAGES).unwrap();
        assert_eq!(huge(), expected);
        fixture.mmu.disallow_huge(all).unwrap();
        assert_eq!(huge(), 0);
        fixture.mmu.allow_huge(all);
        assert_eq!(huge(), expected);
        fixture.mmu.verify();
    }
}

/// A block disallowed and allowed again stays split while the slot logs.
#[test]
fn no_huge_leaf_appears_while_a_slot_logs() {
    for detection in DETECTIONS {
        let (fixture, mut vcpus) = Fixture::new(HugePages::Always, Delivery::Bitmap, 1);
        fixture.mmu.set_detection(detection);
        let mut write = |page| {
            vcpus[0].access(&fixture, page, Some(page)).unwrap();
        };
        (0..512).for_each(&mut write);
        fixture.mmu.set_logging(SLOT, Logging::LAZY).unwrap();
        let block = GfnRange::new(fixture.gfn(0), 512).unwrap();
        fixture.mmu.disallow_huge(block).unwrap();
        write(1);
        fixture.mmu.allow_huge(block);
        assert_eq!(fixture.mmu.counts().of(Level::L2M), 0);
        write(2);
        let mut words = [0; 25];
        fixture.mmu.get_dirty(SLOT, &mut words).unwrap();
        assert_eq!((words[0], words[1..].iter().max()), (0b110, Some(&0)));
        fixture.mmu.verify();
    }
}
