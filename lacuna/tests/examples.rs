//! Runs every example, as a user would. `cargo test -p lacuna` builds them first.

use std::path::PathBuf;
use std::process::Command;

/// What an example prints.
fn output_of(example: &str, arguments: &[&str]) -> String {
    let test = std::env::current_exe().expect("a test knows its own path");
    let profile = test.ancestors().nth(2).expect("target/PROFILE/deps/TEST");
    let program: PathBuf = profile.join("examples").join(example);
    let output = Command::new(&program).args(arguments).output();
    let output = output.unwrap_or_else(|error| {
        panic!(
            "{}: {error}: `cargo test -p lacuna` builds the examples, `--test` alone does not",
            program.display()
        )
    });
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{example}: {}\n{text}{errors}",
        output.status
    );
    text
}

#[test]
fn boot_runs_a_guest_in_a_quarter_of_its_memory() {
    let text = output_of("boot", &[]);
    assert!(text.contains("guest: "), "{text}");
    let swapped = text.lines().last().unwrap_or_default();
    assert!(swapped.contains("pages went to swap"), "{text}");
    assert!(!swapped.starts_with("0 "), "{text}");
}

#[test]
fn boot_kvm_runs_or_says_why_not() {
    let text = output_of("boot_kvm", &[]);
    assert!(
        text.contains("guest: ") || text.starts_with("skipped: "),
        "{text}"
    );
}

#[test]
fn devices_answers_the_guest() {
    let text = output_of("devices", &[]);
    assert!(text.contains("the adder has 42"), "{text}");
}

#[test]
fn dirty_pages_prints_what_the_guest_writes() {
    let text = output_of("dirty_pages", &["2"]);
    let counts = text
        .lines()
        .filter_map(|line| line.strip_suffix(" pages written"));
    let most = counts.filter_map(|count| count.parse::<u64>().ok()).max();
    assert!(most > Some(0), "{text}");
}

#[cfg(feature = "vm-memory")]
#[test]
fn vm_memory_joins_both_ways() {
    let text = output_of("vm_memory", &[]);
    assert!(text.contains("the guest sees: from the device"), "{text}");
    assert!(text.contains("loaded"), "{text}");
}
