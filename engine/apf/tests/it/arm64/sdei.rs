//! The software-delegated exception interface: its calls, and the errors of DEN 0054.

use super::mock::*;
use lacuna_apf::arm64::Answer;

const DENIED: i64 = -3;
const INVALID_PARAMETERS: i64 = -2;
const PENDING: i64 = -5;
const NUMBER: u64 = NUMBERS.event as u64;
const VERSION: u32 = event(0);
const INFO: u32 = event(9);
const ROUTE: u32 = event(0xa);
const PRIVATE_RESET: u32 = event(0x11);
const SHARED_RESET: u32 = event(0x12);

/// A vCPU whose handler is at work.
fn in_handler() -> Fixture {
    let mut fixture = Fixture::by_sdei(0);
    let _ = fixture.notified(5);
    fixture.enter();
    assert_eq!(fixture.guest.context.pc, HANDLER);
    fixture
}

#[test]
fn the_version_is_1_0() {
    assert_eq!(Fixture::new().x0(VERSION, &[]), 1 << 48);
}

#[test]
fn an_event_is_registered_once_enabled_and_disabled() {
    let mut fixture = Fixture::new();
    let mut status = |call: Option<(u32, i64)>| {
        if let Some((call, result)) = call {
            assert_eq!(fixture.x0(call, &[NUMBER, HANDLER, ARGUMENT]), result);
        }
        fixture.x0(STATUS, &[NUMBER])
    };
    assert_eq!(status(None), 0);
    assert_eq!(status(Some((ENABLE, DENIED))), 0);
    assert_eq!(status(Some((DISABLE, DENIED))), 0);
    assert_eq!(status(Some((UNREGISTER, DENIED))), 0);
    assert_eq!(status(Some((REGISTER, 0))), 0b01);
    assert_eq!(status(Some((REGISTER, DENIED))), 0b01);
    assert_eq!(status(Some((ENABLE, 0))), 0b11);
    assert_eq!(status(Some((ENABLE, 0))), 0b11);
    assert_eq!(status(Some((DISABLE, 0))), 0b01);
    assert_eq!(status(Some((UNREGISTER, 0))), 0);
}

#[test]
fn arguments_that_name_nothing_are_invalid() {
    let mut fixture = Fixture::new();
    for other in [0, 1, NUMBER + 1, NUMBER | 1 << 32, u64::MAX] {
        for call in [REGISTER, ENABLE, DISABLE, UNREGISTER, STATUS, INFO] {
            let refused = fixture.x0(call, &[other, HANDLER, 0]);
            assert_eq!(refused, INVALID_PARAMETERS, "{call:#x} {other:#x}");
        }
    }
    for (entry, flags) in [(HANDLER + 2, 0), (HANDLER, 2), (HANDLER, 1 << 63)] {
        let refused = fixture.x0(REGISTER, &[NUMBER, entry, 0, flags]);
        assert_eq!(refused, INVALID_PARAMETERS);
    }
    assert_eq!(fixture.x0(REGISTER, &[NUMBER, HANDLER, 0, 1]), 0, "routing");
    assert_eq!(fixture.x0(ROUTE, &[NUMBER]), INVALID_PARAMETERS, "private");
    let info = [0, 1, 2, 3, 4, 5].map(|what| fixture.x0(INFO, &[NUMBER, what]));
    assert_eq!(
        info,
        [0, 0, 1, -2, -2, -2],
        "private, by the host, critical"
    );
}

#[test]
fn masking_says_whether_it_changed_anything() {
    let mut fixture = Fixture::new();
    assert_eq!(fixture.x0(MASK, &[]), 0, "masked after a reset");
    assert_eq!(fixture.x0(UNMASK, &[]), 0);
    assert_eq!(fixture.x0(UNMASK, &[]), 0);
    assert_eq!(fixture.x0(MASK, &[]), 1);
    assert_eq!(fixture.x0(MASK, &[]), 0);
}

#[test]
fn only_a_handler_reads_its_context_and_completes() {
    let mut fixture = Fixture::new();
    for (call, result) in [(CONTEXT, DENIED), (COMPLETE, DENIED), (RESUME, DENIED)] {
        assert_eq!(fixture.x0(call, &[0]), result);
    }
    let mut fixture = in_handler();
    for register in 0..18 {
        let value = fixture.x0(CONTEXT, &[register]);
        assert_eq!(value, 100 * (register as i64 + 1));
    }
    for register in [18, 31, 1 << 32, u64::MAX] {
        let refused = fixture.x0(CONTEXT, &[register]);
        assert_eq!(refused, INVALID_PARAMETERS);
    }
    assert_eq!(fixture.x0(STATUS, &[NUMBER]), 0b111);
    assert_eq!(fixture.call(COMPLETE, &[0]), Some(Answer::Resumed));
    assert_eq!(fixture.x0(STATUS, &[NUMBER]), 0b011);
    assert_eq!(fixture.x0(COMPLETE, &[0]), DENIED);
}

#[test]
fn a_handler_may_resume_the_kernel_as_if_interrupted_there() {
    let mut fixture = in_handler();
    let before = Mock::new().context;
    let vector = VBAR + 0x480;
    assert_eq!(fixture.call(RESUME, &[vector]), Some(Answer::Resumed));
    let after = fixture.guest.context;
    assert_eq!((after.pc, after.pstate, after.x), (vector, 0x3c5, before.x));
    assert_eq!(fixture.guest.elr, (before.pc, before.pstate));
}

#[test]
fn unregistering_a_handler_at_work_is_pending() {
    for (call, result) in [(UNREGISTER, PENDING), (PRIVATE_RESET, DENIED)] {
        let mut fixture = in_handler();
        for _ in 0..2 {
            assert_eq!(fixture.x0(call, &[NUMBER]), result);
            assert_eq!(fixture.x0(STATUS, &[NUMBER]), 0b100);
        }
        let again = fixture.x0(REGISTER, &[NUMBER, HANDLER, 0]);
        assert_eq!(again, DENIED);
        assert_eq!(fixture.call(COMPLETE, &[]), Some(Answer::Resumed));
        assert_eq!(fixture.x0(STATUS, &[NUMBER]), 0);
        fixture.guest.words = [0; 2];
        let _ = fixture.halts(6);
    }
}

#[test]
fn a_reset_of_private_events_unregisters() {
    let mut fixture = Fixture::by_sdei(0);
    assert_eq!(fixture.x0(SHARED_RESET, &[]), 0);
    assert_eq!(fixture.x0(STATUS, &[NUMBER]), 0b11);
    assert_eq!(fixture.x0(PRIVATE_RESET, &[]), 0);
    assert_eq!(fixture.x0(PRIVATE_RESET, &[]), 0);
    assert_eq!(fixture.x0(STATUS, &[NUMBER]), 0);
}

#[test]
fn a_vcpu_reset_forgets_everything() {
    let mut fixture = in_handler();
    fixture.queue.reset();
    assert_eq!(fixture.x0(STATUS, &[NUMBER]), 0);
    assert_eq!(fixture.x0(MASK, &[]), 0);
    assert_eq!(fixture.x0(COMPLETE, &[]), DENIED);
}
