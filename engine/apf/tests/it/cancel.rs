//! Disable, reset and cancel end tokens early. No earlier event is delivered afterwards.

use crate::common;

use common::{AREA, AS_INT, Answer, ENABLED, Fixture, WAKE_ALL, answer};
use lacuna_apf::NotPresent;
use lacuna_apf::x86::Msr;

const INTERRUPT: u64 = ENABLED | AS_INT;

/// The ways to make the queue forget all tokens. Each leaves the queue disabled.
const ENDS: [fn(&mut Fixture); 3] = [
    |fixture| assert!(fixture.write(Msr::Enable, 0)),
    |fixture| assert!(fixture.write(Msr::Enable, AREA | AS_INT)),
    |fixture| fixture.queue.reset(),
];

#[test]
fn nothing_outstanding_is_delivered_after_the_end() {
    for en in [ENABLED, INTERRUPT] {
        for end in ENDS {
            let mut fixture = Fixture::new(en);
            let (_, arrived) = fixture.inject(5);
            let (_, outstanding) = fixture.inject(6);
            arrived.complete();
            fixture.guest.take_events();
            end(&mut fixture);
            assert!(!fixture.queue.has_arrivals());
            outstanding.complete();
            assert!(!fixture.queue.has_arrivals());
            assert_eq!(fixture.poll(), 0);
            assert_eq!(fixture.guest.take_events(), []);
            assert_eq!(fixture.queue.stats().cancelled, 2);
        }
    }
}

#[test]
fn enabling_again_wakes_all_and_only_that() {
    for end in ENDS {
        let mut fixture = Fixture::new(INTERRUPT);
        let (_, early) = fixture.inject(5);
        let (_, late) = fixture.inject(6);
        end(&mut fixture);
        early.complete();
        fixture.enable(INTERRUPT);
        late.complete();
        assert_eq!(fixture.settle(), [WAKE_ALL]);
    }
}

#[test]
fn a_completion_from_before_a_disable_does_not_affect_a_new_fault_on_the_page() {
    for end in ENDS {
        let mut fixture = Fixture::new(INTERRUPT);
        let (_, before) = fixture.inject(5);
        end(&mut fixture);
        fixture.enable(INTERRUPT);
        assert_eq!(fixture.settle(), [WAKE_ALL]);
        let (token, now) = fixture.inject(5);
        before.complete();
        assert_eq!(fixture.settle(), []);
        now.complete();
        assert_eq!(fixture.settle(), [token]);
    }
}

#[test]
fn the_end_ends_the_halt_and_forgets_ready_tokens() {
    for end in ENDS {
        let mut fixture = Fixture::new(INTERRUPT);
        let (_, completion) = fixture.inject(5);
        completion.complete();
        fixture.settle();
        fixture.guest.state.user = false;
        assert_eq!(answer(&fixture.fault(6)), Answer::HaltAndStart);
        end(&mut fixture);
        assert!(!fixture.queue.halted());
        fixture.queue.verify();
        fixture.guest.state.user = true;
        fixture.enable(INTERRUPT);
        assert_eq!(answer(&fixture.fault(5)), Answer::Injected);
    }
}

#[test]
fn reset_zeroes_the_registers_and_keeps_features_tokens_and_statistics() {
    let mut fixture = Fixture::new(INTERRUPT);
    let (before, _claim) = fixture.inject(5);
    fixture.queue.reset();
    assert_eq!(fixture.queue.read_msr(Msr::Enable), Some(0));
    assert_eq!(fixture.queue.read_msr(Msr::Vector), Some(0));
    assert_eq!(fixture.queue.stats().taken, 1);
    assert_eq!(answer(&fixture.fault(5)), Answer::Wait);
    fixture.enable(INTERRUPT);
    let (after, _claim) = fixture.inject(5);
    assert_ne!(before, after);
}

#[test]
fn a_cancel_alone_owes_the_guest_a_wake_all() {
    let mut fixture = Fixture::new(INTERRUPT);
    let (_, completion) = fixture.inject(5);
    fixture.guest.state.user = false;
    let NotPresent::Halt(Some(other)) = fixture.fault(6) else {
        panic!("CPL 0 halts");
    };
    fixture.queue.cancel();
    fixture.queue.verify();
    assert!(!fixture.queue.halted());
    completion.complete();
    other.complete();
    assert_eq!(fixture.settle(), [WAKE_ALL]);
    fixture.queue.reset();
    fixture.queue.cancel();
    assert!(
        !fixture.queue.has_arrivals(),
        "no thread to wake while disabled"
    );
}

#[test]
fn pages_from_before_a_disable_count_until_they_arrive() {
    for end in ENDS {
        let mut fixture = Fixture::new(INTERRUPT);
        let mut before: Vec<_> = (0..64).map(|page| fixture.inject(page).1).collect();
        end(&mut fixture);
        fixture.enable(INTERRUPT);
        assert_eq!(fixture.settle(), [WAKE_ALL]);
        assert_eq!(answer(&fixture.fault(100)), Answer::Wait);
        drop(before.pop());
        assert_eq!(answer(&fixture.fault(100)), Answer::Injected);
    }
}
