//! `churn` counts its transactions, keeps its objects, and reports its latencies.

use super::machine::{assert_ended, boot, qemu_missing};

/// The number called `name` in the console line that begins with `line`.
fn number(console: &str, line: &str, name: &str) -> u64 {
    let line = console.lines().find(|l| l.starts_with(line));
    let words = line.into_iter().flat_map(str::split_whitespace);
    let mut values = words.filter_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    let value = values.next().and_then(|value| value.parse().ok());
    value.unwrap_or_else(|| panic!("no {name} in {console}"))
}

#[test]
fn parameters_set_the_rate_of_dirty_pages() {
    if qemu_missing() {
        return;
    }
    for (cold, writes, frees) in [(0, 50, 0), (2000, 50, 5), (10_000, 100, 100)] {
        let params = format!(
            "bytes=24M transactions=20000 cold={cold} writes={writes} frees={frees} huge=1"
        );
        let outcome = boot(&format!("churn-{cold}"), "churn", 2, &params);
        assert_ended(&outcome, 0, "verdict=ok");
        let (all, sums) = ("RESULT processes=2 ", "RESULT updates=");
        let total = number(&outcome.console, all, "transactions");
        assert_eq!(total, 40_000);
        let latency = |name: &str| number(&outcome.console, all, name);
        assert!(0 < latency("p50_ns") && latency("p50_ns") <= latency("p99_ns"));
        assert!(latency("p99_ns") <= latency("p999_ns"));
        assert!(latency("p999_ns") <= latency("max_ns"));
        // Within a twentieth: for 8000 and more that is many standard deviations.
        for (name, expected) in [
            ("updates", total * 4 * writes / 100),
            ("cold_updates", total * 4 * writes / 100 * cold / 10_000),
            ("replaced", total * frees / 100),
        ] {
            let found = number(&outcome.console, sums, name);
            assert!(
                found.abs_diff(expected) <= expected / 10,
                "{name}: {found} for {expected}"
            );
        }
    }
}

#[test]
fn a_heap_needs_a_cold_part_and_no_hot_part() {
    if qemu_missing() {
        return;
    }
    let outcome = boot("churn-all", "churn", 1, "bytes=16M hot=0 seconds=1");
    assert_ended(&outcome, 0, "verdict=ok");
    let sums = |name| number(&outcome.console, "RESULT updates=", name);
    assert_eq!(sums("updates"), sums("cold_updates"));
    for params in [
        "bytes=16M hot=14M",
        "bytes=16M hot=4K",
        "bytes=2M",
        "processes=0",
    ] {
        let outcome = boot("churn-refused", "churn", 1, params);
        assert_ended(&outcome, 2, "cannot run with");
    }
}
