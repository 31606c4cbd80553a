//! `docs/figures.json`: runs of the lab.
//!
//! ```text
//! {"runs":[
//! {"commit":"abcdef1","date":"2026-11-24","host":"...","command":"lacuna lab thp","results":[
//! {"id":"thp.call.elsewhere","value":9.1,"min":8.8,"max":9.4,"runs":15,"unit":"x",...},
//! ]}
//! ]}
//! ```
//! A run is in the order of measuring, and the runs are in the order of their adding. A change of
//! the code may change a figure, so a figure comes from all runs of the newest commit that has it,
//! on the host of its newest run.
//! Its value is the median of their medians. Its range goes from the lowest lower end to the
//! highest upper end.

use lacuna_report::repeatable;
use serde_json::{Map, Value, json};
use std::fmt::Write;

/// The kept fields of a result.
const FIELDS: [&str; 14] = [
    "id",
    "value",
    "min",
    "max",
    "runs",
    "unit",
    "better",
    "bar",
    "wanted",
    "met",
    "reference",
    "reference_source",
    "simulated",
    "null",
];
/// The kept fields of a run.
const ABOUT: [&str; 4] = ["commit", "date", "host", "command"];

/// All runs.
pub struct Runs(Vec<Value>);

/// One figure of one or more runs.
#[derive(Clone, PartialEq, Debug)]
pub struct Figure {
    pub value: f64,
    pub low: f64,
    pub high: f64,
    pub unit: String,
    /// The ends of its interval where nothing differs: an arm beside itself.
    pub null: Option<[f64; 2]>,
    /// Rounds of all runs together.
    pub rounds: u64,
    pub runs: usize,
    pub bar: Option<f64>,
    pub wanted: Option<f64>,
    /// Whether each run has met the bar; nothing without a bar, or if a run could not decide.
    pub met: Option<bool>,
    pub simulated: bool,
    /// `higher` or `lower`.
    pub better: Option<String>,
    pub reference: Option<f64>,
    pub reference_source: Option<String>,
    /// The command of its last run.
    pub command: String,
    /// The newest commit that has it, and the day of its last run.
    pub commit: String,
    pub date: String,
}

impl Runs {
    /// Reads the file.
    pub fn parse(text: &str) -> Result<Self, String> {
        let file: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let Some(Value::Array(runs)) = file.get("runs") else {
            return Err("no list of runs".into());
        };
        for run in runs {
            for name in ABOUT {
                word(run, name)?;
            }
            for result in results(run) {
                word(result, "id")?;
                word(result, "unit")?;
                for name in ["value", "min", "max"] {
                    number(result, name)?;
                }
            }
        }
        Ok(Self(runs.clone()))
    }

    /// The file's text: a line for each result, so that a new run changes no other line.
    pub fn to_json(&self) -> String {
        let mut text = String::from("{\"runs\":[\n");
        for (index, run) in self.0.iter().enumerate() {
            let about = kept(run, &ABOUT);
            let about = about.trim_end_matches('}');
            let results: Vec<String> = results(run).map(|one| kept(one, &FIELDS)).collect();
            let comma = if index + 1 < self.0.len() { "," } else { "" };
            let results = results.join(",\n");
            let _ = writeln!(text, "{about},\"results\":[\n{results}\n]}}{comma}");
        }
        text.push_str("]}\n");
        text
    }

    /// Adds the lab's report, measured at `commit`.
    pub fn add(&mut self, report: &str, commit: &str) -> Result<(), String> {
        let mut report: Value = serde_json::from_str(report).map_err(|error| error.to_string())?;
        let command = word(&report, "command")?.to_owned();
        if command.contains("--quick") {
            return Err("a quick run has no figures to quote".into());
        }
        if results(&report).next().is_none() {
            return Err("it has no results".into());
        }
        let host = &report["host"];
        let text = |name: &str| host[name].as_str().unwrap_or("unknown");
        let date = text("date").get(..10).unwrap_or("unknown").to_owned();
        let cores = host["cores"].as_u64().unwrap_or(0);
        let host = format!("{}, {cores} cores, Linux {}", text("cpu"), text("kernel"));
        let mut run = Map::new();
        run.insert("commit".into(), commit.into());
        run.insert("date".into(), date.into());
        run.insert("host".into(), host.into());
        run.insert("command".into(), repeatable(&command).into());
        let mut results = report["results"].take();
        for result in results.as_array_mut().into_iter().flatten() {
            let null = &result["arms"]["null"];
            if let (Some(low), Some(high)) = (null["min"].as_f64(), null["max"].as_f64()) {
                result["null"] = json!([low, high]);
            }
        }
        run.insert("results".into(), results);
        self.0.push(Value::Object(run));
        Self::parse(&self.to_json()).map(drop)
    }

    /// The runs on hosts with so many cores.
    fn on(&self, cores: &str) -> impl DoubleEndedIterator<Item = &Value> {
        let host = format!(", {cores} cores,");
        let runs = self.0.iter();
        runs.filter(move |run| about(run, "host").contains(&host))
    }

    /// The measured commits.
    pub fn commits(&self) -> impl Iterator<Item = &str> {
        let mut commits: Vec<&str> = self.0.iter().map(|run| about(run, "commit")).collect();
        commits.sort_unstable();
        commits.dedup();
        commits.into_iter()
    }

    /// The ids that begin with `prefix`, in the order of measuring of the newest run that has them.
    pub fn ids(&self, prefix: &str, cores: &str) -> Vec<&str> {
        let mut found: Vec<&str> = Vec::new();
        for run in self.on(cores).rev() {
            let ids = results(run).map(|result| about(result, "id"));
            let new: Vec<&str> = ids
                .filter(|id| id.starts_with(prefix) && !found.contains(id))
                .collect();
            found.extend(new);
        }
        found
    }

    /// The figure named `id`.
    pub fn figure(&self, id: &str, cores: &str) -> Option<Figure> {
        let all = self.on(cores).flat_map(|run| {
            let own = results(run).filter(|result| about(result, "id") == id);
            own.map(move |result| (run, result))
        });
        let all: Vec<(&Value, &Value)> = all.collect();
        let (newest, last) = *all.last()?;
        let commit = about(newest, "commit");
        let same = all.iter().filter(|(run, _)| {
            ["commit", "host"].map(|name| about(run, name)) == [commit, about(newest, "host")]
        });
        let same: Vec<&Value> = same.map(|(_, result)| *result).collect();
        let numbers = |name: &str| -> Vec<f64> {
            let mut all: Vec<f64> = same.iter().filter_map(|one| one[name].as_f64()).collect();
            all.sort_by(f64::total_cmp);
            all
        };
        let (values, low, high) = (numbers("value"), numbers("min"), numbers("max"));
        let met: Vec<Option<bool>> = same.iter().map(|one| one["met"].as_bool()).collect();
        Some(Figure {
            value: f64::midpoint(values[(values.len() - 1) / 2], values[values.len() / 2]),
            low: low[0],
            high: high[high.len() - 1],
            unit: about(last, "unit").to_owned(),
            null: null(&same),
            rounds: same.iter().filter_map(|one| one["runs"].as_u64()).sum(),
            runs: same.len(),
            bar: last["bar"].as_f64(),
            wanted: last["wanted"].as_f64(),
            met: if met.contains(&Some(false)) {
                Some(false)
            } else {
                met.into_iter().collect::<Option<Vec<_>>>().map(|_| true)
            },
            simulated: last["simulated"].as_bool().unwrap_or(false),
            better: last["better"].as_str().map(str::to_owned),
            reference: last["reference"].as_f64(),
            reference_source: last["reference_source"].as_str().map(str::to_owned),
            command: about(newest, "command").to_owned(),
            commit: commit.to_owned(),
            date: about(newest, "date").to_owned(),
        })
    }
}

/// The lowest and the highest end of the nulls.
fn null(of: &[&Value]) -> Option<[f64; 2]> {
    let ends = |end: usize| of.iter().filter_map(move |one| one["null"][end].as_f64());
    Some([ends(0).reduce(f64::min)?, ends(1).reduce(f64::max)?])
}

/// The object with the nonnull `fields` of `value`, in their order.
fn kept(value: &Value, fields: &[&str]) -> String {
    let kept = fields.iter().filter_map(|field| {
        let found = value.get(field)?;
        let is_left_out = found.is_null() || (*field == "simulated" && *found == false);
        (!is_left_out).then(|| format!("\"{field}\":{found}"))
    });
    format!("{{{}}}", kept.collect::<Vec<_>>().join(","))
}

fn results(run: &Value) -> impl Iterator<Item = &Value> {
    run["results"].as_array().into_iter().flatten()
}

fn about<'v>(value: &'v Value, name: &str) -> &'v str {
    value[name].as_str().unwrap_or_default()
}

fn word<'v>(value: &'v Value, name: &str) -> Result<&'v str, String> {
    let found = value[name].as_str();
    found.ok_or_else(|| format!("{name} is missing in {value}"))
}

fn number(value: &Value, name: &str) -> Result<f64, String> {
    let found = value[name].as_f64();
    found.ok_or_else(|| format!("{name} is missing in {value}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `lacuna lab --json` writes it, shortened.
    fn report(value: f64, met: bool) -> String {
        format!(
            r#"{{"schema":1,"host":{{"cpu":"Some CPU","cores":2,"kernel":"6.18",
            "memory_bytes":1,"date":"2026-11-24T10:00:00Z"}},
            "command":"/x/lacuna lab thp.call --json out.json",
            "results":[{{"id":"thp.call","value":{value:?},"min":{:?},"max":{:?},"runs":15,
            "unit":"x","better":"higher","bar":5.0,"wanted":null,"met":{met},"reference":5.0,
            "simulated":false,"params":{{}},"arms":{{"null":{{"min":{:?},"max":1.1}}}}}}],
            "skipped":[]}}"#,
            value - 1.0,
            value + 1.0,
            value / 10.0
        )
    }

    fn empty() -> Runs {
        Runs::parse("{\"runs\":[\n]}\n").unwrap()
    }

    #[test]
    fn runs_of_one_commit_are_one_figure() {
        let mut runs = empty();
        for value in [9.0, 4.0, 8.0] {
            runs.add(&report(value, value > 5.0), "abcdef1").unwrap();
        }
        let figure = runs.figure("thp.call", "2").unwrap();
        assert_eq!((figure.value, figure.low, figure.high), (8.0, 3.0, 10.0));
        assert_eq!((figure.runs, figure.rounds), (3, 45));
        assert_eq!(figure.null, Some([0.4, 1.1]));
        assert_eq!((figure.bar, figure.met), (Some(5.0), Some(false)));
        runs.add(&report(20.0, true), "abcdef2").unwrap();
        let figure = runs.figure("thp.call", "2").unwrap();
        assert_eq!(
            (figure.value, figure.runs),
            (20.0, 1),
            "the newest commit's"
        );
        assert_eq!((&*figure.commit, figure.met), ("abcdef2", Some(true)));
        let elsewhere = report(30.0, true).replace("Some CPU", "Another CPU");
        runs.add(&elsewhere, "abcdef2").unwrap();
        let figure = runs.figure("thp.call", "2").unwrap();
        assert_eq!((figure.value, figure.runs), (30.0, 1), "the newest host's");
        assert_eq!(runs.commits().collect::<Vec<_>>(), ["abcdef1", "abcdef2"]);
        assert_eq!(runs.ids("thp.", "2"), ["thp.call"]);
        assert_eq!(runs.figure("thp.gone", "2"), None);
    }

    #[test]
    fn the_file_is_read_as_it_was_written() {
        let mut runs = empty();
        runs.add(&report(9.0, true), "abcdef1").unwrap();
        let text = runs.to_json();
        let about = concat!(
            r#"{"commit":"abcdef1","date":"2026-11-24","host":"Some CPU, 2 cores, Linux 6.18","#,
            r#""command":"lacuna lab thp.call","results":["#
        );
        let result = concat!(
            r#"{"id":"thp.call","value":9.0,"min":8.0,"max":10.0,"runs":15,"unit":"x","#,
            r#""better":"higher","bar":5.0,"met":true,"reference":5.0,"null":[0.9,1.1]}"#
        );
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines, ["{\"runs\":[", about, result, "]}", "]}"]);
        assert_eq!(Runs::parse(&text).unwrap().to_json(), text);
    }

    #[test]
    fn what_has_no_figures_to_quote_is_refused() {
        for (text, word) in [
            ("nonsense", "expected"),
            ("{}", "command is missing"),
            (r#"{"command":"lacuna lab --quick"}"#, "quick"),
            (r#"{"command":"lacuna lab","results":[]}"#, "no results"),
            (
                r#"{"command":"lacuna lab","results":[{"id":"a.b"}]}"#,
                "unit",
            ),
        ] {
            let error = empty().add(text, "abcdef1").unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
