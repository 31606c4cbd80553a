//! Saving and restoring a vCPU's configuration.

use super::mock::*;
use lacuna_apf::arm64::{Features, Line, Numbers};
use lacuna_state::StateError;
use lacuna_state::arm64::{AsyncFaults, Form, Handler, Offered, Sdei};

fn restored(saved: &AsyncFaults, words: [u32; 2]) -> Fixture {
    let mut fixture = Fixture::new();
    fixture.guest.words = words;
    assert_eq!(fixture.queue.check(saved, &mut fixture.guest), Ok(()));
    let done = fixture.queue.restore(saved, NOW, &mut fixture.guest);
    assert_eq!(done, Ok(()));
    fixture.queue.verify();
    assert_eq!(fixture.queue.save(), *saved);
    fixture
}

#[test]
fn a_guest_of_rfcv2_gets_a_wake_all() {
    let mut fixture = Fixture::new();
    assert_eq!(fixture.x0(ABORT, &[0x1000, 1 << 30]), 0);
    assert_eq!(fixture.switch_abort(BLOCK | ENABLED | SEND_ALWAYS), 0);
    assert_eq!(fixture.settle(), [WAKE_ALL]);
    let lost = fixture.notified(5);
    let saved = fixture.queue.save();
    assert_eq!(
        saved.enabled,
        Some((Form::Abort, BLOCK | ENABLED | SEND_ALWAYS))
    );
    assert_eq!(saved.range, 0x1000);
    let mut fixture = restored(&saved, [0; 2]);
    assert_eq!(fixture.settle(), [WAKE_ALL]);
    lost.complete();
    assert_eq!(fixture.settle(), []);
}

#[test]
fn an_event_that_was_not_taken_is_taken_after_the_restore() {
    let mut fixture = Fixture::by_sdei(0);
    let _ = fixture.notified(5);
    let (saved, words) = (fixture.queue.save(), fixture.guest.words);
    assert_eq!(saved.untaken, Some(words[1]));
    let mut fixture = restored(&saved, words);
    assert_eq!(fixture.poll(), 0, "the words are in use");
    fixture.enter();
    assert_eq!(fixture.guest.context.pc, HANDLER);
    fixture.guest.words = [0; 2];
    assert_eq!(fixture.settle(), [WAKE_ALL], "the thread tries again");
}

#[test]
fn an_interrupt_that_was_not_acknowledged_is_raised_again() {
    let mut fixture = Fixture::by_sdei(0);
    let completion = fixture.notified(5);
    fixture.enter();
    fixture.guest.words = [0; 2];
    completion.complete();
    assert_eq!(fixture.poll(), 1);
    let (saved, words) = (fixture.queue.save(), fixture.guest.words);
    assert!(saved.unacknowledged && saved.sdei.interrupted.is_some());
    let mut fixture = restored(&saved, words);
    assert_eq!(fixture.guest.line, Line::High);
    assert_eq!(fixture.settle(), [words[1], WAKE_ALL]);
}

#[test]
fn a_state_that_does_not_fit_is_refused_and_changes_nothing() {
    let saved = Fixture::by_sdei(0).queue.save();
    let refusal = |field, value: u64| StateError::unsupported(field, value);
    let missing = |features: Features| refusal("apf.offered.features", features.bits().into());
    let offers: [(Features, Option<Numbers>, _); 3] = [
        (Features::ABORT, Some(NUMBERS), missing(Features::SDEI)),
        (Features::empty(), Some(NUMBERS), missing(Features::all())),
        (
            Features::all(),
            None,
            refusal("apf.offered.event", NUMBERS.event.into()),
        ),
    ];
    for (features, numbers, refused) in offers {
        let mut fixture = Fixture::offered(features, numbers);
        let before = fixture.queue.save();
        let (queue, guest) = (&mut fixture.queue, &mut fixture.guest);
        assert_eq!(queue.check(&saved, guest), refused);
        assert_eq!(queue.restore(&saved, NOW, guest), refused);
        assert_eq!(queue.save(), before);
    }
    let mut fixture = Fixture::new();
    fixture.guest.memory = Memory::Absent;
    let refused = fixture.queue.check(&saved, &mut fixture.guest);
    assert_eq!(refused, refusal("apf.enabled", BLOCK | ENABLED));
    let mut fixture = Fixture::offered(Features::ABORT, None);
    let claimed = AsyncFaults {
        offered: Offered::default(),
        ..saved
    };
    let refused = fixture.queue.check(&claimed, &mut fixture.guest);
    assert_eq!(
        refused,
        refusal("apf.enabled", BLOCK | ENABLED),
        "it is not offered"
    );
}

#[test]
fn fields_that_no_vcpu_has_are_named() {
    let by_abort = {
        let mut fixture = Fixture::new();
        assert_eq!(fixture.switch_abort(BLOCK | ENABLED), 0);
        fixture.queue.save()
    };
    let by_sdei = Fixture::by_sdei(0).queue.save();
    let handler = by_sdei.sdei.handler.expect("it is registered");
    for (saved, field) in [
        (
            AsyncFaults {
                range: 0x7ff,
                ..by_abort
            },
            "apf.range",
        ),
        (
            AsyncFaults {
                untaken: Some(1),
                ..by_abort
            },
            "apf.untaken",
        ),
        (
            AsyncFaults {
                untaken: Some(0),
                ..by_sdei
            },
            "apf.untaken",
        ),
        (
            AsyncFaults {
                unacknowledged: true,
                ..by_abort
            },
            "apf.unacknowledged",
        ),
        (
            AsyncFaults {
                sdei: Sdei {
                    handler: Some(Handler {
                        entry: handler.entry + 2,
                        ..handler
                    }),
                    ..by_sdei.sdei
                },
                ..by_sdei
            },
            "apf.sdei.handler.entry",
        ),
    ] {
        let mut fixture = Fixture::new();
        let refused = fixture.queue.check(&saved, &mut fixture.guest);
        let refused = refused.expect_err(field).to_string();
        assert!(refused.starts_with(field), "{refused}");
    }
}

#[test]
fn a_disabled_guest_stays_disabled() {
    let saved = Fixture::new().queue.save();
    let mut fixture = restored(&saved, [0; 2]);
    assert_eq!(fixture.settle(), []);
}
