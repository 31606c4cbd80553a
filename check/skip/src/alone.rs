//! A test with its own process.

use std::process::{Command, Stdio};
use std::thread;

/// Set in the process of one test. Its value is the process of the whole run.
pub(crate) const ALONE: &str = "LACUNA_TEST_ALONE";

/// Whether the calling test has its own process. If not, this runs the test again in a new process,
/// and the caller must return.
///
/// For tests that change or count the state of the whole process: limits, signals, descriptors,
/// locked memory. Otherwise the program's other tests run beside them.
///
/// ```no_run
/// if !lacuna_skip::alone() {
///     return;
/// }
/// ```
///
/// # Panics
/// If the test fails there, or if the harness has not named the thread after the test, as under
/// `--test-threads=1`.
pub fn alone() -> bool {
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let thread = thread::current();
    let test = match thread.name() {
        Some(name) if name != "main" => name,
        _ => panic!("this test needs a thread of its own: leave --test-threads=1 out"),
    };
    let program = std::env::current_exe().expect("a test is a program");
    let child = Command::new(program)
        .args(["--exact", test])
        .env(ALONE, std::os::unix::process::parent_id().to_string())
        .stderr(Stdio::inherit())
        .output();
    let child = child.unwrap_or_else(|error| panic!("{test} cannot be started again: {error}"));
    let output = String::from_utf8_lossy(&child.stdout);
    let passed = child.status.success() && output.contains(" 1 passed");
    assert!(passed, "{test}, in a process of its own: {output}");
    false
}
