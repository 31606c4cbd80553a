//! A limit of the bytes that a migration sends in a second.
//!
//! All connections of the migration count their bytes here, and a thread waits before it takes
//! more pages, until the bytes so far fit into the limit. So in `t` seconds the connections send at
//! most the limit times `t`, the limit times [`CREDIT`], and one run of pages for each of them.

use crate::MigrateError;
use lacuna_addr::PAGE_SIZE;
use std::num::NonZeroU64;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How much unused time is made up for. A sleep often takes some 100 us longer than asked for.
const CREDIT: Duration = Duration::from_millis(10);
/// How long the pages read at once take. After each run of pages, other connections have waited.
const RUN: Duration = Duration::from_millis(50);
/// How often a waiting thread does other work: it harvests dirty rings, for example.
const LOOK: Duration = Duration::from_millis(1);

/// A limit. Any thread may call its methods.
pub(crate) struct Bandwidth {
    /// Bytes a second.
    limit: NonZeroU64,
    began: Instant,
    /// How long the counted bytes take at the limit, in nanoseconds since `began`.
    takes: AtomicU64,
}

impl Bandwidth {
    pub fn new(limit: NonZeroU64) -> Self {
        Self {
            limit,
            began: Instant::now(),
            takes: AtomicU64::new(0),
        }
    }

    /// The most pages to read at once, if without a limit it is `most`.
    pub fn pages_at_once(&self, most: u64) -> u64 {
        let bytes = u128::from(self.limit.get()) * RUN.as_nanos() / 1_000_000_000;
        ((bytes / PAGE_SIZE as u128) as u64).clamp(1, most)
    }

    /// Counts bytes as sent.
    pub fn count(&self, bytes: usize) {
        self.count_at(self.began.elapsed(), bytes);
    }

    fn count_at(&self, now: Duration, bytes: usize) {
        let more = bytes as u128 * 1_000_000_000 / u128::from(self.limit.get());
        let since = now.saturating_sub(CREDIT).as_nanos();
        let count = |takes: u64| {
            let takes = u128::from(takes).max(since) + more;
            Some(takes.try_into().unwrap_or(u64::MAX))
        };
        let counted = self
            .takes
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, count);
        counted.expect("each value has a next one");
    }

    /// How long to wait before more bytes are sent.
    fn rest_at(&self, now: Duration) -> Duration {
        Duration::from_nanos(self.takes.load(Ordering::Relaxed)).saturating_sub(now)
    }

    /// Waits until more bytes may be sent. Calls `meanwhile` now and then, which ends the wait by
    /// `Break`.
    pub fn wait(
        &self,
        meanwhile: &mut dyn FnMut() -> Result<ControlFlow<()>, MigrateError>,
    ) -> Result<(), MigrateError> {
        loop {
            let rest = self.rest_at(self.began.elapsed());
            if rest.is_zero() || meanwhile()?.is_break() {
                return Ok(());
            }
            thread::sleep(rest.min(LOOK));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bandwidth(limit: u64) -> Bandwidth {
        Bandwidth::new(NonZeroU64::new(limit).unwrap())
    }

    /// A minute, in which each wait takes a little longer than asked for.
    #[test]
    fn sent_bytes_stay_under_the_limit_and_use_it() {
        let mut random = fastrand::Rng::with_seed(1);
        for limit in [1, 5000, 64 << 10, 10 << 20, 12 << 30, u64::MAX >> 24] {
            let bandwidth = bandwidth(limit);
            let most = bandwidth.pages_at_once(256) as usize * PAGE_SIZE;
            let (mut now, mut sent) = (Duration::ZERO, 0_u128);
            while now < Duration::from_secs(60) {
                let fits = limit as f64 * (now + CREDIT).as_secs_f64() + most as f64;
                assert!(sent as f64 <= fits, "{limit}: {sent} bytes after {now:?}");
                let bytes = random.usize(most / 2..=most);
                bandwidth.count_at(now, bytes);
                sent += bytes as u128;
                let late = Duration::from_micros(random.u64(1..500));
                now += bandwidth.rest_at(now) + late;
            }
            // A run of so many bytes takes as long as the credit, or less than the delays here.
            if (64 << 10..1 << 30).contains(&limit) {
                let fits = limit as f64 * now.as_secs_f64();
                assert!(sent as f64 > fits * 0.99, "{limit}: {sent} of {fits}");
            }
        }
    }

    #[test]
    fn unused_time_is_no_credit() {
        let bandwidth = bandwidth(1000);
        let idle = Duration::from_secs(1000);
        bandwidth.count_at(idle, 500);
        let rest = Duration::from_millis(500) - CREDIT;
        assert_eq!(bandwidth.rest_at(idle), rest);
        bandwidth.count_at(idle, usize::MAX);
        assert!(bandwidth.rest_at(idle) > idle);
    }

    #[test]
    fn a_low_limit_reads_few_pages_at_once() {
        for (limit, pages) in [(1, 1), (80 << 10, 1), (8 << 20, 102), (1 << 30, 256)] {
            assert_eq!(bandwidth(limit).pages_at_once(256), pages);
        }
    }
}
