//! The times for which a vCPU waited for memory, and the times of its faults by kind.

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

/// How a fault got its page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FaultKind {
    /// A new page of zeros.
    ZeroFill,
    /// The page was resident.
    Resident,
    /// From swap.
    SwapIn,
    /// From the page source, or the VMM.
    Missing,
}

/// One in so many faults without a wait is measured. A fault takes less than two readings of the
/// clock.
pub(crate) const SAMPLED: u64 = 64;

/// The times of one vCPU's faults.
#[derive(Clone, Default)]
pub(crate) struct FaultTimes {
    /// The waits of all kinds, for free memory too.
    pub stalls: Stalls,
    by_kind: [Stalls; 4],
}

impl FaultTimes {
    /// Records a fault that has taken `from` to `to`.
    pub fn record(&mut self, kind: FaultKind, from: Nanos, to: Nanos) {
        self.by_kind[kind as usize].record(from, to);
    }

    /// Adds another vCPU's.
    pub fn add(&mut self, other: &Self) {
        self.stalls.add(&other.stalls);
        for (all, more) in self.by_kind.iter_mut().zip(&other.by_kind) {
            all.add(more);
        }
    }

    /// Puts the faults into `to`, by kind.
    pub fn fill(&self, to: &mut Metrics) {
        let help = "Faults of vCPUs by kind: without a wait (one in 64 is measured), or the wait.";
        let of = ("lacuna_fault_seconds", help, Kind::Summary);
        for (kind, faults_of_each) in [
            (FaultKind::ZeroFill, SAMPLED),
            (FaultKind::Resident, SAMPLED),
            (FaultKind::SwapIn, 1),
            (FaultKind::Missing, 1),
        ] {
            let name = match kind {
                FaultKind::ZeroFill => "zero-fill",
                FaultKind::Resident => "resident",
                FaultKind::SwapIn => "swap-in",
                FaultKind::Missing => "missing",
            };
            let mut summary = self.by_kind[kind as usize].summary(&[0.5, 0.99]);
            summary.count *= faults_of_each;
            summary.sum = summary.sum.map(|sum| sum * faults_of_each as f64);
            to.add(of, &[("kind", name)], Value::Summary(summary));
        }
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
        let summary = self.summary(&[0.5, 0.99, 0.999]);
        let help = "Waits of a vCPU for memory.";
        let of = ("lacuna_vcpu_stall_seconds", help, Kind::Summary);
        to.add(of, labels, Value::Summary(summary));
    }

    fn summary(&self, quantiles: &[f64]) -> Summary {
        let seconds = |ns: u64| ns as f64 / 1e9;
        let quantile = |share: &f64| (*share, seconds(self.quantile_ns(*share)));
        Summary {
            count: self.count(),
            sum: Some(seconds(self.total_ns())),
            quantiles: quantiles.iter().map(quantile).collect(),
        }
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
