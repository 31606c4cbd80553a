//! A histogram of durations, for results and plots.

use hdrhistogram::Histogram;
use serde_json::{Value, json};
use std::time::Duration;

/// Durations from 1 ns to 10 s, with two significant digits.
pub struct Spread(Histogram<u64>);

impl Default for Spread {
    fn default() -> Self {
        let histogram = Histogram::new_with_bounds(1, 10_000_000_000, 2);
        Self(histogram.expect("constant bounds are valid"))
    }
}

impl Spread {
    /// Adds a duration.
    pub fn record(&mut self, time: Duration) {
        self.0
            .saturating_record(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    /// The duration that a share `quantile` (0 to 1) of them does not exceed, in nanoseconds.
    pub fn quantile_ns(&self, quantile: f64) -> u64 {
        self.0.value_at_quantile(quantile)
    }

    /// The number of durations.
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// `[[upper end in nanoseconds, count], ...]`, ascending. Each bucket is a tenth wider than the
    /// one before it. Empty ones are left out.
    pub fn buckets(&self) -> Value {
        let all = self.0.iter_log(100, 1.1);
        let some = all.filter(|v| v.count_since_last_iteration() > 0);
        some.map(|v| json!([v.value_iterated_to(), v.count_since_last_iteration()]))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_hold_everything_once() {
        let mut all = Spread::default();
        for ns in [150, 90, 150, 1_000_000, 150] {
            all.record(Duration::from_nanos(ns));
        }
        assert_eq!((all.count(), all.quantile_ns(0.5)), (5, 150));
        let buckets: Vec<[u64; 2]> = serde_json::from_value(all.buckets()).unwrap();
        let counts: Vec<u64> = buckets.iter().map(|[_, count]| *count).collect();
        assert_eq!(counts, [1, 3, 1]);
        assert!(buckets[0][0] < 110 && (150..170).contains(&buckets[1][0]));
        assert!(all.quantile_ns(1.0) >= 1_000_000);
    }
}
