//! The protocols of `RangeLocks` and `Qsbr`, model-checked.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=3 \
//!     CARGO_TARGET_DIR=target/loom cargo test -p lacuna-sync --test loom --release
//! ```
//! The goal is always the same: *a frame is reused only when no thread can access it any more*. The
//! frame is a loom cell that both sides access as plain memory. Reuse is an exclusive access: loom
//! fails if, in any interleaving and any reordering that the memory model allows, an access is not
//! ordered before it or can come after it.
//!
//! [`tlb_filter`] does the same for shoot-downs that address only some vCPUs.
#![cfg(loom)]

mod tlb_filter;

use lacuna_sync::shim::thread::{self, yield_now};
use lacuna_sync::shim::{Arc, AtomicBool, Ordering};
use lacuna_sync::{GracePeriod, Qsbr, RangeLocks, VcpuSlot};
use loom::cell::UnsafeCell;

/// One page of guest memory, its mapping and its state.
struct World {
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
unsafe impl Sync for World {}
// SAFETY: as above.
unsafe impl Send for World {}

const BLOCK: u64 = 0;

impl World {
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
    world: &'w World,
    index: usize,
    tlb: bool,
    flushed_at: GracePeriod,
}

impl<'w> Vcpu<'w> {
    fn new(world: &'w World, index: usize) -> Self {
        Self {
            world,
            index,
            tlb: false,
            flushed_at: GracePeriod::default(),
        }
    }

    /// Comes online, or passes a quiescent point: both do the same.
    fn online(&mut self) {
        let grace = self.world.qsbr.online(self.index);
        if self.flushed_at < grace {
            self.tlb = false;
            self.flushed_at = grace;
        }
    }

    /// The point between two basic blocks.
    fn boundary(&mut self) {
        let slot: &VcpuSlot = self.world.qsbr.vcpu(self.index);
        if slot.has_request() {
            slot.take();
            self.online();
        }
    }

    /// One access: by the TLB, else by a walk; nothing if the page is not mapped.
    fn access(&mut self) {
        self.tlb = self.tlb || self.world.mapped.load(Ordering::Acquire);
        if self.tlb {
            self.world.touch();
        }
    }

    fn offline(&self) {
        self.world.qsbr.offline(self.index);
    }
}

#[test]
fn a_fault_and_an_invalidation_leave_no_way_to_the_frame() {
    loom::model(|| {
        let world = World::new(1);
        let vcpu = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                let mut vcpu = Vcpu::new(&world, 0);
                world.fault();
                vcpu.online();
                vcpu.access();
                vcpu.offline();
            })
        };
        world.invalidate();
        vcpu.join().expect("vCPU");
        assert!(
            !world.mapped.load(Ordering::Relaxed),
            "a freed frame is still mapped"
        );
    });
}

#[test]
fn a_fault_while_online_is_shot_down_too() {
    // The soft backend faults in the middle of an access, without going offline.
    loom::model(|| {
        let world = World::new(1);
        let vcpu = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                let mut vcpu = Vcpu::new(&world, 0);
                vcpu.online();
                world.fault();
                vcpu.access();
                vcpu.boundary();
                vcpu.access();
                vcpu.offline();
            })
        };
        world.invalidate();
        vcpu.join().expect("vCPU");
        assert!(
            !world.mapped.load(Ordering::Relaxed),
            "a freed frame is still mapped"
        );
    });
}

#[test]
fn the_end_of_one_invalidation_opens_no_door_into_another() {
    loom::model(|| {
        let world = World::new(0);
        let fault = {
            let world = Arc::clone(&world);
            thread::spawn(move || world.fault())
        };
        // A neighbour under the same range lock is invalidated too, and ends first.
        world.range_locks.lock(BLOCK).invalidate_begin();
        world.begin_and_unmap();
        world.range_locks.lock(BLOCK).invalidate_end();
        world.resident.store(false, Ordering::Relaxed);
        world.range_locks.lock(BLOCK).invalidate_end();
        fault.join().expect("fault");
        assert!(
            !world.mapped.load(Ordering::Relaxed),
            "a freed frame is still mapped"
        );
    });
}

#[test]
fn no_access_goes_through_a_stale_tlb_after_the_shoot_down() {
    loom::model(|| {
        let world = World::new(1);
        world.mapped.store(true, Ordering::Release);
        let vcpu = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                let mut vcpu = Vcpu::new(&world, 0);
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
        world.mapped.swap(false, Ordering::AcqRel);
        world.shoot_down();
        world.reuse();
        vcpu.join().expect("vCPU");
    });
}

#[test]
fn a_poked_vcpu_lets_the_remover_go_on() {
    // The vCPU never goes offline by itself: only the request can end the wait.
    loom::model(|| {
        let world = World::new(1);
        world.mapped.store(true, Ordering::Release);
        let vcpu = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                let mut vcpu = Vcpu::new(&world, 0);
                vcpu.online();
                vcpu.access();
                while vcpu.flushed_at == GracePeriod::default() {
                    yield_now();
                    vcpu.boundary();
                }
                vcpu.access();
            })
        };
        world.mapped.swap(false, Ordering::AcqRel);
        world.shoot_down();
        world.reuse();
        vcpu.join().expect("vCPU");
    });
}

/// A remover beside a thread that makes another request and does not wait.
fn a_remover_beside(request: fn(&Qsbr)) {
    loom::model(move || {
        let world = World::new(1);
        world.mapped.store(true, Ordering::Release);
        let vcpu = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                let mut vcpu = Vcpu::new(&world, 0);
                vcpu.online();
                vcpu.access();
                vcpu.boundary();
                vcpu.access();
                vcpu.offline();
            })
        };
        let other = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                request(&world.qsbr);
            })
        };
        world.mapped.swap(false, Ordering::AcqRel);
        world.shoot_down();
        world.reuse();
        other.join().expect("the other");
        vcpu.join().expect("vCPU");
    });
}

#[test]
fn a_request_that_nobody_waits_for_disturbs_no_remover() {
    // An aging pass makes such a request.
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
    // `mapped` is a rule that the vCPU reads once each time it is online, `frame` what it does
    // then.
    loom::model(|| {
        let world = World::new(1);
        world.mapped.store(true, Ordering::Release);
        let vcpu = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                let mut vcpu = Vcpu::new(&world, 0);
                for _ in 0..2 {
                    vcpu.online();
                    if world.mapped.load(Ordering::Relaxed) {
                        world.touch();
                    }
                    vcpu.offline();
                }
            })
        };
        world.mapped.store(false, Ordering::Relaxed);
        let kick = world.qsbr.kick_all();
        while !world.qsbr.all_left(&kick) {
            yield_now();
        }
        world.reuse();
        vcpu.join().expect("vCPU");
    });
}

#[test]
fn a_range_lock_excludes() {
    loom::model(|| {
        let world = World::new(0);
        let other = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                let _guard = world.range_locks.lock(BLOCK);
                world.reuse();
            })
        };
        {
            let _guard = world.range_locks.lock(BLOCK);
            world.reuse();
        }
        other.join().expect("other");
    });
}
