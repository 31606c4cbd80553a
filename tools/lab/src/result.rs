//! The stable JSON form of a command's measurements.
//!
//! ```text
//! {"schema":1, "host":{...}, "commit":"abcdef1", "command":"...", "results":[
//!   {"id":"fault.soft_vs_host", "value":0.38, "min":0.36, "max":0.41, "runs":15, "unit":"x",
//!    "better":"lower", "bar":0.5, "wanted":0.4, "met":true, "reference":1.0,
//!    "reference_source":"...", "simulated":false, "spread":[0.35,0.37,0.39,0.44],
//!    "params":{...}, "arms":{"host":{...},...}}],
//!  "skipped":[{"id":"cpu.x86.vs_qemu_tcg.mem64m", "why":"qemu-system-x86_64 is not installed"}],
//!  "finished":[{"command":"lacuna lab base", "seconds":12, "results":1, "skipped":1, "about":1}]}
//! ```
//!
//! Ids are part of the interface: `experiment.measure.variant`. An id is never reused for something
//! else. `min` and `max` are the ends of the 95 % interval ([`crate::stats`]); `spread` is the
//! smallest run, the quartiles and the largest run. A result that could not be measured is listed
//! as skipped, with the reason. It never counts as passed.

use std::collections::BTreeMap;
use std::time::Duration;

use lacuna::Arch;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::host_info::HostInfo;
use crate::stats::{Spread, Summary};

/// Version of the form. It changes when a field changes its meaning or is removed, not when one is
/// added.
pub const SCHEMA: u32 = 1;

/// Everything one command measured.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Where it was measured.
    pub host: HostInfo,
    /// The commit that the program was built from; empty if it is not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub commit: String,
    /// The command line that reproduces it.
    pub command: String,
    /// What was measured, and the findings in words: paragraphs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub about: Vec<String>,
    /// The measurements, in their order.
    pub results: Vec<Measurement>,
    /// What was not measured, and why.
    #[serde(default)]
    pub skipped: Vec<Skipped>,
    /// The finished experiments, in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub finished: Vec<Finished>,
    /// Why the command ended before everything was measured; absent when everything was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_early: Option<String>,
    /// Tables for people. JSON has the same figures in the arms.
    #[serde(skip)]
    pub details: Vec<String>,
    /// Begins the ids of the results that follow; see [`Report::begin`].
    #[serde(skip)]
    prefix: &'static str,
}

impl Report {
    /// An empty report of this machine.
    pub fn new(command: impl Into<String>) -> Self {
        Self {
            schema: SCHEMA,
            host: HostInfo::detect(),
            commit: String::new(),
            command: command.into(),
            about: Vec::new(),
            results: Vec::new(),
            skipped: Vec::new(),
            finished: Vec::new(),
            ended_early: None,
            details: Vec::new(),
            prefix: "",
        }
    }

    /// Begins the results of an experiment that runs on any processor, here on `arch`. Results of
    /// arm64 guests have ids that begin with `arm64`.
    pub fn begin(&mut self, arch: Arch) {
        self.prefix = match arch {
            Arch::Arm64 => "arm64.",
            _ => "",
        };
    }

    /// Adds a paragraph.
    pub fn say(&mut self, paragraph: impl Into<String>) {
        self.about.push(paragraph.into());
    }

    /// Adds a table for people.
    pub fn detail(&mut self, table: impl Into<String>) {
        self.details.push(table.into());
    }

    /// Adds a measurement.
    ///
    /// # Panics
    /// If there is a result of this id.
    pub fn push(&mut self, mut measurement: Measurement) {
        measurement.id.insert_str(0, self.prefix);
        let id = &measurement.id;
        assert!(
            self.results.iter().all(|known| known.id != *id),
            "two results named {id}"
        );
        self.results.push(measurement);
    }

    /// Notes that `id` was not measured.
    pub fn skip(&mut self, id: impl Into<String>, why: impl ToString) {
        self.skipped.push(Skipped {
            id: format!("{}{}", self.prefix, id.into()),
            why: why.to_string(),
        });
    }

    /// Notes that an experiment has ended after `took`; `command` repeats it.
    pub fn finish(&mut self, command: String, took: Duration) {
        self.finished.push(Finished {
            command,
            seconds: took.as_secs_f64().round(),
            results: self.results.len(),
            skipped: self.skipped.len(),
            about: self.about.len(),
        });
    }

    /// Drops what was added after the end of the last finished experiment.
    pub fn keep_finished(&mut self) {
        let [results, skipped, about] = self
            .finished
            .last()
            .map_or([0; 3], |last| [last.results, last.skipped, last.about]);
        self.results.truncate(results);
        self.skipped.truncate(skipped);
        self.about.truncate(about);
    }

    /// The results whose bar was missed.
    pub fn missed(&self) -> impl Iterator<Item = &Measurement> {
        self.results
            .iter()
            .filter(|result| result.met == Some(false))
    }

    /// The JSON form, indented, with a newline at the end.
    ///
    /// # Panics
    /// Never, because every field has a JSON form. An infinite or undefined figure becomes `null`.
    pub fn to_json(&self) -> String {
        to_json(self)
    }
}

/// The JSON form of a result, indented, with a newline at the end.
///
/// # Panics
/// If a field has no JSON form.
pub fn to_json(result: &impl Serialize) -> String {
    serde_json::to_string_pretty(result).expect("every field has a JSON form") + "\n"
}

/// This command, for results.
pub fn command_line() -> String {
    std::env::args().collect::<Vec<_>>().join(" ")
}

/// A finished experiment of a report.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Finished {
    /// The command that repeats it alone.
    pub command: String,
    /// Its time, in seconds.
    pub seconds: f64,
    /// The results of the report up to its end.
    pub results: usize,
    /// The skipped results up to its end.
    pub skipped: usize,
    /// The paragraphs up to its end.
    pub about: usize,
}

/// A result that could not be measured here.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Skipped {
    /// The id it would have had.
    pub id: String,
    /// The reason.
    pub why: String,
}

/// Whether more is better.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    /// More is better: a rate.
    Higher,
    /// Less is better: a cost.
    Lower,
}

/// One figure, with everything needed to judge it.
#[must_use]
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Measurement {
    /// `experiment.measure.variant`.
    pub id: String,
    /// The median.
    #[serde(deserialize_with = "number")]
    pub value: f64,
    /// Lower end of its interval.
    #[serde(deserialize_with = "number")]
    pub min: f64,
    /// Upper end of its interval.
    #[serde(deserialize_with = "number")]
    pub max: f64,
    /// The number of runs behind it.
    pub runs: usize,
    /// Unit of `value`, `min`, `max`, `bar`, `wanted` and `reference`; `x` for a ratio.
    pub unit: String,
    /// Whether more is better.
    pub better: Better,
    /// The value that the project promises; `None` if it promises nothing.
    #[serde(default)]
    pub bar: Option<f64>,
    /// A better value that the project aims for.
    #[serde(default)]
    pub wanted: Option<f64>,
    /// Whether the *worse* end of the interval meets the bar; `None` without a bar, and where the
    /// measurement is too noisy to decide.
    #[serde(default)]
    pub met: Option<bool>,
    /// A published figure to compare with.
    pub reference: Option<f64>,
    /// The source of the published figure.
    pub reference_source: Option<String>,
    /// Whether a part of the value is not measured but computed, such as the cost of exits.
    pub simulated: bool,
    /// How the runs lie, if the figure has runs of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spread: Option<Spread>,
    /// The parameters of the experiment: sizes, seeds, tick, slice.
    pub params: BTreeMap<String, Value>,
    /// The arms behind it, each with its own figures.
    pub arms: BTreeMap<String, Value>,
}

impl Measurement {
    /// A measurement without bar, reference, parameters or arms.
    ///
    /// # Panics
    /// If `id` is not two or more words of `a-z`, `0-9` and `_`, joined by dots.
    pub fn new(id: impl Into<String>, unit: &str, better: Better, summary: Summary) -> Self {
        let id = id.into();
        assert!(is_id(&id), "{id:?} is no result id");
        Self {
            id,
            value: summary.median,
            min: summary.low,
            max: summary.high,
            runs: summary.runs,
            unit: unit.to_owned(),
            better,
            bar: None,
            wanted: None,
            met: None,
            reference: None,
            reference_source: None,
            simulated: false,
            // JSON has no infinite numbers.
            spread: summary
                .spread
                .filter(|ends| ends.iter().all(|end| end.is_finite())),
            params: BTreeMap::new(),
            arms: BTreeMap::new(),
        }
    }

    /// With the value that the project promises.
    pub fn bar(mut self, bar: f64) -> Self {
        self.bar = Some(bar);
        self.met = Some(match self.better {
            Better::Higher => self.min >= bar,
            Better::Lower => self.max <= bar,
        });
        self
    }

    /// With the value that the project promises. This measurement cannot decide whether it is met.
    pub fn undecided(mut self, bar: f64) -> Self {
        self.bar = Some(bar);
        self
    }

    /// With the better value that the project aims for.
    pub fn wanted(mut self, wanted: f64) -> Self {
        self.wanted = Some(wanted);
        self
    }

    /// With a published figure to compare with.
    pub fn reference(mut self, value: f64, source: &str) -> Self {
        self.reference = Some(value);
        self.reference_source = Some(source.to_owned());
        self
    }

    /// Marked as partly computed.
    pub fn simulated(mut self) -> Self {
        self.simulated = true;
        self
    }

    /// With one parameter of the experiment.
    pub fn param(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.params.insert(name.to_owned(), value.into());
        self
    }

    /// With one arm: its median, its interval and other figures.
    pub fn arm(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.arms.insert(name.to_owned(), value.into());
        self
    }
}

/// A number; `null`, which stands for an infinite one, is infinite.
fn number<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::INFINITY))
}

/// An arm's own figures, for [`Measurement::arm`].
impl From<Summary> for Value {
    fn from(summary: Summary) -> Self {
        let Summary { low, high, .. } = summary;
        serde_json::json!({"value": summary.median, "min": low, "max": high, "runs": summary.runs})
    }
}

fn is_id(id: &str) -> bool {
    let word = |word: &str| {
        let mut bytes = word.bytes();
        !word.is_empty() && bytes.all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
    };
    id.contains('.') && id.split('.').all(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(id: &str, better: Better, low: f64, high: f64) -> Measurement {
        let median = f64::midpoint(low, high);
        Measurement::new(id, "x", better, Summary::example(low, median, high))
    }

    /// The worse end decides, not the median, and equality is enough.
    #[test]
    fn bars() {
        for (better, low, high, bar, met) in [
            (Better::Lower, 0.3, 0.5, 0.5, true),
            (Better::Lower, 0.3, 0.51, 0.5, false),
            (Better::Higher, 1.8, 2.0, 1.8, true),
            (Better::Higher, 1.7, 2.0, 1.8, false),
            (Better::Lower, f64::NAN, f64::NAN, 0.5, false),
        ] {
            let result = measured("a.b", better, low, high);
            assert_eq!(result.met, None);
            assert_eq!(result.bar(bar).met, Some(met), "{better:?} {low} {high}");
        }
    }

    #[test]
    fn ids() {
        let good = "run.memory_overhead_percent fault.soft_vs_host.cold a.b2";
        assert!(good.split(' ').all(is_id));
        let bad = "|fault|fault.|.x|fault..x|Fault.x|fault x.y|fault.x-y";
        assert!(!bad.split('|').any(is_id));
    }

    #[test]
    #[should_panic(expected = "two results named a.b")]
    fn an_id_names_one_thing() {
        let mut report = Report::new("lacuna lab");
        let one = measured("a.b", Better::Lower, 1.0, 1.0);
        report.push(one.clone());
        report.push(one);
    }

    #[test]
    fn only_finished_experiments_are_kept() {
        let mut report = Report::new("lacuna lab");
        report.push(measured("a.b", Better::Lower, 1.0, f64::INFINITY));
        report.say("a");
        report.finish("lacuna lab a".into(), Duration::from_secs(3));
        let first = report.clone();
        report.push(measured("c.d", Better::Lower, 1.0, 1.0));
        report.skip("c.e", "no guest");
        report.say("c");
        let mut read: Report = serde_json::from_str(&report.to_json()).unwrap();
        read.keep_finished();
        assert_eq!(read, first, "an infinite value is read again");
    }

    #[test]
    fn results_of_arm64_guests_have_ids_of_their_own() {
        let mut report = Report::new("lacuna lab");
        for arch in [Arch::X86_64, Arch::Arm64] {
            report.begin(arch);
            report.skip("a.b", "no guest");
            report.push(measured("a.c", Better::Lower, 1.0, 1.0));
        }
        report.begin(Arch::X86_64);
        report.skip("a.d", "no guest");
        let ids: Vec<_> = report.skipped.iter().map(|s| s.id.as_str()).collect();
        assert_eq!(ids, ["a.b", "arm64.a.b", "a.d"]);
        assert_eq!(report.results[1].id, "arm64.a.c");
    }

    /// The form that other programs parse. If this test must change, [`SCHEMA`] must change, too,
    /// unless the change only adds a field.
    #[test]
    fn the_json_form_is_stable() {
        let mut report = Report::new("lacuna lab base --quick");
        report.host = HostInfo {
            cpu: "Some CPU".into(),
            cores: 2,
            kernel: "6.18".into(),
            memory_bytes: 1 << 30,
            date: "2026-01-31T00:00:00Z".into(),
        };
        report.push(
            measured("fault.soft_vs_host", Better::Lower, 0.25, 0.5)
                .bar(0.5)
                .wanted(0.375)
                .reference(1.0, "this host's kernel")
                .param("pages", 64)
                .arm("host", Summary::example(1.0, 2.0, 3.0)),
        );
        report.skip("cpu.x86.vs_qemu_tcg.mem64m", "no QEMU");
        let compact = serde_json::to_string(&report).unwrap();
        let expected = concat!(
            r#"{"schema":1,"host":{"cpu":"Some CPU","cores":2,"kernel":"6.18","#,
            r#""memory_bytes":1073741824,"date":"2026-01-31T00:00:00Z"},"#,
            r#""command":"lacuna lab base --quick","results":[{"id":"fault.soft_vs_host","#,
            r#""value":0.375,"min":0.25,"max":0.5,"runs":7,"unit":"x","better":"lower","#,
            r#""bar":0.5,"wanted":0.375,"met":true,"reference":1.0,"#,
            r#""reference_source":"this host's kernel","simulated":false,"params":{"pages":64},"#,
            r#""arms":{"host":{"max":3.0,"min":1.0,"runs":7,"value":2.0}}}],"#,
            r#""skipped":[{"id":"cpu.x86.vs_qemu_tcg.mem64m","why":"no QEMU"}]}"#,
        );
        assert_eq!(compact, expected);
        assert_eq!(
            serde_json::from_str::<Report>(&report.to_json()).unwrap(),
            report
        );
    }
}
