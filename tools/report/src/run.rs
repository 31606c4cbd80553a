//! Figures, and the JSON forms they are read from.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::text::digits;

/// One run of the lab, or the figures that stand for one.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Run {
    /// Names it beside another run: its date, or its machine.
    pub name: String,
    /// The machine.
    pub host: String,
    /// The commit that was measured; empty if it is not known.
    pub commit: String,
    /// When it was measured.
    pub date: String,
    /// The command that measured it.
    pub command: String,
    /// What was measured, in words: paragraphs.
    pub about: Vec<String>,
    /// The figures, in their order.
    pub figures: Vec<Figure>,
    /// The ids that were not measured, and the reasons.
    pub skipped: Vec<Skipped>,
}

/// A result that was not measured.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
pub struct Skipped {
    /// The id it would have had.
    pub id: String,
    /// The reason.
    pub why: String,
}

/// One figure.
#[derive(Clone, PartialEq, Debug, Deserialize)]
pub struct Figure {
    /// `experiment.measure.variant`.
    pub id: String,
    /// The median. It is infinite where no value was found, such as a latency to break even.
    #[serde(deserialize_with = "number")]
    pub value: f64,
    /// Lower end of its 95 % interval.
    #[serde(deserialize_with = "number")]
    pub min: f64,
    /// Upper end of its 95 % interval.
    #[serde(deserialize_with = "number")]
    pub max: f64,
    /// The number of rounds behind it.
    pub runs: u64,
    /// The unit of all values; `x` for a ratio.
    pub unit: String,
    /// `higher` or `lower`: which side is better.
    #[serde(default)]
    pub better: Option<String>,
    /// The value that the project promises.
    #[serde(default)]
    pub bar: Option<f64>,
    /// Whether the worse end of the interval meets the bar.
    #[serde(default)]
    pub met: Option<bool>,
    /// The published figure.
    #[serde(default)]
    pub reference: Option<f64>,
    /// The source of the published figure.
    #[serde(default)]
    pub reference_source: Option<String>,
    /// Whether a part of the value is computed.
    #[serde(default)]
    pub simulated: bool,
    /// The smallest round, the quartiles, and the largest round.
    #[serde(default)]
    pub spread: Option<[f64; 4]>,
    /// The arms behind it; `null` compares an arm with itself.
    #[serde(default)]
    pub arms: BTreeMap<String, Value>,
    /// The command that reproduces it.
    #[serde(skip)]
    pub command: String,
    /// The commit and the date, where the figures of a run differ in them.
    #[serde(skip)]
    pub measured: String,
}

/// Whether a figure reaches its bar.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The worse end of the interval meets the bar.
    Met,
    /// It does not.
    Missed,
    /// The measurement could not decide.
    Undecided,
}

impl Figure {
    /// Whether it reaches its bar; `None` without a bar.
    pub fn verdict(&self) -> Option<Verdict> {
        self.bar?;
        Some(match (self.met, self.runs) {
            // So few rounds have no 95 % interval.
            (None, _) | (Some(_), 2..=4) => Verdict::Undecided,
            (Some(true), _) => Verdict::Met,
            (Some(false), _) => Verdict::Missed,
        })
    }

    /// Its interval where nothing differs: an arm beside itself.
    pub fn null(&self) -> Option<(f64, f64)> {
        let null = self.arms.get("null")?;
        Some((null["min"].as_f64()?, null["max"].as_f64()?))
    }

    /// Whether the intervals of the two do not overlap.
    pub fn differs(&self, other: &Self) -> bool {
        self.max < other.min || other.max < self.min
    }

    /// The value with its unit; `none` if it is infinite.
    pub fn quantity(&self) -> String {
        let unit = if self.value.is_finite() {
            &*self.unit
        } else {
            ""
        };
        format!("{} {unit}", digits(self.value))
            .trim_end()
            .to_owned()
    }
}

/// A figure of a run, and the figure of the same id of the run beside it. One of them exists.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pair<'r> {
    /// The run's.
    pub mine: Option<&'r Figure>,
    /// The other run's.
    pub other: Option<&'r Figure>,
}

impl<'r> Pair<'r> {
    /// The figures of `id`.
    pub fn of(id: &str, run: &'r Run, other: Option<&'r Run>) -> Option<Self> {
        let mine = run.figure(id);
        let other = other.and_then(|other| other.figure(id));
        mine.or(other).map(|_| Self { mine, other })
    }

    /// The run's figure; the other's where the run has none.
    pub fn shown(self) -> &'r Figure {
        let shown = self.mine.or(self.other);
        shown.expect("one of the two exists")
    }

    /// Whether both exist and differ.
    pub fn differs(self) -> bool {
        matches!((self.mine, self.other), (Some(mine), Some(other)) if mine.differs(other))
    }
}

/// The pairs of all figures: the run's in their order, then those of the other run alone.
pub(crate) fn pairs<'r>(run: &'r Run, other: Option<&'r Run>) -> Vec<Pair<'r>> {
    let alone = other.into_iter().flat_map(|other| &other.figures);
    let alone = alone.filter(|figure| run.figure(&figure.id).is_none());
    let all = run.figures.iter().chain(alone);
    all.filter_map(|figure| Pair::of(&figure.id, run, other))
        .collect()
}

/// The JSON form of the lab's report, as far as it is drawn.
#[derive(Deserialize)]
struct Form {
    host: Host,
    #[serde(default)]
    commit: String,
    command: String,
    #[serde(default)]
    about: Vec<String>,
    results: Vec<Figure>,
    #[serde(default)]
    skipped: Vec<Skipped>,
    #[serde(default)]
    finished: Vec<Finished>,
    ended_early: Option<String>,
}

#[derive(Deserialize)]
struct Host {
    cpu: String,
    cores: u64,
    kernel: String,
    memory_bytes: u64,
    date: String,
}

/// An experiment of a run: its command, and the number of results up to its end.
#[derive(Deserialize)]
struct Finished {
    command: String,
    results: usize,
}

impl Run {
    /// Reads the JSON that `lacuna lab --json` writes.
    ///
    /// # Errors
    /// The text is not of that form; the message says why.
    pub fn parse(json: &str) -> Result<Self, String> {
        let form: Form = serde_json::from_str(json).map_err(|error| error.to_string())?;
        let Host { cpu, cores, .. } = &form.host;
        let gib = form.host.memory_bytes as f64 / (1_u64 << 30) as f64;
        let mut about = form.about;
        about.extend(
            form.ended_early
                .map(|why| format!("Ended early: {why}. Results after that are missing.")),
        );
        let mut figures = form.results;
        for (index, figure) in figures.iter_mut().enumerate() {
            let experiment = form.finished.iter().find(|done| index < done.results);
            figure.command = match experiment {
                Some(done) => done.command.clone(),
                None => repeatable(&form.command),
            };
        }
        Ok(Self {
            name: form.host.date.clone(),
            host: format!(
                "{cpu}, {cores} cores, {gib:.1} GiB, Linux {}",
                form.host.kernel
            ),
            commit: form.commit,
            date: form.host.date,
            command: form.command,
            about,
            figures,
            skipped: form.skipped,
        })
    }

    /// The figure of this id.
    pub fn figure(&self, id: &str) -> Option<&Figure> {
        self.figures.iter().find(|figure| figure.id == id)
    }
}

/// The command without the program's folder, and without the options that say where its result
/// goes.
pub fn repeatable(command: &str) -> String {
    let mut words = command.split_whitespace();
    let program = words
        .next()
        .map(|path| path.rsplit('/').next().unwrap_or(path));
    let mut kept: Vec<&str> = program.into_iter().collect();
    while let Some(word) = words.next() {
        match word {
            "--json" | "--report" | "--compare" => drop(words.next()),
            "--quiet" | "--markdown" | "--resume" => {}
            _ if ["--json=", "--report=", "--compare="]
                .iter()
                .any(|name| word.starts_with(name)) => {}
            word => kept.push(word),
        }
    }
    kept.join(" ")
}

/// A number; `null` is infinite, as JSON has no infinite numbers.
fn number<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::INFINITY))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A run with figures of each kind.
    pub(crate) fn example() -> Run {
        Run::parse(include_str!("../tests/example.json")).unwrap()
    }

    #[test]
    fn the_form_of_the_lab_is_read() {
        let run = example();
        assert_eq!(run.host, "Some CPU, 2 cores, 1.0 GiB, Linux 6.18");
        let ratio = run.figure("apf.worker_ratio.latency_1ms").unwrap();
        assert_eq!(ratio.quantity(), "1.96 x");
        assert_eq!(ratio.null(), Some((0.95, 1.04)));
        assert_eq!(ratio.verdict(), Some(Verdict::Met));
        assert_eq!(ratio.command, "lacuna lab apf");
        let later = run.figure("paging.exit_vs_queue.1vcpu").unwrap();
        assert_eq!(
            later.command, "lacuna lab apf paging",
            "no experiment finished after it"
        );
        let even = run.figure("apf.break_even_us").unwrap();
        assert!(even.max.is_infinite());
        assert!(run.about.last().unwrap().contains("Ended early"));
        assert!(Run::parse("{}").unwrap_err().contains("missing field"));
    }

    #[test]
    fn few_rounds_decide_nothing() {
        let mut figure = example().figures[0].clone();
        figure.runs = 3;
        assert_eq!(figure.verdict(), Some(Verdict::Undecided));
        figure.bar = None;
        assert_eq!(figure.verdict(), None);
    }

    #[test]
    fn figures_differ_if_their_intervals_do_not_overlap() {
        let old = example().figures[0].clone();
        let at = |min, max| Figure {
            min,
            max,
            ..old.clone()
        };
        assert!(at(1.0, 1.1).differs(&at(1.2, 1.3)) && at(1.2, 1.3).differs(&at(1.0, 1.1)));
        assert!(!at(1.0, 1.2).differs(&at(1.2, 1.3)));
    }
}
