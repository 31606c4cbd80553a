//! `lacuna pager-test`. The handler is the one of the tests of `lacuna run`: it fills pages with
//! zeros, and serves one VM.

use crate::handler::Handler;
use lacuna_skip::test;
use lacuna_sys::Userfaultfd;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;

fn pager_test(options: &[&str], folder: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lacuna"));
    command.arg("pager-test").args(options).current_dir(folder);
    command.output().unwrap()
}

#[test]
fn a_handler_of_zeros_fails_the_rule_of_content() {
    if let Err(errno) = Userfaultfd::open_user_with_removals() {
        lacuna_skip::skip_test(errno);
    }
    let folder = TempDir::new().unwrap();
    let made = pager_test(&["--make-memory", "memory", "4M"], folder.path());
    assert_eq!(made.status.code(), Some(0), "{made:?}");
    let _handler = Handler::start(&folder.path().join("socket"), None);
    let options = [
        "--socket",
        "socket",
        "--memory",
        "memory",
        "--rule",
        "content-in-order",
    ];
    let options = [&options[..], &["--json", "-"]].concat();
    let ran = pager_test(&options, folder.path());
    assert_eq!(ran.status.code(), Some(1), "{ran:?}");
    let json: serde_json::Value = serde_json::from_slice(&ran.stdout).unwrap();
    assert_eq!(
        (&json["failed"], &json["passed"]),
        (&1.into(), &0.into()),
        "{json}"
    );
    let rule = &json["rules"][0];
    assert_eq!(rule["outcome"], "failed");
    assert_eq!(
        rule["expected"],
        "page 0 has its content in the memory file"
    );
    assert_eq!(rule["seen"], "zeros");
    assert_eq!(rule["events"][0], "connected");
}

#[test]
fn a_run_that_cannot_begin_says_why() {
    let folder = TempDir::new().unwrap();
    let socket = ["--socket", "socket", "--memory", "memory"];
    for (options, code, reason) in [
        (
            &["--make-memory", "memory", "5M"][..],
            2,
            "a multiple of 2 MiB is needed",
        ),
        (
            &["--make-memory", "memory", "much"],
            2,
            "does not begin with a whole number",
        ),
        (&["--socket", "socket"], 2, "--memory <FILE>"),
        (
            &[&socket[..], &["--rule", "walk"]].concat(),
            2,
            "walk is no rule; there are: content-in",
        ),
        (
            &socket,
            3,
            "there is no socket at socket: start the handler first",
        ),
        (
            &["--save-daemon", "true"],
            2,
            "--save-daemon needs {socket} in its command",
        ),
        (
            &[&socket[..], &["--save-daemon", "save {socket}"]].concat(),
            2,
            "cannot be used with",
        ),
        (
            &[&socket[..], &["--restart", "true"]].concat(),
            3,
            "cannot use the memory file memory",
        ),
    ] {
        let ran = pager_test(options, folder.path());
        let errors = String::from_utf8_lossy(&ran.stderr);
        assert_eq!(ran.status.code(), Some(code), "{options:?}: {errors}");
        assert!(errors.contains(reason), "{options:?}: {errors}");
    }
}

/// The whole second half, against `lacuna offload`. Both were written from the protocol alone.
#[test]
fn the_own_daemons_pass_each_rule() {
    // A save waits for its disk.
    let folder = TempDir::new_in("/dev/shm")
        .or_else(|_| TempDir::new())
        .unwrap();
    let lacuna = concat!("exec ", env!("CARGO_BIN_EXE_lacuna"), " offload");
    let save = format!("rm -rf vm; {lacuna} save --socket {{socket}} --to vm --quiet");
    let restore = format!("{lacuna} restore --from vm --to {{socket}} --quiet");
    let demand = format!("{restore} --on-demand");
    let options = [
        ["--save-daemon", &save],
        ["--restore-daemon", &restore],
        ["--on-demand-daemon", &demand],
        ["--json", "-"],
    ];
    let ran = pager_test(options.as_flattened(), folder.path());
    let json: serde_json::Value = serde_json::from_slice(&ran.stdout).unwrap();
    assert_eq!(ran.status.code(), Some(0), "{json}");
    let counts = [&json["passed"], &json["failed"], &json["skipped"]];
    assert_eq!(counts, [51, 0, 0]);
}

/// A program that is no daemon breaks its rules, and rules for others are skipped.
#[test]
fn a_program_that_is_no_daemon_fails() {
    let folder = TempDir::new().unwrap();
    let options = [
        "--save-daemon",
        "sleep 60 # {socket}",
        "--rule",
        "save-answers,restore-order",
        "--timeout",
        "100ms",
    ];
    let ran = pager_test(&options, folder.path());
    assert_eq!(ran.status.code(), Some(1), "{ran:?}");
    let text = String::from_utf8(ran.stdout).unwrap();
    for line in [
        "FAILED  save-answers\n",
        "expected: the daemon listens at its socket\n",
        "seen:     nothing within 100ms\n",
        "1. finds out whether the daemon serves several VMs\n",
        "skipped restore-order: it needs --restore-daemon\n",
    ] {
        assert!(text.contains(line), "{text}");
    }
}
