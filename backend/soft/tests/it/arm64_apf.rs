//! Asynchronous page faults of AArch64 guests end to end: Lacuna's guest kernel on the soft
//! backend, with both published forms.

use crate::common;

use common::apf::{self, total};
use common::{builder_for, pass, run};
use lacuna_guest::status::Status;
use lacuna_machine::{Arch, Ending};
use lacuna_skip::test;
use lacuna_soft::{ApfStats, RunSummary, VmBuilder};

/// The two forms that a guest may choose: data aborts (RFCv2); SDEI event and interrupt (v1 to v4).
const FORMS: [&str; 2] = ["apf=abort", "apf=sdei"];

fn offered(memory: u64, resident: u64, vcpus: usize, words: &str) -> VmBuilder {
    apf::offered(builder_for(Arch::Arm64, (memory, resident), vcpus, words))
}

fn seeded(seed: u64, vcpus: usize, name: &str, words: &str) -> ApfStats {
    apf::seeded(seed, offered(16, 4, vcpus, words), name).1
}

/// The guest has seen the events that the host counts: its threads have slept and were woken. Only
/// the host counts a page-not-present that was taken back, or that a vCPU had not handled at the
/// machine's end.
fn assert_seen(outcome: &RunSummary, at_least: u64, why: &str) {
    let counted = total(&outcome.apf);
    let why = format!("{why}: {counted:?}");
    assert!(
        counted.taken >= at_least && counted.ready >= at_least / 2,
        "{why}"
    );
    let seen = Status::parse(outcome.status.as_ref().expect("a status page"))
        .unwrap()
        .apf;
    let why = format!("{why}: the guest: {seen:?}");
    let close = |seen: u32, counted: u64, fewer: u64| {
        let seen = u64::from(seen);
        seen <= counted && seen + fewer + 2 * outcome.apf.len() as u64 >= counted
    };
    assert!(
        close(seen.not_present, counted.taken, counted.spurious),
        "{why}"
    );
    assert!(close(seen.ready, counted.ready, 0), "{why}");
    assert_eq!(seen.lost, 0, "{why}");
}

#[test]
fn verify_loses_nothing() {
    for form in FORMS {
        for vcpus in [1, 2, 4] {
            let builder = offered(24, 6, vcpus, &format!("rounds=1 {form}"));
            let (outcome, text) = pass(&builder, "verify");
            assert_seen(&outcome, 200, &text);
        }
    }
}

#[test]
fn the_workloads_take_faults() {
    for (name, memory, words, at_least) in [
        ("membound", 16, "rounds=1", 200),
        ("zipf", 16, "accesses=600", 200),
        ("churn", 16, "transactions=600", 200),
        ("gaps", 16, "seconds=1", 200),
        ("reads", 24, "reads=500", 200),
        ("maxpage", 16, "iters=200", 0),
        ("cpubench", 80, "test=mem64m iters=2000", 0),
    ] {
        for form in FORMS {
            for vcpus in [1, 4] {
                let builder = offered(memory, memory / 4, vcpus, &format!("{words} {form}"));
                let (outcome, text) = pass(&builder, name);
                assert_seen(
                    &outcome,
                    at_least,
                    &format!("{name} {form} {vcpus}: {text}"),
                );
            }
        }
    }
}

#[test]
fn storms_of_enabling_and_disabling() {
    for form in FORMS {
        for (seed, vcpus) in [(1, 1), (2, 2), (3, 4), (4, 2)] {
            let arguments = format!("accesses=3000 switches=40 every_us=500 {form}");
            let stats = seeded(seed, vcpus, "apfstorm", &arguments);
            assert!(stats.taken > 0 && stats.cancelled > 0, "{stats:?}");
        }
        let arguments = format!("accesses=3000 switches=40 every_us=500 {form}");
        pass(&offered(16, 4, 4, &arguments), "apfstorm");
    }
}

/// A program breaks each rule in both forms, beside a kernel that uses either form. If a program
/// enables aborts while its kernel uses the other form, the kernel crashes.
#[test]
fn hostile_guests_do_no_harm() {
    for (form, kernel) in FORMS.into_iter().enumerate() {
        for (case, broken) in (0..10).flat_map(|case| [(case, 1), (case, 2)]) {
            let arguments =
                format!("case={case} form={broken} accesses=5000 limit_ms=500 {kernel}");
            let builder = offered(16, 4, 2 + 2 * (case & 1), &arguments);
            let (outcome, text) = run(&builder, "apfhostile");
            let ending = outcome.ending;
            let good = match broken > form {
                true => matches!(ending, Ending::Exited(0)),
                false => !matches!(ending, Ending::Failed(_)),
            };
            assert!(good, "{arguments}: {ending:?}\n{text}");
        }
    }
}

/// With SEND_ALWAYS, the kernel gets page-not-present for its own fault too, so there is no
/// artificial halt. The kernel cannot switch away from itself: it halts in WFI until that page is
/// ready.
#[test]
fn a_kernel_that_cannot_schedule_halts_until_its_page_is_ready() {
    let halts = |always: u32| {
        let arguments = format!("transactions=300 apf=abort apf_always={always}");
        let stats = seeded(1, 2, "churn", &arguments);
        assert_eq!(stats.taken, stats.ready, "{stats:?}");
        stats.halted
    };
    let (programs, all) = (halts(0), halts(1));
    assert!(all + 10 < programs, "{all} and {programs}");
}
