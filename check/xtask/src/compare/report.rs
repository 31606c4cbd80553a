//! The table and the JSON of a comparison.

use std::fmt::Write;

use serde_json::{Value, json};

use super::arguments::{Arguments, Length};
use super::commit::Commit;
use super::count::{BAR, Counted};
use super::pair::{Found, Row};
use super::stats::{Better, CONFIDENCE, Interval, Verdict};

/// Version of the JSON form. It changes when a field changes its meaning or is removed.
const SCHEMA: u32 = 1;

/// All findings of a comparison.
pub struct Comparison {
    old: Commit,
    new: Commit,
    rounds: usize,
    length: Length,
    rows: Vec<Row>,
    failures: Vec<Failed>,
    ended_early: Vec<Failed>,
    /// Instruction counts, if requested.
    pub counts: Vec<Counted>,
}

#[derive(PartialEq, Eq)]
struct Failed {
    commit: Commit,
    what: String,
    why: String,
}

impl Comparison {
    /// A comparison without findings.
    pub fn new(old: &Commit, new: &Commit, arguments: &Arguments) -> Self {
        Self {
            old: old.clone(),
            new: new.clone(),
            rounds: arguments.rounds,
            length: arguments.length,
            rows: Vec::new(),
            failures: Vec::new(),
            ended_early: Vec::new(),
            counts: Vec::new(),
        }
    }

    /// Adds a part's results.
    pub fn add(&mut self, rows: Vec<Row>) {
        self.rows.extend(rows);
    }

    /// Notes that `commit` could not do `what`: a part of the lab or a probe.
    pub fn failed(&mut self, commit: &Commit, what: &str, why: &str) {
        self.failures.push(Failed {
            commit: commit.clone(),
            what: what.to_owned(),
            why: why.to_owned(),
        });
    }

    /// Notes that a slice of `part` measured only some of its results.
    pub fn ended_early(&mut self, commit: &Commit, part: &str, why: &str) {
        let failed = Failed {
            commit: commit.clone(),
            what: part.to_owned(),
            why: why.to_owned(),
        };
        if !self.ended_early.contains(&failed) {
            self.ended_early.push(failed);
        }
    }

    /// Whether the new commit is slower somewhere, or could not do what the old one can.
    pub fn anything_slower(&self) -> bool {
        let slower = |row: &Row| match &row.found {
            Found::Both(pair) => pair.verdict == Verdict::Slower,
            _ => false,
        };
        self.rows.iter().any(slower)
            || self.counts.iter().any(Counted::is_slower)
            || self.failures.iter().any(|failed| failed.commit == self.new)
    }
}

/// The table for people.
pub fn table(comparison: &Comparison) -> String {
    let Comparison { old, new, .. } = comparison;
    let mut text = format!(
        "old {} {}\nnew {} {}\n",
        old.short(),
        old.subject,
        new.short(),
        new.subject
    );
    times(&mut text, comparison);
    counts(&mut text, &comparison.counts);
    for failed in &comparison.failures {
        let Failed { commit, what, why } = failed;
        let _ = writeln!(text, "\n{what} failed in {}: {why}", commit.short());
    }
    for ended in &comparison.ended_early {
        let Failed { commit, what, why } = ended;
        let _ = writeln!(text, "\n{what} ended early in {}: {why}", commit.short());
    }
    text
}

fn times(text: &mut String, comparison: &Comparison) {
    if comparison.rows.is_empty() {
        return;
    }
    let quick = match comparison.length {
        Length::Full => "",
        Length::Quick => " of --quick",
    };
    let _ = writeln!(
        text,
        "\nTime: medians of {} rounds{quick}, each old null new new null old; ratio = new / old. \
         The null is old / old.",
        comparison.rounds
    );
    let mut lines = vec![
        [
            "id", "unit", "better", "old", "new", "ratio", "interval", "null", "verdict",
        ]
        .map(str::to_owned),
    ];
    lines.extend(comparison.rows.iter().map(line));
    align(text, &lines);
    let coverage = comparison.rows.iter().filter_map(|row| match &row.found {
        Found::Both(pair) => Some(pair.ratio.coverage),
        _ => None,
    });
    let coverage = coverage.fold(f64::INFINITY, f64::min);
    if coverage < CONFIDENCE {
        let percent = coverage * 100.0;
        let _ = writeln!(
            text,
            "The intervals cover {percent:.0} %, so nothing is decided: use --rounds 6 or more."
        );
    }
}

fn line(row: &Row) -> [String; 9] {
    let better = match row.better {
        Better::Higher => "higher",
        Better::Lower => "lower",
    };
    let dash = || "-".to_owned();
    let tail = match &row.found {
        Found::Both(pair) => [
            figure(pair.old),
            figure(pair.new),
            format!("{:.3}", pair.ratio.median),
            interval(pair.ratio),
            interval(pair.null),
            pair.verdict.word().to_owned(),
        ],
        Found::OnlyOld(value) => only(figure(*value), dash(), "only in old"),
        Found::OnlyNew(value) => only(dash(), figure(*value), "only in new"),
        Found::NoRatio(why) => only(dash(), dash(), why),
    };
    let [old, new, ratio, interval, null, verdict] = tail;
    let (id, unit) = (row.id.clone(), row.unit.clone());
    [
        id,
        unit,
        better.to_owned(),
        old,
        new,
        ratio,
        interval,
        null,
        verdict,
    ]
}

fn only(old: String, new: String, verdict: &str) -> [String; 6] {
    let dash = || "-".to_owned();
    [old, new, dash(), dash(), dash(), verdict.to_owned()]
}

fn counts(text: &mut String, counts: &[Counted]) {
    if counts.is_empty() {
        return;
    }
    let percent = (BAR - 1.0) * 100.0;
    let _ = writeln!(
        text,
        "\nHost instructions for each unit of work, by callgrind; the bar is +{percent:.0} %."
    );
    let mut lines = vec![["probe", "old", "new", "change", "verdict"].map(str::to_owned)];
    lines.extend(counts.iter().map(|counted| {
        let verdict = match (counted.is_slower(), counted.same_guest()) {
            (true, true) => "over the bar",
            (true, false) => "over the bar (the guest's own work differs, too)",
            (false, true) => "ok",
            (false, false) => "ok (the guest's own work differs)",
        };
        [
            counted.name.clone(),
            figure(counted.old.instructions),
            figure(counted.new.instructions),
            format!("{:+.2} %", (counted.ratio() - 1.0) * 100.0),
            verdict.to_owned(),
        ]
    }));
    align(text, &lines);
}

/// Writes `lines` with their columns aligned, the last one free.
fn align<const N: usize>(text: &mut String, lines: &[[String; N]]) {
    for line in lines {
        for (column, cell) in line.iter().enumerate() {
            if column + 1 == N {
                let _ = writeln!(text, "{cell}");
            } else {
                let width = lines.iter().map(|line| line[column].chars().count()).max();
                let _ = write!(text, "{cell:<0$}  ", width.unwrap_or(0));
            }
        }
    }
}

/// A value with four significant digits.
fn figure(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return format!("{value}");
    }
    let digits = 3 - value.abs().log10().floor() as i32;
    format!("{value:.0$}", digits.clamp(0, 9) as usize)
}

fn interval(interval: Interval) -> String {
    format!("{:.3}..{:.3}", interval.low, interval.high)
}

/// The form for machines, indented, with a newline at the end.
pub fn json(comparison: &Comparison) -> String {
    let commit = |commit: &Commit| json!({"hash": commit.hash, "subject": commit.subject});
    let failures = |failures: &[Failed]| {
        let failures = failures.iter().map(
            |failed| json!({"commit": failed.commit.hash, "what": failed.what, "why": failed.why}),
        );
        failures.collect::<Vec<_>>()
    };
    let counts = comparison.counts.iter().map(|counted| {
        json!({
            "probe": counted.name, "old": counted.old.instructions,
            "new": counted.new.instructions, "ratio": counted.ratio(), "bar": BAR,
            "met": !counted.is_slower(), "same_guest": counted.same_guest(),
        })
    });
    let report = json!({
        "schema": SCHEMA,
        "old": commit(&comparison.old),
        "new": commit(&comparison.new),
        "rounds": comparison.rounds,
        "quick": comparison.length == Length::Quick,
        "results": comparison.rows.iter().map(json_row).collect::<Vec<_>>(),
        "instructions": counts.collect::<Vec<_>>(),
        "failures": failures(&comparison.failures),
        "ended_early": failures(&comparison.ended_early),
    });
    format!("{report:#}\n")
}

fn json_row(row: &Row) -> Value {
    let better = match row.better {
        Better::Higher => "higher",
        Better::Lower => "lower",
    };
    let mut value = json!({"id": row.id, "unit": row.unit, "better": better});
    let interval = |interval: Interval| {
        json!({
            "value": interval.median, "min": interval.low, "max": interval.high,
            "coverage": interval.coverage,
        })
    };
    let found = match &row.found {
        Found::Both(pair) => json!({
            "old": pair.old, "new": pair.new, "ratio": interval(pair.ratio),
            "null": interval(pair.null), "rounds": pair.rounds, "verdict": pair.verdict.word(),
        }),
        Found::OnlyOld(old) => json!({"old": old, "verdict": "only in old"}),
        Found::OnlyNew(new) => json!({"new": new, "verdict": "only in new"}),
        Found::NoRatio(why) => json!({"verdict": "no ratio", "why": why}),
    };
    let (Value::Object(value_map), Value::Object(found)) = (&mut value, found) else {
        unreachable!("both are written as objects above");
    };
    value_map.extend(found);
    value
}

#[cfg(test)]
mod tests;
