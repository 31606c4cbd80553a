//! Faults of a link, from a seed: latency, loss and reordering.

use crate::{MemoryId, PageRequest, PageSource};
use lacuna_sync::{Condvar, Mutex, MutexGuard, join, lock_order};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The faults of a link. The same seed does the same to the same page, in any order of the
/// requests.
#[derive(Clone, PartialEq, Debug)]
pub struct Faults {
    /// The seed of all choices.
    pub seed: u64,
    /// The delay of each request, drawn evenly.
    pub latency: Range<Duration>,
    /// The share of lost requests, 0 to 1. A lost request is sent again after `resend`, and may be
    /// lost again, up to 20 times.
    pub loss: f64,
    /// The time until a lost request is sent again.
    pub resend: Duration,
    /// The share of requests with a second draw of the latency added, so that later requests
    /// overtake them.
    pub reordering: f64,
}

impl Faults {
    /// A link that only delays each request by `latency`.
    pub fn latency(latency: Duration) -> Self {
        Self {
            seed: 0,
            latency: latency..latency,
            loss: 0.0,
            resend: Duration::ZERO,
            reordering: 0.0,
        }
    }

    /// The link's effect on the request for a page.
    pub fn of(&self, page: u64) -> Fate {
        let mixed = page.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut rng = fastrand::Rng::with_seed(self.seed ^ mixed);
        let mut draw = || match self.latency.is_empty() {
            true => self.latency.start,
            false => {
                let span = self.latency.end - self.latency.start;
                self.latency.start + span.mul_f64(rng.f64())
            }
        };
        let mut delay = draw();
        let extra = draw();
        if rng.f64() < self.reordering {
            delay = delay.saturating_add(extra);
        }
        let mut losses = 0;
        while losses < MOST_LOSSES && rng.f64() < self.loss {
            losses += 1;
        }
        Fate {
            delay: delay.saturating_add(self.resend.saturating_mul(losses)),
            losses,
        }
    }
}

/// The most losses of one request.
const MOST_LOSSES: u32 = 20;
/// The delay of a request if its own delay does not fit in an [`Instant`].
const CENTURY: Duration = Duration::from_secs(100 * 365 * 86_400);

/// The link's effect on one request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fate {
    /// The time from the request until the source is asked.
    pub delay: Duration,
    /// The number of losses before that.
    pub losses: u32,
}

/// A source behind a link with [`Faults`].
pub struct Injected<S> {
    shared: Arc<InjectedShared<S>>,
    faults: Faults,
    thread: Option<JoinHandle<()>>,
    losses: AtomicU64,
}

struct InjectedShared<S> {
    source: S,
    queue: Mutex<Queue, lock_order::SourceDelays>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    /// By the time at which the source is asked, then by the order of the requests.
    due: BTreeMap<(Instant, u64), PageRequest>,
    number: u64,
    stop: bool,
}

impl<S: PageSource + 'static> Injected<S> {
    /// Puts `source` behind a link with `faults`.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn new(source: S, faults: Faults) -> std::io::Result<Self> {
        let shared = Arc::new(InjectedShared {
            source,
            queue: Mutex::default(),
            changed: Condvar::new(),
        });
        let runs = Arc::clone(&shared);
        let named = std::thread::Builder::new().name("lacuna-link".into());
        let thread = named.spawn(move || runs.run())?;
        Ok(Self {
            shared,
            faults,
            thread: Some(thread),
            losses: AtomicU64::new(0),
        })
    }
}

impl<S> Injected<S> {
    /// The number of losses so far.
    pub fn losses(&self) -> u64 {
        self.losses.load(Ordering::Relaxed)
    }
}

impl<S: PageSource> PageSource for Injected<S> {
    fn describe(&self) -> String {
        self.shared.source.describe()
    }

    fn memory_id(&self) -> MemoryId {
        self.shared.source.memory_id()
    }

    fn outage(&self) -> Option<String> {
        self.shared.source.outage()
    }

    fn fetch(&self, request: PageRequest) {
        let fate = self.faults.of(request.page().0);
        self.losses.fetch_add(fate.losses.into(), Ordering::Relaxed);
        let now = Instant::now();
        let due = now.checked_add(fate.delay).unwrap_or(now + CENTURY);
        let mut queue = self.shared.queue();
        queue.number += 1;
        let key = (due, queue.number);
        queue.due.insert(key, request);
        let is_first = queue
            .due
            .first_key_value()
            .is_some_and(|(first, _)| *first == key);
        drop(queue);
        if is_first {
            self.shared.changed.notify_one();
        }
    }
}

impl<S> Drop for Injected<S> {
    /// Ends the link. Requests that have not reached the source fail.
    fn drop(&mut self) {
        let mut queue = self.shared.queue();
        queue.stop = true;
        let rest = std::mem::take(&mut queue.due);
        drop(queue);
        self.shared.changed.notify_one();
        drop(rest);
        self.thread.take().into_iter().for_each(join);
    }
}

impl<S> InjectedShared<S> {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next request, when it is due; `None` at the end.
    fn next(&self) -> Option<PageRequest> {
        let mut queue = self.queue();
        while !queue.stop {
            let left = queue.due.first_key_value();
            let left = left.map(|((due, _), _)| due.saturating_duration_since(Instant::now()));
            queue = match left {
                Some(Duration::ZERO) => return queue.due.pop_first().map(|(_, request)| request),
                Some(left) => self.changed.wait_timeout(queue, left),
                None => self.changed.wait(queue),
            }
            .unwrap_or_else(PoisonError::into_inner);
        }
        None
    }
}

impl<S: PageSource> InjectedShared<S> {
    fn run(&self) {
        // The kernel's timer slack of 50 us would be added to every latency. The call may fail.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
        while let Some(request) = self.next() {
            self.source.fetch(request);
        }
    }
}
