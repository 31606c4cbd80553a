//! D, log and harvest, every interleaving of the real code: no write is lost.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=3 \
//!     CARGO_TARGET_DIR=target/loom cargo test -p lacuna-stage2 --test loom_dirty --release
//! ```
//! A vCPU writes a page twice, in two stays online; in the second one it may use its TLB. At the
//! end of each stay it flushes its log into a bit. A monitor harvests once: kick, take the bit,
//! rearm, flush, copy. Then either its copy is the guest's last value, or the bit is set.
#![cfg(loom)]

use lacuna_addr::{Access, Gfn, GfnRange, Pfn};
use lacuna_stage2::{Arena, Flush, Leaf, PmlLog, Stage2, Walk, Write};
use lacuna_sync::shim::{Arc, AtomicU64, Ordering, thread};
use lacuna_sync::{GracePeriod, Qsbr};

struct Fixture {
    stage2: Stage2,
    qsbr: Qsbr,
    /// One word of the dirty bitmap.
    marked: AtomicU64,
    /// The page.
    data: AtomicU64,
}

/// A vCPU with a TLB entry for one page.
struct Vcpu<'w> {
    fixture: &'w Fixture,
    log: PmlLog,
    tlb_writable: bool,
    flushed: GracePeriod,
}

/// How a write is detected.
#[derive(Clone, Copy, PartialEq)]
enum By {
    Log,
    Fault,
}

fn page() -> Gfn {
    Gfn::new(5).expect("a frame")
}

impl Fixture {
    fn new(write: Write) -> Self {
        let stage2 = Stage2::new(Arena::new(4).expect("a small arena")).expect("a root");
        let leaf = Leaf {
            write,
            ..Leaf::clean(Pfn::new(1))
        };
        let mapped = stage2.fault_cursor(page()).map(page(), leaf);
        assert!(mapped.is_ok());
        Self {
            stage2,
            qsbr: Qsbr::new(1),
            marked: AtomicU64::new(0),
            data: AtomicU64::new(0),
        }
    }

    fn rearm(&self, by: By) -> Flush<'_> {
        let range = GfnRange::page(page());
        let mut cursor = self.stage2.fault_cursor(page());
        match by {
            By::Log => cursor.clear_dirty([range], |_| {}),
            By::Fault => cursor.protect([range], |_| {}),
        }
    }

    /// The copy, if the page was marked.
    fn harvest(&self, by: By) -> Option<u64> {
        if by == By::Log {
            let kick = self.qsbr.kick_all();
            while !self.qsbr.all_left(&kick) {
                thread::yield_now();
            }
        }
        if self.marked.swap(0, Ordering::Acquire) == 0 {
            return None;
        }
        self.rearm(by).finish(&self.qsbr);
        Some(self.data.load(Ordering::Relaxed))
    }
}

impl Vcpu<'_> {
    /// Goes online, writes `value`, and goes offline.
    fn write(&mut self, value: u64) {
        let fixture = self.fixture;
        let grace = fixture.qsbr.online(0);
        if grace > self.flushed {
            self.flushed = grace;
            self.tlb_writable = false;
            fixture.qsbr.vcpu(0).flushed();
        }
        if !self.tlb_writable {
            fixture.qsbr.vcpu(0).note(0);
            let walk = fixture
                .stage2
                .walk_logged(page(), Access::Write, &mut self.log);
            if let Walk::Violation(_) = walk.expect("room") {
                fixture
                    .stage2
                    .fast_page_fault(page())
                    .expect("a 4 KiB leaf");
                fixture.marked.fetch_or(1, Ordering::Release);
            }
            self.tlb_writable = true;
        }
        fixture.data.store(value, Ordering::Relaxed);
        self.log.take().iter().for_each(|_| {
            fixture.marked.fetch_or(1, Ordering::Release);
        });
        fixture.qsbr.offline(0);
    }
}

fn no_write_is_lost(write: Write, by: By) {
    let mut model = loom::model::Builder::new();
    model.max_branches = 100_000;
    model.expect_explicit_explore = true;
    model.check(move || {
        let fixture = Arc::new(Fixture::new(write));
        loom::explore();
        let vcpu = {
            let fixture = Arc::clone(&fixture);
            thread::spawn(move || {
                let mut vcpu = Vcpu {
                    fixture: &fixture,
                    log: PmlLog::new(),
                    tlb_writable: false,
                    flushed: GracePeriod::default(),
                };
                vcpu.write(1);
                vcpu.write(2);
            })
        };
        let copy = fixture.harvest(by);
        vcpu.join().expect("vCPU");
        loom::stop_exploring();
        let still_marked = fixture.marked.load(Ordering::Relaxed) == 1;
        assert!(
            still_marked || copy == Some(2),
            "a write was lost: {copy:?}"
        );
        fixture.stage2.verify();
    });
}

#[test]
fn by_the_log() {
    no_write_is_lost(Write::Allowed, By::Log);
}

#[test]
fn by_faults_repaired_without_a_lock() {
    no_write_is_lost(Write::OnFault, By::Fault);
}

/// The detection was just switched: the leaf is protected, and rearming clears D.
#[test]
fn by_the_log_after_faults() {
    no_write_is_lost(Write::OnFault, By::Log);
}
