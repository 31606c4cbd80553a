//! What ends a token early: disable, reset, cancel. No earlier event is delivered afterwards.

mod common;

use common::{AREA, AS_INT, Answer, ENABLED, WAKE_ALL, World, answer};
use lacuna_apf::NotPresent;
use lacuna_apf::x86::Msr;

const INTERRUPT: u64 = ENABLED | AS_INT;

/// The ways to forget all tokens; each leaves the queue disabled.
const ENDS: [fn(&mut World); 3] = [
    |world| assert!(world.write(Msr::Enable, 0)),
    |world| assert!(world.write(Msr::Enable, AREA | AS_INT)),
    |world| world.queue.reset(),
];

#[test]
fn nothing_outstanding_is_delivered_after_the_end() {
    for en in [ENABLED, INTERRUPT] {
        for end in ENDS {
            let mut world = World::new(en);
            let (_, arrived) = world.inject(5);
            let (_, outstanding) = world.inject(6);
            arrived.complete();
            world.guest.told();
            end(&mut world);
            assert!(!world.queue.has_arrivals());
            outstanding.complete();
            assert!(!world.queue.has_arrivals());
            assert_eq!(world.poll(), 0);
            assert_eq!(world.guest.told(), []);
            assert_eq!(world.queue.stats().cancelled, 2);
        }
    }
}

#[test]
fn enabling_again_wakes_all_and_only_that() {
    for end in ENDS {
        let mut world = World::new(INTERRUPT);
        let (_, early) = world.inject(5);
        let (_, late) = world.inject(6);
        end(&mut world);
        early.complete();
        world.enable(INTERRUPT);
        late.complete();
        assert_eq!(world.settle(), [WAKE_ALL]);
    }
}

#[test]
fn a_completion_from_before_a_disable_does_not_affect_a_new_fault_on_the_page() {
    for end in ENDS {
        let mut world = World::new(INTERRUPT);
        let (_, before) = world.inject(5);
        end(&mut world);
        world.enable(INTERRUPT);
        assert_eq!(world.settle(), [WAKE_ALL]);
        let (token, now) = world.inject(5);
        before.complete();
        assert_eq!(world.settle(), []);
        now.complete();
        assert_eq!(world.settle(), [token]);
    }
}

#[test]
fn the_end_ends_the_halt_and_forgets_ready_tokens() {
    for end in ENDS {
        let mut world = World::new(INTERRUPT);
        let (_, completion) = world.inject(5);
        completion.complete();
        world.settle();
        world.guest.state.user = false;
        assert_eq!(answer(&world.fault(6)), Answer::HaltAndStart);
        end(&mut world);
        assert!(!world.queue.halted());
        world.queue.verify();
        world.guest.state.user = true;
        world.enable(INTERRUPT);
        assert_eq!(answer(&world.fault(5)), Answer::Injected);
    }
}

#[test]
fn reset_zeroes_the_registers_and_keeps_features_tokens_and_statistics() {
    let mut world = World::new(INTERRUPT);
    let (before, _claim) = world.inject(5);
    world.queue.reset();
    assert_eq!(world.queue.read_msr(Msr::Enable), Some(0));
    assert_eq!(world.queue.read_msr(Msr::Vector), Some(0));
    assert_eq!(world.queue.stats().taken, 1);
    assert_eq!(answer(&world.fault(5)), Answer::Wait);
    world.enable(INTERRUPT);
    let (after, _claim) = world.inject(5);
    assert_ne!(before, after);
}

#[test]
fn a_cancel_alone_owes_the_guest_a_wake_all() {
    let mut world = World::new(INTERRUPT);
    let (_, completion) = world.inject(5);
    world.guest.state.user = false;
    let NotPresent::Halt(Some(other)) = world.fault(6) else {
        panic!("CPL 0 halts");
    };
    world.queue.cancel();
    world.queue.verify();
    assert!(!world.queue.halted());
    completion.complete();
    other.complete();
    assert_eq!(world.settle(), [WAKE_ALL]);
    world.queue.reset();
    world.queue.cancel();
    assert!(
        !world.queue.has_arrivals(),
        "no thread to wake while disabled"
    );
}

#[test]
fn pages_from_before_a_disable_count_until_they_arrive() {
    for end in ENDS {
        let mut world = World::new(INTERRUPT);
        let mut before: Vec<_> = (0..64).map(|page| world.inject(page).1).collect();
        end(&mut world);
        world.enable(INTERRUPT);
        assert_eq!(world.settle(), [WAKE_ALL]);
        assert_eq!(answer(&world.fault(100)), Answer::Wait);
        drop(before.pop());
        assert_eq!(answer(&world.fault(100)), Answer::Injected);
    }
}
