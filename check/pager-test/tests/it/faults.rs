//! Which rules find which mistake.

use crate::handler::{Fault, Handler, Memory};
use lacuna_pager_test::{Image, Outcome, Report, Rule, Suite, all, check_one};
use lacuna_skip::test;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;
use std::{env, fs, thread};
use tempfile::TempDir;

/// The suite's text for the process of a rule.
const ORDER: &str = "LACUNA_PAGER_TEST_ORDER";

/// The process of a rule; without its variable this is no test.
#[test]
fn rule_process() {
    if let Some(order) = env::var_os(ORDER) {
        check_one(order.to_str().unwrap()).unwrap();
    }
}

/// A folder with a memory file.
struct Fixture {
    folder: TempDir,
    memory: Memory,
}

impl Fixture {
    fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("memory");
        Image::make(&path, 4 << 20).unwrap();
        let bytes = fs::read(path).unwrap();
        let memory = Memory::new(bytes.as_chunks().0.to_vec());
        Self { folder, memory }
    }

    fn suite(&self, socket: &Path) -> Suite {
        Suite {
            socket: socket.into(),
            memory: self.folder.path().join("memory"),
            timeout: Duration::from_secs(2),
            restart: None,
            again: Box::new(|order| {
                let mut command = Command::new(env::current_exe().unwrap());
                command.args(["--exact", "faults::rule_process", "--nocapture"]);
                command.env(ORDER, order);
                command
            }),
        }
    }

    /// Checks one rule of a new handler.
    fn check(&self, rule: &'static Rule, fault: Fault) -> Report {
        let socket = self.folder.path().join(format!("{}{fault:?}", rule.name));
        let _handler = Handler::start(&socket, &self.memory, fault);
        self.suite(&socket).run(rule).unwrap()
    }
}

fn is_skipped(report: &Report) -> bool {
    matches!(report.outcome, Outcome::Skipped { .. })
}

/// All rules, one after the other, of one handler.
#[test]
fn a_right_handler_passes_each_rule() {
    let fixture = Fixture::new();
    let socket = fixture.folder.path().join("socket");
    let suite = fixture.suite(&socket);
    if let Err(refused) = suite.check_host() {
        lacuna_skip::skip_test(refused);
    }
    let _handler = Handler::start(&socket, &fixture.memory, Fault::None);
    let reports: Vec<Report> = all().map(|rule| suite.run(rule).unwrap()).collect();
    for report in &reports {
        print!("{:?} {report}", report.took);
    }
    assert!(!reports.iter().any(Report::is_failed));
    for report in reports.iter().filter(|report| is_skipped(report)) {
        lacuna_skip::skip(report);
    }
}

/// A mistake, the rules that it breaks, and others that need luck to find it.
type Row = (Fault, &'static [&'static str], &'static [&'static str]);

const FAULTS: &[Row] = &[
    (
        Fault::TakesTheFirstRegion,
        &["two-regions", "removed-region"],
        &[],
    ),
    (
        Fault::IgnoresTheOffset,
        &["two-regions", "removed-region", "removed-across-regions"],
        &[],
    ),
    (
        Fault::AnswersOnePageWrongly,
        &[
            "content-in-order",
            "content-random",
            "content-threads",
            "removal-without-fault",
        ],
        &[],
    ),
    (
        Fault::ReadsAheadAndEndsAtAPresentPage,
        &[
            "content-random",
            "content-threads",
            "filled-by-another",
            "two-regions",
            "removed-region",
            "removed-across-regions",
            "many-removals",
            "huge-page-neighbours",
        ],
        &["killed-vm", "removal-storm"],
    ),
    (
        Fault::AnswersTheFirstEventOfABatch,
        &["content-threads", "filled-by-another", "many-removals"],
        &["removal-storm", "killed-vm"],
    ),
    (Fault::AnswersAWriteWithZeros, &["first-access-writes"], &[]),
    (Fault::WakesNoThreadAtEexist, &["filled-by-another"], &[]),
    (
        Fault::EndsAtTheSecondFaultOfAPage,
        &["one-page-many-threads"],
        &["killed-vm"],
    ),
    (
        Fault::IgnoresRemovals,
        &[
            "removed-reads-zeros",
            "removed-never-read",
            "removed-region",
            "removed-across-regions",
            "removal-without-fault",
            "fault-before-removal",
            "many-removals",
            "removal-storm",
            "huge-page-neighbours",
            "two-vms-at-once",
        ],
        &[],
    ),
    (
        Fault::RemovesAPageOnce,
        &["removed-reads-zeros", "removal-storm"],
        &[],
    ),
    (
        Fault::RemovesFilledPagesAlone,
        &[
            "removed-never-read",
            "removed-region",
            "removed-across-regions",
            "fault-before-removal",
            "many-removals",
            "removal-storm",
            "huge-page-neighbours",
            "two-vms-at-once",
        ],
        &[],
    ),
    (
        Fault::RemovesTheEndToo,
        &[
            "removed-range-ends",
            "removed-across-regions",
            "many-removals",
            "removal-storm",
        ],
        &[],
    ),
    (
        Fault::RemovesTheFirstPageAlone,
        &[
            "removed-never-read",
            "removed-region",
            "removed-across-regions",
            "removal-without-fault",
            "removal-storm",
            "two-vms-at-once",
        ],
        &[],
    ),
    (
        Fault::RemovesWholeBlocks,
        &[
            "removed-range-ends",
            "removed-across-regions",
            "fault-beside-removal",
            "many-removals",
            "removal-storm",
            "huge-page-neighbours",
        ],
        &[],
    ),
    (Fault::ForgetsARemovedRegion, &["removed-region"], &[]),
    (
        Fault::RemovesWithinOneRegion,
        &["removed-across-regions"],
        &[],
    ),
    (
        Fault::StopsWhenAllIsFilled,
        &["removal-without-fault"],
        &["killed-vm"],
    ),
    (
        Fault::ReadsNothingAtEagain,
        &[
            "fault-beside-removal",
            "fault-before-removal",
            "many-removals",
        ],
        &["removal-storm", "killed-vm"],
    ),
    (
        Fault::TriesAgainAfterAnEvent,
        &["fault-beside-removal", "fault-before-removal"],
        &["many-removals", "removal-storm", "killed-vm"],
    ),
    (
        Fault::TriesThreeTimes,
        &["many-removals"],
        &[
            "fault-beside-removal",
            "fault-before-removal",
            "removal-storm",
            "killed-vm",
        ],
    ),
    (
        Fault::ChoosesContentBeforeEagain,
        &["fault-before-removal"],
        &["removal-storm"],
    ),
    (Fault::NeedsPageSizeKib, &["page-size-alone"], &[]),
    (Fault::NeedsPageSize, &["page-size-kib-alone"], &[]),
    (Fault::ReadsOnce, &["message-in-pieces"], &[]),
    (Fault::KeepsGarbage, &["garbage"], &[]),
    (
        Fault::KeepsAMessageWithoutDescriptor,
        &["no-descriptor"],
        &[],
    ),
    (Fault::KeepsAWrongDescriptor, &["wrong-descriptor"], &[]),
    (Fault::BelievesTheLength, &["region-beyond-file"], &[]),
    (Fault::BelievesInDisjointRegions, &["regions-overlap"], &[]),
    (Fault::BelievesInAlignment, &["region-unaligned"], &[]),
    (Fault::SumsWrap, &["region-overflow"], &[]),
    (Fault::BelievesThePageSize, &["page-size-wrong"], &[]),
    (Fault::DiesOfAnEmptyConnection, &["closed-early"], &[]),
    (Fault::DiesOfHalfAMessage, &["half-message"], &[]),
    (Fault::DiesOfASecondMessage, &["second-message"], &[]),
    (
        Fault::ServesOneVmAtATime,
        &["two-vms-at-once", "silent-client"],
        &[],
    ),
    (Fault::WaitsForEachMessage, &["silent-client"], &[]),
    (Fault::SharesRemovals, &["two-vms-at-once"], &[]),
    (Fault::DiesOfADeadVm, &["killed-vm"], &["removal-storm"]),
];

/// Each mistake, against each rule. The pairs run at the same time, because a thread that waits for
/// ever is found only by the limit.
#[test]
fn each_mistake_fails_its_rules() {
    const THREADS: usize = 24;
    let fixture = Fixture::new();
    if let Err(refused) = fixture.suite(Path::new("")).check_host() {
        lacuna_skip::skip_test(refused);
    }
    let pairs = FAULTS
        .iter()
        .flat_map(|row| all().map(move |rule| (row.0, rule)));
    let mut pairs: Vec<(Fault, &Rule)> = pairs.collect();
    let is_expected = |(fault, rule): &(Fault, &Rule)| {
        let row = FAULTS.iter().find(|row| row.0 == *fault).unwrap();
        row.1.contains(&rule.name)
    };
    // From the end on: the ones that wait first.
    pairs.sort_by_key(is_expected);
    let (pairs, failed) = (Mutex::new(pairs), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                loop {
                    let Some((fault, rule)) = pairs.lock().unwrap().pop() else {
                        break;
                    };
                    let report = fixture.check(rule, fault);
                    if report.is_failed() {
                        failed.lock().unwrap().push((fault, report));
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap();
    let mut wrong = Vec::new();
    for (fault, expected, lucky) in FAULTS {
        let of = failed.iter().filter(|(found, _)| found == fault);
        let found: BTreeSet<&str> = of.map(|(_, report)| report.rule.name).collect();
        let expected: BTreeSet<&str> = expected.iter().copied().collect();
        let all: BTreeSet<&str> = expected.iter().chain(*lucky).copied().collect();
        if !(expected.is_subset(&found) && found.is_subset(&all)) {
            wrong.push(format!("{fault:?}: {found:?}"));
        }
    }
    for (fault, report) in &failed {
        print!("{fault:?}: {report}");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
