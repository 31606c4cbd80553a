//! Runs every example, as a user would. `cargo test -p lacuna` builds them first.

use lacuna_skip::test;
use std::path::PathBuf;
use std::process::Command;

/// The output of an example with a built-in guest.
fn output_with_guest(example: &str, arguments: &[&str]) -> String {
    if let Some(reason) = lacuna_guest::unavailable() {
        lacuna_skip::skip_test(reason);
    }
    output_of(example, arguments)
}

/// The output of an example, which must succeed.
fn output_of(example: &str, arguments: &[&str]) -> String {
    let (succeeded, text) = run(example, arguments);
    assert!(succeeded, "{example}: {text}");
    text
}

/// The program of an example.
pub fn program(example: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test knows its own path");
    let profile = test.ancestors().nth(2).expect("target/PROFILE/deps/TEST");
    let program = profile.join("examples").join(example);
    let advice = "`cargo test -p lacuna` builds the examples, `--test` alone does not";
    assert!(program.exists(), "no {}: {advice}", program.display());
    program
}

/// Whether an example succeeds, and its output.
fn run(example: &str, arguments: &[&str]) -> (bool, String) {
    let output = Command::new(program(example)).args(arguments).output();
    let output = output.expect("a process");
    let text = [output.stderr, output.stdout].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    (output.status.success(), text)
}

#[test]
fn boot_runs_a_guest_in_a_quarter_of_its_memory() {
    let text = output_with_guest("boot", &[]);
    assert!(text.contains("guest: "), "{text}");
    let swapped = text.lines().last().unwrap_or_default();
    assert!(swapped.contains("pages went to swap"), "{text}");
    assert!(!swapped.starts_with("0 "), "{text}");
}

/// The sum of the page numbers 512 to 611. The guest's accesses to its page tables exit as well.
#[test]
fn missing_provides_what_the_guest_needs() {
    let text = output_of("missing", &[]);
    assert!(text.contains("the guest exited with code 56150"), "{text}");
    let exits = text.split(' ').next().and_then(|word| word.parse().ok());
    assert!(
        exits.is_some_and(|exits: u32| (100..120).contains(&exits)),
        "{text}"
    );
}

#[test]
fn devices_answers_the_guest() {
    let text = output_of("devices", &[]);
    assert!(text.contains("the adder has 42"), "{text}");
}

#[test]
fn migrate_moves_a_guest() {
    let text = output_with_guest("migrate", &[]);
    assert!(text.contains("source: the guest has gone: "), "{text}");
    let told = "destination: RESULT";
    assert!(text.contains(told) && text.contains("verdict=ok"), "{text}");
}

#[test]
fn vmm_says_what_is_wrong_with_its_arguments() {
    for (arguments, message) in [
        (&[][..], "usage: "),
        (&["hvf"][..], "no backend `hvf`"),
        (&["soft", "many"][..], "usage: "),
        (&["soft", "restore=none"][..], "cannot find a snapshot"),
        (&["soft", "listen=localhost:1"][..], "use unix:PATH"),
    ] {
        let (succeeded, text) = run("vmm", arguments);
        assert!(
            !succeeded && text.contains(message),
            "{arguments:?}: {text}"
        );
    }
}

#[cfg(feature = "vm-memory")]
#[test]
fn vm_memory_joins_both_ways() {
    let text = output_with_guest("vm_memory", &[]);
    assert!(text.contains("the guest sees: from the device"), "{text}");
    assert!(text.contains("loaded"), "{text}");
}
