//! Completions that wait for their time: deliberately slow devices.
//!
//! Completions are delivered with no lock held, by a polling thread, or else by the timer's thread.
//! This thread starts when first needed, and wakes once for each due time.

use super::Completion;
use super::watch::{POLLERS_LATE, Watch};
use crate::core::Core;
use crate::region::Region;
use lacuna_sync::{Mutex, Nanos, join, lock, lock_order};
use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Never due.
const NEVER: u64 = u64::MAX;

pub(crate) struct Timer {
    shared: Arc<SharedTimer>,
    thread: Mutex<Option<JoinHandle<()>>, lock_order::TimerThread>,
}

struct SharedTimer {
    core: Arc<Core>,
    watch: Arc<Watch>,
    queue: Mutex<Queue, lock_order::TimerQueue>,
    /// The earliest time in the queue, as a hint.
    first: AtomicU64,
    stop: AtomicBool,
}

#[derive(Default)]
struct Queue {
    /// By due time, then by submission.
    due: BTreeMap<(Nanos, u64), Completion>,
    submitted: u64,
}

impl Timer {
    pub fn new(core: Arc<Core>, watch: Arc<Watch>) -> Self {
        let shared = SharedTimer {
            core,
            watch,
            queue: Mutex::default(),
            first: AtomicU64::new(NEVER),
            stop: AtomicBool::new(false),
        };
        Self {
            shared: Arc::new(shared),
            thread: Mutex::default(),
        }
    }

    /// Delivers `completion` when it is due: now, or later from another thread.
    pub fn complete_at(&self, due: Nanos, completion: Completion) {
        let core = &self.shared.core;
        if due > core.clock.now() {
            if self.is_running() {
                if self.shared.schedule(due, completion) && !self.shared.watch.is_polled() {
                    self.wake();
                }
                // The thread that ends the latency empties the queue: it has done so, or will.
                if core.at_once.load(Ordering::SeqCst) {
                    self.deliver_all();
                }
                return;
            }
            let _ = sleep_until(core, due, &self.shared.stop, None);
        }
        core.complete(completion);
    }

    /// Delivers the completions that `region` waits for, due or not.
    pub fn hurry(&self, region: &Region) {
        let mut queue = lock(&self.shared.queue);
        let due = queue
            .due
            .extract_if(.., |_, completion| completion.concerns(region));
        let early: Vec<_> = due.map(|(_, completion)| completion).collect();
        self.shared.note_first(&queue);
        drop(queue);
        let core = &self.shared.core;
        early
            .into_iter()
            .for_each(|completion| core.complete(completion));
    }

    /// Delivers the completions that are due at `now`; returns their number.
    pub fn poll(&self, now: Nanos) -> usize {
        self.shared.deliver(now)
    }

    /// Delivers everything, due or not.
    pub fn deliver_all(&self) {
        self.shared.deliver(Nanos(NEVER));
    }

    /// When the first completion is due.
    pub fn first(&self) -> Option<Nanos> {
        Some(self.shared.first())
            .filter(|&first| first != NEVER)
            .map(Nanos)
    }

    /// Called when the last poller has stopped.
    pub fn take_over(&self) {
        if self.shared.first() != NEVER {
            self.wake();
        }
    }

    /// Ends the thread, and delivers all completions, even early.
    pub fn shut_down(&self) {
        self.shared.stop.store(true, Ordering::Release);
        self.wake();
        let thread = lock(&self.thread).take();
        thread.into_iter().for_each(join);
        self.deliver_all();
    }

    /// Starts the thread if it does not run. False if it cannot be started: then a caller with a
    /// completion that is due later sleeps by itself.
    fn is_running(&self) -> bool {
        let mut thread = lock(&self.thread);
        if thread.is_none() {
            let shared = self.shared.clone();
            let named = std::thread::Builder::new().name("lacuna-timer".into());
            *thread = named.spawn(move || shared.run()).ok();
        }
        thread.is_some()
    }

    fn wake(&self) {
        if let Some(thread) = &*lock(&self.thread) {
            thread.thread().unpark();
        }
    }
}

impl SharedTimer {
    fn first(&self) -> u64 {
        self.first.load(Ordering::Relaxed)
    }

    /// Queues a completion; true if it is the first to be due.
    fn schedule(&self, due: Nanos, completion: Completion) -> bool {
        let mut queue = lock(&self.queue);
        queue.submitted += 1;
        let number = queue.submitted;
        queue.due.insert((due, number), completion);
        self.note_first(&queue)
            && queue
                .due
                .first_key_value()
                .is_some_and(|(key, _)| key.1 == number)
    }

    fn note_first(&self, queue: &Queue) -> bool {
        let first = queue.due.first_key_value().map(|(&(due, _), _)| due.0);
        self.first.store(first.unwrap_or(NEVER), Ordering::Relaxed);
        first.is_some()
    }

    fn deliver(&self, now: Nanos) -> usize {
        let mut delivered = 0;
        while self.first() <= now.0 {
            let mut queue = lock(&self.queue);
            let is_due = queue
                .due
                .first_key_value()
                .is_some_and(|(key, _)| key.0 <= now);
            let next = if is_due { queue.due.pop_first() } else { None };
            self.note_first(&queue);
            drop(queue);
            let Some((_, completion)) = next else { break };
            self.core.complete(completion);
            delivered += 1;
        }
        delivered
    }

    fn run(&self) {
        fine_sleeps();
        while !self.stop.load(Ordering::Acquire) {
            self.deliver(self.core.clock.now());
            match self.first() {
                NEVER => std::thread::park(),
                first => {
                    let left = Nanos(first).since(self.core.clock.now());
                    let left = Duration::from_nanos(left);
                    // A poller may be late: preempted, or in a long string instruction.
                    let late = self.watch.is_polled();
                    std::thread::park_timeout(left + POLLERS_LATE * u32::from(late));
                }
            }
        }
    }
}

/// The longest sleep without a check of the stop flag.
const NAP: Duration = Duration::from_millis(10);

/// The end of a sleep.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub(super) enum Slept {
    UntilDue,
    Stopped,
}

/// Sleeps on the caller's thread until `due`, or until soon after `stop` is set. The sleep ends
/// early, as if it were due, when simulated latency ends, or when `region` is removed.
pub(super) fn sleep_until(
    core: &Core,
    due: Nanos,
    stop: &AtomicBool,
    region: Option<&Region>,
) -> Slept {
    let mut now = core.clock.now();
    if now < due {
        fine_sleeps();
    }
    while now < due {
        if stop.load(Ordering::Acquire) {
            return Slept::Stopped;
        }
        let is_removed = region.is_some_and(Region::is_removed);
        if core.at_once.load(Ordering::Relaxed) || is_removed {
            return Slept::UntilDue;
        }
        std::thread::sleep(Duration::from_nanos(due.since(now)).min(NAP));
        now = core.clock.now();
    }
    Slept::UntilDue
}

/// Sets the calling thread's timer slack to 1 ns: the kernel's default of 50 us would be added to
/// every latency.
pub fn fine_sleeps() {
    // Only kernels without the call refuse it; the latencies are a little longer then.
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
}
