use super::*;
use crate::record::Skipped;
use core::prelude::v1::test;
use std::panic::catch_unwind;

fn skipped(test: &str, why: &str) -> Skipped {
    Skipped {
        test: test.into(),
        why: why.into(),
    }
}

#[test]
fn a_list_is_by_reason_and_has_each_test_once() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("1");
    assert_eq!(List::read(&folder).to_string(), "skipped tests: none\n");
    for (test, why) in [
        ("b two", "no disk"),
        ("a one", "no KVM"),
        ("a one", "no KVM"),
    ] {
        skipped(test, why).record(&folder).unwrap();
    }
    let expected =
        "skipped tests: 2\n  because: no KVM\n    a one\n  because: no disk\n    b two\n";
    assert_eq!(List::read(&folder).to_string(), expected);
}

#[test]
fn records_of_dead_runs_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let mine = std::process::id().to_string();
    // No process has this id: it is above Linux's highest.
    for parent in ["4194305", &mine] {
        skipped("a", "b").record(&dir.path().join(parent)).unwrap();
    }
    remove_left_behind(dir.path());
    let left: Vec<_> = fs::read_dir(dir.path()).unwrap().flatten().collect();
    assert_eq!(left.len(), 1);
    assert_eq!(left[0].file_name().to_string_lossy(), mine);
}

#[test]
fn a_panic_is_no_skip() {
    assert!(catch_unwind(|| run(|| assert_eq!(1, 2))).is_err());
}

/// Starts this test program again as a child. The child's skip must be on its stderr, although the
/// harness keeps the output of passed tests. It must also be in a folder named after the child's
/// parent, this process.
#[test]
fn a_skip_reaches_stderr_and_the_list() {
    if std::env::var_os("SKIP_HERE").is_some() {
        run(|| skip_test("only an\nexample"));
        return;
    }
    let program = std::env::current_exe().unwrap();
    let output = std::process::Command::new(&program)
        .args(["--exact", "tests::a_skip_reaches_stderr_and_the_list"])
        .args(["--test-threads", "2"])
        .env("SKIP_HERE", "1")
        .env("CARGO_PKG_NAME", "some-crate")
        .output()
        .unwrap();
    assert!(output.status.success());
    let printed = String::from_utf8_lossy(&output.stderr);
    let test = "some-crate tests::a_skip_reaches_stderr_and_the_list";
    assert!(
        printed.contains(&format!("skipped: {test}: only an example")),
        "{printed}"
    );
    let all = program.parent().unwrap().parent().unwrap().join("skipped");
    let folder = all.join(std::process::id().to_string());
    let list = List::read(&folder).to_string();
    fs::remove_dir_all(folder).unwrap();
    assert!(
        list.contains(&format!("because: only an example\n    {test}\n")),
        "{list}"
    );
}
