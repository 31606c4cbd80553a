//! Which rules find which mistake.

use crate::handler::{Fault, Handler, Memory};
use lacuna_pager_test::{
    Image, Outcome, Report, Reports, Rule, Suite, Target, all, check_one, chosen,
};
use lacuna_skip::{HugePages, test};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;
use std::{env, fs, thread};
use tempfile::TempDir;

/// The suite's text for the process of a rule.
const ORDER: &str = "LACUNA_PAGER_TEST_ORDER";

/// A limit that a right handler never reaches.
const LONG: Duration = Duration::from_secs(120);

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
            timeout: LONG,
            restart: None,
            again: Box::new(|order| {
                let mut command = Command::new(env::current_exe().unwrap());
                command.args(["--exact", "faults::rule_process", "--nocapture"]);
                command.env(ORDER, order);
                command
            }),
        }
    }

    /// Checks one rule of a new handler. On a busy machine, a rule may make no progress within the
    /// short limit: so a failure that is not expected is checked again, with a long one.
    fn check(&self, rule: &'static Rule, fault: Fault, is_expected: bool) -> Report {
        let report = self.check_within(Duration::from_secs(2), rule, fault);
        match report.is_failed() && !is_expected {
            true => self.check_within(LONG, rule, fault),
            false => report,
        }
    }

    fn check_within(&self, limit: Duration, rule: &'static Rule, fault: Fault) -> Report {
        let socket = self.folder.path().join(format!("{}{fault:?}", rule.name));
        let handler = Handler::start(&socket, &self.memory, fault);
        let mut suite = self.suite(&socket);
        suite.timeout = limit;
        let report = suite.run(rule).unwrap();
        drop(handler);
        fs::remove_file(&socket).unwrap();
        report
    }
}

/// The rules that need no huge pages. Those that do take pages of the whole machine, so they have a
/// test of their own.
fn others() -> impl Iterator<Item = &'static Rule> {
    let rules = all().filter(|rule| rule.target() == Target::Handler);
    rules.filter(|rule| !needs_huge_pages(rule))
}

fn needs_huge_pages(rule: &Rule) -> bool {
    rule.name.starts_with("hugetlb")
}

fn is_skipped(report: &Report) -> bool {
    matches!(report.outcome, Outcome::Skipped { .. })
}

/// One handler, all rules one after the other.
#[test]
fn a_right_handler_passes_each_rule() {
    let fixture = Fixture::new();
    let socket = fixture.folder.path().join("socket");
    let suite = fixture.suite(&socket);
    if let Err(refused) = suite.check_host() {
        lacuna_skip::skip_test(refused);
    }
    let _handler = Handler::start(&socket, &fixture.memory, Fault::None);
    let reports: Vec<Report> = others().map(|rule| suite.run(rule).unwrap()).collect();
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
        .flat_map(|row| others().map(move |rule| (row.0, rule)));
    let mut pairs: Vec<(Fault, &Rule)> = pairs.collect();
    let is_expected = |(fault, rule): &(Fault, &Rule)| {
        let row = FAULTS.iter().find(|row| row.0 == *fault).unwrap();
        row.1.iter().chain(row.2).any(|name| *name == rule.name)
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
                    let is_expected = is_expected(&(fault, rule));
                    let report = fixture.check(rule, fault, is_expected);
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

/// Mistakes with huge pages, each against its rules. Without a free huge page, a fill fails with
/// ENOMEM or with EEXIST, as the kernel's version decides: one of the last two mistakes shows.
#[test]
fn mistakes_with_huge_pages_fail_their_rules() {
    let fixture = Fixture::new();
    if let Err(refused) = fixture.suite(Path::new("")).check_host() {
        lacuna_skip::skip_test(refused);
    }
    let _reserved = HugePages::reserve(4);
    let failed = |fault| {
        let rules = all().filter(|rule| needs_huge_pages(rule));
        let check = |rule| fixture.check(rule, fault, fault != Fault::None);
        let reports: Vec<Report> = rules.map(check).collect();
        for report in &reports {
            print!("{fault:?}: {report}");
        }
        // Other programs have reserved huge pages too.
        if let Some(report) = reports.iter().find(|report| is_skipped(report)) {
            lacuna_skip::skip_test(report);
        }
        let failed = reports.iter().filter(|report| report.is_failed());
        failed.map(|report| report.rule.name).collect::<Vec<_>>()
    };
    assert_eq!(failed(Fault::None), [""; 0]);
    let all = ["hugetlb-content", "hugetlb-removed", "hugetlb-exhausted"];
    assert_eq!(failed(Fault::FillsSmallPages), all);
    assert_eq!(failed(Fault::ZeropageOfAHugePage), all[1..2]);
    let exhausted = [Fault::EndsWithoutMemory, Fault::IgnoresAPageAfterEexist].map(failed);
    assert_eq!(exhausted.concat(), all[2..]);
}

/// A handler that is started for each rule, and one that does not start.
#[test]
fn a_handler_is_started_for_each_rule() {
    let fixture = Fixture::new();
    let socket = fixture.folder.path().join("socket");
    let mut suite = fixture.suite(&socket);
    if let Err(refused) = suite.check_host() {
        lacuna_skip::skip_test(refused);
    }
    let started = fixture.folder.path().join("started");
    suite.restart = Some(format!("echo x >> {}", started.display()));
    let names = ["removed-never-read", "two-vms-at-once", "garbage"].map(String::from);
    let rules = chosen(&names, &[]).unwrap();
    thread::scope(|scope| {
        // The socket appears after the command.
        let handler = scope.spawn(|| {
            while !started.exists() {
                thread::sleep(Duration::from_millis(1));
            }
            Handler::start(&socket, &fixture.memory, Fault::None)
        });
        let reports = rules.iter().map(|rule| suite.run(rule).unwrap());
        let reports = Reports(reports.collect());
        handler.join().unwrap();
        assert_eq!(reports.failed(), 0, "{reports}");
        let text = reports.to_string();
        assert!(text.ends_with("2 passed, 0 failed, 1 skipped\n"), "{text}");
    });
    assert_eq!(fs::read_to_string(&started).unwrap(), "x\nx\n");
    for (command, reason) in [
        ("exit 3", "exit status: 3"),
        ("sleep 9", "has not returned"),
    ] {
        suite.restart = Some(command.into());
        suite.timeout = Duration::from_millis(200);
        let refused = suite.run(rules[0]).unwrap_err().to_string();
        assert!(refused.contains(reason), "{refused}");
    }
    assert_eq!(chosen(&["walk".into()], &[]).unwrap_err(), "walk");
}

/// A wrong answer must not look right.
#[test]
fn a_memory_file_has_pages_that_differ() {
    let fixture = Fixture::new();
    let path = fixture.folder.path().join("memory");
    let socket = Path::new("");
    let refused = || fixture.suite(socket).check_host().unwrap_err().to_string();
    let mut bytes = fs::read(&path).unwrap();
    bytes.copy_within(0..4096, 7 * 4096);
    fs::write(&path, &bytes).unwrap();
    assert!(
        refused().contains("page 7 of the memory file"),
        "{}",
        refused()
    );
    bytes[..4096].fill(0);
    fs::write(&path, &bytes).unwrap();
    assert!(
        refused().contains("page 0 of the memory file"),
        "{}",
        refused()
    );
    fs::write(&path, &bytes[..3 << 20]).unwrap();
    assert!(refused().contains("has 3145728 bytes"), "{}", refused());
    fs::remove_file(&path).unwrap();
    assert!(
        refused().contains("cannot use the memory file"),
        "{}",
        refused()
    );
}

/// The page of the documentation has the tables of rules, in the order of a run.
#[test]
fn the_page_has_each_rule() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/pager-test.md");
    let page = fs::read_to_string(path).unwrap();
    let row = |rule: &Rule| {
        let Rule {
            name,
            requires,
            origin,
            ..
        } = rule;
        format!("| `{name}` | {requires} | {origin} |\n")
    };
    for is_handler in [true, false] {
        let rules = all().filter(|rule| (rule.target() == Target::Handler) == is_handler);
        let table: String = rules.map(row).collect();
        assert!(
            page.contains(&table),
            "docs/pager-test.md needs this table:\n{table}"
        );
    }
}
