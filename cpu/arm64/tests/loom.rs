//! The broadcast of TLB invalidations in every interleaving: after DSB, no vCPU uses an invalidated
//! translation.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=3 \
//!     CARGO_TARGET_DIR=target/loom cargo test -p lacuna-arm64 --test loom --release
//! ```
#![cfg(loom)]

use lacuna_arm64::shootdown::{Invalidation, Shootdown};
use lacuna_cpu::testing::Wakes;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;

fn machine(vcpus: usize) -> (Arc<Shootdown>, std::sync::Arc<Wakes>) {
    let wakes = std::sync::Arc::new(Wakes::default());
    (Arc::new(Shootdown::new(vcpus, wakes.clone())), wakes)
}

/// One run of a vCPU: it uses its translation unless it got a request to drop it. `reused`: the
/// page has a new use.
fn run(all: &Shootdown, index: usize, reused: &AtomicBool) -> bool {
    let valid = all.enter(index).is_empty();
    if valid {
        assert!(
            !reused.load(Ordering::Relaxed),
            "a stale translation is used"
        );
    }
    all.leave(index);
    valid
}

#[test]
fn after_dsb_no_vcpu_uses_the_translation() {
    loom::model(|| {
        let (all, _) = machine(2);
        let reused = Arc::new(AtomicBool::new(false));
        let other = {
            let (all, reused) = (Arc::clone(&all), Arc::clone(&reused));
            thread::spawn(move || run(&all, 1, &reused) && run(&all, 1, &reused))
        };
        all.send(0, Invalidation::Address(0x1000));
        if all.is_done(0) {
            reused.store(true, Ordering::Relaxed);
        }
        if other.join().unwrap() {
            assert_eq!(
                all.enter(1),
                [Invalidation::Address(0x1000)],
                "nothing is lost"
            );
        }
    });
}

#[test]
fn a_vcpu_that_runs_without_the_invalidation_is_woken() {
    loom::model(|| {
        let (all, wakes) = machine(2);
        let other = {
            let all = Arc::clone(&all);
            thread::spawn(move || all.enter(1).is_empty())
        };
        all.send(0, Invalidation::All);
        let missed = other.join().unwrap();
        assert!(!missed || wakes.take() == [1]);
        assert_eq!(all.is_done(0), !missed);
    });
}

#[test]
fn two_that_invalidate_do_not_wait_for_each_other() {
    loom::model(|| {
        let (all, _) = machine(2);
        let other = {
            let all = Arc::clone(&all);
            thread::spawn(move || invalidate(&all, 1))
        };
        invalidate(&all, 0);
        other.join().unwrap();
        assert!(all.is_done(0) && all.is_done(1));
    });
}

/// TLBI and the first attempt of DSB. A waiting vCPU leaves its run, so the other one continues.
fn invalidate(all: &Shootdown, index: usize) {
    all.enter(index);
    all.send(index, Invalidation::All);
    let _ = all.is_done(index);
    all.leave(index);
}
