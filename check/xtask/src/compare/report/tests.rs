use super::*;
use crate::compare::arguments::{Request, parse};
use crate::compare::count::PerUnit;
use crate::compare::lab::Figure;
use crate::compare::pair::{Arm, ROUND, Samples};

fn commit(hash: &str, subject: &str) -> Commit {
    Commit {
        hash: hash.into(),
        subject: subject.into(),
    }
}

fn empty() -> Comparison {
    let words = ["a", "b", "--quick"].map(str::to_owned);
    let Ok(Request::Compare(arguments)) = parse(&words) else {
        panic!("a comparison");
    };
    let old = commit("0123456789abcdef", "old: is old");
    let new = commit("fedcba9876543210", "new: is new");
    Comparison::new(&old, &new, &arguments)
}

/// Seven rounds: the new commit costs `new`, and the old one 100.
fn comparison(new: f64) -> Comparison {
    let mut samples = Samples::default();
    for round in 0..7 {
        for arm in ROUND {
            let figure = |id: &str, value| Figure {
                id: id.into(),
                value,
                unit: "ns".into(),
                better: Better::Lower,
            };
            let both = figure("a.cost", if arm == Arm::New { new } else { 100.0 });
            let more = (arm == Arm::New).then(|| figure("a.added", 7.25));
            samples.add(round, arm, [both].into_iter().chain(more).collect());
        }
    }
    let mut comparison = empty();
    comparison.add(samples.into_rows());
    comparison
}

#[test]
fn a_table_has_a_line_a_result() {
    let text = table(&comparison(110.0));
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "old 0123456789 old: is old");
    assert_eq!(lines[1], "new fedcba9876 new: is new");
    assert!(lines[3].contains("7 rounds of --quick"), "{}", lines[3]);
    let words: Vec<&str> = lines[5].split_whitespace().collect();
    let expected = [
        "a.cost",
        "ns",
        "lower",
        "100.0",
        "110.0",
        "1.100",
        "1.100..1.100",
        "1.000..1.000",
        "slower",
    ];
    assert_eq!(words, expected);
    assert!(lines[6].starts_with("a.added ") && lines[6].ends_with("only in new"));
    assert!(
        !text.contains("nothing is decided"),
        "seven rounds are enough"
    );
}

#[test]
fn slower_is_a_result_a_count_or_a_failure() {
    assert!(comparison(110.0).anything_slower());
    assert!(!comparison(90.0).anything_slower());
    assert!(!comparison(100.0).anything_slower());

    let mut counted = empty();
    let per_unit = |instructions| PerUnit {
        instructions,
        guest_ns: 1.0,
    };
    let add = |new| Counted {
        name: "fault.first_touch".into(),
        old: per_unit(100.0),
        new: per_unit(new),
    };
    counted.counts.push(add(101.0));
    assert!(!counted.anything_slower());
    counted.counts.push(add(102.0));
    assert!(counted.anything_slower());
    let text = table(&counted);
    assert!(text.contains("+2.00 %  over the bar"), "{text}");

    let mut failed = empty();
    failed.failed(&failed.old.clone(), "thp.new", "does not know it");
    assert!(!failed.anything_slower(), "the old commit lacks it");
    assert!(table(&failed).contains("thp.new failed in 0123456789: does not know it"));
    failed.failed(&failed.new.clone(), "thp.old", "does not know it");
    assert!(failed.anything_slower());
}

#[test]
fn json_has_every_result() {
    let report: Value = serde_json::from_str(&json(&comparison(110.0))).unwrap();
    assert_eq!(report["old"]["hash"], "0123456789abcdef");
    let [cost, added] = &report["results"].as_array().unwrap()[..] else {
        panic!("two results");
    };
    assert_eq!(cost["verdict"], "slower");
    assert_eq!(cost["ratio"]["value"], 1.1);
    assert_eq!(cost["null"]["max"], 1.0);
    assert_eq!(added["verdict"], "only in new");
    assert_eq!(added["new"], 7.25);
}

#[test]
fn figures_have_four_digits() {
    let figures = [123_456.0, 123.45, 0.012_345, 0.0, f64::NAN].map(figure);
    assert_eq!(figures, ["123456", "123.5", "0.01235", "0", "NaN"]);
}
