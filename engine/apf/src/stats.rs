//! Counters of one vCPU's faults.

/// A reading of one vCPU's counters, or a sum over vCPUs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// Faults with a delivered page-not-present.
    pub taken: u64,
    /// Faults whose page-not-present could not be delivered: artificial halts for which a read was
    /// started.
    pub halted: u64,
    /// Faults on a page already on its way to this vCPU: artificial halts without a new read.
    pub repeated: u64,
    /// Synchronous waits because the queue was full.
    pub waited_full: u64,
    /// Synchronous waits because the vCPU was not interruptible.
    pub waited_uninterruptible: u64,
    /// Synchronous waits for a page evicted a moment after it was made ready.
    pub waited_recent: u64,
    /// Faults whose page arrived while the vCPU polled for it, before the guest was notified.
    pub waited_polled: u64,
    /// Delivered page-ready events.
    pub ready: u64,
    /// Arrivals without an event for the guest: it had no token for the page, it had not taken the
    /// event with the token yet, or the word in its memory could not be written. The vCPU only
    /// became runnable.
    pub spurious: u64,
    /// Arrivals that could be mapped before the retry.
    pub prefaulted: u64,
    /// Wake-alls delivered.
    pub wake_alls: u64,
    /// Faults in flight at a cancel, a disable or a reset.
    pub cancelled: u64,
    /// The time from the fault until the vCPU dequeued the page's arrival.
    pub swap_in: SwapIn,
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

impl Stats {
    /// Adds another vCPU's.
    pub fn merge(&mut self, other: &Self) {
        // Every field is named, so that the compiler refuses a new counter that is not merged.
        let Self {
            taken,
            halted,
            repeated,
            waited_full,
            waited_uninterruptible,
            waited_recent,
            waited_polled,
            ready,
            spurious,
            prefaulted,
            wake_alls,
            cancelled,
            swap_in,
        } = other;
        self.taken += taken;
        self.halted += halted;
        self.repeated += repeated;
        self.waited_full += waited_full;
        self.waited_uninterruptible += waited_uninterruptible;
        self.waited_recent += waited_recent;
        self.waited_polled += waited_polled;
        self.ready += ready;
        self.spurious += spurious;
        self.prefaulted += prefaulted;
        self.wake_alls += wake_alls;
        self.cancelled += cancelled;
        self.swap_in.merge(swap_in);
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
