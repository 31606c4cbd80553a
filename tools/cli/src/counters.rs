//! Counters by name and labels, as a metrics socket or the request `stat` reports them.

use serde_json::Number;
use std::collections::BTreeMap;

/// The labels of a value.
pub(crate) type Labels = BTreeMap<String, String>;

/// Values by the metric's name.
#[derive(Clone, Default)]
pub(crate) struct Counters(BTreeMap<String, Vec<(Labels, f64)>>);

impl Counters {
    /// Reads Prometheus' text. Lines of another form are left out.
    pub fn of_text(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let values = lines.filter_map(|line| line.rsplit_once(' '));
        Self::of(values.filter_map(|(key, value)| Some((key, value.parse().ok()?))))
    }

    /// Takes the answer to `stat`.
    pub fn of_stat(stat: &BTreeMap<String, Number>) -> Self {
        let values = stat.iter();
        Self::of(values.filter_map(|(key, value)| Some((&**key, value.as_f64()?))))
    }

    fn of<'a>(values: impl Iterator<Item = (&'a str, f64)>) -> Self {
        let mut all = Self::default();
        for (key, value) in values {
            let (name, labels) = key.split_once('{').unwrap_or((key, ""));
            let labels = labels.trim_end_matches('}').split("\",");
            let label = |text: &str| {
                let (name, value) = text.split_once("=\"")?;
                Some((name.into(), value.trim_end_matches('"').into()))
            };
            let labels = labels.filter_map(label).collect();
            all.0.entry(name.into()).or_default().push((labels, value));
        }
        all
    }

    /// Whether the metric `name` has a value.
    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// The values of the metric `name` with these labels among its own.
    pub fn values(&self, name: &str, labels: &[(&str, &str)]) -> impl Iterator<Item = f64> {
        let fits = |all: &Labels| {
            let mut labels = labels.iter();
            labels.all(|(name, value)| all.get(*name).is_some_and(|of| of == value))
        };
        let samples = self.0.get(name).into_iter().flatten();
        samples
            .filter(move |(all, _)| fits(all))
            .map(|(_, value)| *value)
    }

    /// The first of [`Counters::values`]; 0 without one.
    pub fn get(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.values(name, labels).next().unwrap_or(0.0)
    }

    /// The labels of the metric `name` that have the label `label`.
    pub fn each<'a>(&'a self, name: &str, label: &'a str) -> impl Iterator<Item = &'a Labels> {
        let samples = self.0.get(name).into_iter().flatten();
        samples
            .map(|(labels, _)| labels)
            .filter(move |labels| labels.contains_key(label))
    }
}
