//! Whether a vCPU polls for a page before its guest is notified.
//!
//! A notification has a price: two exceptions, two switches of address space, cold TLBs. If a page
//! arrives within that time, a wait is cheaper. The vCPU does not know the time in advance, so it
//! polls for [`POLL_NS`], about the price of a notification, and notifies the guest only then. So a
//! fault costs at most twice as much as under a rule that knows the time.
//!
//! On a slow device every poll would be wasted. So the vCPU does not poll if the device itself
//! states a longer latency. While most of the last polls ended without the page, the vCPU polls for
//! one fault in [`PROBE_EVERY`], to find out when the device has become fast.

/// The longest poll: more than a fast disk takes for a page, and less than a slow one
/// (docs/speed-apf.md).
pub const POLL_NS: u64 = 35_000;

/// On a device that seems slow, the vCPU polls for one fault in so many.
const PROBE_EVERY: u32 = 64;

/// A share of 1, in the fixed-point form of [`PollFirst::share`].
const ONE: u32 = 1 << 16;
/// A poll's weight in the share is one part in so many.
const WEIGHT: u32 = 8;

/// The recent polls of one vCPU. It has no clock: its caller measures.
pub(crate) struct PollFirst {
    /// The share of polls that ended with the page; older ones count less.
    share: u32,
    /// Faults since the last poll.
    unpolled: u32,
}

impl PollFirst {
    pub fn new() -> Self {
        Self {
            share: ONE,
            unpolled: 0,
        }
    }

    /// Whether to poll for the page of this fault. No read takes less than `least_ns`.
    pub fn begin(&mut self, least_ns: u64) -> bool {
        if least_ns >= POLL_NS {
            return false;
        }
        self.unpolled += 1;
        let polls = self.share >= ONE / 2 || self.unpolled >= PROBE_EVERY;
        if polls {
            self.unpolled = 0;
        }
        polls
    }

    /// A poll has ended, with the page or without.
    pub fn ended(&mut self, with_page: bool) {
        self.share -= self.share / WEIGHT;
        if with_page {
            self.share += ONE / WEIGHT;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of polls for `faults` faults on a device whose pages arrive in time or not.
    fn polled(polls: &mut PollFirst, faults: u32, in_time: bool) -> u32 {
        let polls = (0..faults).filter(|_| {
            let begun = polls.begin(0);
            if begun {
                polls.ended(in_time);
            }
            begun
        });
        polls.count() as u32
    }

    #[test]
    fn a_fast_device_is_always_polled() {
        assert_eq!(polled(&mut PollFirst::new(), 1000, true), 1000);
    }

    #[test]
    fn a_slow_device_is_polled_rarely_after_a_few_faults() {
        let mut polls = PollFirst::new();
        assert!(polled(&mut polls, 10, false) < 10);
        let faults = 100 * PROBE_EVERY;
        assert_eq!(polled(&mut polls, faults, false), 100);
        assert!(
            polled(&mut polls, 10 * PROBE_EVERY, true) > 2 * PROBE_EVERY,
            "fast again"
        );
    }

    #[test]
    fn a_device_that_states_a_longer_latency_is_never_polled() {
        let mut polls = PollFirst::new();
        assert!((0..1000).all(|_| !polls.begin(POLL_NS)));
        assert!(polls.begin(POLL_NS - 1));
    }
}
