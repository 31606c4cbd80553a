//! A limit on the bytes of a second.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How much unused time counts later: a thread sleeps longer than it asks for, and catches up.
const BURST: Duration = Duration::from_millis(10);

/// A limit on the bytes of a second, for all threads together that take from it.
#[derive(Debug)]
pub struct FillRate {
    bytes_per_second: NonZeroU64,
    began: Instant,
    /// When the taken bytes have had their time, in nanoseconds since `began`.
    paid: AtomicU64,
}

impl FillRate {
    /// At most this many bytes a second.
    pub fn new(bytes_per_second: NonZeroU64) -> Self {
        Self {
            bytes_per_second,
            began: Instant::now(),
            paid: AtomicU64::new(0),
        }
    }

    /// Takes `bytes`. The thread takes no more before the returned time.
    pub fn take(&self, bytes: u64) -> Instant {
        let now = self.began.elapsed();
        self.began + self.take_at(now, bytes)
    }

    /// As [`FillRate::take`], with times since the beginning.
    fn take_at(&self, now: Duration, bytes: u64) -> Duration {
        let cost = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_second.get());
        let cost = u64::try_from(cost).unwrap_or(u64::MAX);
        let from = now.saturating_sub(BURST).as_nanos() as u64;
        let after = |paid: u64| paid.max(from).saturating_add(cost);
        let (set, fetch) = (Ordering::Relaxed, Ordering::Relaxed);
        let before = self
            .paid
            .fetch_update(set, fetch, |paid| Some(after(paid)))
            .expect("it is always updated");
        Duration::from_nanos(after(before))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three threads on a simulated clock. Each wakes up to 300 us late.
    #[test]
    fn all_threads_together_keep_the_limit_and_reach_it() {
        const MIB: u64 = 1 << 20;
        let rate = FillRate::new(NonZeroU64::new(100 * MIB).unwrap());
        let mut random = fastrand::Rng::with_seed(1);
        let (mut bytes, mut due) = (0, [Duration::ZERO; 3]);
        let end = Duration::from_secs(2);
        loop {
            let (at, now) = (0..3)
                .map(|at| (at, due[at]))
                .min_by_key(|of| of.1)
                .unwrap();
            if now > end {
                break;
            }
            let page = if random.bool() { 4096 } else { 2 * MIB };
            bytes += page;
            due[at] = now.max(rate.take_at(now, page)) + Duration::from_micros(random.u64(0..300));
        }
        // One page of each thread is taken before its time is over.
        assert!(bytes <= 200 * MIB + MIB + 3 * 2 * MIB, "{bytes}");
        assert!(bytes >= 198 * MIB, "{bytes}");
    }

    #[test]
    fn a_limit_of_one_byte_a_second_waits_for_ever() {
        let rate = FillRate::new(NonZeroU64::MIN);
        let second = Duration::from_secs(1);
        assert_eq!(rate.take_at(second, 4096), second * 4097 - BURST);
        for _ in 0..2 {
            let end = rate.take_at(second, u64::MAX);
            assert_eq!(end, Duration::from_nanos(u64::MAX));
        }
    }
}
