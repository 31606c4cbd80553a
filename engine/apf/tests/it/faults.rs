//! Faults on an absent page: when the event is delivered, when the vCPU halts, when it waits.

use crate::common;

use common::{AS_INT, Answer, ENABLED, Event, Fixture, Memory, SEND_ALWAYS, answer, gfn};
use lacuna_apf::{Completion, NotPresent, QUEUED_MAX};

/// EN for the two forms of page-ready. Page-not-present is the same in both.
const BOTH: [u64; 2] = [ENABLED, ENABLED | AS_INT];

fn claim_of(answer: NotPresent) -> Completion {
    match answer {
        NotPresent::Injected(completion) | NotPresent::Halt(Some(completion)) => completion,
        NotPresent::Wait | NotPresent::Halt(None) => panic!("there is a completion"),
    }
}

#[test]
fn the_guest_gets_a_reason_word_and_a_page_fault() {
    for en in BOTH {
        let mut fixture = Fixture::new(en);
        let answer = fixture.fault(5);
        assert!(matches!(answer, NotPresent::Injected(_)));
        assert_eq!(fixture.guest.words, [1, 0]);
        let events = fixture.guest.take_events();
        let [Event::PageFault(address)] = events[..] else {
            panic!("one #PF: {events:?}");
        };
        assert_eq!(address & 0xfff, 3, "the vCPU");
        assert!(address >> 12 != 0 && address < u64::from(u32::MAX));
        assert!(!fixture.queue.halted());
        assert_eq!(fixture.queue.stats().taken, 1);
    }
}

#[test]
fn delivery_depends_on_privilege_and_paging() {
    for en in BOTH {
        for (always, user, paging, expected) in [
            (0, true, true, Answer::Injected),
            (0, false, true, Answer::HaltAndStart),
            (SEND_ALWAYS, false, true, Answer::Injected),
            (SEND_ALWAYS, true, true, Answer::Injected),
            (0, true, false, Answer::HaltAndStart),
            (SEND_ALWAYS, false, false, Answer::HaltAndStart),
        ] {
            let mut fixture = Fixture::new(en | always);
            (fixture.guest.state.user, fixture.guest.state.paging) = (user, paging);
            let given = fixture.fault(5);
            assert_eq!(answer(&given), expected, "{always} {user} {paging}");
            let halts = expected == Answer::HaltAndStart;
            assert_eq!(fixture.queue.halted(), halts);
            assert_eq!(fixture.guest.events.is_empty(), halts);
            assert_eq!(fixture.queue.stats().halted, u64::from(halts));
        }
    }
}

/// `can_notify` predicts a fault's outcome and changes nothing. A reported page is no longer
/// awaited, but its fault is in flight until page-ready is delivered.
#[test]
fn a_fault_is_predicted_and_awaited_until_its_page_has_arrived() {
    for en in BOTH {
        let mut fixture = Fixture::new(en);
        let page = gfn(5);
        assert!(fixture.queue.can_notify(page, &mut fixture.guest));
        assert!(fixture.guest.events.is_empty() && fixture.guest.words == [0, 0]);
        assert!(!fixture.queue.awaits(page));
        let completion = claim_of(fixture.fault(5));
        assert!(fixture.queue.awaits(page) && !completion.is_cancelled());
        assert!(!fixture.queue.can_notify(page, &mut fixture.guest));
        completion.complete();
        assert!(!fixture.queue.awaits(page));
        assert!(!fixture.queue.can_notify(page, &mut fixture.guest));
    }
}

#[test]
fn a_vcpu_that_can_take_no_event_waits() {
    for en in BOTH {
        let mut fixture = Fixture::new(en | SEND_ALWAYS);
        fixture.guest.state.interruptible = false;
        assert_eq!(answer(&fixture.fault(5)), Answer::Wait);
        assert!(!fixture.queue.halted());
        assert_eq!(fixture.queue.stats().waited_uninterruptible, 1);
    }
}

#[test]
fn a_disabled_guest_waits_and_never_halts() {
    let mut fixture = Fixture::disabled(lacuna_apf::x86::Features::all());
    for user in [true, false] {
        fixture.guest.state.user = user;
        assert_eq!(answer(&fixture.fault(5)), Answer::Wait);
    }
    assert!(fixture.guest.take_events().is_empty());
}

#[test]
fn an_unread_event_is_not_overwritten() {
    for en in BOTH {
        for unread in [1, 2, u32::MAX] {
            let mut fixture = Fixture::new(en);
            fixture.guest.words[0] = unread;
            assert_eq!(answer(&fixture.fault(5)), Answer::HaltAndStart);
            assert_eq!(fixture.guest.words[0], unread);
        }
    }
}

#[test]
fn an_unread_token_is_no_obstacle_to_the_next_fault() {
    let mut fixture = Fixture::new(ENABLED | AS_INT);
    fixture.guest.words[1] = 0x5003;
    assert_eq!(answer(&fixture.fault(5)), Answer::Injected);
}

#[test]
fn an_area_that_cannot_be_written_halts() {
    for en in BOTH {
        for memory in [Memory::ReadOnly, Memory::Absent] {
            let mut fixture = Fixture::new(en);
            fixture.guest.memory = memory;
            let completion = claim_of(fixture.fault(5));
            assert!(fixture.queue.halted() && fixture.guest.take_events().is_empty());
            completion.complete();
            fixture.poll();
            assert!(!fixture.queue.halted(), "it gets its page all the same");
        }
    }
}

#[test]
fn a_page_in_flight_halts_and_starts_nothing() {
    let mut fixture = Fixture::new(ENABLED | AS_INT);
    let (token, completion) = fixture.inject(5);
    assert_eq!(answer(&fixture.fault(5)), Answer::HaltOnly);
    assert!(fixture.queue.halted());
    assert_eq!(fixture.queue.stats().repeated, 1);
    let (_, _other) = fixture.inject(6);
    completion.complete();
    assert_eq!(fixture.settle(), [token]);
    assert!(!fixture.queue.halted());
}

#[test]
fn an_interrupt_breaks_the_halt_and_the_retry_halts_again() {
    let mut fixture = Fixture::new(ENABLED);
    fixture.guest.state.user = false;
    let completion = claim_of(fixture.fault(5));
    fixture.queue.break_halt();
    assert!(!fixture.queue.halted());
    assert_eq!(answer(&fixture.fault(5)), Answer::HaltOnly);
    assert!(fixture.queue.halted());
    completion.complete();
    assert_eq!(fixture.poll(), 1);
    assert!(!fixture.queue.halted());
}

#[test]
fn a_full_queue_waits() {
    for en in BOTH {
        let mut fixture = Fixture::new(en);
        let mut completions: Vec<_> = (0..QUEUED_MAX as u64)
            .map(|n| fixture.inject(n).1)
            .collect();
        assert_eq!(answer(&fixture.fault(100)), Answer::Wait);
        assert!(!fixture.queue.halted());
        assert_eq!(fixture.queue.stats().waited_full, 1);
        assert_eq!(
            answer(&fixture.fault(7)),
            Answer::HaltOnly,
            "in flight is tested first"
        );
        completions.pop().unwrap().complete();
        assert_eq!(fixture.settle().len(), 1);
        assert_eq!(answer(&fixture.fault(100)), Answer::Injected);
    }
}

#[test]
fn a_wake_all_takes_a_place_in_the_queue() {
    let mut fixture = Fixture::new(ENABLED | AS_INT);
    let full = QUEUED_MAX as u64;
    let mut completions: Vec<_> = (1..full).map(|number| fixture.inject(number).1).collect();
    fixture.enable(ENABLED | AS_INT);
    assert_eq!(answer(&fixture.fault(100)), Answer::Wait);
    assert_eq!(fixture.settle(), [common::WAKE_ALL]);
    completions.push(fixture.inject(100).1);
    fixture.enable(ENABLED | AS_INT);
    assert!(
        !fixture.queue.has_arrivals(),
        "no place, and no token was forgotten"
    );
    drop(completions);
    assert_eq!(fixture.settle().len(), QUEUED_MAX);
}

#[test]
fn a_page_that_was_evicted_before_the_retry_is_waited_for_once() {
    let mut fixture = Fixture::new(ENABLED | AS_INT);
    let (token, completion) = fixture.inject(5);
    completion.complete();
    assert_eq!(fixture.settle(), [token]);
    assert_eq!(answer(&fixture.fault(5)), Answer::Wait);
    assert_eq!(fixture.queue.stats().waited_recent, 1);
    assert_eq!(answer(&fixture.fault(5)), Answer::Injected);
}

#[test]
fn a_page_is_recent_until_sixty_four_others_have_come() {
    for (others, expected) in [(63, Answer::Wait), (64, Answer::Injected)] {
        let mut fixture = Fixture::new(ENABLED | AS_INT);
        for number in 0..=others {
            let (_, completion) = fixture.inject(number);
            completion.complete();
            fixture.settle();
        }
        assert_eq!(answer(&fixture.fault(0)), expected, "after {others}");
    }
}

/// The guest does not read its tokens, so the arrival stays in the list. Then the page is evicted,
/// and the vCPU faults on it. If the vCPU halted then, no event would end the halt.
#[test]
fn a_page_that_has_come_but_cannot_be_dequeued_is_waited_for() {
    let mut fixture = Fixture::new(ENABLED | AS_INT);
    let (_, completion) = fixture.inject(5);
    completion.complete();
    fixture.guest.words[1] = 0x5003;
    assert_eq!(fixture.poll(), 0);
    assert_eq!(answer(&fixture.fault(5)), Answer::Wait);
}

#[test]
fn tokens_differ() {
    let mut fixture = Fixture::new(ENABLED);
    let injected: Vec<_> = (0..64).map(|number| fixture.inject(number)).collect();
    let mut tokens: Vec<_> = injected.iter().map(|(token, _)| *token).collect();
    tokens.dedup();
    assert_eq!(tokens.len(), 64);
    assert!(tokens.is_sorted(), "ids increment");
}
