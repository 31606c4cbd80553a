//! RFCv2: both events are data aborts.

use super::mock::*;
use lacuna_apf::NotPresent;
use lacuna_apf::arm64::ExceptionLevel;

/// ESR_EL1 of a synchronous external abort from EL0, and from EL1.
const FROM_EL0: u64 = 0x9200_0010;
const FROM_EL1: u64 = 0x9600_0010;

#[test]
fn a_guest_gets_a_reason_and_an_abort_with_the_token() {
    let mut fixture = Fixture::by_abort(0);
    let completion = fixture.notified(5);
    let (esr, reason, token) = fixture.guest.take_abort().unwrap();
    assert_eq!((esr, reason), (FROM_EL0, 1));
    assert_eq!((token & 0xffff, fixture.guest.words[1]), (3, 0), "the vCPU");
    assert!(token >> 16 != 0 && token != WAKE_ALL);
    fixture.guest.words[0] = 0;
    completion.complete();
    fixture.guest.level = ExceptionLevel::El1;
    assert_eq!(fixture.poll(), 1);
    let ready = fixture.guest.take_abort().unwrap();
    assert_eq!(ready, (FROM_EL1, 2, token), "in the kernel too");
    assert_eq!(fixture.guest.resumed, 2, "with the wake-all before");
}

#[test]
fn only_send_always_interrupts_the_kernel() {
    for (flags, level, notified) in [
        (0, ExceptionLevel::El0, true),
        (0, ExceptionLevel::El1, false),
        (SEND_ALWAYS, ExceptionLevel::El0, true),
        (SEND_ALWAYS, ExceptionLevel::El1, true),
    ] {
        let mut fixture = Fixture::by_abort(flags);
        fixture.guest.level = level;
        assert_eq!(
            fixture.queue.can_notify(gfn(5), &mut fixture.guest),
            notified
        );
        let answer = fixture.fault(5);
        assert_eq!(matches!(answer, NotPresent::Injected(_)), notified);
        assert_eq!(fixture.queue.halted(), !notified, "an artificial halt");
        assert_eq!(fixture.guest.abort.is_some(), notified);
    }
}

/// The guest may clear the reason at any time. Other nonzero values hold events off as well.
#[test]
fn no_event_while_the_reason_is_not_zero() {
    for reason in [1, 2, 3, u32::MAX] {
        let mut fixture = Fixture::by_abort(0);
        let first = fixture.notified(5);
        let (_, _, token) = fixture.guest.take_abort().unwrap();
        fixture.guest.words[0] = reason;
        let second = fixture.halts(6);
        first.complete();
        second.complete();
        assert_eq!(fixture.poll(), 0);
        assert!(fixture.guest.abort.is_none());
        assert!(!fixture.queue.halted(), "its own page has arrived");
        fixture.guest.words[0] = 0;
        assert_eq!(fixture.settle(), [token], "none for the other");
        assert_eq!(fixture.queue.stats().spurious, 1);
    }
}

#[test]
fn no_event_in_the_range_behind_the_vectors() {
    for (range, inside, outside) in [
        (None, 0x7fc, 0x800),
        (Some(0x100), 0x7fc, 0x800),
        (Some(0x1800), 0x17fc, 0x1800),
    ] {
        let mut fixture = Fixture::new();
        if let Some(range) = range {
            let high = 1u64 << 30;
            assert_eq!(fixture.x0(ABORT, &[range, high]), 0);
            assert_eq!(fixture.x0(ABORT, &[0, high]), 0, "the larger one is kept");
        }
        let enabled = fixture.switch_abort(BLOCK | ENABLED | SEND_ALWAYS);
        assert_eq!(enabled, 0);
        assert_eq!(fixture.settle(), [WAKE_ALL]);
        fixture.guest.level = ExceptionLevel::El1;
        for pc in [VBAR, VBAR + inside] {
            fixture.guest.pc = pc;
            fixture.halts(5 + pc - VBAR).complete();
            assert_eq!(fixture.poll(), 0, "{pc:#x}");
        }
        for (page, pc) in [(1, VBAR - 4), (2, VBAR + outside), (3, 0)] {
            fixture.guest.pc = pc;
            assert_eq!(fixture.settle(), []);
            fixture.notified(page).complete();
            let (_, _, token) = fixture.guest.take_abort().unwrap();
            fixture.guest.words[0] = 0;
            assert_eq!(fixture.settle(), [token], "{pc:#x}");
        }
    }
}

/// A hostile range only makes the guest wait.
#[test]
fn a_range_over_everything_keeps_events_away() {
    let mut fixture = Fixture::new();
    assert_eq!(fixture.x0(ABORT, &[u64::MAX, 0x40ff_ffff]), 0);
    assert_eq!(fixture.switch_abort(BLOCK | ENABLED), 0);
    fixture.guest.pc = VBAR + (1 << 40);
    assert_eq!(fixture.poll(), 0);
    assert!(matches!(fixture.fault(5), NotPresent::Halt(Some(_))));
    fixture.queue.reset();
    assert_eq!(fixture.switch_abort(BLOCK | ENABLED), 0);
    assert_eq!(fixture.settle(), [WAKE_ALL], "the range is gone");
}

#[test]
fn an_exception_that_waits_holds_events_off() {
    let mut fixture = Fixture::by_abort(0);
    let completion = fixture.notified(5);
    assert!(!fixture.guest.interruptible, "the abort is not taken yet");
    assert!(matches!(fixture.fault(6), NotPresent::Wait));
    completion.complete();
    fixture.guest.words[0] = 0;
    assert_eq!(fixture.poll(), 0);
    let (_, _, token) = fixture.guest.take_abort().unwrap();
    assert_eq!(fixture.settle(), [token]);
}

#[test]
fn a_block_that_cannot_be_written_any_more_costs_the_event() {
    let mut fixture = Fixture::by_abort(0);
    fixture.guest.memory = Memory::ReadOnly;
    let completion = fixture.halts(5);
    assert!(fixture.guest.abort.is_none());
    completion.complete();
    assert_eq!(fixture.poll(), 1);
    assert_eq!(fixture.queue.stats().spurious, 1);
}

#[test]
fn disabling_with_faults_pending_forgets_them() {
    let mut fixture = Fixture::by_abort(0);
    let (one, two) = (fixture.notified(5), {
        fixture.guest.take_abort().unwrap();
        fixture.guest.words[0] = 0;
        fixture.notified(6)
    });
    fixture.guest.take_abort().unwrap();
    fixture.guest.words[0] = 0;
    one.complete();
    assert_eq!(fixture.switch_abort(0), 0);
    two.complete();
    assert_eq!(fixture.poll(), 0);
    assert!(fixture.guest.abort.is_none());
    assert_eq!(fixture.queue.stats().cancelled, 2);
    assert_eq!(fixture.switch_abort(BLOCK | ENABLED), 0);
    assert_eq!(fixture.settle(), [WAKE_ALL]);
}

/// 16 bits of counter: after 65535 tokens the first is used again, unless its page is still on its
/// way.
#[test]
fn a_token_in_use_is_not_given_out_again() {
    let mut fixture = Fixture::by_abort(0);
    let slow = fixture.notified(1);
    let (_, _, first) = fixture.guest.take_abort().unwrap();
    fixture.guest.words[0] = 0;
    let mut token = 0;
    for page in 0..0x1_0000 {
        fixture.notified(100 + page % 200).complete();
        (_, _, token) = fixture.guest.take_abort().unwrap();
        assert!(token != 0 && token != first);
        fixture.guest.words[0] = 0;
        assert_eq!(fixture.settle(), [token]);
    }
    assert_eq!(token, first + (2 << 16), "it was left out");
    slow.complete();
    assert_eq!(fixture.settle(), [first]);
}
