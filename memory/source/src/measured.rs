//! Counts what a source is asked, and how long it takes.

use crate::{Answer, External, Failure, MemoryId, PageRequest, PageRequester, PageSource};
use hdrhistogram::Histogram;
use lacuna_addr::PAGE_SIZE;
use lacuna_sync::{Mutex, MutexGuard, lock_order};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// Counters of a source, at about one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SourceStats {
    /// Pages that it was asked for.
    pub asked: u64,
    /// Pages that it has provided.
    pub provided: u64,
    /// Pages that it has failed to provide: they are lost.
    pub failed: u64,
    /// Pages that it was asked for and has not answered.
    pub in_flight: u64,
    /// Half of the provided pages came within this time.
    pub p50: Duration,
    /// 99 of 100 provided pages came within this time.
    pub p99: Duration,
}

/// A source whose counters can be read while it works. It answers as `S` does.
pub struct Measured<S> {
    source: S,
    counts: Arc<Counts>,
}

/// Counters and times of one source.
#[derive(Default)]
pub(crate) struct Counts {
    asked: AtomicU64,
    provided: AtomicU64,
    failed: AtomicU64,
    /// Requests that have ended without an answer that counted: the VMM has provided the page, or
    /// its memory is gone.
    late: AtomicU64,
    times: Mutex<Times, lock_order::SourceTimes>,
}

/// In nanoseconds, with two significant digits, from 100 ns to a minute.
struct Times(Histogram<u64>);

impl Default for Times {
    fn default() -> Self {
        let histogram = Histogram::new_with_bounds(100, 60_000_000_000, 2);
        Self(histogram.expect("constant bounds are valid"))
    }
}

impl<S> Measured<S> {
    /// Counts what `source` does.
    pub fn new(source: S) -> Self {
        Self {
            source,
            counts: Arc::default(),
        }
    }

    /// Its counters now.
    pub fn stats(&self) -> SourceStats
    where
        S: PageSource,
    {
        match self.source.external() {
            Some(external) => external.stats(),
            None => self.counts.stats(),
        }
    }
}

impl Counts {
    /// The counters now.
    pub fn stats(&self) -> SourceStats {
        let counts = self;
        // Answers are read before requests, so that no page counts as answered and not asked.
        let [provided, failed, late] = [&counts.provided, &counts.failed, &counts.late]
            .map(|count| count.load(Ordering::Acquire));
        let asked = counts.asked.load(Ordering::Relaxed);
        let times = counts.times();
        let [p50, p99] = [0.5, 0.99].map(|q| times.0.value_at_quantile(q));
        SourceStats {
            asked,
            provided,
            failed,
            in_flight: asked.saturating_sub(provided + failed + late),
            p50: Duration::from_nanos(p50),
            p99: Duration::from_nanos(p99),
        }
    }
}

impl<S: PageSource> PageSource for Measured<S> {
    fn describe(&self) -> String {
        self.source.describe()
    }

    fn memory_id(&self) -> MemoryId {
        self.source.memory_id()
    }

    fn outage(&self) -> Option<String> {
        self.source.outage()
    }

    fn fetch(&self, request: PageRequest) {
        self.counts.asked();
        let page = request.page();
        let timed = Timed {
            request,
            asked: Instant::now(),
            counts: Arc::clone(&self.counts),
            taken: AtomicBool::new(false),
        };
        self.source
            .fetch(PageRequest::new(Arc::new(timed), page.0, page));
    }

    fn external(&self) -> Option<&External> {
        self.source.external()
    }
}

/// A request that passes through.
struct Timed {
    request: PageRequest,
    asked: Instant,
    counts: Arc<Counts>,
    taken: AtomicBool,
}

impl PageRequester for Timed {
    fn answer(&self, _key: u64, content: Result<&[u8; PAGE_SIZE], Failure<'_>>) -> Answer {
        let answer = match content {
            Ok(content) => {
                let answer = self.request.provide(content);
                if answer == Answer::Taken {
                    self.counts.provided(self.asked.elapsed());
                }
                answer
            }
            Err(failure) => {
                // A lost page may end the run at once, and the run's last counts have it.
                self.counts.failed();
                let answer = self.request.pass(failure);
                if answer != Answer::Taken {
                    self.counts.not_failed();
                }
                answer
            }
        };
        if answer == Answer::Taken {
            self.taken.store(true, Ordering::Relaxed);
        }
        answer
    }
}

impl Drop for Timed {
    fn drop(&mut self) {
        if !self.taken.load(Ordering::Relaxed) {
            self.counts.late();
        }
    }
}

impl Counts {
    /// A page was asked for.
    pub fn asked(&self) {
        self.asked.fetch_add(1, Ordering::Relaxed);
    }

    /// A page that was asked for has come in another way.
    pub fn late(&self) {
        self.late.fetch_add(1, Ordering::Release);
    }

    fn times(&self) -> MutexGuard<'_, Times> {
        self.times.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A page is lost.
    pub fn failed(&self) {
        self.failed.fetch_add(1, Ordering::Release);
    }

    /// A page for which [`Counts::failed`] was called has come in another way.
    fn not_failed(&self) {
        self.failed.fetch_sub(1, Ordering::Release);
    }

    /// A page has come, after `time`.
    pub fn provided(&self, time: Duration) {
        let time = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.times().0.saturating_record(time);
        self.provided.fetch_add(1, Ordering::Release);
    }
}
