//! The dirty bitmap and the dirty ring, model-checked: *no write is lost*.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=3 \
//!     CARGO_TARGET_DIR=target/loom cargo test -p lacuna-slots --test loom --release
//! ```
//! One page of guest memory is one word, and the harvester's copy of it another. At the end, if the
//! page differs from its copy, the next harvest must still report it. For each rule that users must
//! keep, a model breaks the rule, and must fail.
#![cfg(loom)]
#![allow(
    dead_code,
    reason = "the ring is whole, the models need small sizes of it"
)]

#[path = "../src/dirty_ring.rs"]
mod dirty_ring;

use dirty_ring::{RingConsumer, RingProducer, RingSize, RingSpace, dirty_ring as new_ring};
use lacuna_slots::{DirtyBitmap, SlotId};
use lacuna_sync::shim::thread::{self, yield_now};
use lacuna_sync::shim::{Arc, AtomicBool, AtomicU64, Ordering};
use lacuna_sync::{GracePeriod, Qsbr};

const SLOT: SlotId = SlotId(0);

/// One page, and the bit of its stage-2 entry that lets a write go unrecorded: W, or D.
struct Fixture {
    bitmap: DirtyBitmap,
    open: AtomicBool,
    data: AtomicU64,
    qsbr: Qsbr,
}

impl Fixture {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            bitmap: DirtyBitmap::new(1),
            open: AtomicBool::new(false),
            data: AtomicU64::new(0),
            qsbr: Qsbr::new(1),
        })
    }

    /// Reads first, as a cursor does, and does not write an entry that needs no change.
    fn rearm(&self) {
        if self.open.load(Ordering::Acquire) {
            self.open.swap(false, Ordering::AcqRel);
        }
    }

    fn flush(&self) {
        let grace = self.qsbr.request();
        while !self.qsbr.passed(grace) {
            yield_now();
        }
    }

    fn copy(&self) -> u64 {
        self.data.load(Ordering::Relaxed)
    }

    /// Takes the mark, rearms and flushes. Returns the copy if the page was dirty.
    fn harvest(&self) -> Option<u64> {
        let mut word = [0];
        self.bitmap.take(0, &mut word);
        (word[0] == 1).then(|| {
            self.rearm();
            self.flush();
            self.copy()
        })
    }

    /// When all threads have ended: either the last copy is right, or the page will be reported.
    fn check(&self, copy: u64) {
        let mut word = [0];
        self.bitmap.copy(0, &mut word);
        assert!(copy == self.copy() || word[0] == 1, "a write was lost");
    }
}

/// A vCPU with a TLB of one entry.
struct Vcpu<'w> {
    fixture: &'w Fixture,
    tlb: bool,
    flushed_at: GracePeriod,
}

impl<'w> Vcpu<'w> {
    fn online(fixture: &'w Fixture) -> Self {
        let flushed_at = fixture.qsbr.online(0);
        Self {
            fixture,
            tlb: false,
            flushed_at,
        }
    }

    /// The point between two basic blocks.
    fn boundary(&mut self) {
        let slot = self.fixture.qsbr.vcpu(0);
        if slot.has_request() {
            slot.take();
            let grace = self.fixture.qsbr.online(0);
            self.tlb &= self.flushed_at >= grace;
            self.flushed_at = grace;
        }
    }

    /// A store; `log` records the page once the entry has the bit.
    fn write(&mut self, value: u64, log: impl FnOnce()) {
        if !self.tlb {
            if !self.fixture.open.swap(true, Ordering::AcqRel) {
                log();
            }
            self.tlb = true;
        }
        self.fixture.data.store(value, Ordering::Relaxed);
    }

    fn offline(self) {
        self.fixture.qsbr.offline(0);
    }
}

fn mark(fixture: &Fixture) {
    fixture.bitmap.mark(0);
}

#[test]
fn a_guest_write_is_in_the_copy_or_in_the_next_harvest() {
    loom::model(|| {
        let fixture = Fixture::new();
        // A host write, or initially-all-set, leaves this state: dirty, but armed.
        mark(&fixture);
        let vcpu = {
            let fixture = Arc::clone(&fixture);
            thread::spawn(move || {
                let mut vcpu = Vcpu::online(&fixture);
                vcpu.write(1, || mark(&fixture));
                vcpu.boundary();
                vcpu.write(2, || mark(&fixture));
                vcpu.offline();
            })
        };
        let copy = fixture.harvest().expect("marked before");
        vcpu.join().expect("vCPU");
        fixture.check(copy);
    });
}

/// The wrong order: `take` clears the mark; no entry is rearmed; then the entry gets its bit.
#[test]
#[should_panic(expected = "a write was lost")]
fn a_mark_before_the_bit_is_gained_loses_a_write() {
    loom::model(|| {
        let fixture = Fixture::new();
        let vcpu = {
            let fixture = Arc::clone(&fixture);
            thread::spawn(move || {
                let mut vcpu = Vcpu::online(&fixture);
                mark(&fixture);
                vcpu.write(1, || ());
                vcpu.boundary();
                vcpu.write(2, || ());
                vcpu.offline();
            })
        };
        let copy = fixture.harvest().unwrap_or(0);
        vcpu.join().expect("vCPU");
        fixture.check(copy);
    });
}

/// A bitmap of one page.
trait Bit: Send + Sync + 'static {
    fn mark(&self);
    fn take(&self) -> u64;
}

impl Bit for DirtyBitmap {
    fn mark(&self) {
        DirtyBitmap::mark(self, 0);
    }

    fn take(&self) -> u64 {
        let mut word = [0];
        DirtyBitmap::take(self, 0, &mut word);
        word[0]
    }
}

/// A wrong `mark`: it does not write a set bit.
struct LooksFirst(AtomicU64);

impl Bit for LooksFirst {
    fn mark(&self) {
        if self.0.load(Ordering::Acquire) == 0 {
            self.0.fetch_or(1, Ordering::AcqRel);
        }
    }

    fn take(&self) -> u64 {
        self.0.swap(0, Ordering::AcqRel)
    }
}

/// A host write marks the page after the write; no entry is rearmed, so no flush is needed. The
/// page was dirty before.
fn host_write<B: Bit>(new: fn() -> B) {
    loom::model(move || {
        let fixture = Arc::new((new(), AtomicU64::new(0)));
        fixture.0.mark();
        let writer = {
            let fixture = Arc::clone(&fixture);
            thread::spawn(move || {
                fixture.1.store(1, Ordering::Relaxed);
                fixture.0.mark();
            })
        };
        assert_eq!(fixture.0.take(), 1);
        let copy = fixture.1.load(Ordering::Relaxed);
        writer.join().expect("writer");
        let now = fixture.1.load(Ordering::Relaxed);
        assert!(copy == now || fixture.0.take() == 1, "a write was lost");
    });
}

#[test]
fn a_host_write_is_in_the_copy_or_in_the_next_harvest() {
    host_write(|| DirtyBitmap::new(1));
}

#[test]
#[should_panic(expected = "a write was lost")]
fn a_mark_that_looks_first_loses_a_write() {
    host_write(|| LooksFirst(AtomicU64::new(0)));
}

#[test]
fn marks_and_harvests_lose_no_bit_and_double_none() {
    loom::model(|| {
        let bitmap = Arc::new(DirtyBitmap::new(3));
        let other = {
            let bitmap = Arc::clone(&bitmap);
            thread::spawn(move || {
                bitmap.mark(0);
                bitmap.mark(1);
            })
        };
        bitmap.mark(2);
        let (mut taken, mut cleared) = ([0], [0b11]);
        bitmap.take(0, &mut taken);
        bitmap.clear(0, 3, &mut cleared).expect("all of it");
        bitmap.put_back(0, &[taken[0] & 0b100]);
        other.join().expect("marker");
        let mut left = [0];
        bitmap.take(0, &mut left);
        assert_eq!(taken[0] & 0b11 | cleared[0] | left[0], 0b111);
        assert_eq!(taken[0] & cleared[0], 0, "twice");
        assert_eq!((taken[0] | cleared[0]) & left[0] & 0b11, 0, "twice");
    });
}

/// Four entries, two of them the reserve.
fn tiny() -> (RingProducer, RingConsumer) {
    new_ring(RingSize::of(4, 2))
}

/// Pushes up to the soft limit, then one more into the reserve, and waits; the ring wraps around.
#[test]
fn the_ring_passes_everything_on_once_and_in_order() {
    const PAGES: usize = 5;
    loom::model(|| {
        let (mut producer, mut consumer) = tiny();
        let vcpu = thread::spawn(move || {
            let mut page = 0;
            while page < PAGES {
                let space = producer.push(SLOT, page);
                page += 1;
                if space == RingSpace::SoftFull && page < PAGES {
                    let _ = producer.push(SLOT, page);
                    page += 1;
                    while producer.space() == RingSpace::SoftFull {
                        yield_now();
                    }
                }
            }
        });
        let (mut next, mut armed) = (0, 0);
        while next < PAGES {
            let found = consumer.harvest(|_, page| {
                assert_eq!(page, next);
                next += 1;
            });
            let freed = consumer.reset(|_, page| {
                assert_eq!(page, armed);
                armed += 1;
            });
            assert_eq!((freed, armed), (found, next));
            if found == 0 {
                yield_now();
            }
        }
        vcpu.join().expect("vCPU");
    });
}

/// A vCPU writes twice; the harvester copies the page before the reset or after it.
fn write_and_harvest(reset_and_copy: fn(&Fixture, &mut RingConsumer) -> u64) {
    loom::model(move || {
        let fixture = Fixture::new();
        let (mut producer, mut consumer) = new_ring(RingSize::of(4, 1));
        let vcpu = {
            let fixture = Arc::clone(&fixture);
            thread::spawn(move || {
                let mut vcpu = Vcpu::online(&fixture);
                for value in [1, 2] {
                    vcpu.write(value, || {
                        assert_eq!(producer.push(SLOT, 0), RingSpace::Free)
                    });
                    vcpu.boundary();
                }
                vcpu.offline();
            })
        };
        let copy = match consumer.harvest(|_, _| ()) {
            0 => 0,
            _ => reset_and_copy(&fixture, &mut consumer),
        };
        vcpu.join().expect("vCPU");
        let is_reported = consumer.harvest(|_, _| ()) > 0;
        assert!(is_reported || copy == fixture.copy(), "a write was lost");
    });
}

#[test]
fn reset_then_copy_loses_no_write() {
    write_and_harvest(|fixture, consumer| {
        consumer.reset(|_, _| fixture.rearm());
        fixture.flush();
        fixture.copy()
    });
}

#[test]
#[should_panic(expected = "a write was lost")]
fn copy_then_reset_loses_a_write() {
    write_and_harvest(|fixture, consumer| {
        let copy = fixture.copy();
        consumer.reset(|_, _| fixture.rearm());
        fixture.flush();
        copy
    });
}

#[test]
#[should_panic(expected = "a write was lost")]
fn a_copy_before_the_flush_loses_a_write() {
    write_and_harvest(|fixture, consumer| {
        consumer.reset(|_, _| fixture.rearm());
        let copy = fixture.copy();
        fixture.flush();
        copy
    });
}
