//! Runs a commit's own `lacuna lab` and reads its JSON.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use super::arguments::Length;
use super::stats::Better;
use super::{Failure, failure};

/// Exit code of `lacuna` for an unknown argument.
const USAGE: i32 = 2;
/// How many lines of a failed command's output are shown.
const TAIL_LINES: usize = 5;

/// One result of a lab run.
#[derive(Clone, PartialEq, Debug)]
pub struct Figure {
    /// `experiment.measure.variant`.
    pub id: String,
    /// The median; NaN if the run has no value.
    pub value: f64,
    /// Unit of the value.
    pub unit: String,
    /// Which direction is progress.
    pub better: Better,
}

/// The result of a lab run.
pub enum Outcome {
    /// Its results.
    Figures(Vec<Figure>),
    /// The results before a failure, and its reason.
    EndedEarly(Vec<Figure>, String),
    /// The reason why there are no results.
    Failed(String),
}

/// Runs `part` with the program `lacuna`.
///
/// An error ends the whole comparison: an interrupt, or a program that cannot be started.
pub fn run(lacuna: &Path, part: &str, length: Length) -> Result<Outcome, Failure> {
    let mut command = Command::new(lacuna);
    command.args(["lab", part, "--quiet", "--json", "-"]);
    if length == Length::Quick {
        command.arg("--quick");
    }
    let output = match command.output() {
        Ok(output) => output,
        Err(error) => return failure(format!("cannot run {}: {error}", lacuna.display())),
    };
    let complaint = tail(&String::from_utf8_lossy(&output.stderr), TAIL_LINES);
    match output.status.code() {
        Some(USAGE) => return Ok(Outcome::Failed(format!("does not know it: {complaint}"))),
        Some(129 | 130 | 143) | None => return failure("interrupted"),
        Some(_) => {}
    }
    Ok(match figures(&String::from_utf8_lossy(&output.stdout)) {
        Ok(figures) if figures.is_empty() && output.status.success() => {
            Outcome::Failed("measured nothing here".into())
        }
        Ok(figures) if output.status.success() => Outcome::Figures(figures),
        Ok(figures) if !figures.is_empty() => Outcome::EndedEarly(figures, complaint),
        Ok(_) => Outcome::Failed(complaint),
        Err(why) => Outcome::Failed(format!("{why}; it printed: {complaint}")),
    })
}

/// The results in a report of the lab.
fn figures(json: &str) -> Result<Vec<Figure>, String> {
    let report: Value = serde_json::from_str(json)
        .map_err(|error| format!("the report of lacuna is not JSON: {error}"))?;
    let results = report["results"].as_array();
    let results = results.ok_or("the report of lacuna has no list of results")?;
    results.iter().map(figure).collect()
}

fn figure(result: &Value) -> Result<Figure, String> {
    let text = |field: &str| {
        let text = result[field].as_str();
        text.ok_or_else(|| format!("a result without {field}: {result}"))
    };
    Ok(Figure {
        id: text("id")?.to_owned(),
        value: result["value"].as_f64().unwrap_or(f64::NAN),
        unit: text("unit")?.to_owned(),
        better: match text("better")? {
            "higher" => Better::Higher,
            "lower" => Better::Lower,
            other => return Err(format!("better: {other}")),
        },
    })
}

/// The last `lines` nonempty lines of `text`.
pub fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `lacuna lab base --quick --json -` prints it, shortened.
    const REPORT: &str = r#"{
        "schema": 1, "host": {"cpu": "Some CPU"}, "command": "lacuna lab base --quick",
        "results": [
            {"id": "fault.soft_vs_host", "value": 0.26, "min": 0.25, "max": 0.27, "runs": 7,
             "unit": "x", "better": "lower", "bar": 0.5, "met": true, "simulated": false,
             "params": {"pages": 64}, "arms": {"host": {"value": 1613.0}}},
            {"id": "apf.rate", "value": null, "unit": "/s", "better": "higher"}],
        "skipped": [{"id": "cpu.x86.vs_qemu_tcg", "why": "no QEMU"}]}"#;

    #[test]
    fn a_report_is_read() {
        let figures = figures(REPORT).unwrap();
        let expected = Figure {
            id: "fault.soft_vs_host".into(),
            value: 0.26,
            unit: "x".into(),
            better: Better::Lower,
        };
        assert_eq!(figures[0], expected);
        assert_eq!(figures[1].better, Better::Higher);
        assert!(figures[1].value.is_nan(), "null is no number");
    }

    #[test]
    fn what_is_no_report_is_refused() {
        for (text, word) in [
            ("", "not JSON"),
            ("{}", "no list of results"),
            (
                r#"{"results": [{"id": "a.b", "value": 1}]}"#,
                "without unit",
            ),
            (
                r#"{"results": [{"id": "a.b", "unit": "x", "better": "best"}]}"#,
                "better: best",
            ),
        ] {
            let error = figures(text).expect_err(text);
            assert!(error.contains(word), "{text}: {error}");
        }
    }

    #[test]
    fn a_tail_has_no_empty_lines() {
        assert_eq!(tail("a\n\nb\nc\n\n", 2), "b\nc");
        assert_eq!(tail("a", 2), "a");
        assert_eq!(tail("", 2), "");
    }
}
