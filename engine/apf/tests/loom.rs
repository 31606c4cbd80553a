//! The completion queue against cancel, reset, a panicking worker, and sleep, in every
//! interleaving.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=3 \
//!     CARGO_TARGET_DIR=target/loom cargo test -p lacuna-apf --test loom --release
//! ```
#![cfg(loom)]

#[path = "it/common/mod.rs"]
mod common;

use common::{AS_INT, ENABLED, Event, Fixture, WAKE_ALL};
use lacuna_apf::x86::Features;
use lacuna_apf::{Completion, NotPresent};
use loom::sync::{Arc, Notify};
use loom::thread;
use std::panic;

const INTERRUPT: u64 = ENABLED | AS_INT;

fn complete(completion: Completion) -> thread::JoinHandle<()> {
    thread::spawn(move || completion.complete())
}

#[test]
fn a_completion_against_cancel_is_delivered_before_or_never() {
    loom::model(|| {
        let mut fixture = Fixture::new(INTERRUPT);
        let (token, completion) = fixture.inject(5);
        let worker = complete(completion);
        let before = fixture.settle();
        assert!(before.is_empty() || before == [token]);
        fixture.queue.cancel();
        assert_eq!(fixture.settle(), [WAKE_ALL]);
        worker.join().unwrap();
        assert!(!fixture.queue.has_arrivals());
        assert_eq!(fixture.poll(), 0);
    });
}

#[test]
fn a_completion_against_reset_says_nothing_about_the_same_page_afterwards() {
    loom::model(|| {
        let mut fixture = Fixture::new(INTERRUPT);
        let (_, before) = fixture.inject(5);
        let worker = complete(before);
        fixture.queue.reset();
        fixture.enable(INTERRUPT);
        assert_eq!(fixture.settle(), [WAKE_ALL]);
        let (token, now) = fixture.inject(5);
        assert_eq!(fixture.settle(), []);
        worker.join().unwrap();
        assert_eq!(fixture.settle(), []);
        now.complete();
        assert_eq!(fixture.settle(), [token]);
    });
}

#[test]
fn completions_against_the_end_of_the_queue() {
    loom::model(|| {
        let mut fixture = Fixture::new(INTERRUPT);
        let workers = [5, 6].map(|number| complete(fixture.inject(number).1));
        drop(fixture);
        workers
            .into_iter()
            .for_each(|worker| worker.join().unwrap());
    });
}

/// The vCPU's thread, which sleeps if it has nothing to do.
struct Sleeper {
    fixture: Fixture,
    bell: Arc<Notify>,
}

impl Sleeper {
    fn new() -> Self {
        let bell = Arc::new(Notify::new());
        let kick = {
            let bell = Arc::clone(&bell);
            move || bell.notify()
        };
        let mut fixture = Fixture::with_kick(Features::all(), kick);
        fixture.enable(INTERRUPT);
        assert_eq!(fixture.settle(), [WAKE_ALL]);
        fixture.guest.take_events();
        Self { fixture, bell }
    }

    /// Sleeps and checks only [`lacuna_apf::Queue::has_arrivals`]. A lost kick is a deadlock, which
    /// loom reports.
    fn wait_for(&mut self, count: usize) -> Vec<u32> {
        let mut ready = Vec::new();
        while ready.len() < count {
            if self.fixture.queue.has_arrivals() {
                self.fixture
                    .queue
                    .poll(common::NOW, &mut self.fixture.guest);
                ready.extend(self.fixture.guest.take_interrupt());
            } else {
                self.bell.wait();
            }
        }
        ready
    }
}

#[test]
fn a_completion_dropped_by_a_panicking_worker_wakes_the_sleeper() {
    loom::model(|| {
        let mut vcpu = Sleeper::new();
        let (token, completion) = vcpu.fixture.inject(5);
        let worker = thread::spawn(move || {
            let died = panic::catch_unwind(panic::AssertUnwindSafe(move || {
                let _claim = completion;
                panic::resume_unwind(Box::new("the worker dies"));
            }));
            assert!(died.is_err());
        });
        assert_eq!(vcpu.wait_for(1), [token]);
        worker.join().unwrap();
    });
}

#[test]
fn two_completers_and_no_lost_kick() {
    loom::model(|| {
        let mut vcpu = Sleeper::new();
        let (one, first) = vcpu.fixture.inject(5);
        let (two, second) = vcpu.fixture.inject(6);
        let workers = [first, second].map(complete);
        let mut ready = vcpu.wait_for(2);
        ready.sort_unstable();
        assert_eq!(ready, [one, two]);
        workers
            .into_iter()
            .for_each(|worker| worker.join().unwrap());
        assert_eq!(vcpu.fixture.poll(), 0);
    });
}

/// The guest reads no token, so nothing can be dequeued. The vCPU has halted for one of two pages,
/// and that page may arrive second.
#[test]
fn a_halted_vcpu_is_kicked_for_its_page_behind_another() {
    loom::model(|| {
        let mut vcpu = Sleeper::new();
        let (_, other) = vcpu.fixture.inject(6);
        vcpu.fixture.guest.state.user = false;
        let NotPresent::Halt(Some(own)) = vcpu.fixture.fault(5) else {
            panic!("CPL 0 halts");
        };
        vcpu.fixture.guest.words[1] = 9;
        let workers = [other, own].map(complete);
        while vcpu.fixture.queue.halted() {
            let dequeued = vcpu
                .fixture
                .queue
                .poll(common::NOW, &mut vcpu.fixture.guest);
            assert_eq!(dequeued, 0);
            if vcpu.fixture.queue.halted() {
                vcpu.bell.wait();
            }
        }
        workers
            .into_iter()
            .for_each(|worker| worker.join().unwrap());
        assert!(!vcpu.fixture.guest.take_events().contains(&Event::Resume));
    });
}
