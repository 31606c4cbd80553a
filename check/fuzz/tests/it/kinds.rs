//! Runs a few seeds of each kind. Checks that there is no finding, and that the fuzzer reaches
//! exceptions, interrupts, split locks and started images.

use lacuna_fuzz::{Campaign, Kind, Tally};
use lacuna_machine::Arch;
use std::ops::Range;
use std::path::PathBuf;

/// The path of cargo's `lacuna` binary in this test's profile. The file exists only if the binary
/// was built.
fn binary() -> PathBuf {
    let this = std::env::current_exe().expect("a test is a program");
    let folder = this.parent().and_then(|deps| deps.parent());
    folder.expect("target/PROFILE/deps").join("lacuna")
}

fn run(kind: Kind, seeds: Range<u64>) -> Tally {
    let mut campaign = Campaign::new(binary());
    campaign.run(kind, seeds, None, 1, |_, _| ());
    let finding = campaign.findings.first();
    assert!(
        finding.is_none(),
        "{}",
        finding.map_or(String::new(), |it| format!(
            "{}\nagain: {}",
            it.what,
            it.again()
        ))
    );
    println!("{}\n{}", campaign.tally.table(), campaign.tally);
    campaign.tally
}

/// All kinds in one test, because the process has one panic hook.
#[test]
fn some_seeds_of_each_kind() {
    let machine = run(Kind::Machine, 1..9);
    assert!(machine.instructions > 100_000, "{machine}");
    for vector in ["0x06", "0x0d", "0x0e", "0x20"] {
        let count = machine.count("exceptions and interrupts", vector);
        assert!(count > 50, "vector {vector}: {count}");
    }
    // SVC and aborts of both exception levels, and interrupts.
    for vector in ["0x200", "0x280", "0x400"] {
        let name = format!("arm64 vector {vector}");
        let count = machine.count("exceptions and interrupts", &name);
        assert!(count > 20, "{name}: {count}");
    }
    assert!(machine.count("guest", "traces compared") == 2);
    assert!(machine.count("acts", "split lock") > 0);
    let threads = run(Kind::Threads, 1..4);
    assert!(
        threads.instructions > 100_000 && threads.verified > 30,
        "{threads}"
    );
    let images = run(Kind::Images, 1..4);
    let started = |arch| images.count("images", &format!("started, {arch}"));
    assert!(started(Arch::Arm64) > 10, "{images}");
    match lacuna_guest::unavailable() {
        Some(reason) => lacuna_skip::skip(reason),
        None => assert!(started(Arch::X86_64) > 20, "{images}"),
    }
    let stream = run(Kind::Stream, 1..65);
    assert!(stream.count("streams", "the guest arrived") > 3, "{stream}");
    assert!(stream.count("answers", "moved") > 3, "{stream}");
    let snapshot = run(Kind::Snapshot, 1..9);
    assert!(snapshot.count("snapshots", "opened") > 20, "{snapshot}");
    for way in ["restored", "restored lazily"] {
        assert!(snapshot.count("snapshots", way) > 3, "{way}: {snapshot}");
    }
    let pager = run(Kind::Pager, 1..9);
    for group in ["messages of VMMs", "files of a pager"] {
        for answer in ["accepted", "refused"] {
            assert!(pager.count(group, answer) > 10, "{group} {answer}: {pager}");
        }
    }
    let offload = run(Kind::Offload, 1..9);
    for group in ["frames of VMMs", "configurations of VMMs", "ranges of VMMs"] {
        for answer in ["accepted", "refused"] {
            assert!(
                offload.count(group, answer) > 10,
                "{group} {answer}: {offload}"
            );
        }
    }
    let control = run(Kind::Control, 1..3);
    if control.operations == 0 {
        lacuna_skip::skip("the control socket: the lacuna binary is not built");
    }
    let command = run(Kind::Command, 1..3);
    if command.operations == 0 {
        lacuna_skip::skip("command lines: the lacuna binary is not built");
    }
}
