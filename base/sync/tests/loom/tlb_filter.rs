//! Shoot-downs that address only the vCPUs that may hold the block.
//!
//! There are two pages in two blocks, each with its frame. A vCPU notes a block before it walks,
//! and empties its filter together with its TLB.

use lacuna_sync::shim::thread::{self, yield_now};
use lacuna_sync::shim::{Arc, AtomicBool, Ordering};
use lacuna_sync::{Blocks, GracePeriod, Qsbr, VcpuSlot};
use loom::cell::UnsafeCell;

struct Fixture {
    qsbr: Qsbr,
    mapped: [AtomicBool; 2],
    frames: [UnsafeCell<()>; 2],
}

// SAFETY: as in the parent: loom fails the test on the race that `Sync` would rule out.
unsafe impl Sync for Fixture {}
// SAFETY: as above.
unsafe impl Send for Fixture {}

impl Fixture {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            qsbr: Qsbr::new(1),
            mapped: [AtomicBool::new(true), AtomicBool::new(true)],
            frames: [UnsafeCell::new(()), UnsafeCell::new(())],
        })
    }

    fn unmap_and_request(&self, block: usize) -> GracePeriod {
        self.mapped[block].swap(false, Ordering::AcqRel);
        self.qsbr.request_for(&Blocks::one(block as u64))
    }

    fn wait_and_reuse(&self, block: usize, grace: GracePeriod) {
        while !self.qsbr.passed(grace) {
            yield_now();
        }
        self.frames[block].with_mut(|_| ());
    }

    /// Takes the frame of `block` away and reuses it.
    fn invalidate(&self, block: usize) {
        self.wait_and_reuse(block, self.unmap_and_request(block));
    }
}

struct Vcpu {
    fixture: Arc<Fixture>,
    tlb: [bool; 2],
    flushed_at: GracePeriod,
}

impl Vcpu {
    /// An online vCPU with an empty TLB. Its filter is in use from here on.
    fn new(fixture: &Arc<Fixture>) -> Self {
        let mut vcpu = Self {
            fixture: Arc::clone(fixture),
            tlb: [false; 2],
            flushed_at: GracePeriod::default(),
        };
        vcpu.online();
        vcpu.slot().flushed();
        vcpu
    }

    fn slot(&self) -> &VcpuSlot {
        self.fixture.qsbr.vcpu(0)
    }

    fn online(&mut self) {
        let grace = self.fixture.qsbr.online(0);
        if self.flushed_at < grace {
            self.flush();
            self.flushed_at = grace;
        }
    }

    fn flush(&mut self) {
        self.tlb = [false; 2];
        self.slot().flushed();
    }

    fn boundary(&mut self) {
        if self.slot().has_request() {
            self.slot().take();
            self.online();
        }
    }

    fn access(&mut self, block: usize) {
        if !self.tlb[block] {
            self.slot().note(block as u64);
            self.tlb[block] = self.fixture.mapped[block].load(Ordering::Acquire);
        }
        if self.tlb[block] {
            self.fixture.frames[block].with(|_| ());
        }
    }

    fn offline(&self) {
        self.fixture.qsbr.offline(0);
    }
}

fn run(
    vcpu: impl Fn(&mut Vcpu) + Sync + Send + Copy + 'static,
    remove: impl Fn(&Fixture) + Sync + Send + 'static,
) {
    loom::model(move || {
        let fixture = Fixture::new();
        let thread = {
            let fixture = Arc::clone(&fixture);
            thread::spawn(move || {
                let mut new = Vcpu::new(&fixture);
                vcpu(&mut new);
                new.offline();
            })
        };
        remove(&fixture);
        thread.join().expect("vCPU");
    });
}

#[test]
fn a_walk_is_seen_or_sees_that_the_leaf_is_gone() {
    run(
        |vcpu| {
            vcpu.access(0);
            vcpu.boundary();
            vcpu.access(0);
        },
        |fixture| fixture.invalidate(0),
    );
}

#[test]
fn a_filter_that_is_emptied_forgets_nothing_that_is_held() {
    // The vCPU flushes by itself, and then accesses the same block again. The remover may see the
    // bit before, between, or after.
    run(
        |vcpu| {
            vcpu.access(0);
            vcpu.flush();
            vcpu.access(0);
        },
        |fixture| fixture.invalidate(0),
    );
}

#[test]
fn a_vcpu_that_went_offline_with_its_tlb_comes_back_flushed() {
    run(
        |vcpu| {
            vcpu.access(0);
            vcpu.offline();
            vcpu.online();
            vcpu.access(0);
        },
        |fixture| fixture.invalidate(0),
    );
}

#[test]
fn shoot_downs_of_two_blocks_do_not_cover_for_each_other() {
    loom::model(|| {
        let fixture = Fixture::new();
        let vcpu = {
            let fixture = Arc::clone(&fixture);
            thread::spawn(move || {
                let mut vcpu = Vcpu::new(&fixture);
                vcpu.access(0);
                vcpu.boundary();
                vcpu.access(1);
                vcpu.offline();
            })
        };
        let other = {
            let fixture = Arc::clone(&fixture);
            thread::spawn(move || fixture.unmap_and_request(1))
        };
        fixture.invalidate(0);
        let grace = other.join().expect("other remover");
        fixture.wait_and_reuse(1, grace);
        vcpu.join().expect("vCPU");
    });
}

#[test]
fn a_noted_vcpu_lets_the_remover_go_on() {
    // Only the request can end the wait: the vCPU stays online until it has flushed.
    run(
        |vcpu| {
            vcpu.access(0);
            while vcpu.tlb[0] && vcpu.flushed_at == GracePeriod::default() {
                yield_now();
                vcpu.boundary();
            }
            vcpu.access(0);
        },
        |fixture| fixture.invalidate(0),
    );
}
