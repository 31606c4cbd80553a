//! Readings of counters.

/// A reading of counters. The same metric may be filled in several times, with other labels.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Metrics(Vec<Metric>);

/// A metric with its samples.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct Metric {
    /// Its name.
    pub name: &'static str,
    /// What it counts.
    pub help: &'static str,
    /// How its values change.
    pub kind: Kind,
    /// A value for each set of labels.
    pub samples: Vec<Sample>,
}

/// How the values of a metric change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Kind {
    /// They only grow.
    Counter,
    /// They grow and shrink.
    Gauge,
    /// They are the distribution of a quantity since the VM began.
    Summary,
}

/// One value of a metric.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct Sample {
    /// What this value belongs to.
    pub labels: Vec<(&'static str, String)>,
    /// The value.
    pub value: Value,
}

/// A value.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum Value {
    /// Of a counter or a gauge.
    Whole(u64),
    /// Of a gauge, or of a counter of seconds.
    Real(f64),
    /// Of a summary.
    Summary(Summary),
}

/// A distribution.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Summary {
    /// How many observations there were.
    pub count: u64,
    /// Their sum; `None` if it is not counted.
    pub sum: Option<f64>,
    /// Quantiles (0 to 1) and the observations that these shares of all do not exceed. Empty if
    /// they are not counted.
    pub quantiles: Vec<(f64, f64)>,
}

impl Metrics {
    /// Adds a value of the metric `name`.
    pub fn add(
        &mut self,
        (name, help, kind): (&'static str, &'static str, Kind),
        labels: &[(&'static str, &str)],
        value: Value,
    ) {
        let labels = labels.iter().map(|(name, of)| (*name, (*of).to_owned()));
        let sample = Sample {
            labels: labels.collect(),
            value,
        };
        if let Some(known) = self.0.iter_mut().find(|known| known.name == name) {
            debug_assert_eq!((known.help, known.kind), (help, kind), "{name}");
            known.samples.push(sample);
            return;
        }
        self.0.push(Metric {
            name,
            help,
            kind,
            samples: vec![sample],
        });
    }

    /// Adds another reading, such as another VM's, with `labels` in front of its own.
    pub fn extend(&mut self, other: &Self, labels: &[(&'static str, &str)]) {
        for metric in other.iter() {
            for sample in &metric.samples {
                let own = sample.labels.iter().map(|(name, of)| (*name, &**of));
                let labels: Vec<_> = labels.iter().copied().chain(own).collect();
                let of = (metric.name, metric.help, metric.kind);
                self.add(of, &labels, sample.value.clone());
            }
        }
    }

    /// The metrics.
    pub fn iter(&self) -> impl Iterator<Item = &Metric> {
        self.0.iter()
    }
}
