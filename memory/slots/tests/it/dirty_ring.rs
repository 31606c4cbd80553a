//! The dirty ring, compared with a plain queue; its sizes; and its two ends on two threads.

use lacuna_slots::{RingConsumer, RingProducer, RingSize, RingSpace, SlotId, dirty_ring};
use proptest::prelude::*;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The smallest ring: 1024 entries, 576 of them the reserve.
fn smallest() -> (RingProducer, RingConsumer) {
    dirty_ring(RingSize::from_bytes(RingSize::BYTES_MIN).expect("a size"))
}

#[test]
fn sizes_are_kvms() {
    for (bytes, entries) in [(16 << 10, 1024), (64 << 10, 4096), (1 << 20, 65_536)] {
        let size = RingSize::from_bytes(bytes).expect("a size");
        assert_eq!(size.entries(), entries);
        assert_eq!(size.soft_limit(), entries - (64 + 512));
    }
    for bytes in [0, 1, 4096, 8192, 16385, 3 << 15, 2 << 20, usize::MAX] {
        let error = RingSize::from_bytes(bytes).expect_err("no size");
        assert_eq!(
            error.to_string(),
            format!(
                "a dirty ring cannot have {bytes} bytes: choose a power of two from 16384 to \
                 1048576"
            )
        );
    }
}

#[test]
fn many_pages_at_once_are_pushed_one_after_the_other() {
    let (mut producer, mut consumer) = smallest();
    let pages = [5, 900, 6, 5];
    assert_eq!(producer.push_all(SlotId(3), pages.into_iter()), pages.len());
    assert_eq!(producer.push_all(SlotId(3), std::iter::empty()), 0);
    assert_eq!(producer.space(), RingSpace::Free);
    let mut found = Vec::new();
    consumer.harvest(|slot, page| found.push((slot.0, page)));
    assert_eq!(found, pages.map(|page| (3, page)));
    // A full log after nearly as many entries as the soft limit.
    let limit = 1024 - (64 + 512);
    producer.push_all(SlotId(1), 0..limit - pages.len() - 1);
    assert_eq!(producer.space(), RingSpace::Free);
    assert_eq!(producer.push_all(SlotId(1), 0..512), 512);
    assert_eq!(producer.space(), RingSpace::SoftFull);
}

#[derive(Clone, Debug)]
enum Op {
    /// Pushes pages of this slot, from the first one on, at this distance; then, if the ring is
    /// full, pushes more into the reserve.
    Push {
        slot: u16,
        page: usize,
        step: isize,
        count: usize,
        more: usize,
    },
    Harvest,
    PutBack,
    Reset,
}

fn any_op() -> impl Strategy<Value = Op> {
    let page = prop_oneof![0..200usize, usize::MAX - 200..usize::MAX];
    let step = prop_oneof![-3..4isize, -70..70isize];
    prop_oneof![
        4 => (0..2u16, page, step, 0..300usize, 0..100usize)
            .prop_map(|(slot, page, step, count, more)| Op::Push { slot, page, step, count, more }),
        2 => Just(Op::Harvest),
        1 => Just(Op::PutBack),
        1 => Just(Op::Reset),
    ]
}

/// Entries in use: the harvested ones first.
#[derive(Default)]
struct Model {
    harvested: VecDeque<(u16, usize)>,
    dirty: VecDeque<(u16, usize)>,
}

impl Model {
    fn used(&self) -> usize {
        self.harvested.len() + self.dirty.len()
    }

    fn space(&self) -> RingSpace {
        if self.used() < 448 {
            RingSpace::Free
        } else {
            RingSpace::SoftFull
        }
    }
}

fn push(producer: &mut RingProducer, model: &mut Model, slot: u16, page: usize) {
    model.dirty.push_back((slot, page));
    assert_eq!(producer.push(SlotId(slot), page), model.space());
}

fn step(ends: &mut (RingProducer, RingConsumer), model: &mut Model, op: Op) {
    let (producer, consumer) = ends;
    match op {
        Op::Push {
            slot,
            page,
            step,
            count,
            more,
        } => {
            let mut pages = (0..).map(|i: isize| page.wrapping_add_signed(i * step));
            for page in pages.by_ref().take(count) {
                if producer.space() == RingSpace::SoftFull {
                    break;
                }
                push(producer, model, slot, page);
            }
            for page in pages.take(more).take(1024 - model.used()) {
                push(producer, model, slot, page);
            }
        }
        Op::Harvest => {
            let expected = model.dirty.len();
            let count = consumer.harvest(|slot, page| {
                let next = model.dirty.pop_front();
                assert_eq!(next, Some((slot.0, page)));
                model.harvested.extend(next);
            });
            assert_eq!(count, expected);
        }
        Op::PutBack => {
            consumer.put_back();
            model.harvested.append(&mut model.dirty);
            std::mem::swap(&mut model.harvested, &mut model.dirty);
        }
        Op::Reset => {
            let expected: Vec<_> = model.harvested.iter().copied().collect();
            let mut armed = Vec::new();
            let count = consumer.reset(|slot, page| armed.push((slot.0, page)));
            assert_eq!(count, expected.len());
            assert_eq!(armed, expected);
            model.harvested.clear();
        }
    }
    assert_eq!(producer.space(), model.space());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn a_ring_is_a_queue(ops in prop::collection::vec(any_op(), 1..60)) {
        let (mut ends, mut model) = (smallest(), Model::default());
        for op in ops {
            step(&mut ends, &mut model, op);
        }
    }
}

#[test]
#[should_panic(expected = "the vCPU pushed with 1024 pages in its ring")]
fn a_vcpu_that_goes_on_is_stopped_before_it_overwrites() {
    let (mut producer, _consumer) = smallest();
    for page in 0..=1024 {
        let _ = producer.push(SlotId(0), page);
    }
}

#[test]
fn entries_are_free_before_their_pages_are_armed() {
    let (mut producer, mut consumer) = smallest();
    while producer.push(SlotId(0), 0) == RingSpace::Free {}
    for page in 0..1024 - 448 {
        let _ = producer.push(SlotId(0), page * 64);
    }
    consumer.harvest(|_, _| ());
    let mut armed = 0;
    consumer.reset(|_, page| {
        // Rearming a page lets the vCPU write and push it again, into a full ring.
        let _ = producer.space();
        let _ = producer.push(SlotId(1), page);
        armed += 1;
    });
    assert_eq!(armed, 1024);
    let mut again = 0;
    consumer.harvest(|slot, _| again += usize::from(slot == SlotId(1)));
    assert_eq!(again, armed);
}

/// One page of a VM with a ring: armed, or written and logged.
struct Page {
    data: u64,
    dirty: bool,
    ring: RingProducer,
}

impl Page {
    fn write(&mut self, value: u64) {
        if !std::mem::replace(&mut self.dirty, true) {
            let _ = self.ring.push(SlotId(0), 0);
        }
        self.data = value;
    }
}

/// The rule for users of a ring: reset first, then copy.
#[test]
fn reset_then_copy_sees_a_write_that_copy_then_reset_loses() {
    for (reset_first, lost) in [(true, false), (false, true)] {
        let (ring, mut consumer) = smallest();
        let mut page = Page {
            data: 0,
            dirty: false,
            ring,
        };
        page.write(1);
        assert_eq!(consumer.harvest(|_, _| ()), 1);
        let mut copy = 0;
        if reset_first {
            page.write(2);
            consumer.reset(|_, _| page.dirty = false);
            copy = page.data;
        } else {
            copy += page.data;
            page.write(2);
            consumer.reset(|_, _| page.dirty = false);
        }
        let is_reported = consumer.harvest(|_, _| ()) > 0;
        assert_eq!(!is_reported && copy != page.data, lost);
    }
}

#[test]
fn two_threads_pass_every_page_on_in_order() {
    const PAGES: usize = 300_000;
    let (mut producer, mut consumer) = smallest();
    std::thread::scope(|s| {
        s.spawn(move || {
            for page in 0..PAGES {
                while producer.space() == RingSpace::SoftFull {
                    std::thread::yield_now();
                }
                let _ = producer.push(SlotId((page % 3) as u16), page);
            }
        });
        let (mut next, mut armed, mut round) = (0, 0, 0);
        while armed < PAGES {
            let before = next;
            let expect = |slot: SlotId, page: usize, next: &mut usize| {
                assert_eq!((usize::from(slot.0), page), (*next % 3, *next));
                *next += 1;
            };
            consumer.harvest(|slot, page| expect(slot, page, &mut next));
            if round % 5 == 0 {
                consumer.put_back();
                next = armed;
            } else {
                armed += consumer.reset(|_, _| ());
                assert_eq!(armed, next);
            }
            if next == before {
                std::thread::yield_now();
            }
            round += 1;
        }
    });
}

/// A page whose harvest panics is harvested again.
#[test]
fn a_harvest_that_panics_loses_no_page() {
    let (mut producer, mut consumer) = smallest();
    let pages = [3, 4, 5];
    for page in pages {
        assert_eq!(producer.push(SlotId(1), page), RingSpace::Free);
    }
    let mut seen = Vec::new();
    let harvest = catch_unwind(AssertUnwindSafe(|| {
        consumer.harvest(|_, page| match page {
            4 => panic!("the user's own"),
            page => seen.push(page),
        })
    }));
    assert!(harvest.is_err());
    assert_eq!(consumer.harvest(|_, page| seen.push(page)), 2);
    assert_eq!(seen, pages);
}
