//! v1 to v4: page-not-present is an SDEI event, page-ready an interrupt.

use super::mock::*;
use lacuna_apf::NotPresent;
use lacuna_apf::arm64::{Answer, ExceptionLevel, Features, Line};

/// The handler has read the words and completes.
fn complete(fixture: &mut Fixture) -> u32 {
    let [reason, token] = std::mem::take(&mut fixture.guest.words);
    assert_eq!(reason, 1);
    assert_eq!(fixture.call(COMPLETE, &[]), Some(Answer::Resumed));
    token
}

#[test]
fn a_guest_gets_two_words_and_an_event() {
    let mut fixture = Fixture::by_sdei(0);
    let before = fixture.guest.context;
    let completion = fixture.notified(5);
    let [reason, token] = fixture.guest.words;
    assert_eq!((reason, token & 0xfff, token >> 28), (1, 3, 0));
    assert_eq!(fixture.guest.context, before, "before its next instruction");
    fixture.enter();
    let taken = fixture.guest.context;
    assert_eq!((taken.pc, taken.pstate), (HANDLER, 0x3c5));
    let event = u64::from(NUMBERS.event);
    assert_eq!(taken.x[..4], [event, ARGUMENT, before.pc, before.pstate]);
    assert_eq!(taken.x[4..], before.x[4..]);
    assert_eq!(complete(&mut fixture), token);
    assert_eq!(fixture.guest.context, before);
    completion.complete();
    assert_eq!(fixture.poll(), 1);
    assert_eq!(fixture.guest.words, [2, token]);
    assert_eq!(fixture.guest.line, Line::High);
    fixture.guest.words = [0; 2];
    assert_eq!(fixture.acknowledge(), 0);
    assert_eq!(fixture.guest.line, Line::Low);
}

#[test]
fn a_vcpu_that_takes_no_events_halts() {
    let obstacles: [fn(&mut Fixture); 9] = [
        |it| it.guest.level = ExceptionLevel::El1,
        |it| assert_eq!(it.x0(MASK, &[]), 1),
        |it| assert_eq!(it.x0(DISABLE, &[u64::from(NUMBERS.event)]), 0),
        |it| assert_eq!(it.x0(UNREGISTER, &[u64::from(NUMBERS.event)]), 0),
        |it| it.guest.words = [1, 0],
        |it| it.guest.words = [0, 1],
        |it| it.guest.words = [3, 0],
        |it| it.guest.memory = Memory::Absent,
        |it| it.guest.memory = Memory::ReadOnly,
    ];
    for (case, hinder) in obstacles.into_iter().enumerate() {
        let mut fixture = Fixture::by_sdei(0);
        hinder(&mut fixture);
        let (words, before) = (fixture.guest.words, fixture.guest.context);
        let completion = fixture.halts(5);
        fixture.enter();
        assert_eq!(fixture.guest.words, words, "case {case}");
        assert_eq!(fixture.guest.context, before, "case {case}");
        (fixture.guest.words, fixture.guest.memory) = ([0; 2], Memory::Ram);
        completion.complete();
        assert_eq!(fixture.poll(), 1);
        assert_eq!(fixture.guest.line, Line::Low, "it was not notified");
    }
    let mut fixture = Fixture::by_sdei(SEND_ALWAYS);
    fixture.guest.level = ExceptionLevel::El1;
    let _ = fixture.notified(5);
}

#[test]
fn no_event_while_a_handler_runs() {
    let mut fixture = Fixture::by_sdei(SEND_ALWAYS);
    let first = fixture.notified(5);
    fixture.enter();
    let token = std::mem::take(&mut fixture.guest.words)[1];
    let second = fixture.halts(6);
    assert_eq!(fixture.call(COMPLETE, &[]), Some(Answer::Resumed));
    assert!(matches!(fixture.fault(6), NotPresent::Halt(None)), "again");
    second.complete();
    first.complete();
    assert_eq!(fixture.settle(), [token]);
}

/// The page arrives before the vCPU has executed an instruction: the guest gets no event for it.
#[test]
fn an_event_that_is_not_taken_is_cancelled() {
    let mut fixture = Fixture::by_sdei(0);
    let before = fixture.guest.context;
    fixture.notified(5).complete();
    assert_eq!(fixture.poll(), 1);
    assert_eq!(fixture.guest.words, [0; 2]);
    fixture.enter();
    assert_eq!(fixture.guest.context, before);
    assert_eq!(fixture.guest.line, Line::Low);
    let stats = fixture.queue.stats();
    assert_eq!((stats.taken, stats.ready, stats.spurious), (1, 0, 1));
    // As after every page-ready, the next fault on the page is synchronous.
    assert!(matches!(fixture.fault(5), NotPresent::Wait));
    let _ = fixture.notified(6);
}

/// `poll` checks only the page that arrived first: another one waits for the words.
#[test]
fn an_untaken_event_keeps_other_pages_waiting() {
    let mut fixture = Fixture::by_sdei(0);
    let first = fixture.notified(5);
    fixture.enter();
    let one = complete(&mut fixture);
    let second = fixture.notified(6);
    first.complete();
    second.complete();
    assert_eq!(fixture.poll(), 0, "page 5 cannot be delivered now");
    fixture.enter();
    let two = complete(&mut fixture);
    assert_eq!(fixture.settle(), [one, two]);
}

/// If the guest has written to the words meanwhile, its values stay.
#[test]
fn a_cancelled_event_leaves_foreign_words_alone() {
    for words in [[1, 9], [3, 0], [0, 0]] {
        let mut fixture = Fixture::by_sdei(0);
        let completion = fixture.notified(5);
        fixture.guest.words = words;
        completion.complete();
        assert_eq!(fixture.poll(), 1);
        assert_eq!(fixture.guest.words, words);
        let before = fixture.guest.context;
        fixture.enter();
        assert_eq!(fixture.guest.context, before, "no event");
    }
}

#[test]
fn a_guest_that_never_acknowledges_gets_no_more_pages_and_harms_nobody() {
    let mut fixture = Fixture::by_sdei(0);
    let completions = [5, 6, 7].map(|page| {
        let completion = fixture.notified(page);
        fixture.enter();
        complete(&mut fixture);
        completion
    });
    for completion in completions {
        completion.complete();
    }
    assert_eq!(fixture.poll(), 1);
    // It reads the words, and does not acknowledge.
    fixture.guest.words = [0; 2];
    assert_eq!(fixture.poll(), 0);
    assert!(fixture.queue.has_arrivals());
    assert_eq!(fixture.guest.line, Line::High);
    // More faults follow, until the queue is full.
    for page in 10..71 {
        let _pages = fixture.notified(page);
        fixture.enter();
        complete(&mut fixture);
    }
    assert_eq!(fixture.acknowledge(), 0);
    assert_eq!(fixture.guest.line, Line::High, "the next one");
    assert_ne!(fixture.guest.words, [0; 2]);
}

#[test]
fn an_acknowledgement_of_nothing_succeeds() {
    let mut fixture = Fixture::new();
    assert_eq!(fixture.acknowledge(), 0, "disabled");
    let mut fixture = Fixture::by_sdei(0);
    assert_eq!(fixture.acknowledge(), 0);
    assert_eq!(fixture.guest.line, Line::Low);
    // While the words are unread, an acknowledgement does not free them.
    let completions = [5, 6].map(|page| {
        let completion = fixture.notified(page);
        fixture.enter();
        complete(&mut fixture);
        completion
    });
    for completion in completions {
        completion.complete();
    }
    assert_eq!(fixture.poll(), 1);
    let words = fixture.guest.words;
    assert_eq!(fixture.acknowledge(), 0);
    assert_eq!(
        (fixture.guest.line, fixture.guest.words),
        (Line::Low, words)
    );
    fixture.guest.words = [0; 2];
    assert_eq!(fixture.poll(), 1);
}

#[test]
fn disabling_takes_back_what_the_guest_has_not_seen() {
    let mut fixture = Fixture::by_sdei(0);
    let untaken = fixture.notified(5);
    assert_eq!(fixture.switch_sdei(0), 0);
    assert_eq!(fixture.guest.words, [0; 2]);
    let before = fixture.guest.context;
    fixture.enter();
    assert_eq!(fixture.guest.context, before);
    untaken.complete();
    assert_eq!(fixture.poll(), 0);

    let mut fixture = Fixture::by_sdei(0);
    let completion = fixture.notified(5);
    fixture.enter();
    complete(&mut fixture);
    completion.complete();
    assert_eq!(fixture.poll(), 1);
    assert_eq!(fixture.switch_sdei(0), 0);
    assert_eq!(fixture.guest.line, Line::Low);
    assert_eq!(fixture.acknowledge(), 0);
    fixture.guest.words = [0; 2];
    assert_eq!(fixture.switch_sdei(BLOCK | ENABLED), 0);
    assert_eq!(fixture.settle(), [WAKE_ALL]);
}

#[test]
fn interrupts_wait_in_the_controller_not_here() {
    let mut fixture = Fixture::by_sdei(0);
    let completion = fixture.notified(5);
    fixture.enter();
    complete(&mut fixture);
    completion.complete();
    (fixture.guest.level, fixture.guest.interruptible) = (ExceptionLevel::El1, false);
    assert_eq!(fixture.x0(MASK, &[]), 1);
    assert_eq!(fixture.poll(), 1);
    assert_eq!(fixture.guest.line, Line::High);
}

#[test]
fn an_instruction_that_waits_for_a_device_is_not_interrupted() {
    let mut fixture = Fixture::by_sdei(0);
    let _completion = fixture.notified(5);
    let before = fixture.guest.context;
    fixture.guest.interruptible = false;
    fixture.enter();
    assert_eq!(fixture.guest.context, before);
    fixture.guest.interruptible = true;
    fixture.enter();
    assert_eq!(fixture.guest.context.pc, HANDLER);
}

#[test]
fn a_guest_without_the_form_enters_as_if_nothing_were_there() {
    let mut fixture = Fixture::offered(Features::ABORT, None);
    let before = fixture.guest.context;
    fixture.enter();
    assert_eq!(fixture.guest.context, before);
}
