//! Real threads: readers for those who do not wait, a timer for devices that are slow on purpose.
//!
//! Both are started when first needed. Completions are delivered with no lock held.

use super::Completion;
use crate::host::{Core, lock};
use crate::ticket::Ticket;
use lacuna_sync::Nanos;
use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU64;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

pub(crate) struct Threads {
    shared: Arc<Shared>,
    handles: Mutex<Vec<JoinHandle<()>>>,
    readers: usize,
}

struct Shared {
    core: Arc<Core>,
    queue: Mutex<Queue>,
    read: Condvar,
    timer: Condvar,
}

#[derive(Default)]
struct Queue {
    reads: VecDeque<(Ticket, Nanos)>,
    due: BTreeMap<(Nanos, u64), Completion>,
    submitted: u64,
    readers: usize,
    idle: usize,
    timer_runs: bool,
    stop: bool,
}

impl Threads {
    pub fn new(core: Arc<Core>, readers: usize) -> Self {
        let (read, timer) = (Condvar::new(), Condvar::new());
        let shared = Shared {
            core,
            queue: Mutex::default(),
            read,
            timer,
        };
        Self {
            shared: Arc::new(shared),
            handles: Mutex::default(),
            readers: readers.max(1),
        }
    }

    /// Queues a claimed read.
    pub fn read(&self, ticket: Ticket) {
        let due = self.shared.core.deadline();
        if self.shared.core.store.latency_ns() > 0 {
            self.timer_runs();
        }
        let mut queue = lock(&self.shared.queue);
        queue.reads.push_back((ticket, due));
        let spawn = queue.idle < queue.reads.len() && queue.readers < self.readers;
        queue.readers += usize::from(spawn);
        drop(queue);
        if spawn && !self.spawn("lacuna-read", Shared::run_reader) {
            let mut queue = lock(&self.shared.queue);
            queue.readers -= 1;
            if queue.readers == 0 {
                // No thread to be had: the read is still owed.
                let next = queue.reads.pop_front();
                drop(queue);
                next.into_iter()
                    .for_each(|(ticket, due)| self.shared.carry_out(ticket, due));
            }
        }
        self.shared.read.notify_one();
    }

    /// Delivers `completion` when it is due: now, or from the timer thread.
    pub fn complete_at(&self, due: Nanos, completion: Completion) {
        if due <= self.shared.core.clock.now() {
            return self.shared.core.complete(completion);
        }
        if self.timer_runs() {
            return self.shared.schedule(due, completion);
        }
        sleep_until(&self.shared.core, due);
        self.shared.core.complete(completion);
    }

    /// Starts the timer thread if it does not run; false when there is no thread to be had, and
    /// whoever has something due sleeps himself.
    fn timer_runs(&self) -> bool {
        let mut queue = lock(&self.shared.queue);
        if !queue.timer_runs {
            // Under the lock: the thread waits for it, and nobody starts a second one.
            queue.timer_runs = self.spawn("lacuna-timer", Shared::run_timer);
        }
        queue.timer_runs
    }

    /// Ends the threads. What is in flight is delivered first: a completion owns frames and slots.
    pub fn shut_down(&self) {
        lock(&self.shared.queue).stop = true;
        self.shared.read.notify_all();
        self.shared.timer.notify_all();
        for handle in lock(&self.handles).drain(..) {
            // A thread that panicked has reported it.
            let _ = handle.join();
        }
    }

    fn spawn(&self, name: &str, run: fn(&Shared)) -> bool {
        let shared = self.shared.clone();
        let thread = std::thread::Builder::new().name(name.into());
        let spawned = thread.spawn(move || run(&shared));
        spawned
            .map(|handle| lock(&self.handles).push(handle))
            .is_ok()
    }
}

impl Shared {
    fn run_reader(&self) {
        let mut queue = lock(&self.queue);
        loop {
            if let Some((ticket, due)) = queue.reads.pop_front() {
                drop(queue);
                self.carry_out(ticket, due);
                queue = lock(&self.queue);
            } else if queue.stop {
                return;
            } else {
                queue.idle += 1;
                queue = self
                    .read
                    .wait(queue)
                    .unwrap_or_else(PoisonError::into_inner);
                queue.idle -= 1;
            }
        }
    }

    fn carry_out(&self, ticket: Ticket, due: Nanos) {
        let result = self.core.read(&ticket);
        if due <= self.core.clock.now() {
            return self.core.complete_read(&ticket, result);
        }
        if lock(&self.queue).timer_runs {
            return self.schedule(due, Completion::Read(ticket, result));
        }
        sleep_until(&self.core, due);
        self.core.complete_read(&ticket, result);
    }

    fn schedule(&self, due: Nanos, completion: Completion) {
        let mut queue = lock(&self.queue);
        queue.submitted += 1;
        let number = queue.submitted;
        queue.due.insert((due, number), completion);
        drop(queue);
        self.timer.notify_one();
    }

    fn run_timer(&self) {
        fine_sleeps();
        let mut queue = lock(&self.queue);
        loop {
            let now = self.core.clock.now();
            match queue.due.first_key_value().map(|(&(due, _), _)| due) {
                Some(due) if due <= now => {
                    let next = queue.due.pop_first();
                    drop(queue);
                    next.into_iter()
                        .for_each(|(_, completion)| self.core.complete(completion));
                    queue = lock(&self.queue);
                }
                Some(due) => queue = self.nap(queue, Duration::from_nanos(due.since(now))),
                None if queue.stop => return,
                None => {
                    queue = self
                        .timer
                        .wait(queue)
                        .unwrap_or_else(PoisonError::into_inner)
                }
            }
        }
    }

    fn nap<'a>(&self, queue: MutexGuard<'a, Queue>, time: Duration) -> MutexGuard<'a, Queue> {
        self.timer
            .wait_timeout(queue, time)
            .unwrap_or_else(PoisonError::into_inner)
            .0
    }
}

/// Sleeps on the caller's thread until `due`.
pub(super) fn sleep_until(core: &Core, due: Nanos) {
    let mut now = core.clock.now();
    if now < due {
        fine_sleeps();
    }
    while now < due {
        std::thread::sleep(Duration::from_nanos(due.since(now)));
        now = core.clock.now();
    }
}

/// Timer slack of 1 ns for this thread: the kernel's default of 50 us would be added to every
/// latency.
fn fine_sleeps() {
    // Refused only by kernels without the call; the latencies are a little longer then.
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
}
