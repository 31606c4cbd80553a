//! Which rules find which mistake of a daemon.

use crate::daemon::{Mistake, command, folder};
use lacuna_pager_test::{Daemons, Outcome, Reports, Rule, Target, all};
use lacuna_skip::test;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

/// A limit that a right daemon never reaches.
const LONG: Duration = Duration::from_secs(120);

/// The three daemons.
fn daemons(
    folder: &Path,
    timeout: Duration,
    mistake: impl Fn(Target) -> Option<Mistake>,
) -> Daemons {
    let kinds = [
        (Target::SaveDaemon, "save"),
        (Target::RestoreDaemon, "restore"),
        (Target::OnDemandDaemon, "demand"),
    ];
    let daemon = |(target, name)| Some((target, command(name, mistake(target)?, folder)));
    Daemons::new(kinds.into_iter().filter_map(daemon).collect(), timeout).unwrap()
}

fn rule(name: &str) -> &'static Rule {
    all().find(|rule| rule.name == name).unwrap()
}

fn rules_of(target: Target) -> impl Iterator<Item = &'static Rule> {
    all().filter(move |rule| rule.target() == target)
}

const TARGETS: [Target; 3] = [
    Target::SaveDaemon,
    Target::RestoreDaemon,
    Target::OnDemandDaemon,
];

#[test]
fn right_daemons_pass_each_rule() {
    let folder = folder();
    let daemons = daemons(folder.path(), LONG, |_| Some(Mistake::None));
    let rules = TARGETS.into_iter().flat_map(rules_of);
    let reports = Reports(rules.map(|rule| daemons.run(rule)).collect());
    for report in &reports.0 {
        print!("{:?} {report}", report.took);
    }
    assert!(
        reports
            .0
            .iter()
            .all(|report| report.outcome == Outcome::Pass)
    );
}

/// A daemon that ends after each VM is started again.
#[test]
fn a_daemon_for_one_vm_passes_each_rule() {
    let folder = folder();
    let daemons = daemons(folder.path(), LONG, |target| match target {
        Target::SaveDaemon => Some(Mistake::ServesOneVm),
        _ => Some(Mistake::None),
    });
    for rule in rules_of(Target::SaveDaemon) {
        let report = daemons.run(rule);
        assert_eq!(report.outcome, Outcome::Pass, "{report}");
    }
}

/// A mistake, the rules that it breaks, and others that need luck to find it.
type Row = (Mistake, &'static [&'static str], &'static [&'static str]);

const SAVE: &[Row] = &[
    (Mistake::KnowsNoComplete, &["save-running-vm"], &[]),
    (
        Mistake::NeedsSlotsInOrder,
        &["save-slots-in-any-order"],
        &[],
    ),
    (Mistake::ReadsOnce, &["save-in-pieces"], &[]),
    (
        Mistake::ReadsTheVersionFromAllBytes,
        &["save-reserved-bytes"],
        &[],
    ),
    (
        Mistake::IgnoresTheOffset,
        &[
            "save-running-vm",
            "save-slots-in-any-order",
            "save-in-pieces",
            "save-content",
            "save-last-answer",
            "save-next-vm",
        ],
        &[],
    ),
    (
        Mistake::AnswersBeforeItReads,
        &["save-last-answer", "save-short-memory"],
        &[
            "save-running-vm",
            "save-slots-in-any-order",
            "save-in-pieces",
            "save-content",
            "save-next-vm",
        ],
    ),
    (
        Mistake::KeepsTheFirstVm,
        &["save-next-vm", "save-short-memory"],
        &[],
    ),
    (Mistake::IgnoresTheVersion, &["save-wrong-version"], &[]),
    (
        Mistake::AcknowledgesUnknownCommands,
        &["save-unknown-command"],
        &[],
    ),
    (Mistake::KeepsNoOrder, &["save-out-of-order"], &[]),
    (Mistake::AcceptsNoDescriptor, &["save-no-descriptor"], &[]),
    (
        Mistake::TakesTheFirstDescriptor,
        &["save-two-descriptors"],
        &[],
    ),
    (Mistake::BelievesInFiles, &["save-wrong-descriptor"], &[]),
    (Mistake::TakesTheFirstOfASlot, &["save-slot-twice"], &[]),
    (Mistake::AcceptsMissingSlots, &["save-slot-missing"], &[]),
    (Mistake::IgnoresUnknownSlots, &["save-slot-unknown"], &[]),
    (
        Mistake::FillsShortMemoryWithZeros,
        &["save-short-memory"],
        &[],
    ),
    (Mistake::AllocatesAnyLength, &["save-giant-length"], &[]),
    (
        Mistake::IgnoresTheLengthOfMemoryFd,
        &["save-wrong-length"],
        &[],
    ),
    (Mistake::TakesAnyConfig, &["save-wrong-config"], &[]),
    (Mistake::DiesOfHalfARequest, &["save-half-request"], &[]),
    (Mistake::DiesOfADeadVmm, &["save-dead-vmm"], &[]),
    (Mistake::IgnoresAbandon, &["save-abandon"], &[]),
];

const RESTORE: &[Row] = &[
    (Mistake::SendsStateBeforeConfig, &["restore-order"], &[]),
    (Mistake::SendsASlotTwice, &["restore-order"], &[]),
    (Mistake::SendsVersion1, &["restore-version"], &[]),
    (Mistake::SendsTwoDescriptors, &["restore-descriptors"], &[]),
    (
        Mistake::SendsTheDescriptorWithTheHeader,
        &[
            "restore-descriptors",
            "restore-memory",
            "restore-own-memory",
        ],
        &[],
    ),
    (
        Mistake::SendsWithoutWaiting,
        &["restore-waits", "restore-refused"],
        &[],
    ),
    (
        Mistake::ReadsAnAnswerOnce,
        &["restore-answer-in-pieces"],
        &[],
    ),
    (Mistake::FillsAfterState, &["restore-memory"], &[]),
    (
        Mistake::RestoresWithoutOffset,
        &["restore-memory", "restore-own-memory"],
        &[],
    ),
    (Mistake::ChangesTheConfig, &["restore-config"], &[]),
    (Mistake::CutsTheState, &["restore-state"], &[]),
    (Mistake::SendsTheSnapshotFile, &["restore-own-memory"], &[]),
    (Mistake::SendsReadOnlyMemory, &["restore-own-memory"], &[]),
    (
        Mistake::NeverEnds,
        &["restore-ends", "restore-answer-in-pieces"],
        &[],
    ),
    (
        Mistake::IgnoresTheStatus,
        &["restore-refused", "restore-unknown-status"],
        &[],
    ),
    (Mistake::KnowsStatus2Alone, &["restore-unknown-status"], &[]),
    (Mistake::EndsWellWithoutTheVmm, &["restore-dead-vmm"], &[]),
];

const CONNECTED: &[&str] = &[
    "demand-connection",
    "demand-before-answer",
    "demand-any-order",
    "demand-last-page",
    "demand-in-flight",
    "demand-huge-page",
    "demand-in-pieces",
    "demand-twice",
    "demand-keeps-writes",
    "demand-beyond",
    "demand-wrong-request",
    "demand-ends",
    "demand-dead-vmm",
];

const DEMAND: &[Row] = &[
    (Mistake::SendsStateBeforeConfig, &["demand-order"], &[]),
    (Mistake::ConnectsAfterState, CONNECTED, &[]),
    (Mistake::AnnouncesRole1, CONNECTED, &[]),
    (Mistake::ServesAfterComplete, &["demand-before-answer"], &[]),
    (
        Mistake::AnswersInline,
        &[
            "demand-before-answer",
            "demand-any-order",
            "demand-last-page",
            "demand-in-flight",
            "demand-huge-page",
            "demand-in-pieces",
            "demand-twice",
            "demand-keeps-writes",
            "demand-ends",
        ],
        &[],
    ),
    (
        Mistake::SkipsAPage,
        &[
            "demand-any-order",
            "demand-in-flight",
            "demand-huge-page",
            "demand-keeps-writes",
        ],
        &[],
    ),
    (
        Mistake::RefusesTheLastPage,
        &[
            "demand-any-order",
            "demand-last-page",
            "demand-in-flight",
            "demand-huge-page",
            "demand-keeps-writes",
        ],
        &[],
    ),
    (Mistake::ReadsOneOfABatch, &["demand-in-flight"], &[]),
    (Mistake::FillsOnePage, &["demand-huge-page"], &[]),
    (Mistake::ReadsARequestOnce, &["demand-in-pieces"], &[]),
    (Mistake::FillsAgain, &["demand-twice"], &[]),
    (Mistake::FillsAllAtTheEnd, &["demand-keeps-writes"], &[]),
    (Mistake::AcknowledgesAnyRange, &["demand-beyond"], &[]),
    (Mistake::DiesOfARange, &["demand-beyond"], &[]),
    (Mistake::TakesAnyRequest, &["demand-wrong-request"], &[]),
    (
        Mistake::NeverEnds,
        &["demand-ends", "demand-keeps-writes"],
        &[],
    ),
    (Mistake::EndsWellWithoutTheVmm, &["demand-dead-vmm"], &[]),
];

/// Saves the VM that daemons restore.
fn save(folder: &Path) {
    let save = |target| (target == Target::SaveDaemon).then_some(Mistake::ServesOneVm);
    let report = daemons(folder, LONG, save).run(rule("save-answers"));
    assert_eq!(report.outcome, Outcome::Pass, "{report}");
}

/// A limit that finds a daemon that waits for ever.
const SHORT: Duration = Duration::from_millis(500);

/// The part of the rules that a mistake does not break, and that are checked with it.
const PART: usize = 3;

/// Each mistake, against its rules and a part of the others: each rule meets a part of the mistakes
/// that it must not find. On a busy machine, a right daemon may make no
/// progress within the short limit: so a failure that is not expected is checked again, with a long
/// one.
fn check_table(target: Target, table: &[Row]) {
    const THREADS: usize = 8;
    let rows = Mutex::new(table.iter().enumerate());
    let wrong = Mutex::new(Vec::new());
    let next = || rows.lock().unwrap().next();
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                while let Some((row, (mistake, expected, lucky))) = next() {
                    let folder = folder();
                    let within = |limit| {
                        daemons(folder.path(), limit, |kind| match (kind, target) {
                            _ if kind == target => Some(*mistake),
                            // For the comparison of what was saved.
                            (Target::RestoreDaemon, Target::SaveDaemon) => Some(Mistake::None),
                            _ => None,
                        })
                    };
                    if target != Target::SaveDaemon {
                        save(folder.path());
                    }
                    let (short, long) = (within(SHORT), within(LONG));
                    for (column, rule) in rules_of(target).enumerate() {
                        let is_expected = expected.contains(&rule.name);
                        if !is_expected && !(row + column).is_multiple_of(PART) {
                            continue;
                        }
                        let is_lucky = lucky.contains(&rule.name);
                        let mut report = short.run(rule);
                        if report.is_failed() && !is_expected && !is_lucky {
                            report = long.run(rule);
                        }
                        if report.is_failed() != is_expected && !is_lucky {
                            wrong.lock().unwrap().push(format!("{mistake:?}: {report}"));
                        }
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn each_mistake_of_a_save_daemon_fails_its_rules() {
    check_table(Target::SaveDaemon, SAVE);
}

#[test]
fn each_mistake_of_a_restore_daemon_fails_its_rules() {
    check_table(Target::RestoreDaemon, RESTORE);
}

#[test]
fn each_mistake_of_an_on_demand_daemon_fails_its_rules() {
    check_table(Target::OnDemandDaemon, DEMAND);
}

/// Each rule has a mistake that it finds.
#[test]
fn each_rule_finds_a_mistake() {
    let rows = [SAVE, RESTORE, DEMAND].concat();
    let found: BTreeSet<&str> = rows.iter().flat_map(|row| row.1).copied().collect();
    let rules = TARGETS.into_iter().flat_map(rules_of);
    let unfound: Vec<&str> = rules
        .map(|rule| rule.name)
        .filter(|name| !found.contains(name))
        .collect();
    // Without right answers, no other rule passes.
    assert_eq!(unfound, ["save-answers"]);
    let folder = folder();
    let mistake = |target| (target == Target::SaveDaemon).then_some(Mistake::AnswersWithALength);
    let report = daemons(folder.path(), LONG, mistake).run(rule("save-answers"));
    assert!(report.is_failed(), "{report}");
}

/// A rule without its daemon, and a command without a socket.
#[test]
fn a_missing_daemon_skips_its_rules() {
    let folder = folder();
    let save = command("save", Mistake::None, folder.path());
    let daemons = Daemons::new(vec![(Target::SaveDaemon, save)], LONG).unwrap();
    let run = |name: &str| daemons.run(rule(name));
    assert_eq!(run("save-running-vm").outcome, Outcome::Pass);
    for (name, option) in [
        ("save-last-answer", "--restore-daemon"),
        ("demand-ends", "--on-demand-daemon"),
        ("content-random", "--socket"),
    ] {
        let reason = format!("it needs {option}");
        assert_eq!(run(name).outcome, Outcome::Skipped { reason });
    }
    let refused = Daemons::new(vec![(Target::SaveDaemon, "true".into())], LONG).unwrap_err();
    assert!(
        refused.starts_with("--save-daemon needs {socket}"),
        "{refused}"
    );
    assert!(fs::exists(folder.path().join("config")).unwrap());
}
