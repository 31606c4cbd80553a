//! Arrived pages: which event is delivered, in which order, and the reasons for a delay.

use crate::common;

use common::{AS_INT, ENABLED, Event, Fixture, Memory, VECTOR, gfn};
use lacuna_addr::Access;
use lacuna_apf::x86::Features;
use lacuna_apf::{NotPresent, Prefault};
use lacuna_sync::Nanos;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::{panic, thread};

const INTERRUPT: u64 = ENABLED | AS_INT;

/// A fault for which the vCPU halts: the guest has no token for it.
fn halt(fixture: &mut Fixture, number: u64) -> lacuna_apf::Completion {
    fixture.guest.state.user = false;
    let NotPresent::Halt(Some(completion)) = fixture.fault(number) else {
        panic!("CPL 0 halts");
    };
    fixture.guest.state.user = true;
    completion
}

#[test]
fn ready_maps_the_page_then_tells_then_resumes() {
    for (en, words, events) in [
        (ENABLED, [2, 0], Event::PageFault(0x2003)),
        (INTERRUPT, [0, 0x2003], Event::Interrupt(VECTOR)),
    ] {
        let mut fixture = Fixture::new(en);
        fixture.inject(4).1.complete();
        fixture.settle();
        let (token, completion) = fixture.inject(5);
        assert_eq!(token, 0x2003, "the second token of vCPU 3");
        fixture.guest.take_events();
        completion.complete();
        assert!(fixture.queue.has_arrivals());
        assert_eq!(fixture.poll(), 1);
        let mapped = Event::Prefault(gfn(5), Access::Write);
        assert_eq!(fixture.guest.take_events(), [mapped, events, Event::Resume]);
        assert_eq!(fixture.guest.words, words);
        assert!(!fixture.queue.has_arrivals());
    }
}

#[test]
fn a_wake_all_maps_nothing() {
    let mut fixture = Fixture::disabled(Features::all());
    fixture.enable(ENABLED);
    assert_eq!(fixture.poll(), 1);
    let events = Event::PageFault(0xffff_ffff);
    assert_eq!(fixture.guest.take_events(), [events, Event::Resume]);
    assert_eq!(fixture.guest.words, [2, 0]);
}

#[test]
fn ready_events_come_in_order_and_one_at_a_time() {
    for en in [ENABLED, INTERRUPT] {
        let mut fixture = Fixture::new(en);
        let (first, one) = fixture.inject(5);
        let (second, two) = fixture.inject(6);
        let (third, three) = fixture.inject(7);
        two.complete();
        three.complete();
        one.complete();
        assert_eq!(fixture.poll(), 1);
        assert_eq!(fixture.poll(), 0, "the first is not read");
        assert_eq!(fixture.settle(), [second, third, first]);
        assert_eq!(fixture.queue.stats().ready, 3);
    }
}

/// In both forms of page-ready, these conditions delay the event, and no delay loses it.
#[test]
fn ready_waits_until_it_can_be_delivered() {
    type Obstacle = fn(&mut common::Mock);
    let obstacles: [(u64, Obstacle, Obstacle); 7] = [
        (
            ENABLED,
            |g| g.state.interruptible = false,
            |g| g.state.interruptible = true,
        ),
        (ENABLED, |g| g.words[0] = 1, |g| g.words[0] = 0),
        (ENABLED, |g| g.words[0] = 2, |g| g.words[0] = 0),
        (
            ENABLED,
            |g| g.memory = Memory::Absent,
            |g| g.memory = Memory::Ram,
        ),
        (
            INTERRUPT,
            |g| g.state.lapic = false,
            |g| g.state.lapic = true,
        ),
        (INTERRUPT, |g| g.words[1] = 9, |g| g.words[1] = 0),
        (
            INTERRUPT,
            |g| g.memory = Memory::Absent,
            |g| g.memory = Memory::Ram,
        ),
    ];
    for (case, (en, hinder, clear)) in obstacles.into_iter().enumerate() {
        let mut fixture = Fixture::new(en);
        let (token, completion) = fixture.inject(5);
        completion.complete();
        hinder(&mut fixture.guest);
        assert_eq!(fixture.poll(), 0, "case {case}");
        assert!(fixture.guest.take_events().is_empty() && fixture.queue.has_arrivals());
        clear(&mut fixture.guest);
        assert_eq!(fixture.settle(), [token], "case {case}");
    }
}

/// These conditions do *not* delay a ready event. Today's form is an interrupt, which the
/// controller keeps until IF is set. Neither form depends on the privilege level.
#[test]
fn interrupts_wait_in_the_lapic_not_here() {
    let mut fixture = Fixture::new(INTERRUPT);
    let (_, completion) = fixture.inject(5);
    completion.complete();
    fixture.guest.state.interruptible = false;
    fixture.guest.state.user = false;
    fixture.guest.words[0] = 1;
    assert_eq!(fixture.poll(), 1);

    let mut fixture = Fixture::new(ENABLED);
    let (_, completion) = fixture.inject(5);
    completion.complete();
    fixture.guest.state.user = false;
    fixture.guest.state.lapic = false;
    fixture.guest.words[1] = 9;
    assert_eq!(fixture.poll(), 1);
}

#[test]
fn a_page_without_page_not_present_gets_no_page_ready() {
    for en in [ENABLED, INTERRUPT] {
        let mut fixture = Fixture::new(en);
        let completion = halt(&mut fixture, 5);
        let (token, other) = fixture.inject(6);
        fixture.guest.take_events();
        completion.complete();
        other.complete();
        assert_eq!(fixture.poll(), 2, "silent ones do not take turns");
        let events = fixture.guest.take_events();
        let resumed = events.iter().filter(|&&event| event == Event::Resume);
        assert_eq!(resumed.count(), 2);
        assert_eq!(
            events[..2],
            [Event::Prefault(gfn(5), Access::Write), Event::Resume]
        );
        assert!(!fixture.queue.halted());
        let stats = fixture.queue.stats();
        assert_eq!((stats.ready, stats.spurious, stats.halted), (1, 1, 1));
        assert!(
            fixture
                .guest
                .words
                .contains(&if en == ENABLED { 2 } else { token })
        );
    }
}

#[test]
fn any_arrival_ends_the_halt() {
    let mut fixture = Fixture::new(INTERRUPT);
    let (_, other) = fixture.inject(6);
    let completion = halt(&mut fixture, 5);
    other.complete();
    assert_eq!(fixture.poll(), 1);
    assert!(!fixture.queue.halted());
    drop(completion);
}

#[test]
fn the_page_ends_its_halt_though_the_guest_reads_nothing() {
    let mut fixture = Fixture::new(INTERRUPT);
    let (token, other) = fixture.inject(6);
    let completion = halt(&mut fixture, 5);
    fixture.guest.words[1] = 9;
    other.complete();
    assert_eq!(fixture.poll(), 0);
    assert!(
        fixture.queue.halted(),
        "another page's arrival does not help"
    );
    completion.complete();
    assert_eq!(fixture.poll(), 0);
    assert!(!fixture.queue.halted());
    fixture.guest.words[1] = 0;
    assert_eq!(fixture.settle(), [token]);
}

#[test]
fn a_ready_that_cannot_be_written_still_makes_the_vcpu_run() {
    for en in [ENABLED, INTERRUPT] {
        let mut fixture = Fixture::new(en);
        let (_, completion) = fixture.inject(5);
        fixture.guest.take_events();
        fixture.guest.memory = Memory::ReadOnly;
        completion.complete();
        assert_eq!(fixture.poll(), 1);
        let mapped = Event::Prefault(gfn(5), Access::Write);
        assert_eq!(fixture.guest.take_events(), [mapped, Event::Resume]);
        assert_eq!(fixture.queue.stats().spurious, 1);
    }
}

#[test]
fn a_dropped_completion_counts_as_done() {
    let mut fixture = Fixture::new(INTERRUPT);
    let (token, completion) = fixture.inject(5);
    drop(completion);
    assert_eq!(fixture.settle(), [token]);
}

#[test]
fn a_worker_that_dies_loses_nothing() {
    let mut fixture = Fixture::new(INTERRUPT);
    let (token, completion) = fixture.inject(5);
    let worker = thread::spawn(move || {
        let _claim = completion;
        panic::resume_unwind(Box::new("the worker dies"));
    });
    assert!(worker.join().is_err());
    assert_eq!(fixture.settle(), [token]);
}

#[test]
fn every_completion_kicks_unless_it_is_void() {
    let kicks = Arc::new(AtomicU32::new(0));
    let kick = {
        let kicks = Arc::clone(&kicks);
        move || _ = kicks.fetch_add(1, Ordering::Relaxed)
    };
    let mut fixture = Fixture::with_kick(Features::all(), kick);
    fixture.enable(INTERRUPT);
    fixture.settle();
    let (_, one) = fixture.inject(5);
    let (_, two) = fixture.inject(6);
    let (_, three) = fixture.inject(7);
    one.complete();
    two.complete();
    assert_eq!(kicks.load(Ordering::Relaxed), 2);
    fixture.queue.cancel();
    three.complete();
    fixture.settle();
    let (_, four) = fixture.inject(8);
    drop(fixture);
    four.complete();
    assert_eq!(kicks.load(Ordering::Relaxed), 2);
}

#[test]
fn swap_in_is_timed_and_prefaults_are_counted() {
    let mut fixture = Fixture::new(INTERRUPT);
    for (number, took, prefault) in [
        (5, 300, Prefault::Mapped),
        (6, 100, Prefault::NotMapped),
        (7, 200, Prefault::Mapped),
    ] {
        fixture.guest.prefault = prefault;
        let begun = Nanos(number * 10_000);
        let NotPresent::Injected(completion) = fixture.fault_at(number, begun) else {
            panic!("page-not-present is delivered");
        };
        completion.complete();
        fixture.guest.take_page_fault();
        assert_eq!(fixture.poll_at(begun.after(took)), 1);
        fixture.guest.take_interrupt();
    }
    let stats = fixture.queue.stats();
    assert_eq!((stats.prefaulted, stats.taken, stats.ready), (2, 3, 3));
    let swap_in = stats.swap_in;
    let times = (
        swap_in.number,
        swap_in.min_ns,
        swap_in.mean_ns(),
        swap_in.max_ns,
    );
    assert_eq!(times, (3, 100, 200, 300));
}
