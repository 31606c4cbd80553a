//! Every call, and every refusal.

use super::mock::*;
use lacuna_addr::Access;
use lacuna_apf::arm64::{Answer, Features};

#[test]
fn a_guest_finds_the_hypervisor_and_its_services() {
    let mut fixture = Fixture::new();
    let uid = fixture.values(UID, &[]);
    assert_eq!(uid, [0xb66f_b428, 0xe911_c52e, 0x564b_caa9, 0x743a_004d]);
    for (features, bitmap) in [
        (Features::empty(), 0b001),
        (Features::ABORT, 0b011),
        (Features::SDEI, 0b101),
        (Features::all(), 0b111),
    ] {
        let mut fixture = Fixture::offered(features, Some(NUMBERS));
        assert_eq!(fixture.values(SERVICES, &[]), [bitmap, 0, 0, 0]);
    }
}

#[test]
fn unknown_calls_are_refused_or_left_to_others() {
    let mut fixture = Fixture::new();
    for function in [0x8600_0003, 0x8600_007f, 0x8600_ff03, 0xc600_0001] {
        assert_eq!(fixture.x0(function, &[]), NOT_SUPPORTED, "{function:#x}");
    }
    for function in [0x8400_0000, 0x8000_0000, 0xc400_0003, 0, u32::MAX] {
        assert_eq!(fixture.call(function, &[]), None, "{function:#x}");
    }
    for number in [6, 7, 0x8000_0000, u32::MAX] {
        assert_eq!(fixture.x0(SDEI, &[u64::from(number)]), NOT_SUPPORTED);
    }
    for number in [0xd, 0xe, 0xf, 0x10, 0x13, 0x1f] {
        assert_eq!(fixture.x0(event(number), &[]), NOT_SUPPORTED, "{number:#x}");
    }
}

#[test]
fn a_form_that_is_not_offered_does_not_exist() {
    for features in [Features::empty(), Features::SDEI] {
        let mut fixture = Fixture::offered(features, Some(NUMBERS));
        assert_eq!(fixture.switch_abort(BLOCK | ENABLED), NOT_SUPPORTED);
        assert_eq!(fixture.switch_abort(0), NOT_SUPPORTED);
    }
    for features in [Features::empty(), Features::ABORT] {
        let mut fixture = Fixture::offered(features, Some(NUMBERS));
        for function in 0..8 {
            assert_eq!(fixture.x0(SDEI, &[function]), NOT_SUPPORTED);
        }
        for number in 0..32 {
            assert_eq!(fixture.x0(event(number), &[]), NOT_SUPPORTED);
        }
    }
}

#[test]
fn the_second_form_says_its_version_and_numbers() {
    let mut fixture = Fixture::new();
    assert_eq!(fixture.values(SDEI, &[0]), [0, 0x01_0000, 0, 0]);
    assert_eq!(fixture.values(SDEI, &[1]), [0, 64, 0, 0]);
    assert_eq!(fixture.values(SDEI, &[2]), [0, 0x4040_0001, 0, 0]);
    assert_eq!(fixture.values(SDEI, &[3]), [0, 17, 0, 0]);
    // Only the low halves of the arguments of a 32-bit call count.
    assert_eq!(fixture.values(SDEI, &[1 << 32]), [0, 0x01_0000, 0, 0]);
}

#[test]
fn without_numbers_the_second_form_cannot_be_enabled() {
    let mut fixture = Fixture::offered(Features::all(), None);
    assert_eq!(fixture.values(SDEI, &[2]), [0; 4]);
    assert_eq!(fixture.values(SDEI, &[3]), [0; 4]);
    assert_eq!(fixture.switch_sdei(BLOCK | ENABLED), INVALID);
    assert_eq!(fixture.switch_sdei(0), NOT_REQUIRED);
    assert_eq!(fixture.acknowledge(), 0);
    assert_eq!(fixture.switch_abort(BLOCK | ENABLED), 0, "it needs none");
}

/// Enables or disables one of the forms.
type Switch = fn(&mut Fixture, u64) -> i64;
const SWITCHES: [Switch; 2] = [Fixture::switch_abort, Fixture::switch_sdei];

#[test]
fn enabling_and_disabling_twice_is_not_required() {
    for switch in SWITCHES {
        let mut fixture = Fixture::new();
        assert_eq!(switch(&mut fixture, BLOCK), NOT_REQUIRED, "it is off");
        assert_eq!(switch(&mut fixture, BLOCK | ENABLED), 0);
        assert_eq!(switch(&mut fixture, BLOCK | ENABLED), NOT_REQUIRED);
        let elsewhere = 0x9_0000 | ENABLED | SEND_ALWAYS;
        assert_eq!(switch(&mut fixture, elsewhere), NOT_REQUIRED);
        assert_eq!(fixture.queue.shared_page(), Some(gfn(BLOCK >> 12)));
        assert_eq!(switch(&mut fixture, 0), 0);
        assert_eq!(switch(&mut fixture, 0), NOT_REQUIRED);
        assert_eq!(fixture.queue.shared_page(), None);
        assert_eq!(switch(&mut fixture, BLOCK | ENABLED), 0, "and on again");
    }
}

#[test]
fn a_vcpu_has_one_form_at_a_time() {
    for (one, other) in [(0, 1), (1, 0)] {
        let mut fixture = Fixture::new();
        assert_eq!(SWITCHES[one](&mut fixture, BLOCK | ENABLED), 0);
        let refused = SWITCHES[other](&mut fixture, BLOCK | ENABLED);
        assert_eq!(refused, NOT_SUPPORTED);
        assert_eq!(SWITCHES[other](&mut fixture, 0), NOT_REQUIRED);
        assert_eq!(SWITCHES[one](&mut fixture, 0), 0, "still on");
        assert_eq!(SWITCHES[other](&mut fixture, BLOCK | ENABLED), 0);
    }
}

#[test]
fn the_block_must_be_memory_when_it_is_enabled() {
    for switch in SWITCHES {
        let mut fixture = Fixture::new();
        for (block, flags) in [
            (0x9_0000, 0),
            // Beyond the guest's addresses, up to the last bit of the field.
            (1 << 48 | BLOCK, 0),
            (1 << 55, SEND_ALWAYS),
        ] {
            let refused = switch(&mut fixture, block | flags | ENABLED);
            assert_eq!(refused, NOT_SUPPORTED, "{block:#x}");
            assert_eq!(switch(&mut fixture, 0), NOT_REQUIRED, "still off");
        }
        fixture.guest.memory = Memory::Absent;
        assert_eq!(switch(&mut fixture, BLOCK | ENABLED), NOT_SUPPORTED);
        assert_eq!(switch(&mut fixture, 0x9_0000), NOT_REQUIRED, "unused");
        fixture.guest.memory = Memory::ReadOnly;
        assert_eq!(switch(&mut fixture, BLOCK | ENABLED), 0, "only read");
    }
}

/// Bits 5:0 are flags. A block that is not aligned to 64 bytes cannot be named: the published forms
/// ignore the bits that are no flags.
#[test]
fn a_misaligned_block_is_the_aligned_one() {
    for switch in SWITCHES {
        let mut fixture = Fixture::new();
        assert_eq!(switch(&mut fixture, BLOCK | 0x3c | ENABLED), 0);
        assert_eq!(fixture.settle(), [WAKE_ALL], "the words are at the block");
    }
    let mut fixture = Fixture::new();
    // The last block of a page, so that both words are within it.
    fixture.guest.block = 0x7_0fc0;
    assert_eq!(fixture.switch_sdei(0x7_0fff & !SEND_ALWAYS), 0);
}

#[test]
fn rfcv2_refuses_what_is_neither_switch_nor_range() {
    let mut fixture = Fixture::new();
    let mut argument = |argument: u64| fixture.x0(ABORT, &[argument & 0xffff_ffff, argument >> 32]);
    for function in (0..=0xff_u64).filter(|it| ![0x80, 0x40].contains(it)) {
        assert_eq!(argument(function << 56 | BLOCK | ENABLED), NOT_SUPPORTED);
    }
    assert_eq!(argument(0x40 << 56 | 0x1000), 0);
    assert_eq!(argument(0x80 << 56 | BLOCK | ENABLED), 0);
    assert_eq!(
        argument(0x40 << 56 | 0x2000),
        NOT_SUPPORTED,
        "while enabled"
    );
}

#[test]
fn the_page_that_a_call_accesses_is_known_before() {
    let page = |fixture: &Fixture, function, args| fixture.queue.page_accessed_by(function, &args);
    let (low, high) = (BLOCK | ENABLED, 0x8000_0000);
    let (read, written) = [Access::Read, Access::Write]
        .map(|it| Some((gfn(0x70), it)))
        .into();
    let off = Fixture::new();
    for (function, args, accessed) in [
        (ABORT, [low, high, 0, 0, 0], read),
        (ABORT, [BLOCK, high, 0, 0, 0], None),
        (ABORT, [low, 1 << 30, 0, 0, 0], None),
        (ABORT, [low, 0, 0, 0, 0], None),
        (SDEI, [4, low, 0, 0, 0], read),
        (SDEI, [4, 0, 0, 0, 0], None),
        (SDEI, [5, low, 0, 0, 0], None),
        (SDEI, [4, low, 1 << 16, 0, 0], None),
        (UID, [low; 5], None),
    ] {
        assert_eq!(
            page(&off, function, args),
            accessed,
            "{function:#x} {args:x?}"
        );
    }
    let on = Fixture::by_sdei(0);
    for (function, args, accessed) in [
        (SDEI, [5, 0, 0, 0, 0], written),
        (SDEI, [4, 0, 0, 0, 0], written),
        (SDEI, [0; 5], None),
        (event(5), [0; 5], None),
        (UID, [0; 5], None),
    ] {
        assert_eq!(
            page(&on, function, args),
            accessed,
            "{function:#x} {args:x?}"
        );
    }
}

/// No call of a guest causes a panic, and every call of these services gets an answer.
#[test]
fn no_call_is_left_without_an_answer() {
    let values = [0, 1, 4, 5, 63, 64, BLOCK | ENABLED, 1 << 31, u64::MAX];
    let functions = (0..32).map(event).chain([UID, SERVICES, ABORT, SDEI]);
    for function in functions {
        for a in values {
            for b in values {
                let mut fixture = Fixture::by_sdei(0);
                let answer = fixture.call(function, &[a, b, a, b, a]);
                assert!(matches!(answer, Some(Answer::Values(_))), "{function:#x}");
            }
        }
    }
}
