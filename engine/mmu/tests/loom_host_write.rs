//! Host writes against the start of a slot's log, every interleaving of the real code: no write is
//! lost.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=3 \
//!     CARGO_TARGET_DIR=target/loom cargo test -p lacuna-mmu --test loom_host_write --release
//! ```
//! A device writes two pages, one after the other; another thread may write the second one too. A
//! monitor turns the log on as `Mmu::set_logging` does, copies both pages, and harvests once. Then
//! its copy of each page is the last value, or the page's bit is set.
//!
//! The tests fail in each of these cases: one of the fences is missing; the start does not wait for
//! the writers; a writer reads the log's state before it has counted itself; it marks only at the
//! beginning.
#![cfg(loom)]
#![allow(dead_code, reason = "the modules are whole, the models use their part")]

#[path = "../src/dirty/host_write.rs"]
mod host_write;
#[path = "../src/dirty/state.rs"]
mod state;

use lacuna_addr::{BackingAddr, Gfn};
use lacuna_slots::{
    DirtyError, HugeLeaves, Limits, Slot, SlotData, SlotFlags, SlotId, SlotSpec, Slots,
};
use lacuna_sync::shim::{Arc, AtomicU64, Ordering, thread};
use state::{Count, SlotLog, Tracking};
use std::marker::PhantomData;

/// The parts of the MMU that these modules use, for any format.
struct Mmu<F> {
    dirty: Tracking,
    format: PhantomData<F>,
}

trait MmuFormat {}
impl MmuFormat for () {}

/// The parts of the reverse map.
struct Rmap {
    log: std::sync::Arc<SlotLog>,
}

impl SlotData for Rmap {
    type Addr = BackingAddr;
}

impl Rmap {
    fn log(&self) -> &std::sync::Arc<SlotLog> {
        &self.log
    }
}

/// A vCPU's side, in a VM whose delivery is the bitmap.
struct VcpuMmu {
    marker: Marker,
}

struct Marker;

impl Marker {
    fn mark(&mut self, slot: &Slot<Rmap>, gfn: Gfn, _: Count) {
        slot.attach.log().mark(slot.page(gfn));
    }
}

const PAGES: usize = 2;

struct Fixture {
    mmu: Mmu<()>,
    slot: std::sync::Arc<Slot<Rmap>>,
    /// The pages.
    data: [AtomicU64; PAGES],
}

/// Which thread writes.
#[derive(Clone, Copy)]
enum By {
    Device,
    Vcpu,
}

impl Fixture {
    fn new() -> Self {
        let spec = SlotSpec {
            id: SlotId(1),
            guest: 0,
            backing: BackingAddr::new(0x10_0000),
            bytes: (PAGES * lacuna_addr::PAGE_SIZE) as u64,
            flags: SlotFlags::empty(),
        };
        let attach = |_, _| Rmap {
            log: std::sync::Arc::default(),
        };
        let slots = Slots::new(Limits::default());
        let slot = slots.add(spec, attach).expect("the first slot");
        // The bitmap exists from here on: loom does not model the ordering that `OnceLock` gives.
        slot.attach.log().clean_bitmap(PAGES);
        Self {
            mmu: Mmu {
                dirty: Tracking::default(),
                format: PhantomData,
            },
            slot,
            data: [AtomicU64::new(0), AtomicU64::new(0)],
        }
    }

    fn log(&self) -> &SlotLog {
        self.slot.attach.log()
    }

    fn write(&self, page: usize, value: u64, by: By) {
        let gfn = Gfn::new(page as u64).expect("a small number");
        let store = || self.data[page].store(value, Ordering::Relaxed);
        match by {
            By::Device => {
                let writing = self.mmu.host_write(&self.slot, gfn).expect("a bitmap");
                store();
                writing.done();
            }
            By::Vcpu => {
                let writing = self.mmu.vcpu_write(&self.slot, gfn);
                store();
                writing.done_by(&mut VcpuMmu { marker: Marker });
            }
        }
    }

    /// As `Mmu::set_logging`. After it returns, pages not marked as written may be copied.
    fn begin(&self) -> [u64; PAGES] {
        self.log().clean_bitmap(PAGES);
        self.log().turn_on(HugeLeaves::Lazy);
        self.log().wait_for_writers();
        [0, 1].map(|page| self.data[page].load(Ordering::Relaxed))
    }

    fn harvest(&self, copy: &mut [u64; PAGES]) {
        let bits = self.take();
        for (page, copy) in copy.iter_mut().enumerate() {
            if bits >> page & 1 == 1 {
                *copy = self.data[page].load(Ordering::Relaxed);
            }
        }
    }

    fn take(&self) -> u64 {
        let mut bits = [0];
        let bitmap = self.log().bitmap().expect("it logs");
        bitmap.take(0, &mut bits);
        bits[0]
    }
}

/// `writers` write their pages in order, while `monitor` begins a log and copies.
fn no_write_is_lost(
    writers: &'static [(By, &'static [usize])],
    monitor: fn(&Fixture) -> [u64; PAGES],
) {
    loom::model(move || {
        let fixture = Arc::new(Fixture::new());
        let threads: Vec<_> = (1..)
            .zip(writers)
            .map(|(value, (by, pages))| {
                let fixture = Arc::clone(&fixture);
                thread::spawn(move || {
                    pages
                        .iter()
                        .for_each(|page| fixture.write(*page, value, *by))
                })
            })
            .collect();
        let copy = monitor(&fixture);
        for thread in threads {
            thread.join().expect("writer");
        }
        let still_marked = fixture.take();
        for (page, copy) in copy.into_iter().enumerate() {
            let now = fixture.data[page].load(Ordering::Relaxed);
            assert!(
                copy == now || still_marked >> page & 1 == 1,
                "a write to page {page} was lost: {now}, not {copy}"
            );
        }
    });
}

fn begin(fixture: &Fixture) -> [u64; PAGES] {
    fixture.begin()
}

fn begin_and_harvest(fixture: &Fixture) -> [u64; PAGES] {
    let mut copy = fixture.begin();
    fixture.harvest(&mut copy);
    copy
}

/// The writer may have seen the ended log, or that there is none.
fn begin_again(fixture: &Fixture) -> [u64; PAGES] {
    let _ = fixture.begin();
    fixture.log().turn_off();
    fixture.begin()
}

#[test]
fn a_device_that_writes_while_the_log_begins() {
    no_write_is_lost(&[(By::Device, &[0, 1])], begin_and_harvest);
}

#[test]
fn a_vcpu_that_writes_while_the_log_begins() {
    no_write_is_lost(&[(By::Vcpu, &[0, 1])], begin_and_harvest);
}

#[test]
fn two_at_the_same_page() {
    no_write_is_lost(&[(By::Device, &[0]), (By::Vcpu, &[0])], begin);
}

#[test]
fn a_log_that_begins_again() {
    no_write_is_lost(&[(By::Device, &[0, 1])], begin_again);
}
