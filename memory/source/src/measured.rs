//! Counts the requests to a source, and times them; ends the waits for its pages.

use crate::{Answer, External, Failure, MemoryId, PageRequest, PageRequester, PageSource};
use hdrhistogram::Histogram;
use lacuna_addr::PAGE_SIZE;
use lacuna_metrics::{Kind, Metrics, Summary, Value};
use lacuna_sync::{Mutex, MutexGuard, lock_order};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Counters of a source, at about one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SourceStats {
    /// Requested pages.
    pub asked: u64,
    /// Provided pages.
    pub provided: u64,
    /// Pages that the source failed to provide: they are lost.
    pub failed: u64,
    /// Requested pages without an answer.
    pub in_flight: u64,
    /// Half of the provided pages arrived within this time.
    pub p50: Duration,
    /// 99 of 100 provided pages arrived within this time.
    pub p99: Duration,
    /// 999 of 1000 provided pages arrived within this time.
    pub p999: Duration,
}

impl SourceStats {
    /// Puts the counters into `to`.
    pub fn fill(&self, to: &mut Metrics) {
        let Self {
            asked,
            failed,
            in_flight,
            ..
        } = *self;
        let help = "Pages requested from the page source.";
        let of = ("lacuna_source_asked_total", help, Kind::Counter);
        to.add(of, &[], Value::Whole(asked));
        // A gauge, because a page that the VMM provides meanwhile is taken off again.
        let help = "Pages that the page source has failed to provide.";
        let of = ("lacuna_source_failed", help, Kind::Gauge);
        to.add(of, &[], Value::Whole(failed));
        let help = "Pages requested from the page source that have no answer yet.";
        let of = ("lacuna_source_in_flight", help, Kind::Gauge);
        to.add(of, &[], Value::Whole(in_flight));
        let help = "From the request of a page until it is provided.";
        let of = ("lacuna_source_fetch_seconds", help, Kind::Summary);
        to.add(of, &[], Value::Summary(self.times()));
    }

    /// The times as a metric.
    pub fn times(&self) -> Summary {
        let quantiles = [(0.5, self.p50), (0.99, self.p99), (0.999, self.p999)];
        Summary {
            count: self.provided,
            sum: None,
            quantiles: quantiles.map(|(q, time)| (q, time.as_secs_f64())).into(),
        }
    }
}

/// A source whose counters can be read while it works. It answers as `S` does, until
/// [`Measured::end`].
pub struct Measured<S> {
    source: S,
    counts: Arc<Counts>,
    open: Arc<OpenRequests>,
}

/// Unanswered requests, each under its own number.
#[derive(Default)]
struct OpenRequests {
    next: AtomicU64,
    state: Mutex<Open, lock_order::SourceOpen>,
}

#[derive(Default)]
struct Open {
    requests: HashMap<u64, Weak<Timed>>,
    /// Why every later request fails.
    ended: Option<Arc<str>>,
}

impl OpenRequests {
    fn lock(&self) -> MutexGuard<'_, Open> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counters and times of one source.
#[derive(Default)]
pub(crate) struct Counts {
    asked: AtomicU64,
    provided: AtomicU64,
    failed: AtomicU64,
    /// Requests that ended without the source's answer: the VMM has provided the page, or its
    /// memory is gone.
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
            open: Arc::default(),
        }
    }

    /// Ends every wait for a page, whatever the source's policy says: unanswered and later requests
    /// fail for `reason`. For a run that is over, or does not begin.
    pub fn end(&self, reason: &str)
    where
        S: PageSource,
    {
        if let Some(external) = self.source.external() {
            external.give_up(reason);
        }
        let mut open = self.open.lock();
        open.ended = Some(reason.into());
        let requests = std::mem::take(&mut open.requests);
        drop(open);
        for timed in requests.values().filter_map(Weak::upgrade) {
            if !timed.is_answered.swap(true, Ordering::Relaxed) {
                // Late: the page was provided in another way.
                let _ = timed.request.fail(reason);
            }
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
        // Answers are read before requests, so that no page counts as answered but not requested.
        let [provided, failed, late] = [&counts.provided, &counts.failed, &counts.late]
            .map(|count| count.load(Ordering::Acquire));
        let asked = counts.asked.load(Ordering::Relaxed);
        let times = counts.times();
        let [p50, p99, p999] = [0.5, 0.99, 0.999].map(|q| times.0.value_at_quantile(q));
        SourceStats {
            asked,
            provided,
            failed,
            in_flight: asked.saturating_sub(provided + failed + late),
            p50: Duration::from_nanos(p50),
            p99: Duration::from_nanos(p99),
            p999: Duration::from_nanos(p999),
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
        let number = self.open.next.fetch_add(1, Ordering::Relaxed);
        let timed = Arc::new(Timed {
            request,
            asked: Instant::now(),
            counts: Arc::clone(&self.counts),
            is_answered: AtomicBool::new(false),
            taken: AtomicBool::new(false),
            open: Arc::clone(&self.open),
            number,
        });
        let mut open = self.open.lock();
        if let Some(reason) = open.ended.clone() {
            drop(open);
            // Late: the page was provided in another way.
            let _ = timed.request.fail(&reason);
            return;
        }
        open.requests.insert(number, Arc::downgrade(&timed));
        drop(open);
        self.source.fetch(PageRequest::new(timed, page.0, page));
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
    is_answered: AtomicBool,
    /// The answer counts.
    taken: AtomicBool,
    open: Arc<OpenRequests>,
    number: u64,
}

impl PageRequester for Timed {
    fn answer(&self, _key: u64, content: Result<&[u8; PAGE_SIZE], Failure<'_>>) -> Answer {
        // The end of a request calls this with a failure, also after an answer.
        if self.is_answered.swap(true, Ordering::Relaxed) {
            return Answer::Late;
        }
        let answer = match content {
            Ok(content) => {
                let answer = self.request.provide(content);
                if answer == Answer::Taken {
                    self.counts.provided(self.asked.elapsed());
                }
                answer
            }
            Err(failure) => {
                // Count first: a lost page may end the run at once, and the last counts must have
                // it.
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
        self.open.lock().requests.remove(&self.number);
        if !self.taken.load(Ordering::Relaxed) {
            self.counts.late();
        }
    }
}

impl Counts {
    /// Counts a requested page.
    pub fn asked(&self) {
        self.asked.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a requested page that arrived in another way.
    pub fn late(&self) {
        self.late.fetch_add(1, Ordering::Release);
    }

    fn times(&self) -> MutexGuard<'_, Times> {
        self.times.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a lost page.
    pub fn failed(&self) {
        self.failed.fetch_add(1, Ordering::Release);
    }

    /// Undoes [`Counts::failed`] for a page that arrived in another way.
    fn not_failed(&self) {
        self.failed.fetch_sub(1, Ordering::Release);
    }

    /// Counts a page that arrived after `time`.
    pub fn provided(&self, time: Duration) {
        let time = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.times().0.saturating_record(time);
        self.provided.fetch_add(1, Ordering::Release);
    }
}
