//! The times for which a vCPU waited for memory.

use hdrhistogram::Histogram;
use lacuna_metrics::{Kind, Metrics, Summary, Value};
use lacuna_sync::Nanos;

/// Stalls of one vCPU, in nanoseconds, with two significant digits, from 100 ns to a minute.
#[derive(Clone)]
pub struct Stalls(Histogram<u64>);

impl Default for Stalls {
    fn default() -> Self {
        let histogram = Histogram::new_with_bounds(100, 60_000_000_000, 2);
        Self(histogram.expect("constant bounds are valid"))
    }
}

impl Stalls {
    pub(crate) fn record(&mut self, from: Nanos, to: Nanos) {
        self.0.saturating_record(to.since(from));
    }

    /// The number of stalls.
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// The sum of all stalls, in nanoseconds.
    pub fn total_ns(&self) -> u64 {
        self.0
            .iter_recorded()
            .map(|v| v.value_iterated_to() * v.count_at_value())
            .sum()
    }

    /// The stall, in nanoseconds, that a share `quantile` (0 to 1) of all stalls does not exceed.
    pub fn quantile_ns(&self, quantile: f64) -> u64 {
        self.0.value_at_quantile(quantile)
    }

    /// Puts them into `to` with `labels`.
    pub(crate) fn fill(&self, to: &mut Metrics, labels: &[(&'static str, &str)]) {
        let seconds = |ns: u64| ns as f64 / 1e9;
        let summary = Summary {
            count: self.count(),
            sum: Some(seconds(self.total_ns())),
            quantiles: [0.5, 0.99, 0.999]
                .map(|quantile| (quantile, seconds(self.quantile_ns(quantile))))
                .to_vec(),
        };
        let help = "Waits of a vCPU for memory.";
        let of = ("lacuna_vcpu_stall_seconds", help, Kind::Summary);
        to.add(of, labels, Value::Summary(summary));
    }

    /// The stalls after `earlier`, an earlier reading of the same vCPU.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let mut rest = self.clone();
        rest.0.subtract(&earlier.0).expect("a reading only grows");
        rest
    }

    /// Adds another vCPU's stalls.
    pub fn add(&mut self, other: &Self) {
        self.0.add(&other.0).expect("the same bounds everywhere");
    }
}
