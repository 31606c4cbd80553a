//! The binary as a script sees it: output, exit codes.

use assert_cmd::Command;

fn lacuna(line: &str) -> assert_cmd::assert::Assert {
    let mut command = Command::cargo_bin("lacuna").expect("cargo builds it for this test");
    command.args(line.split_whitespace()).assert()
}

fn stdout(assert: &assert_cmd::assert::Assert) -> String {
    String::from_utf8_lossy(&assert.get_output().stdout).into_owned()
}

#[test]
fn doctor_speaks_to_people_and_machines() {
    let text = stdout(&lacuna("doctor").success());
    assert!(
        text.contains("\nmemory ") && text.contains("\nkvm "),
        "{text}"
    );
    let json: serde_json::Value =
        serde_json::from_str(&stdout(&lacuna("doctor --json").success())).unwrap();
    assert_eq!(json["schema"], 1);
    assert!(
        json["checks"]
            .as_array()
            .is_some_and(|checks| checks.len() >= 8)
    );
}

#[test]
fn doctor_examines_the_folder_it_is_given() {
    let text = stdout(&lacuna("doctor --swap-dir /nonexistent").success());
    assert!(text.contains("/nonexistent cannot hold a file"), "{text}");
}

#[test]
fn wrong_arguments_end_with_two_and_help_tells_the_codes() {
    lacuna("run bm --memory much").code(2);
    lacuna("walk").code(2);
    assert!(stdout(&lacuna("--help").success()).contains("Exit codes: 0"));
}
