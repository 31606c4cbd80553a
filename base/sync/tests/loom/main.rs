//! The protocols of `RangeLocks` and `Qsbr`, model-checked.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=3 \
//!     CARGO_TARGET_DIR=target/loom cargo test -p lacuna-sync --test loom --release
//! ```
//! Every model checks one rule: *a frame is reused only when no thread can access it any more*. The
//! frame is a loom cell that both sides access as plain memory. Reuse is an exclusive access: loom
//! fails if, in any interleaving and any reordering that the memory model allows, an access is not
//! ordered before it or can follow it.
//!
//! [`tlb_filter`] does the same for shoot-downs that address only some vCPUs.
#![cfg(loom)]

mod tlb_filter;

use lacuna_sync::shim::thread::{self, yield_now};
use lacuna_sync::shim::{Arc, AtomicBool, Ordering};
use lacuna_sync::{GracePeriod, Qsbr, RangeLocks, VcpuSlot};
use loom::cell::UnsafeCell;

/// One page of guest memory, its mapping and its state.
struct Fixture {
    range_locks: RangeLocks,
    qsbr: Qsbr,
    /// The answer of the host: the page has its frame.
    resident: AtomicBool,
    /// The stage-2 entry: present or not.
    mapped: AtomicBool,
    frame: UnsafeCell<()>,
}

// SAFETY: `frame` is accessed only through loom's tracked accesses, which fail the test on the very
// race that `Sync` would otherwise have to rule out.
unsafe impl Sync for Fixture {}
// SAFETY: as above.
unsafe impl Send for Fixture {}

const BLOCK: u64 = 0;

impl Fixture {
    fn new(vcpus: usize) -> Arc<Self> {
        Arc::new(Self {
            range_locks: RangeLocks::new(1),
            qsbr: Qsbr::new(vcpus),
            resident: AtomicBool::new(true),
            mapped: AtomicBool::new(false),
            frame: UnsafeCell::new(()),
        })
    }

    /// A guest access through a translation.
    fn touch(&self) {
        self.frame.with(|_| ());
    }

    /// The frame is given to another page.
    fn reuse(&self) {
        self.frame.with_mut(|_| ());
    }

    /// One attempt of a stage-2 fault. The order of its first two lines is the protocol.
    fn fault(&self) {
        let seq = self.range_locks.invalidate_seq(BLOCK);
        if !self.resident.load(Ordering::Relaxed) {
            return;
        }
        let guard = self.range_locks.lock(BLOCK);
        if !guard.invalidate_retry(seq) {
            self.mapped.store(true, Ordering::Release);
        }
    }

    fn begin_and_unmap(&self) {
        let mut guard = self.range_locks.lock(BLOCK);
        guard.invalidate_begin();
        self.mapped.swap(false, Ordering::AcqRel);
    }

    fn shoot_down(&self) {
        let grace = self.qsbr.request();
        while !self.qsbr.passed(grace) {
            yield_now();
        }
    }

    /// Takes the frame away from the guest and reuses it.
    fn invalidate(&self) {
        self.begin_and_unmap();
        self.resident.store(false, Ordering::Relaxed);
        self.shoot_down();
        self.range_locks.lock(BLOCK).invalidate_end();
        self.reuse();
    }
}

/// A software vCPU with a TLB of one entry.
struct Vcpu<'w> {
    fixture: &'w Fixture,
    index: usize,
    tlb: bool,
    flushed_at: GracePeriod,
}

impl<'w> Vcpu<'w> {
    fn new(fixture: &'w Fixture, index: usize) -> Self {
        Self {
            fixture,
            index,
            tlb: false,
            flushed_at: GracePeriod::default(),
        }
    }

    /// Goes online, or passes a quiescent point: both do the same.
    fn online(&mut self) {
        let grace = self.fixture.qsbr.online(self.index);
        if self.flushed_at < grace {
            self.tlb = false;
            self.flushed_at = grace;
        }
    }

    /// The point between two basic blocks.
    fn boundary(&mut self) {
        let slot: &VcpuSlot = self.fixture.qsbr.vcpu(self.index);
        if slot.has_request() {
            slot.take();
            self.online();
        }
    }

    /// Accesses the page by the TLB, else by a walk. Does nothing if the page is not mapped.
    fn access(&mut self) {
        self.tlb = self.tlb || self.fixture.mapped.load(Ordering::Acquire);
        if self.tlb {
            self.fixture.touch();
        }
    }

    fn offline(&self) {
        self.fixture.qsbr.offline(self.index);
    }
}

#[test]
fn a_fault_and_an_invalidation_leave_no_way_to_the_frame() {
    loom::model(|| {
        let fixture = Fixture::new(1);
        let vcpu = {
            let fixture = Arc::clone(&fixture);
            thread::spawn(move || {
                let mut vcpu = Vcpu::new(&fixture, 0);
                fixture.fault();
                vcpu.online();
                vcpu.access();
                vcpu.offline();
            })
        };
        fixture.invalidate();
        vcpu.join().expect("vCPU");
        assert!(
            !fixture.mapped.load(Ordering::Relaxed),
            "a freed frame is still mapped"
        );
    });
}

#[test]
fn a_fault_while_online_is_shot_down_too() {
    // The soft backend faults in the middle of an access, without going offline.
    loom::model(|| {
        let fixture = Fixture::new(1);
        let vcpu = {
            let fixture = Arc::clone(&fixture);
            thread::spawn(move || {
                let mut vcpu = Vcpu::new(&fixture, 0);
                vcpu.online();
                fixture.fault();
                vcpu.access();
                vcpu.boundary();
                vcpu.access();
                vcpu.offline();
            })
        };
        fixture.invalidate();
        vcpu.join().expect("vCPU");
        assert!(
            !fixture.mapped.load(Ordering::Relaxed),
            "a freed frame is still mapped"
        );
    });
}

#[test]
fn the_end_of_one_invalidation_opens_no_door_into_another() {
    loom::model(|| {
        let fixture = Fixture::new(0);
        let fault = {
            let fixture = Arc::clone(&fixture);
            thread::spawn(move || fixture.fault())
        };
        // A neighbour under the same range lock is invalidated too, and ends first.
        fixture.range_locks.lock(BLOCK).invalidate_begin();
        fixture.begin_and_unmap();
        fixture.range_locks.lock(BLOCK).invalidate_end();
        fixture.resident.store(false, Ordering::Relaxed);
        fixture.range_locks.lock(BLOCK).invalidate_end();
        fault.join().expect("fault");
        assert!(
            !fixture.mapped.load(Ordering::Relaxed),
            "a freed frame is still mapped"
        );
    });
}

#[test]
fn no_access_goes_through_a_stale_tlb_after_the_shoot_down() {
    loom::model(|| {
        let fixture = Fixture::new(1);
        fixture.mapped.store(true, Ordering::Release);
        let vcpu = {
            let fixture = Arc::clone(&fixture);
            thread::spawn(move || {
                let mut vcpu = Vcpu::new(&fixture, 0);
                vcpu.online();
                vcpu.access();
                vcpu.boundary();
                vcpu.access();
                vcpu.offline();
                vcpu.online();
                vcpu.access();
                vcpu.offline();
            })
        };
        fixture.mapped.swap(false, Ordering::AcqRel);
        fixture.shoot_down();
        fixture.reuse();
        vcpu.join().expect("vCPU");
    });
}

#[test]
fn a_poked_vcpu_lets_the_remover_go_on() {
    // The vCPU never goes offline by itself, so only the request can end the wait.
    loom::model(|| {
        let fixture = Fixture::new(1);
        fixture.mapped.store(true, Ordering::Release);
        let vcpu = {
            let fixture = Arc::clone(&fixture);
            thread::spawn(move || {
                let mut vcpu = Vcpu::new(&fixture, 0);
                vcpu.online();
                vcpu.access();
                while vcpu.flushed_at == GracePeriod::default() {
                    yield_now();
                    vcpu.boundary();
                }
                vcpu.access();
            })
        };
        fixture.mapped.swap(false, Ordering::AcqRel);
        fixture.shoot_down();
        fixture.reuse();
        vcpu.join().expect("vCPU");
    });
}

/// A remover runs beside a thread that makes another request and does not wait.
fn a_remover_beside(request: fn(&Qsbr)) {
    loom::model(move || {
        let fixture = Fixture::new(1);
        fixture.mapped.store(true, Ordering::Release);
        let vcpu = {
            let fixture = Arc::clone(&fixture);
            thread::spawn(move || {
                let mut vcpu = Vcpu::new(&fixture, 0);
                vcpu.online();
                vcpu.access();
                vcpu.boundary();
                vcpu.access();
                vcpu.offline();
            })
        };
        let other = {
            let fixture = Arc::clone(&fixture);
            thread::spawn(move || {
                request(&fixture.qsbr);
            })
        };
        fixture.mapped.swap(false, Ordering::AcqRel);
        fixture.shoot_down();
        fixture.reuse();
        other.join().expect("the other");
        vcpu.join().expect("vCPU");
    });
}

#[test]
fn a_request_that_nobody_waits_for_disturbs_no_remover() {
    // An aging pass makes a request without a wait.
    a_remover_beside(|qsbr| {
        let _ = qsbr.request();
    });
}

#[test]
fn a_pass_keeps_no_tlb_from_its_flush() {
    a_remover_beside(|qsbr| drop(qsbr.kick_all()));
}

#[test]
fn after_a_pass_nobody_does_what_was_forbidden_before() {
    // The vCPU reads `mapped`, a rule, once each time it is online. `frame` is its action under
    // that rule.
    loom::model(|| {
        let fixture = Fixture::new(1);
        fixture.mapped.store(true, Ordering::Release);
        let vcpu = {
            let fixture = Arc::clone(&fixture);
            thread::spawn(move || {
                let mut vcpu = Vcpu::new(&fixture, 0);
                for _ in 0..2 {
                    vcpu.online();
                    if fixture.mapped.load(Ordering::Relaxed) {
                        fixture.touch();
                    }
                    vcpu.offline();
                }
            })
        };
        fixture.mapped.store(false, Ordering::Relaxed);
        let kick = fixture.qsbr.kick_all();
        while !fixture.qsbr.all_left(&kick) {
            yield_now();
        }
        fixture.reuse();
        vcpu.join().expect("vCPU");
    });
}

#[test]
fn a_range_lock_excludes() {
    loom::model(|| {
        let fixture = Fixture::new(0);
        let other = {
            let fixture = Arc::clone(&fixture);
            thread::spawn(move || {
                let _guard = fixture.range_locks.lock(BLOCK);
                fixture.reuse();
            })
        };
        {
            let _guard = fixture.range_locks.lock(BLOCK);
            fixture.reuse();
        }
        other.join().expect("other");
    });
}
