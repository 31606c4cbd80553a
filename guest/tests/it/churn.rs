//! The check of `churn` finds every kind of damage, and its percentiles are right.

use std::path::Path;
use std::process::Command;

fn run(what: &str) -> Vec<String> {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("churn-{what}"));
    let guest = Path::new(env!("CARGO_MANIFEST_DIR"));
    let cc = std::env::var_os("LACUNA_GUEST_CC").unwrap_or("cc".into());
    let built = Command::new(cc)
        .args([
            "-std=gnu11",
            "-O1",
            "-Wall",
            "-Werror",
            "-fno-strict-aliasing",
            "-I",
        ])
        .arg(guest.join("include"))
        .arg(guest.join("tests/churn.c"))
        .arg("-o")
        .arg(&out)
        .output()
        .expect("the compiler that built the guest runs");
    assert!(
        built.status.success(),
        "{}",
        String::from_utf8_lossy(&built.stderr)
    );
    let output = Command::new(&out).arg(what).output().expect("it runs");
    let text = String::from_utf8(output.stdout).expect("text");
    assert!(output.status.success(), "{text}");
    text.lines().map(str::to_owned).collect()
}

#[test]
fn a_page_lost_stale_or_torn_is_found() {
    if let Some(reason) = lacuna_guest::unavailable() {
        lacuna_skip::skip(reason);
        return;
    }
    let lines = run("objects");
    assert_eq!(lines[..3], ["init ok", "work ok", "work ok"]);
    for how in ["zero", "old", "half"] {
        let verdicts: Vec<&str> = lines
            .iter()
            .filter_map(|line| line.strip_prefix(how)?.strip_prefix(' '))
            .collect();
        assert_eq!(verdicts.len(), 300);
        let unchanged = verdicts.iter().filter(|v| **v == "same").count();
        assert!(unchanged < 3, "{how}: {unchanged} pages were not changed");
        for verdict in &verdicts {
            assert!(!["ok", "where?"].contains(verdict), "{how}: {verdict}");
        }
        // The earlier content is whole, so no object's own checksum can find it.
        assert_eq!(verdicts.contains(&"stale"), how != "zero", "{verdicts:?}");
    }
}

#[test]
fn percentiles_are_an_eighth_too_large_at_most() {
    if let Some(reason) = lacuna_guest::unavailable() {
        lacuna_skip::skip(reason);
        return;
    }
    let lines = run("latency");
    assert_eq!(lines[0], "0", "of nothing");
    for line in &lines[1..] {
        let (part, found) = line.split_once(' ').expect("two numbers");
        let [part, found] = [part, found].map(|n| n.parse::<u64>().expect("a number"));
        let exact = (part * 10).max(1);
        assert!(
            (exact..=exact + exact / 8).contains(&found) && found <= 100_000,
            "{part} of 10000: {found}"
        );
    }
}
