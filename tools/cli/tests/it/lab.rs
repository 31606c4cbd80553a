//! Saved runs of `lacuna lab`: reports, comparisons, and the continuation of an interrupted one.

use assert_cmd::Command;
use serde_json::Value;
use std::fs;
use std::path::Path;

/// The run that the tests of the report draw, as `lacuna lab --json` has written it.
const SAVED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../report/tests/example.json");

fn lab(line: &str) -> Command {
    let mut command = Command::cargo_bin("lacuna").expect("cargo builds it for this test");
    command.arg("lab").args(line.split_whitespace());
    command
}

/// What `command` prints to stdout, if it succeeds.
fn printed(mut command: Command) -> String {
    let output = command.assert().success().get_output().clone();
    String::from_utf8(output.stdout).unwrap()
}

/// What `command` prints to stderr, if it refuses its arguments.
fn refused(mut command: Command) -> String {
    let output = command.assert().code(2).get_output().clone();
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_saved_run_becomes_a_table_and_a_report() {
    let folder = tempfile::tempdir().unwrap();
    let old = folder.path().join("old.json");
    let text = fs::read_to_string(SAVED).unwrap();
    fs::write(
        &old,
        text.replace("\"value\":1.96,\"min\":1.89", "\"value\":1.5,\"min\":1.4")
            .replace("2.08", "1.6"),
    )
    .unwrap();
    let page = folder.path().join("report.html");
    let (old, html) = (old.display(), page.display());
    let text = printed(lab(&format!(
        "--from {SAVED} --compare {old} --report {html}"
    )));
    assert!(
        text.contains("45.8 %   44.1 .. 47.5    21  >= 95.0"),
        "{text}"
    );
    assert!(
        text.contains("1.50 x [1.40 .. 1.60] -> 1.96 x [1.89 .. 2.08]"),
        "{text}"
    );
    assert!(text.contains("1 of 7 figures differ"), "{text}");
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains(" <b>differs</b>"));
    let text = printed(lab(&format!("--from {SAVED} --markdown")));
    assert!(
        text.contains("| `apf.worker_share_percent.file` | 45.8 % |"),
        "{text}"
    );
}

#[test]
fn what_is_no_saved_run_is_refused_before_measuring() {
    let text = refused(lab("thp.call --compare /nonexistent.json"));
    assert!(text.contains("cannot read /nonexistent.json"), "{text}");
    let mut unwritable = lab("thp.call --report /nonexistent/r.html");
    let output = unwritable.assert().code(3).get_output().clone();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(
        text.contains("cannot write the report to /nonexistent/r.html"),
        "{text}"
    );
    let text = refused(lab("--from /proc/self/cmdline"));
    assert!(
        text.contains("is not the JSON of `lacuna lab --json`"),
        "{text}"
    );
    for line in [
        "--resume",
        "--resume --json f",
        "--full --resume",
        "thp --from f",
        "--from f --json g",
    ] {
        lab(line).assert().code(2);
    }
    let text = refused(lab("thp --resume --json -"));
    assert!(text.contains("--resume needs a file"), "{text}");
}

/// The saved results of the finished experiment stay, and what came after its end is measured
/// again.
#[test]
fn an_interrupted_run_continues_after_the_last_finished_experiment() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.json");
    let file = path.display();
    printed(lab(&format!(
        "thp.call --quick --quiet --resume --json {file}"
    )));
    let text = refused(lab(&format!("thp.call --quick --resume --json {file}")));
    assert!(text.contains("its run is complete"), "{text}");
    let mut run = read(&path);
    run["ended_early"] = "killed".into();
    let measured = run["results"].clone();
    let results = run["results"].as_array_mut().unwrap();
    let mut half = results[0].clone();
    half["id"] = "pml.half_measured".into();
    results.push(half);
    write(&path, &run);
    let text = refused(lab(&format!("thp.call --resume --json {file}")));
    assert!(
        text.contains("`lacuna lab thp.call --quick`, which this command does not"),
        "{text}"
    );

    printed(lab(&format!(
        "thp.call --quick --quiet --resume --json {file}"
    )));
    let continued = read(&path);
    assert_eq!(continued["results"], measured);
    assert_eq!(continued["finished"], run["finished"]);
    assert_eq!(continued.get("ended_early"), None);

    run["host"]["kernel"] = "another".into();
    write(&path, &run);
    let text = refused(lab(&format!("thp.call --quick --resume --json {file}")));
    assert!(text.contains("measured on another host"), "{text}");
}

fn read(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn write(path: &Path, run: &Value) {
    fs::write(path, run.to_string()).unwrap();
}
