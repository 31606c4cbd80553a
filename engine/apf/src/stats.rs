//! Counters of one vCPU's faults.

use lacuna_metrics::{Kind, Metrics, Summary, Value, counters};

counters! {
    /// A reading of one vCPU's counters, or a sum over vCPUs.
    pub struct Stats as "lacuna_apf" {
        /// Faults with a delivered page-not-present.
        counter taken,
        /// Faults whose page-not-present could not be delivered: artificial halts for which a read
        /// was started.
        counter halted,
        /// Faults on a page already on its way to this vCPU: artificial halts without a new read.
        counter repeated,
        /// Synchronous waits because the queue was full.
        counter waited_full,
        /// Synchronous waits because the vCPU was not interruptible.
        counter waited_uninterruptible,
        /// Synchronous waits for a page evicted a moment after it was made ready.
        counter waited_recent,
        /// Faults whose page arrived while the vCPU polled for it, before the guest was notified.
        counter waited_polled,
        /// Delivered page-ready events.
        counter ready,
        /// Arrivals without an event for the guest: it had no token for the page, it had not taken
        /// the event with the token yet, or the word in its memory could not be written. The vCPU
        /// only became runnable.
        counter spurious,
        /// Arrivals that could be mapped before the retry.
        counter prefaulted,
        /// Wake-alls delivered.
        counter wake_alls,
        /// Faults in flight at a cancel, a disable or a reset.
        counter cancelled,
        /// Faults in flight.
        gauge in_flight,
        also {
            /// The time from the fault until the vCPU dequeued the page's arrival.
            swap_in: SwapIn,
        }
    }
}

/// Swap-in times in nanoseconds: number, sum, shortest and longest.
///
/// A time ends when the vCPU's thread dequeues the arrival, because a worker has no clock here. So
/// it includes the wait until the guest has acknowledged the previous event.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SwapIn {
    /// How many were measured.
    pub number: u64,
    /// Their sum, saturating.
    pub total_ns: u64,
    /// The shortest; 0 while there is none.
    pub min_ns: u64,
    /// The longest.
    pub max_ns: u64,
}

impl SwapIn {
    /// The mean; 0 while there is none.
    pub const fn mean_ns(&self) -> u64 {
        match self.total_ns.checked_div(self.number) {
            Some(mean) => mean,
            None => 0,
        }
    }

    pub(crate) fn record(&mut self, ns: u64) {
        self.merge(&Self {
            number: 1,
            total_ns: ns,
            min_ns: ns,
            max_ns: ns,
        });
    }

    /// Puts the times into `to` with `labels`.
    pub fn fill(&self, to: &mut Metrics, labels: &[(&'static str, &str)]) {
        let summary = Summary {
            count: self.number,
            sum: Some(self.total_ns as f64 / 1e9),
            quantiles: Vec::new(),
        };
        let help = "From a fault until the vCPU has dequeued its page's arrival.";
        let of = ("lacuna_apf_swap_in_seconds", help, Kind::Summary);
        to.add(of, labels, Value::Summary(summary));
    }

    /// Adds another vCPU's.
    pub fn merge(&mut self, other: &Self) {
        self.min_ns = match (self.number, other.number) {
            (0, _) => other.min_ns,
            (_, 0) => self.min_ns,
            _ => self.min_ns.min(other.min_ns),
        };
        self.number += other.number;
        self.total_ns = self.total_ns.saturating_add(other.total_ns);
        self.max_ns = self.max_ns.max(other.max_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(of: &[u64]) -> SwapIn {
        let mut swap_in = SwapIn::default();
        of.iter().for_each(|&ns| swap_in.record(ns));
        swap_in
    }

    #[test]
    fn swap_in_times_know_their_shortest_mean_and_longest() {
        let SwapIn {
            number,
            min_ns,
            max_ns,
            ..
        } = times(&[30, 10, 80]);
        assert_eq!((number, min_ns, max_ns), (3, 10, 80));
        assert_eq!(times(&[30, 10, 80]).mean_ns(), 40);
        assert_eq!(times(&[]).mean_ns(), 0);
    }

    #[test]
    fn the_sum_over_vcpus_is_as_if_one_had_counted_all() {
        for (some, others) in [
            (&[30, 10][..], &[80][..]),
            (&[], &[7]),
            (&[7], &[]),
            (&[], &[]),
        ] {
            let mut sum = Stats {
                ready: 2,
                swap_in: times(some),
                ..Stats::default()
            };
            sum.merge(&Stats {
                ready: 3,
                swap_in: times(others),
                ..Stats::default()
            });
            assert_eq!(sum.ready, 5);
            assert_eq!(sum.swap_in, times(&[some, others].concat()));
        }
    }
}
