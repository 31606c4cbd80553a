//! EN, INT and ACK: each rule of `msr.rst` about reading and writing them.

use crate::common;

use common::{
    AREA, AS_INT, Answer, ENABLED, Event, Fixture, Memory, SEND_ALWAYS, WAKE_ALL, answer,
};
use lacuna_addr::{Access, Gpa};
use lacuna_apf::x86::{Features, Msr};

#[test]
fn a_write_of_en_raises_gp_when_it_asks_for_what_is_not_there() {
    let all = Features::all();
    let with_int = Features::ASYNC_PF | Features::ASYNC_PF_INT;
    for (features, value, accepted) in [
        (all, 0, true),
        (all, AREA | ENABLED, true),
        (all, AREA | ENABLED | AS_INT, true),
        (all, AREA | ENABLED | SEND_ALWAYS | AS_INT | 4, true),
        // Reserved bits, also with bit 0 clear.
        (all, AREA | ENABLED | 1 << 4, false),
        (all, AREA | ENABLED | 1 << 5, false),
        (all, 1 << 4, false),
        (all, 1 << 5, false),
        // Bit 2 and bit 3 each need their feature, also with bit 0 clear.
        (with_int, AREA | ENABLED | 4, false),
        (with_int, 4, false),
        (with_int, AREA | ENABLED | AS_INT, true),
        (Features::ASYNC_PF, AREA | ENABLED | AS_INT, false),
        (Features::ASYNC_PF, AS_INT, false),
        (Features::ASYNC_PF, AREA | ENABLED, true),
        // Without the feature, even zero is refused.
        (Features::ASYNC_PF_INT, 0, false),
        (Features::empty(), 0, false),
        // The area must be memory if it is used, and a valid address.
        (all, 0x9_0000 | ENABLED, false),
        (all, 0x9_0000, true),
        (all, 1 << 48 | AREA | ENABLED, false),
        (all, !0x3f | ENABLED, false),
        (all, !0x3f, true),
    ] {
        let mut fixture = Fixture::disabled(features);
        let written = fixture.write(Msr::Enable, value);
        assert_eq!(written, accepted, "{features:?} {value:#x}");
        let kept = features
            .contains(Features::ASYNC_PF)
            .then_some(if accepted { value } else { 0 });
        assert_eq!(fixture.queue.read_msr(Msr::Enable), kept, "{value:#x}");
    }
}

#[test]
fn the_page_that_a_write_accesses_is_known_before() {
    let area = Gpa::new(AREA).unwrap().gfn();
    let mut fixture = Fixture::disabled(Features::all());
    let page = |fixture: &Fixture, msr, value| fixture.queue.page_accessed_by(msr, value);
    let read = Some((area, Access::Read));
    assert_eq!(page(&fixture, Msr::Enable, AREA | ENABLED), read);
    assert_eq!(page(&fixture, Msr::Enable, AREA), None, "it disables");
    assert_eq!(
        page(&fixture, Msr::Enable, !0x3f | ENABLED),
        None,
        "no address"
    );
    assert_eq!(
        page(&fixture, Msr::Acknowledge, 1),
        None,
        "nothing to deliver"
    );
    assert!(fixture.write(Msr::Enable, AREA | ENABLED | AS_INT));
    let written = Some((area, Access::Write));
    assert_eq!(page(&fixture, Msr::Acknowledge, 1), written);
    assert_eq!(page(&fixture, Msr::Vector, 1), None);
}

#[test]
fn the_area_must_be_memory_when_it_is_enabled() {
    for (area, accepted) in [(AREA, true), (AREA + 0x40, false), (AREA - 0x40, false)] {
        let mut fixture = Fixture::disabled(Features::all());
        assert_eq!(fixture.write(Msr::Enable, area | ENABLED), accepted);
    }
    let mut fixture = Fixture::disabled(Features::all());
    fixture.guest.memory = Memory::Absent;
    assert!(!fixture.write(Msr::Enable, AREA | ENABLED | AS_INT));
    fixture.guest.memory = Memory::ReadOnly;
    assert!(
        fixture.write(Msr::Enable, AREA | ENABLED | AS_INT),
        "only reads are checked"
    );
}

#[test]
fn a_write_that_raises_gp_changes_nothing() {
    let mut fixture = Fixture::new(ENABLED | AS_INT);
    let (token, completion) = fixture.inject(5);
    assert!(!fixture.write(Msr::Enable, AREA | ENABLED | 1 << 4));
    assert!(!fixture.write(Msr::Enable, 0x9_0000 | ENABLED));
    assert!(!fixture.write(Msr::Vector, 0x100));
    assert_eq!(
        fixture.queue.read_msr(Msr::Enable),
        Some(AREA | ENABLED | AS_INT)
    );
    completion.complete();
    assert_eq!(fixture.settle(), [token]);
}

#[test]
fn the_vector_has_eight_bits() {
    let mut fixture = Fixture::disabled(Features::all());
    for (value, accepted) in [
        (0, true),
        (0xf3, true),
        (0xff, true),
        (0x100, false),
        (1 << 63, false),
    ] {
        assert_eq!(fixture.write(Msr::Vector, value), accepted, "{value:#x}");
    }
    assert_eq!(fixture.queue.read_msr(Msr::Vector), Some(0xff));
}

#[test]
fn vector_and_acknowledge_need_the_interrupt_feature_alone() {
    for (features, there) in [
        (Features::all(), true),
        (Features::ASYNC_PF_INT, true),
        (Features::ASYNC_PF, false),
        (Features::empty(), false),
    ] {
        let mut fixture = Fixture::disabled(features);
        for msr in [Msr::Vector, Msr::Acknowledge] {
            assert_eq!(fixture.write(msr, 1), there, "{msr:?} {features:?}");
            assert_eq!(fixture.queue.read_msr(msr).is_some(), there);
        }
    }
}

#[test]
fn acknowledge_takes_any_value_and_reads_zero() {
    let mut fixture = Fixture::new(ENABLED | AS_INT);
    for value in [0, 1, u64::MAX] {
        assert!(fixture.write(Msr::Acknowledge, value));
        assert_eq!(fixture.queue.read_msr(Msr::Acknowledge), Some(0));
    }
}

#[test]
fn bit_0_enables_and_bit_3_alone_does_not() {
    for (en, expected) in [
        (0, Answer::Wait),
        (AS_INT, Answer::Wait),
        (SEND_ALWAYS, Answer::Wait),
        (ENABLED, Answer::Injected),
        (ENABLED | AS_INT, Answer::Injected),
    ] {
        let mut fixture = Fixture::disabled(Features::all());
        fixture.enable(en);
        assert_eq!(answer(&fixture.fault(5)), expected, "{en:#x}");
    }
}

/// Bit 2 is for a nested guest, and there is none: the bit is kept, and changes no event.
#[test]
fn bit_2_changes_no_event() {
    const NESTED: u64 = 1 << 2;
    let events = |en| {
        let mut fixture = Fixture::new(en);
        let (_, completion) = fixture.inject(5);
        let mut events = fixture.guest.take_events();
        completion.complete();
        assert_eq!(fixture.poll(), 1);
        events.extend(fixture.guest.take_events());
        let kept = fixture.queue.read_msr(Msr::Enable);
        assert_eq!(kept, Some(AREA | en));
        events
    };
    for en in [ENABLED, ENABLED | AS_INT, ENABLED | SEND_ALWAYS | AS_INT] {
        assert_eq!(events(en | NESTED), events(en), "{en:#x}");
    }
}

#[test]
fn enabling_queues_a_wake_all() {
    for en in [ENABLED, ENABLED | AS_INT] {
        let mut fixture = Fixture::disabled(Features::all());
        fixture.enable(en);
        assert!(fixture.queue.has_arrivals());
        assert!(
            fixture.guest.take_events().is_empty(),
            "not within the instruction"
        );
        assert_eq!(fixture.settle(), [WAKE_ALL]);
        assert_eq!(fixture.queue.stats().wake_alls, 1);
        fixture.enable(en);
        assert_eq!(fixture.settle(), [WAKE_ALL], "again, when enabled again");
    }
}

#[test]
fn no_wake_all_is_queued_behind_arrivals() {
    let mut fixture = Fixture::new(ENABLED | AS_INT);
    let (token, completion) = fixture.inject(5);
    completion.complete();
    fixture.enable(ENABLED | AS_INT);
    assert_eq!(fixture.settle(), [token]);
    fixture.enable(ENABLED | AS_INT);
    fixture.enable(ENABLED | AS_INT);
    assert_eq!(fixture.settle(), [WAKE_ALL], "one for both");
}

#[test]
fn an_area_that_moves_is_used_from_then_on() {
    let mut fixture = Fixture::new(ENABLED | AS_INT);
    let (token, completion) = fixture.inject(5);
    fixture.guest.area = 0x8_0000;
    assert!(fixture.write(Msr::Enable, 0x8_0000 | ENABLED | AS_INT));
    completion.complete();
    assert_eq!(fixture.settle(), [WAKE_ALL, token]);
}

#[test]
fn an_acknowledgement_dequeues_at_once() {
    let mut fixture = Fixture::new(ENABLED | AS_INT);
    let (first, one) = fixture.inject(5);
    let (second, two) = fixture.inject(6);
    one.complete();
    two.complete();
    assert_eq!(fixture.poll(), 1);
    assert_eq!(fixture.guest.take_interrupt(), Some(first));
    assert!(fixture.write(Msr::Acknowledge, 0));
    assert_eq!(fixture.guest.words[1], 0, "bit 0 was clear");
    assert!(fixture.write(Msr::Acknowledge, 1));
    assert_eq!(fixture.guest.take_interrupt(), Some(second));
}

#[test]
fn the_original_delivery_knows_no_acknowledgement() {
    let mut fixture = Fixture::new(ENABLED);
    let (token, completion) = fixture.inject(5);
    completion.complete();
    fixture.guest.take_events();
    assert!(fixture.write(Msr::Acknowledge, 1));
    assert_eq!(fixture.guest.take_events(), [], "no #PF within WRMSR");
    assert_eq!(fixture.settle(), [token]);
}

#[test]
fn the_vector_is_the_one_written_last() {
    let mut fixture = Fixture::disabled(Features::all());
    assert!(fixture.write(Msr::Enable, AREA | ENABLED | AS_INT));
    assert!(fixture.write(Msr::Vector, 0x51));
    assert_eq!(fixture.poll(), 1);
    assert!(
        fixture
            .guest
            .take_events()
            .contains(&Event::Interrupt(0x51))
    );
}
